"""Draws one chart into one panel of a figure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gemmscope import units
from gemmscope.document.charts import GREY, Bar, BarChart, CurveChart, HeatMap, Segment, WaterfallChart, axis_ends, legend
from gemmscope.interval import Interval

# Okabe and Ito's palette, made to be told apart with every kind of color vision; wine instead of its black, and yellow last,
# because it is faint on white.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#882255", "#F0E442")
DARK, REST, ALARM = "#4D4D4D", "#9A9A9A", "#B00020"
DOWN, UP = "#D55E00", "#009E73"
MARKERS = "os^DvPX*"
BAR_WIDTH = 0.62
QUANTIZATION: dict[str, Any] = {"facecolor": "white", "edgecolor": "#555555", "hatch": "/////", "linewidth": 0.6}
CLEAR: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind text, or lines would cross it
MOST_LABELS = 24  # that can be read along a side
MOST_LETTERS = 40  # of all labels below a panel: more stand upright


def lighter(color: str) -> tuple[float, float, float]:
    """Half-way to white."""
    red, green, blue = to_rgb(color)
    return (1 + red) / 2, (1 + green) / 2, (1 + blue) / 2


def bars(figure: Any, charts: Sequence[BarChart]) -> None:
    """Stacked bars, a panel for each chart, with one legend."""
    widths = [max(len(chart.bars), 1) for chart in charts]
    axes = figure.subplots(1, len(charts), squeeze=False, sharey=True, width_ratios=widths)[0]
    for axis, chart in zip(axes, charts, strict=True):
        for place, bar in enumerate(chart.bars):
            _bar(axis, place, bar)
        axis.set_xticks(range(len(chart.bars)), [bar.label for bar in chart.bars])
        axis.set_xlim(*((-0.6, len(chart.bars) - 0.4) if len(chart.bars) > 1 else (-0.9, 0.9)))
        axis.set_title(chart.title, fontsize=9.5)
        axis.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axis.tick_params(axis="x", length=0)
    axes[0].set_ylabel(charts[0].unit)
    axes[0].set_ylim(0, max((bar.total_ms for chart in charts for bar in chart.bars), default=1.0) * 1.2 or 1.0)
    segments = [segment for chart in charts for bar in chart.bars for segment in bar.segments]
    handles = [Patch(facecolor=_color(color), label=name) for name, color in reversed(legend(charts).items())]
    hatched = [segment.name for segment in segments if segment.shade == "hatched"]
    if hatched:
        handles.insert(0, Patch(**QUANTIZATION, label=hatched[0]))
    if any(segment.shade == "light" for segment in segments):
        handles += [Patch(facecolor=DARK, label="fprop + dgrad"), Patch(facecolor=lighter(DARK), label="wgrad (lighter)")]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8.5)


def _bar(axis: Any, place: int, bar: Bar) -> None:
    height = 0.0
    for segment in bar.segments:
        axis.bar(place, segment.time_ms, bottom=height, width=BAR_WIDTH, **_look(segment))
        height += segment.time_ms
    if not bar.segments:
        axis.text(place, 0, bar.note.replace(" as ", "\nas "), ha="center", va="bottom", fontsize=8, color="#777777")
        return
    interval = f"{units.ends(bar.speedup, 2)}\n" if bar.speedup is not None and bar.speedup.known else ""
    time = f"{height:.0f} ms" if height >= 100 else f"{height:.3g} ms"
    small = axis.annotate(f"{interval}{time}", (place, height), (0, 2), textcoords="offset points", ha="center", va="bottom",
                          fontsize=7.5, color="#333333", linespacing=1.15, bbox=CLEAR)  # fmt: skip
    axis.annotate(bar.head, (0.5, 1.0), (0, 0.5), xycoords=small, textcoords="offset points", ha="center", va="bottom",
                  fontsize=10, fontweight="bold", color=ALARM if bar.alarm else "black", bbox=CLEAR)  # fmt: skip


def _color(index: int) -> str:
    return REST if index == GREY else COLORS[index % len(COLORS)]


def _look(segment: Segment) -> dict[str, Any]:
    if segment.shade == "hatched":
        return QUANTIZATION
    color = _color(segment.color)
    return {"facecolor": lighter(color) if segment.shade == "light" else color, "edgecolor": "white", "linewidth": 0.5}


def waterfalls(figure: Any, charts: Sequence[WaterfallChart]) -> None:
    """From the speedup of the GEMMs to that of the step, a panel for each recipe."""
    low, high = axis_ends([1.0, *(fall.speedup for chart in charts for fall in chart.falls)])
    for axis, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        before = 1.0
        for place, fall in enumerate(chart.falls):
            color = COLORS[0] if place == 0 else DOWN if fall.speedup <= before else UP
            axis.barh(place, fall.speedup - before, left=before, height=0.62, color=color)
            _value(axis, max(fall.speedup, before), place, fall.speedup)
            before = fall.speedup
        axis.barh(len(chart.falls), before - 1, left=1, height=0.62, color=DARK)
        _value(axis, max(before, 1.0), len(chart.falls), before)
        axis.set_yticks(range(len(chart.falls) + 1), [*(fall.part for fall in chart.falls), "the step"])
        axis.invert_yaxis()
        axis.set_xlim(low, high + (high - low) * 0.12)
        axis.axvline(1, color="#777777", linewidth=0.8, linestyle="--")
        axis.set_title(chart.title, fontsize=9.5)
        axis.set_xlabel(f"speedup over {chart.baseline}")


def _value(axis: Any, x: float, y: int, speedup: float) -> None:
    axis.annotate(f"{speedup:.2f}x", (x, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5, color="#333333")


def curve(axis: Any, chart: CurveChart) -> None:
    """Values with their intervals against a size."""
    places = chart.places
    for name, points in chart.series.items():
        x = [places.index(point.at) for point in points]
        reach = [_reach(point.value) for point in points]
        axis.errorbar(x, [point.value.value for point in points], yerr=[list(side) for side in zip(*reach, strict=True)],
                      label=name, **_dot(chart.color(name)))  # fmt: skip
        marked = [(places.index(point.at), point.value.value) for point in points if point.mark]
        axis.plot([at for at, _ in marked], [value for _, value in marked], "x", color=_color(chart.color(name)), markersize=8)
    for mark in dict.fromkeys(point.mark for points in chart.series.values() for point in points if point.mark):
        axis.plot([], [], "x", color=DARK, markersize=8, label=mark)
    turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if any(len(place) > 8 for place in places) else {}
    shown, labels = _ticks(places)
    axis.set_xticks(shown, labels, **turned)
    axis.set_xlabel(chart.axis)
    axis.set_ylabel("speedup over BF16" if chart.unit == "x" else chart.unit)
    if chart.unit == "x":
        axis.axhline(1, color="#777777", linewidth=0.8, linestyle="--")
    else:
        axis.set_ylim(bottom=0)
    axis.set_title(chart.title, fontsize=9.5)
    if chart.series:
        axis.legend(frameon=False, fontsize=8.5)


def _reach(found: Interval) -> tuple[float, float]:
    """How far the interval reaches below and above the value. Nothing that is drawn can be negative."""
    low = max(found.low, 0.0) if found.low is not None else found.value
    high = found.high if found.high is not None else found.value
    return max(found.value - low, 0.0), max(high - found.value, 0.0)


def heat(figure: Any, axis: Any, chart: HeatMap) -> None:
    """The best speedup as color, the best recipe in each field, the break-even line where speedups become certain."""
    values = np.array([[cell.value if cell.value is not None else np.nan for cell in row] for row in chart.cells])
    certain = np.array([[float(cell.certain) if cell.value is not None else np.nan for cell in row] for row in chart.cells])
    highest = max(1.05, float(np.nanmax(values, initial=1.0)))
    image = axis.imshow(values, origin="lower", aspect="auto", cmap="cividis_r", vmin=1.0, vmax=highest)
    figure.colorbar(image, ax=axis, label="speedup over BF16, best recipe")
    if max(values.shape) <= MOST_LABELS:
        for row, cells in enumerate(chart.cells):
            for column, cell in enumerate(cells):
                color = "white" if (cell.value or 0.0) > (1 + highest) / 2 else "black"
                axis.text(column, row, cell.label, color=color, ha="center", va="center", fontsize=6.5)
    handles = [Line2D([], [], linestyle="", label=f"{mark} = {meaning}") for mark, meaning in chart.legend]
    known = certain[~np.isnan(certain)]
    if min(certain.shape) > 1 and known.size and known.min() < known.max():
        axis.contour(np.nan_to_num(certain, nan=0.0), levels=[0.5], colors=DOWN, linewidths=2)
        handles.insert(0, Line2D([], [], color=DOWN, linewidth=2, label="break-even (certain beyond)"))
    upright = sum(map(len, _ticks(chart.columns)[1])) > MOST_LETTERS
    if handles:
        below = (0.5, -0.2 if upright else -0.14)
        axis.legend(handles=handles, loc="upper center", bbox_to_anchor=below, ncol=3, frameon=False, fontsize=7)
    axis.set_xticks(*_ticks(chart.columns))
    axis.tick_params(axis="x", rotation=90 if upright else 0)
    axis.set_yticks(*_ticks(chart.rows))
    axis.set_xlabel(chart.column_name)
    axis.set_ylabel(chart.row_name)
    axis.set_title(chart.title, fontsize=9.5)


def _ticks(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """Every label, or every n-th where there are many.

    >>> _ticks(["1", "2", "4"])
    ([0, 1, 2], ['1', '2', '4'])
    """
    every = max(1, -(-len(labels) // MOST_LABELS))
    places = list(range(0, len(labels), every))
    return places, [labels[place] for place in places]


def side_by_side(axis: Any, rows: Sequence[tuple[str, str, dict[str, Interval]]], labels: Mapping[str, str]) -> None:
    """All runs' speedups below one another: dots with their intervals."""
    for index, (key, label) in enumerate(labels.items()):
        shift = (index - (len(labels) - 1) / 2) * 0.7 / len(labels)
        shown: str | None = label
        for place, (_, _, by_run) in enumerate(rows):
            if (found := by_run.get(key)) is not None:
                below, above = _reach(found)
                axis.errorbar(found.value, place + shift, xerr=[[below], [above]], label=shown, **_dot(index))
                shown = None  # once in the legend
    axis.set_yticks(range(len(rows)), [f"{recipe}\n{what}" for what, recipe, _ in rows], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color="#777777", linewidth=0.8, linestyle="--")
    axis.set_xlabel("speedup over BF16")
    axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0))


def _dot(index: int) -> dict[str, Any]:
    """Series are told apart by color and by marker."""
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    return {"color": color, "marker": marker, "markersize": 4.5, "linewidth": 1.2, "capsize": 2}
