"""The picture of a bench run, for papers and pull requests. Colours can be told apart by those who see red and green alike.

A model: one stacked bar per recipe, its linears in one micro-batch, every op in its colour, fprop and dgrad plain, wgrad lighter,
and what quantizing takes as a hatched part of its own on top; above stands the speedup over BF16 with its 95% interval. Bare
shapes: TFLOP/s of every recipe side by side, with the interval as an error bar. The two modes have a panel each.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmscope.errors import UserError
from gemmscope.measure.findings import Findings, known
from gemmscope.recipe.recipes import BASELINE

if TYPE_CHECKING:
    from gemmscope.measure.breakdown import Breakdown
    from gemmscope.workload.cases import Case, Mode

# Okabe and Ito's set, made to be told apart with every kind of colour vision; wine for its black, and yellow last, because it is
# faint on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#882255", "#F0E442")
DARK, REST = "#4D4D4D", "#9A9A9A"
MOST_OPS = 7  # in colours of their own; the smallest of more are drawn together
WIDTH = 0.62
HEADS = {"autocast": "Autocast: quantizing included", "pre-quantized": "Pre-quantized: products alone"}
QUANTIZING: dict[str, Any] = {"facecolor": "white", "edgecolor": "#555555", "hatch": "/////", "linewidth": 0.6}
ALARM = "#B00020"
CLEAR: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind text, or lines would cross it
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


def save_plot(report: Findings, title: str, path: str) -> None:
    """Draw both modes and write the file; its ending says in which format (png, svg, pdf)."""
    save_plots([(title, report)], "", path)


def save_plots(reports: Sequence[tuple[str, Findings]], title: str, path: str) -> None:
    """Several, one below the other, each with its own heading; `title` above them all."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        sizes = [_shapes_size(report) if report.bare else _model_size(report) for _, report in reports]
        width = max(width for width, _ in sizes)
        figure = Figure(figsize=(width, sum(height for _, height in sizes)), layout="constrained")
        parts = figure.subfigures(len(reports), 1, squeeze=False, height_ratios=[height for _, height in sizes])[:, 0]
        letters = int(width * 10)  # that fit into a line of this size
        for part, (heading, report) in zip(parts, reports, strict=True):
            (_draw_shapes if report.bare else _draw_model)(part, report)
            part.suptitle(textwrap.fill(heading, letters), fontsize=11, fontweight="bold")
        if title:
            figure.suptitle(textwrap.fill(title, letters), fontsize=11, fontweight="bold")
        write_figure(figure, path)


def write_figure(figure: Any, path: str) -> None:
    """To a file; its ending says in which format."""
    try:
        figure.savefig(Path(path), dpi=200, metadata=UNDATED if Path(path).suffix.lower() == ".svg" else None)
    except (OSError, ValueError) as error:
        raise UserError(f"the plot cannot be written to {path}: {error}", "for example -o bench.png") from error


# --- a model: stacked bars --------------------------------------------------------------------------------------------


def _draw_model(figure: Any, report: Findings) -> None:
    widths = _widths(report)
    panels = figure.subplots(1, len(widths), squeeze=False, sharey=True, width_ratios=widths)[0]
    colours = _colours(report)
    for panel, mode in zip(panels, report.modes, strict=True):
        _bars(panel, report, mode, colours)
    panels[0].set_ylabel("ms per micro-batch, all linears")
    tallest = max((panel.get_ylim()[1] for panel in panels), default=1.0)
    panels[0].set_ylim(0, tallest * 1.16)  # room for what stands above the bars
    figure.legend(handles=_legend(report, colours), loc="outside right center", frameon=False, fontsize=8.5)


def _widths(report: Findings) -> list[int]:
    """Bars in each panel."""
    return [max(len(report.columns(mode)), 1) for mode in report.modes]


def _model_size(report: Findings) -> tuple[float, float]:
    return 3.2 + 1.15 * sum(_widths(report)), 4.6


