"""Writers: a Document as terminal output, Markdown, CSV, an HTML page, figures. They know the Document and nothing else.

Each is loaded when it is first used: matplotlib and rich take a while.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmscope.writers import csv as csv
    from gemmscope.writers import figure as figure
    from gemmscope.writers import html as html
    from gemmscope.writers import markdown as markdown
    from gemmscope.writers import terminal as terminal


def __getattr__(name: str) -> ModuleType:
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
