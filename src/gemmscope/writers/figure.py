"""Charts as image files (PNG, SVG, PDF) that go into a paper as they are.

Charts of one kind and unit are panels of one block: they share their scale and a legend. A figure is as wide as two columns of a
paper and embeds its fonts. The same numbers give the same file.
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
from matplotlib.figure import Figure, FigureBase

from gemmscope.document.charts import BarChart, Chart, CurveChart, HeatMap, RankChart, ScatterChart, WaterfallChart
from gemmscope.document.combine import ComparedTime, common_baselines, label, letter, own_baseline, sources, speedup_rows
from gemmscope.document.model import Document, visible
from gemmscope.document.table import grouped
from gemmscope.errors import UserError
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.units import ratio, slug
from gemmscope.writers import dots, drawing, panels, plots, save

FORMATS = (".png", ".svg")
DPI = 300
WIDTH_IN = 7.0  # two columns of a paper
MOST_PANELS = 12  # of one file
MOST_GPUS = 4  # whose bars are drawn below those of all GPUs together
BATCH = ("micro-batch", "sequence")  # named in titles, also if they are 1
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
    "figure.constrained_layout.h_pad": 0.04,
    "figure.constrained_layout.w_pad": 0.04,
}
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "ps": {}, "png": {"Software": None}}


@dataclass(frozen=True)
class PanelGroup:
    """Panels of one figure that belong together: the name of their file, their height, and how they are drawn."""

    name: str
    height_in: float
    draw: Callable[[Any], None]


def image(document: Document, ending: str, dpi: int = DPI) -> bytes:
    """The main charts of a document in one image, or all if none is main; a `UserError` if there is no chart."""
    with _drawing():
        return _packed(_main_charts(document), ending, dpi)


@contextmanager
def _drawing() -> Iterator[None]:
    """Draw in our style. Characters that a font lacks are drawn as boxes, without a warning."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _main_charts(document: Document) -> Figure:
    document = visible(document, longest=LONGEST)
    charts = document.charts()
    shown = [chart for chart in charts if chart.main or chart.figure] or charts
    several = _several([document])
    if several:  # all charts of all GPUs would be unreadable: only the first kind, for a few GPUs
        first = [
            chart
            for chart in shown
            if (type(chart), getattr(chart, "unit", "")) == (type(shown[0]), getattr(shown[0], "unit", ""))
        ]
        shown = first if len(first) <= MOST_GPUS else []
    blocks = [*several, *_blocks(shown)]
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
        raise UserError(message, "give a folder that can be written") from error
    with _drawing():
        for name, figure in _figures([visible(document, longest=LONGEST) for document in documents]):
            for ending in FORMATS:
                written.append(folder / f"{name}{ending}")
                save(written[-1], _packed(figure, ending), HINT)
    return written


def _figures(documents: Sequence[Document]) -> Iterator[tuple[str, Figure]]:
    for document in documents:
        start = f"{letter(documents, document).lower()}-" if len(documents) > 1 else ""
        used = Counter[str]()
        for block in _blocks(document.charts()):
            used[block.name] += 1
            number = f"-{used[block.name]}" if used[block.name] > 1 else ""
            yield f"{start}{block.name}{number}", _figure(_titles(document), [block])
    titles = _titles(documents[0])
    if len(documents) > 1:
        titles = documents[0].subject.title, "; ".join(label(documents, document) for document in documents)
    for block in _several(documents):
        yield block.name, _figure(titles, [block])
    if len(documents) > 1 and speedup_rows(documents):
        yield "side-by-side", _figure(titles, [_side_by_side(documents)])


def _titles(document: Document) -> tuple[str, str]:
    """The title of a figure (model and GPU), and the line below it: sizes, batch and layout."""
    batch = {name: value for name, value in document.subject.batch.items() if value not in (1, "none") or name in BATCH}
    parts = [document.subject.title, *(f"{name} {value}" for name, value in batch.items())]
    if not batch:
        parts = list(document.context[:1]) if document.kind == "forecast" else []
    where = document.where.removesuffix(", FORECAST")
    return document.title, ", ".join([*parts, *([] if (document.kind == "forecast" or where in document.title) else [where])])


def _figure(titles: tuple[str, str], blocks: Sequence[PanelGroup]) -> Figure:
    """All blocks below one another, the title above them. The layout is computed once, for every format."""
    lines = textwrap.wrap(titles[0], int(WIDTH_IN * 11.5)) or [""]
    below = textwrap.wrap(titles[1], int(WIDTH_IN * 15.5))
    head_in = 0.17 * len(lines) + 0.14 * len(below) + 0.08
    figure = Figure(figsize=(WIDTH_IN, head_in + sum(block.height_in for block in blocks)), dpi=DPI, layout="constrained")
    heights = [head_in, *(block.height_in for block in blocks)]
    head, *parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    head.text(0.008, 0.94, "\n".join(lines), fontsize=9.5, fontweight="bold", ha="left", va="top", linespacing=1.15)
    low = 0.94 - 0.165 * len(lines) / head_in
    head.text(0.008, low, "\n".join(below), fontsize=drawing.NORMAL, color=drawing.SOFT, ha="left", va="top", linespacing=1.15)
    for part, block in zip(parts, blocks, strict=True):
        block.draw(part)
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine(None)  # or every format would compute it again
    return figure


