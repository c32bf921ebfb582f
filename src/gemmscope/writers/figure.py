"""Charts as image files (PNG, SVG, PDF), for papers and slides.

Charts of one kind and unit share a row of panels. The colors can be told apart with every kind of color vision.
"""

import io
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from gemmscope.document.charts import BarChart, Chart, CurveChart, HeatMap, WaterfallChart
from gemmscope.document.combine import letter, sources, speedup_rows
from gemmscope.document.model import Document, visible
from gemmscope.errors import UserError
from gemmscope.files import replacing
from gemmscope.units import slug
from gemmscope.writers import panels

FORMATS = ("png", "svg")
DPI = 200
LONGEST = 160  # characters of a label: laying out thousands takes minutes
HINT = "for example -o figure.png"
STYLE: Any = {
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gemmscope",  # the same numbers, the same file
    "text.parse_math": False,  # a dollar in a name is a dollar
    "pdf.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
UNDATED: dict[str, Any] = {"Date": None}  # of an SVG, for the same reason


def save_figure(document: Document, path: str | Path) -> None:
    """Draw the main charts of a document into one file, or all if none is main; its ending selects the format."""
    with _drawing():
        _write(_main_charts(document), Path(path))


def png(document: Document) -> bytes:
    """The same as a picture; empty if there is no chart."""
    if not document.charts():
        return b""
    out = io.BytesIO()
    with _drawing():
        _main_charts(document).savefig(out, format="png", dpi=DPI)
    return out.getvalue()


@contextmanager
def _drawing() -> Iterator[None]:
    """In our style. What a font lacks is drawn as a box, without a warning."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _main_charts(document: Document) -> Figure:
    document = visible(document, longest=LONGEST)
    charts = document.charts()
    rows = list(_rows([chart for chart in charts if chart.main or getattr(chart, "figure", False)] or charts))
    if not rows:
        raise UserError(f"there is no chart to draw in this {document.kind} result")
    sizes = [_size(row) for row in rows]
    width = max(width for width, _ in sizes)
    figure = _figure(document.title, width, sum(height for _, height in sizes) + 0.3)
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=[height for _, height in sizes])[:, 0]
    for part, row in zip(parts, rows, strict=True):
        _draw(part, row)
    return figure


def save_figures(documents: Sequence[Document], folder: Path) -> list[Path]:
    """Draw every chart of every document, a file for each row of panels, as PNG and SVG; returns what was written."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"figures cannot be written to {folder}: {error.strerror}"
        raise UserError(message, "name a folder that can be written") from error
    with _drawing():
        for name, figure in _figures([visible(document, longest=LONGEST) for document in documents]):
            for ending in FORMATS:
                written.append(folder / f"{name}.{ending}")
                _write(figure, written[-1])
    return written


def _figures(documents: Sequence[Document]) -> Iterator[tuple[str, Figure]]:
    for document in documents:
        start = f"{letter(documents, document).lower()}-" if len(documents) > 1 else ""
        used = Counter[str]()
        for row in _rows(document.charts()):
            figure = _figure(document.title, *_size(row))
            _draw(figure, row)
            name = _file_name(row[0])
            used[name] += 1
            yield f"{start}{name}" + (f"-{used[name]}" if used[name] > 1 else ""), figure
    if len(documents) > 1 and sources(documents):
        rows = speedup_rows(documents)
        figure = _figure(documents[0].subject.title, 6.5, 1.0 + 0.16 * len(rows) * (len(sources(documents)) + 1))
        panels.side_by_side(figure.subplots(), rows, sources(documents))
        yield "side-by-side", figure


def _figure(title: str, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(width * 10)), fontsize=11, fontweight="bold")
    return figure


def _file_name(chart: Chart) -> str:
    if isinstance(chart, BarChart):
        return f"time-{slug(chart.unit.split()[-1])}"
    if isinstance(chart, WaterfallChart):
        return "waterfall"
    return f"{'speedup' if isinstance(chart, HeatMap) or chart.unit == 'x' else 'rate'}-{slug(chart.title.split(':')[0])}"


def _rows(charts: Sequence[Chart]) -> Iterator[list[Chart]]:
    """Charts that share a row: neighbors of one kind; bars also of one unit. At most four stand side by side."""
    for _, group in groupby(charts, key=lambda chart: (type(chart), getattr(chart, "unit", ""))):
        row = list(group)
        most = 1 if isinstance(row[0], CurveChart) else 4
        yield from (row[first : first + most] for first in range(0, len(row), most))


def _size(row: Sequence[Chart]) -> tuple[float, float]:
    first = row[0]
    if isinstance(first, BarChart):
        return 3.2 + 1.15 * sum(max(len(chart.bars), 2) for chart in row if isinstance(chart, BarChart)), 4.6
    if isinstance(first, WaterfallChart):
        most = max(len(chart.falls) for chart in row if isinstance(chart, WaterfallChart)) + 1
        return 1.4 + 3.1 * len(row), 1.3 + 0.26 * most
    if isinstance(first, CurveChart):
        return max(4.8, 2.0 + 0.6 * len(first.places)), 3.5
    return 6.2 * len(row), 4.8


def _draw(figure: Any, row: Sequence[Chart]) -> None:
    first = row[0]
    if isinstance(first, BarChart):
        panels.bars(figure, [chart for chart in row if isinstance(chart, BarChart)])
    elif isinstance(first, WaterfallChart):
        panels.waterfalls(figure, [chart for chart in row if isinstance(chart, WaterfallChart)])
    elif isinstance(first, CurveChart):
        panels.curve(figure.subplots(), first)
    else:
        axes = figure.subplots(1, len(row), squeeze=False)[0]
        for axis, chart in zip(axes, row, strict=True):
            assert isinstance(chart, HeatMap)
            panels.heat(figure, axis, chart)


def _write(figure: Any, path: Path) -> None:
    ending = path.suffix.lower().removeprefix(".")
    try:
        with replacing(path, HINT) as out:
            figure.savefig(out, format=ending, dpi=DPI, metadata=UNDATED if ending == "svg" else None)
    except ValueError as error:
        raise UserError(f"the figure cannot be written to {path}: {error}", HINT) from error