def _colours(report: Findings) -> dict[Case, str]:
    """The largest ops in colours of their own, in the order they run; grey for the rest."""
    work = {case: case.flops * case.count for case in report.cases}
    largest = sorted(work, key=lambda case: -work[case])[: len(work) if len(work) <= len(COLOURS) else MOST_OPS]
    own = [case for case in report.cases if case in largest]
    return {case: COLOURS[own.index(case)] if case in largest else REST for case in report.cases}


def _legend(report: Findings, colours: dict[Case, str]) -> list[Any]:
    """Ops from the top of a bar down, then what shades mean."""
    from matplotlib.patches import Patch

    own = [Patch(facecolor=colour, label=case.op) for case, colour in colours.items() if colour != REST]
    rest = sum(colour == REST for colour in colours.values())
    shades = [Patch(facecolor=DARK, label="fprop + dgrad"), Patch(facecolor=lighter(DARK), label="wgrad (lighter)")]
    if any(report.quantizing_ms(name, mode) for mode in report.modes for name in report.columns(mode)):
        shades.insert(0, Patch(**QUANTIZING, label="quantizing"))
    others = [Patch(facecolor=REST, label=f"{rest} smaller ops")] if rest else []
    return [*others, *reversed(own), Patch(alpha=0.0, label=""), *shades]


def _bars(panel: Any, report: Findings, mode: Mode, colours: dict[Case, str]) -> None:
    """One mode: a bar for every recipe that has all its parts."""
    names = report.columns(mode)
    for position, name in enumerate(names):
        total = report.total(name, mode)
        if total is None:
            panel.text(
                position,
                0,
                "not\npossible" if report.kind else "not\nmeasured",
                ha="center",
                va="bottom",
                fontsize=8,
                color="#777777",
            )
            continue
        height = 0.0
        for colour in dict.fromkeys(sorted(colours.values(), key=lambda each: each == REST)):  # the rest on top
            cells = [report.cell(case, name, mode) for case in report.cases if colours[case] == colour]
            height = _stack(panel, [cell for cell in cells if cell is not None], position, height, colour)
        spent = report.quantizing_ms(name, mode)
        if spent:
            panel.bar(position, spent, bottom=height, width=WIDTH, **QUANTIZING)
        _label(panel, report, name, mode, position, height + spent)
    panel.set_xticks(range(len(names)), names)
    panel.set_xlim(*((-0.6, len(names) - 0.4) if len(names) > 1 else (-0.9, 0.9)))
    panel.set_title(f"{report.kind} {HEADS[mode]}".strip(), fontsize=9.5)
    panel.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    panel.tick_params(axis="x", length=0)


def _stack(panel: Any, cells: list[Breakdown], position: int, bottom: float, colour: str) -> float:
    """The products of one op (or the smallest ones): fprop and dgrad together, wgrad lighter. Returns the new height."""
    forward = wgrad = 0.0
    for cell in cells:
        products = cell.product_ms() or {"fprop": cell.total.value}  # not split into passes: one plain block
        wgrad += products.get("wgrad", 0.0) * cell.case.count
        forward += sum(time for name, time in products.items() if name != "wgrad") * cell.case.count
    edge = {"edgecolor": "white", "linewidth": 0.5, "width": WIDTH}
    panel.bar(position, forward, bottom=bottom, facecolor=colour, **edge)
    if wgrad:
        panel.bar(position, wgrad, bottom=bottom + forward, facecolor=lighter(colour), **edge)
    return bottom + forward + wgrad


