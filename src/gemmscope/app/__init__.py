"""The application layer: one typed function per command, called by `cli/` and by `gemmscope.api`.

Modules are loaded when they are first used (`app.bench.run_bench(...)`), so that `gemmscope --help` answers at once.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmscope.app import bench, calibrate, choose, compare, doctor, explain, fleet, forecast, launched

    # isort: split
    from gemmscope.app import model, names, numerics, plan, pools, progress, read, report, result, shapes, step, sweep

__all__ = [
    "bench", "calibrate", "choose", "compare", "doctor", "explain", "fleet", "forecast", "launched", "model", "names", "numerics",
    "plan", "pools", "progress", "read", "report", "result", "shapes", "step", "sweep",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
