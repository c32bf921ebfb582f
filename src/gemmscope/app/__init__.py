"""The application layer: one typed function per command, called by `cli/` and by `gemmscope.api`.

Modules are loaded when they are first used (`app.bench.run_bench(...)`), so that `gemmscope --help` answers at once. This and
`writers/__init__.py` are the only places that load modules lazily.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmscope.app import bench as bench
    from gemmscope.app import calibrate as calibrate
    from gemmscope.app import compare as compare
    from gemmscope.app import doctor as doctor
    from gemmscope.app import explain as explain
    from gemmscope.app import forecast as forecast
    from gemmscope.app import model as model
    from gemmscope.app import progress as progress
    from gemmscope.app import report as report
    from gemmscope.app import result as result
    from gemmscope.app import shapes as shapes
    from gemmscope.app import step as step


def __getattr__(name: str) -> ModuleType:
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
