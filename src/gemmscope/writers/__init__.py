"""Writers: a Document as terminal output, Markdown, CSV, an HTML page, figures. They know the Document and nothing else.

Each is loaded when it is first used: matplotlib and rich take a while.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmscope.writers import csv, figure, frame, html, markdown, terminal

FIGURE_ENDINGS = (".png", ".svg", ".pdf", ".eps", ".jpg", ".webp")
__all__ = ["csv", "figure", "frame", "html", "markdown", "terminal"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
