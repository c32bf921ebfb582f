"""How a result shows itself in Python: as text, as HTML in a notebook, as DataFrames, as a file.

`results/base.py` calls these functions by name, so that results need not import what shows them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmscope import writers
from gemmscope.document import document
from gemmscope.document.model import Chart, Document
from gemmscope.errors import UserError
from gemmscope.results.base import Result
from gemmscope.results.keep import Keeper
from gemmscope.say import say
from gemmscope.writers import WRITERS, figure, tables, terminal
from gemmscope.writers.html import notebook_html

NOTEBOOK_DPI = 120  # pictures in a notebook are stored in it


def answer(result: Result) -> str:
    """The answer in a sentence."""
    return document(result).answer


def text(result: Result, *, detail: bool = False) -> str:
    """What the command would print."""
    return terminal.text(document(result), detail=detail)


def notebook(result: Result) -> str:
    """The answer, the main charts and the main table as HTML, the rest collapsed."""
    told = document(result)
    return notebook_html(told, figure.image(_main_figure(told), ".webp", NOTEBOOK_DPI) if told.charts() else b"")


def _main_figure(told: Document) -> Document:
    """The document with its first chart, and those drawn beside it on the same axis: for other GPUs, for the other mode."""
    charts = told.charts()
    drawn = [chart for chart in charts if chart.main or chart.figure] or charts
    kept = [chart for chart in drawn if type(chart) is type(drawn[0]) and _unit(chart) == _unit(drawn[0])]
    sections = [replace(section, blocks=tuple(block for block in section.blocks if block in kept)) for section in told.sections]
    return replace(told, sections=tuple(sections))


def _unit(chart: Chart) -> str:
    return str(getattr(chart, "unit", ""))


def frame(result: Result, name: str = "") -> Any:
    """The main table as a DataFrame, or the one with this name or title."""
    return tables.frame(document(result), name)


def frames(result: Result) -> dict[str, Any]:
    """Every table as a DataFrame, by its name."""
    return tables.frames(document(result))


def save(result: Result, path: str | Path) -> None:
    """Write it in the format that the ending selects: .json is the run file, and the others are those of `WRITERS`."""
    ending, endings = Path(path).suffix.lower(), (".json", *WRITERS)
    if ending not in endings:
        raise UserError(
            f"{Path(path).name} has no extension that selects a format", f"use one of the extensions {', '.join(endings)}"
        )
    keeper = Keeper(result)
    place, note = keeper.place(path, run_file=ending == ".json")
    if note:
        say(f"{note}; wrote {place}" if place is not None else note)
    if place is not None:
        written = result.to_json() if ending == ".json" else writers.content(ending, [document(result)])
        keeper.write(place, written, "name a file in a folder that exists")
