"""Charts as image files (PNG, SVG, PDF) that go into a paper as they are.

Charts of one kind and unit are panels of one block: they share their scale and a legend. A figure is two columns of a paper wide, has
its fonts inside, and the same numbers give the same file.
"""

import io
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from gemmscope.writers import drawing, panels, plots

FORMATS = ("png", "svg")
DPI = 300
WIDTH_IN = 7.0  # two columns of a paper
MOST_PANELS = 12  # of one file
LONGEST = 160  # characters of a label: laying out thousands takes minutes
HINT = "for example -o figure.png"
STYLE: Any = {
    "font.size": drawing.NORMAL,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gemmscope",  # the same numbers, the same file
    "text.parse_math": False,  # a dollar in a name is a dollar
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
}
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "ps": {}, "png": {"Software": None}}


@dataclass(frozen=True)
class Block:
    """Panels of one figure that belong together: the name of their file, their height, and how they are drawn."""

    name: str
    height_in: float
    draw: Callable[[Any], None]


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
        _main_charts(document).savefig(out, format="png", dpi=DPI, metadata=UNDATED["png"])
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
    blocks = list(_blocks([chart for chart in charts if chart.main or getattr(chart, "figure", False)] or charts))
    if not blocks:
        raise UserError(f"there is no chart to draw in this {document.kind} result")
    return _figure(_titles(document), blocks)


def save_figures(documents: Sequence[Document], folder: Path) -> list[Path]:
    """Draw every chart of every document, a file for each block of panels, as PNG and SVG; returns what was written."""
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
        for block in _blocks(document.charts()):
            used[block.name] += 1
            number = f"-{used[block.name]}" if used[block.name] > 1 else ""
            yield f"{start}{block.name}{number}", _figure(_titles(document), [block])
    if len(documents) > 1 and sources(documents):
        yield "side-by-side", _figure((documents[0].subject.title, ""), [_side_by_side(documents)])


def _titles(document: Document) -> tuple[str, str]:
    """What a figure is of: model and GPU; batch and layout."""
    batch = dict(document.subject.batch)
    parts = [f"{name} {batch[name]}" for name in ("micro-batch", "sequence") if name in batch]
    parts += [
        f"{name} {value}" for name, value in batch.items() if name not in ("micro-batch", "sequence", "recompute") and value != 1
    ]
    parts += [f"recompute {batch['recompute']}"] if batch.get("recompute", "none") != "none" else []
    where = "" if document.where.removesuffix(", FORECAST") in document.title or document.kind == "forecast" else document.where
    return document.title, ", ".join([*parts, *([where] if where else [])])


def _figure(titles: tuple[str, str], blocks: Sequence[Block]) -> Figure:
    """All blocks below one another, the title above them. The layout is computed once, for every format."""
    lines = textwrap.wrap(titles[0], int(WIDTH_IN * 13)) or [""]
    below = textwrap.wrap(titles[1], int(WIDTH_IN * 16))
    head_in = 0.17 * len(lines) + 0.14 * len(below) + 0.08
    figure = Figure(figsize=(WIDTH_IN, head_in + sum(block.height_in for block in blocks)), layout="constrained")
    heights = [head_in, *(block.height_in for block in blocks)]
    head, *parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    head.text(0.008, 0.94, "\n".join(lines), fontsize=9.5, fontweight="bold", ha="left", va="top", linespacing=1.15)
    low = 0.94 - 0.165 * len(lines) / head_in
    head.text(0.008, low, "\n".join(below), fontsize=drawing.NORMAL, color=drawing.SOFT, ha="left", va="top", linespacing=1.15)
    for part, block in zip(parts, blocks, strict=True):
        block.draw(part)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _blocks(charts: Sequence[Chart]) -> Iterator[Block]:
    """Charts of one kind and unit together, wherever they stand; of a waterfall those of one GPU."""
    groups: dict[tuple[Any, ...], list[Chart]] = {}
    for chart in charts:
        own = chart.title.split(":")[0] if isinstance(chart, WaterfallChart) else getattr(chart, "axis", "")
        groups.setdefault((type(chart), getattr(chart, "unit", ""), own), []).append(chart)
    for group in groups.values():
        for first in range(0, len(group), MOST_PANELS):
            yield _block(group[first : first + MOST_PANELS])


def _block(group: Sequence[Chart]) -> Block:
    stacked = [chart for chart in group if isinstance(chart, BarChart)]
    if stacked:
        name = f"time-{slug(stacked[0].unit.split()[-1])}"
        return Block(name, panels.bars_size(stacked, WIDTH_IN)[1], lambda part: panels.bars(part, stacked, WIDTH_IN))
    falls = [chart for chart in group if isinstance(chart, WaterfallChart)]
    if falls:
        height_in = panels.waterfalls_size(falls, WIDTH_IN)[1]
        return Block("waterfall", height_in, lambda part: panels.waterfalls(part, falls, WIDTH_IN))
    lines = [chart for chart in group if isinstance(chart, CurveChart)]
    if lines:
        name = "speedup" if lines[0].unit == "x" else "rate"
        return Block(name, plots.curves_size(lines)[1], lambda part: plots.curves(part, lines, WIDTH_IN))
    planes = [chart for chart in group if isinstance(chart, HeatMap)]
    return Block("speedup", plots.heat_size(planes, WIDTH_IN)[1], lambda part: plots.heat(part, planes, WIDTH_IN))


def _side_by_side(documents: Sequence[Document]) -> Block:
    rows, labels = speedup_rows(documents), sources(documents)

    def draw(part: Any) -> None:
        drawing.legend(part, plots.side_by_side(part.subplots(), rows, labels), WIDTH_IN)

    height_in = min(0.6 + len(rows) * max(0.22, 0.11 * len(labels) + 0.06), 40.0)
    return Block("side-by-side", height_in + 0.17 * len(labels), draw)


def _write(figure: Any, path: Path) -> None:
    ending = path.suffix.lower().removeprefix(".")
    try:
        with replacing(path, HINT) as out:
            figure.savefig(out, format=ending, dpi=DPI, metadata=UNDATED.get(ending))
    except ValueError as error:
        raise UserError(f"the figure cannot be written to {path}: {error}", HINT) from error