def lighter(colour: str) -> tuple[float, float, float]:
    """Half-way to white."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return (1 + red) / 2, (1 + green) / 2, (1 + blue) / 2


def _label(panel: Any, report: Findings, name: str, mode: Mode, position: int, height: float) -> None:
    """The speedup with its interval, or what stands in its way; the time below it."""
    falls_back = report.falls_back(name, mode)
    found = report.speedup(name, mode)
    head = "FALLBACK" if falls_back else "1.00x" if name == BASELINE else f"{found.value:.2f}x" if found else ""
    interval = f"[{found.low:.2f}, {found.high:.2f}]\n" if found and known(found) else ""
    small = panel.annotate(
        f"{interval}{_milliseconds(height)}", (position, height), (0, 2), textcoords="offset points",
        ha="center", va="bottom", fontsize=7.5, color="#333333", linespacing=1.15, bbox=CLEAR,
    )  # fmt: skip
    panel.annotate(
        head, (0.5, 1.0), (0, 0.5), xycoords=small, textcoords="offset points",
        ha="center", va="bottom", fontsize=10, fontweight="bold", color=ALARM if falls_back else "black", bbox=CLEAR,
    )  # fmt: skip


def _milliseconds(time_ms: float) -> str:
    """Three digits.

    >>> _milliseconds(674.9), _milliseconds(0.01234)
    ('675 ms', '0.0123 ms')
    """
    return f"{time_ms:.0f} ms" if time_ms >= 100 else f"{time_ms:.3g} ms"


# --- bare shapes: grouped bars ----------------------------------------------------------------------------------------


def _recipe_colour(report: Findings, name: str) -> str:
    """The baseline is dark; the others follow in their order."""
    return (DARK, *COLOURS)[report.recipes.index(name) % (len(COLOURS) + 1)]


def _shapes_size(report: Findings) -> tuple[float, float]:
    return max(4.5, 2.4 + len(report.cases) * (0.3 + 0.19 * len(report.recipes))), 1.0 + 2.5 * len(report.modes)


def _draw_shapes(figure: Any, report: Findings) -> None:
    from matplotlib.patches import Patch

    shapes = len(report.cases)
    panels = figure.subplots(len(report.modes), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for panel, mode in zip(panels, report.modes, strict=True):
        _groups(panel, report, mode)
    drawn = [name for name in report.recipes if any(name in report.columns(mode) for mode in report.modes)]
    handles = [Patch(facecolor=_recipe_colour(report, name), label=name) for name in drawn]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    square = all(case.tokens == case.inputs == case.outputs for case in report.cases)
    labels = [str(case.tokens) if square else case.op for case in report.cases]
    panels[-1].set_xticks(range(shapes), labels, **({} if square else {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}))
    panels[-1].set_xlabel("side of square matrices" if square else "M x K x N")


def _groups(panel: Any, report: Findings, mode: Mode) -> None:
    """One mode: the recipes of each shape side by side."""
    names = report.columns(mode)
    width = 0.8 / max(len(report.recipes), 1)
    for name in names:
        offset = (names.index(name) - (len(names) - 1) / 2) * width
        for index, case in enumerate(report.cases):
            cell = report.cell(case, name, mode)
            if cell is None:
                continue
            rate = case.flops / cell.total.value / 1e9
            fell_back = bool(report.fallback(case, name, mode))
            look: dict[str, Any] = {"hatch": "xxx", "edgecolor": ALARM} if fell_back else {"edgecolor": "white"}
            panel.bar(index + offset, rate, width, facecolor=_recipe_colour(report, name), linewidth=0.4, **look)
            if known(cell.total):
                _error_bar(panel, index + offset, case.flops, rate, cell)
            if fell_back:
                panel.annotate("FALLBACK", (index + offset, rate), (0, 3), textcoords="offset points",
                               ha="center", va="bottom", rotation=90, fontsize=7, color=ALARM)  # fmt: skip
    panel.set_title(f"{report.kind} {HEADS[mode]}".strip(), fontsize=9.5)
    panel.set_ylabel("TFLOP/s")
    panel.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    panel.tick_params(axis="x", length=0)


def _error_bar(panel: Any, x: float, flops: int, rate: float, cell: Breakdown) -> None:
    low, high = flops / cell.total.high / 1e9, flops / max(cell.total.low, 1e-9) / 1e9
    reach = [[max(rate - low, 0.0)], [max(high - rate, 0.0)]]
    panel.errorbar(x, rate, yerr=reach, color="black", linewidth=0.7, capsize=1.8, capthick=0.7)