def _blocks(charts: Sequence[Chart]) -> Iterator[PanelGroup]:
    """Group charts of the same kind and unit, wherever they are in the document; waterfalls also by GPU."""

    def kind(chart: Chart) -> tuple[Any, ...]:
        return (
            type(chart),
            getattr(chart, "unit", ""),
            (chart.title.split(":")[0] if isinstance(chart, WaterfallChart) else getattr(chart, "axis", "")),
        )

    for group in grouped((kind(chart), chart) for chart in charts).values():
        for first in range(0, len(group), MOST_PANELS):
            yield _block(group[first : first + MOST_PANELS])


def _block(group: Sequence[Chart]) -> PanelGroup:
    kind = PANELS[type(group[0])]
    return PanelGroup(kind.name(group[0]), kind.height_in(group, WIDTH_IN), lambda part: kind.draw(part, group, WIDTH_IN))


@dataclass(frozen=True)
class PanelKind:
    """How charts of one type become panels: the name of their file, the height of all of them, and what draws them."""

    name: Callable[[Any], str]
    height_in: Callable[[Any, float], float]
    draw: Callable[[Any, Any, float], None]


PANELS: dict[type[Any], PanelKind] = {
    BarChart: PanelKind(
        lambda chart: f"time-{slug(chart.unit.split()[-1])}",
        lambda group, width_in: panels.layout(group, width_in).height_in,
        panels.bars,
    ),
    WaterfallChart: PanelKind(lambda _: "waterfall", panels.waterfalls_height, panels.waterfalls),
    CurveChart: PanelKind(
        lambda chart: "speedup" if chart.unit == "x" else "error" if chart.unit.startswith("%") else "rate",
        plots.curves_height,
        plots.curves,
    ),
    HeatMap: PanelKind(lambda chart: "speedup" if chart.unit == "x" else slug(chart.measure), plots.heat_height, plots.heat),
    ScatterChart: PanelKind(lambda _: "speed-and-error", dots.scatters_height, dots.scatters),
    RankChart: PanelKind(lambda _: "ranks", dots.ranks_height, dots.ranks),
}


def _several(documents: Sequence[Document]) -> list[PanelGroup]:
    """The panels that compare several GPUs or runs: tokens/s, then the speedups over BF16 on the same GPU."""
    common = next(iter(common_baselines(documents)), None)
    if common is None:
        return []
    labels = {(time.run, time.recipe): ratio(time.over) for time in common.times}
    rates = grouped((time.run, (time.recipe, _rate(time))) for time in common.times)
    baselines = [(time.run, (BASELINE, Interval(1.0))) for time in common.times if time.recipe == BASELINE]
    speedups = [
        (run, (recipe, speedup))
        for what, recipe, by_run in speedup_rows(documents)
        for run, speedup in by_run.items()
        if what == common.what
    ]
    gains = grouped([*baselines, *speedups])
    unit = f"{common.unit}/s per GPU" if common.has_rates else "ms per micro-batch"
    baseline = common.baseline.removesuffix(", FORECAST")
    title = f"{common.what[0].upper()}{common.what[1:]}; above each bar its speedup over {BASELINE} on {baseline}"
    own = {(run, recipe): ratio(speedup) for run, values in gains.items() for recipe, speedup in values}
    beside = own_baseline(documents)
    named = {run: name.removesuffix(", FORECAST") for run, name in sources(documents).items()}

    def draw(part: FigureBase) -> None:
        above, below = part.subplots(2, 1)
        plots.grouped_bars(above, list(rates.items()), unit, title, WIDTH_IN, labels, named)
        plots.grouped_bars(below, list(gains.items()), "x", beside, WIDTH_IN, own, named)
        drawing.legend(part, plots.group_handles(list(rates.items())), WIDTH_IN)

    return [PanelGroup("common-baseline", 5.2, draw)]


def _rate(compared: ComparedTime) -> Interval:
    """Tokens/s with the interval of the time; the time itself where there is no rate."""
    rate, time = compared.tokens_per_s, compared.time_ms
    return time if rate is None else time.inverse(rate * time.value)


def _side_by_side(documents: Sequence[Document]) -> PanelGroup:
    rows = speedup_rows(documents)
    labels = {run: name for run, name in sources(documents).items() if any(run in by_run for _, _, by_run in rows)}

    def draw(part: FigureBase) -> None:
        drawing.legend(part, plots.side_by_side(part.subplots(), rows, labels), WIDTH_IN)

    return PanelGroup(
        "side-by-side", min(0.6 + len(rows) * max(0.22, 0.11 * len(labels) + 0.06), 40.0) + 0.17 * len(labels), draw
    )


def _packed(figure: Figure, ending: str, dpi: int = DPI) -> bytes:
    """The content of an image file."""
    kind, out = ending.removeprefix("."), io.BytesIO()
    packing: dict[str, Any] = {"pil_kwargs": {"compress_level": 4}} if kind == "png" else {}  # 6 takes twice as long for 3%
    try:
        figure.savefig(out, format=kind, dpi=dpi, metadata=UNDATED.get(kind), **packing)
    except ValueError as error:
        raise UserError(f"the figure cannot be drawn as {ending}: {error}", HINT) from error
    return out.getvalue()
