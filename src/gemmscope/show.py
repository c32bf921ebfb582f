"""How a result shows itself in Python: as text, as HTML in a notebook, as a file.

`results/base.py` calls these functions by name, so that results need not import what shows them.
"""

from collections.abc import Callable
from pathlib import Path

from gemmscope.document.build import document
from gemmscope.errors import UserError
from gemmscope.folders import temporary_folder
from gemmscope.results.base import Result
from gemmscope.writers import FIGURE_ENDINGS, csv, figure, markdown, terminal
from gemmscope.writers.html import notebook_html, page


def text(result: Result, *, detail: bool = False) -> str:
    """What the command would print."""
    return terminal.text(document(result), detail=detail)


def notebook(result: Result) -> str:
    """The answer, the main tables and the main charts, as HTML."""
    found = document(result)
    if not found.charts():
        return notebook_html(found)
    with temporary_folder() as folder:
        path = folder / "figure.png"
        figure.save_figure(found, path)
        return notebook_html(found, path.read_bytes())


def save(result: Result, path: str | Path) -> None:
    """Write it: .json the run file, .md Markdown, .csv every table, .html a page, .png, .svg or .pdf the main charts."""
    target, found = Path(path), document(result)
    ending = target.suffix.lower()
    if ending in FIGURE_ENDINGS:
        figure.save_figure(found, target)
        return
    texts: dict[str, Callable[[], str]] = {
        ".json": result.to_json,
        ".md": lambda: markdown.markdown([found]),
        ".csv": lambda: csv.csv_text(found),
        ".html": lambda: page([found]),
    }
    if ending not in texts:
        raise UserError(
            f"{target.name} does not tell what to write", f"use one of the endings {', '.join((*texts, *FIGURE_ENDINGS))}"
        )
    try:
        target.write_text(texts[ending](), encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror or error}", "name a file in a folder that exists"
        ) from error
