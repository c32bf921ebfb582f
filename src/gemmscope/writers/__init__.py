"""Writers: a Document as terminal output, Markdown, CSV, an HTML page, figures. They know the Document and nothing else.

`WRITERS` is the one list of the formats of files. Modules are loaded when they are used: matplotlib and rich take a while.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gemmscope.files import replacing

if TYPE_CHECKING:
    from gemmscope.document.model import Document, Message
    from gemmscope.writers import figure, html, markdown, tables, terminal

__all__ = ["figure", "html", "markdown", "tables", "terminal"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def _draw(ending: str, documents: "Sequence[Document]", _: object) -> bytes:
    return bytes(__getattr__("figure").image(documents[0], ending))


FIGURE_ENDINGS = (".png", ".svg", ".pdf", ".eps", ".jpg", ".webp")
WRITERS: dict[str, Callable[[Any, Any], str | bytes]] = {
    ".md": lambda documents, messages: str(__getattr__("markdown").markdown(documents, messages)),
    ".csv": lambda documents, _: str(__getattr__("tables").csv_text(documents[0])),
    ".html": lambda documents, messages: str(__getattr__("html").page(documents, messages)),
    **{ending: partial(_draw, ending) for ending in FIGURE_ENDINGS},
}
"""The ending of a file → the function that writes documents, with messages about all of them, as its content."""
SEVERAL = (".html", ".md")
"""The formats that hold several documents; the others hold one."""


def content(ending: str, documents: "Sequence[Document]", messages: "Sequence[Message]" = ()) -> str | bytes:
    """Documents as the content of a file with this ending."""
    return WRITERS[ending](documents, messages)


def save(path: str | Path, written: str | bytes, hint: str = "") -> None:
    """Write the content of a file."""
    with replacing(path, hint) as out:
        out.write(written if isinstance(written, bytes) else written.encode("utf-8", "replace"))
