"""Curves, heat maps, and the dots and bars of several GPUs or runs. Panels of one figure share their scale and a legend."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, pstdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from gemmscope.document.charts import CurveChart, HeatMap, Point
from gemmscope.document.palette import heat_stops, recipe_key, series_key
from gemmscope.interval import Interval
from gemmscope.writers import drawing
from gemmscope.writers.drawing import INK, LETTER_IN, NORMAL, PAPER, SMALL, SOFT, WHISKER, dot, face, finite, style

CURVE_IN = 2.3  # height of a panel of curves
SIDE_IN = 0.6
LEAST = 5.0  # points of text that can be read
MOST_MARKERS = 14  # points of a curve that are drawn with markers
Groups = Sequence[tuple[str, Sequence[tuple[str, Interval]]]]
"""GPU or run → recipe → value."""

# --- curves ---------------------------------------------------------------------------------------------------------------


def curves_height(charts: Sequence[CurveChart], _: float) -> float:
    """The height of all panels."""
    rows = -(-len(charts) // 2)
    return rows * (CURVE_IN + 0.75 + (0.5 if any(len(place) > 8 for chart in charts for place in chart.places) else 0.0)) + 0.35


def curves(figure: FigureBase, charts: Sequence[CurveChart], width_in: float) -> None:
    """Values with their intervals against a size, a panel for each chart."""
    rows, columns = drawing.rows_of(len(charts), 2)
    panel_in = (width_in - SIDE_IN) / columns - 0.2
    points = [point.value for chart in charts for series in chart.series.values() for point in series]
    highest = max(map(drawing.top_of, points), default=1.0)
    lowest = min((finite(point.value - drawing.reach(point)[0]) for point in points), default=1.0)
    speedups = charts[0].unit == "x"
    margin = 0.06 * (max(highest, 1.0) - min(lowest, 1.0)) or 0.05
    ends = (min(lowest, 1.0) - margin, max(highest, 1.0) + margin) if speedups else (0.0, highest * 1.08 or 1.0)
    for place, panel, chart in drawing.panels(figure.subplots(rows, columns, squeeze=False), charts):
        _curve(panel, chart, panel_in)
        panel.set_ylim(*ends)
        if speedups:
            panel.axhline(1, color=SOFT, linewidth=0.8, linestyle="--", zorder=0.9)
            drawing.speedup_axis(panel.yaxis)
        else:
            drawing.numbers(panel.yaxis)
        drawing.grid(panel)
        below = textwrap.fill(chart.note, int(panel_in * 13)) if chart.note else ""
        scale = " (log scale)" if positions(chart.places)[2] and chart.limit is None else ""
        panel.set_xlabel(f"{chart.axis}{scale}\n{below}".strip(), fontsize=NORMAL)
        if place % columns == 0:
            panel.set_ylabel("speedup over BF16" if speedups else chart.unit, fontsize=NORMAL)
        else:
            panel.tick_params(labelleft=False)
        drawing.title(panel, chart.title, panel_in)
    drawing.legend(figure, _curve_handles(charts), width_in)


def positions(places: Sequence[str]) -> tuple[list[float], bool, bool]:
    """The positions of sizes or names along an axis, whether they are sizes, and whether the axis is logarithmic: that of sizes
    that double. Other sizes are on a linear one; names are at equal distances.

    >>> positions(["1024", "2048", "4096"]), positions(["QKV", "MLP"])
    (([10.0, 11.0, 12.0], True, True), ([0.0, 1.0], False, False))
    """
    values = [float(place) for place in places if place.isascii() and place.isdecimal() and 0 < len(place) < 18]
    if len(values) < len(places) or len(values) < 2 or min(values) <= 0:
        return [float(place) for place in range(len(places))], False, False
    logs = [math.log2(value) for value in values]
    return (logs, True, len(logs) > 2) if _unevenness(logs) <= _unevenness(values) else (values, True, False)


def _unevenness(places: Sequence[float]) -> float:
    """How much the gaps between neighbors differ, relative to their mean."""
    gaps = [later - earlier for earlier, later in pairwise(sorted(set(places)))]
    return pstdev(gaps) / mean(gaps) if gaps else 0.0


def _curve(panel: Axes, chart: CurveChart, panel_in: float) -> None:
    places = chart.places
    where, numeric, _ = positions(places) if chart.limit is None else ([float(place) for place in places], True, False)
    at = dict(zip(places, where, strict=True))
    span = max(where, default=0.0) - min(where, default=0.0) or 1.0
    many = len(places) > MOST_MARKERS
    for index, (name, points) in enumerate(chart.series.items()):
        line_style = dot(chart.color(name), 2.5 if many else 4.5)
        shift = 0.0 if numeric else (index - (len(chart.series) - 1) / 2) * 0.12  # or intervals would hide each other
        if not numeric:
            line_style["linestyle"] = "none"
        x, y = [at[point.at] + shift for point in points], [finite(point.value.value, math.nan) for point in points]
        panel.plot(x, y, **line_style, zorder=3)
        _intervals(panel, x, points, line_style["color"], band=numeric and len(points) > 1)
        marked = [(here, value) for here, value, point in zip(x, y, points, strict=True) if point.mark]
        if marked:
            panel.plot(*zip(*marked, strict=True), "x", color=INK, markersize=6.5, markeredgewidth=1.1, zorder=4)
    labels = [drawing.short(place) for place in places]
    turned = not numeric and max((len(label) for label in labels), default=0) * LETTER_IN > panel_in / max(len(places), 1)
    shown = _apart(where, labels, span / panel_in, turned=turned)
    rotation: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if turned else {}
    panel.set_xticks([where[place] for place in shown], [labels[place] for place in shown], **rotation)
    margin = span * 0.06 if numeric else 0.5
    panel.set_xlim(min(where, default=0.0) - margin, max(where, default=0.0) + margin)
    if chart.limit is not None:
        drawing.numbers(panel.xaxis, 8)
        panel.set_xlim(0, chart.limit * 1.02)
        panel.axvline(chart.limit, color=SOFT, linewidth=0.8, linestyle="--", zorder=0.9)


def _intervals(panel: Axes, x: Sequence[float], points: Sequence[Point], color: str, *, band: bool) -> None:
    """Draw the intervals: a band along a curve, bars where there is none."""
    known = [(here, *drawing.reach(point.value), point.value.value) for here, point in zip(x, points, strict=True)]
    known = [entry for entry in known if all(map(math.isfinite, entry))]
    if not known or not any(below or above for _, below, above, _ in known):
        return
    here, below, above, value = (np.array(side) for side in zip(*known, strict=True))
    if band:
        panel.fill_between(here, value - below, value + above, color=color, alpha=0.11, linewidth=0, zorder=2)
        for edge in (value - below, value + above):
            panel.plot(here, edge, color=color, linewidth=0.5, alpha=0.6, zorder=2)
    else:
        panel.errorbar(here, value, yerr=[below, above], **{**WHISKER, "ecolor": color}, zorder=3)


def _apart(where: Sequence[float], labels: Sequence[str], per_inch: float, *, turned: bool) -> list[int]:
    """The indices of the labels that have room; the last one always has."""
    kept: list[int] = []
    for place in [*range(len(where) - 1, -1, -1)]:
        need = 0.14 if turned else LETTER_IN * (len(labels[place]) + len(labels[kept[-1]])) / 2 + 0.06 if kept else 0.0
        if not kept or abs(where[kept[-1]] - where[place]) / per_inch >= need:
            kept.append(place)
    return kept[::-1]


def _curve_handles(charts: Sequence[CurveChart]) -> list[Line2D]:
    handles = [
        Line2D([], [], **dot(key), label=name)
        for name, key in {name: chart.color(name) for chart in charts for name in chart.series}.items()
    ]
    marks = dict.fromkeys(
        point.mark for point in [point for chart in charts for series in chart.series.values() for point in series] if point.mark
    )
    return [*handles, *(Line2D([], [], linestyle="", marker="x", color=INK, markersize=6, label=mark) for mark in marks)]


# --- heat maps ------------------------------------------------------------------------------------------------------------


def _heat_columns(charts: Sequence[HeatMap], width_in: float) -> int:
    """How many columns of panels have room."""
    return max(1, min(len(charts), 2, int((width_in - 1.0) / (max(len(chart.columns) for chart in charts) * 0.5 + 0.6))))


def heat_height(charts: Sequence[HeatMap], width_in: float) -> float:
    """The height of all panels."""
    lines = max((cell.label.count("\n") + 1 for chart in charts for row in chart.cells for cell in row), default=1)
    rows = max(len(chart.rows) for chart in charts)
    return -(-len(charts) // _heat_columns(charts, width_in)) * (min(max(1.9, rows * (0.1 + 0.11 * lines)), 7.5) + 0.85) + 0.35


def heat(figure: FigureBase, charts: Sequence[HeatMap], width_in: float) -> None:
    """Speedups or errors as color, the label of each field, the best point, and the line along the fields."""
    columns, height_in = _heat_columns(charts, width_in), heat_height(charts, width_in)
    rows = -(-len(charts) // columns)
    axes = figure.subplots(rows, columns, squeeze=False)
    scale = Normalize(charts[0].ends[0], max(chart.ends[1] for chart in charts))
    colors = LinearSegmentedColormap.from_list("speedup", heat_stops())
    panel_in = (width_in - 1.4) / columns - 0.3 * (columns - 1), (height_in - 0.35) / rows - 0.85
    handles: list[Any] = []
    for _, panel, chart in drawing.panels(axes, charts):
        handles += _plane(panel, chart, scale, colors, panel_in)
    image: Any = axes.flat[0].images[0]
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=26)
    bar.set_label(charts[0].measure, fontsize=NORMAL)
    bar.outline.set_visible(False)
    (drawing.speedup_axis if charts[0].unit == "x" else drawing.share_axis)(bar.ax.yaxis)
    bar.ax.tick_params(labelsize=NORMAL)
    drawing.legend(figure, list({handle.get_label(): handle for handle in handles}.values()), width_in)


def _plane(panel: Axes, chart: HeatMap, scale: Normalize, colors: Any, panel_in: tuple[float, float]) -> list[Any]:
    values = np.array([[math.nan if cell.value is None else finite(cell.value) for cell in row] for row in chart.cells])
    panel.imshow(values, origin="lower", aspect="auto", cmap=colors, norm=scale)
    handles: list[Any] = []
    missing = [(x, y) for y, x in zip(*np.nonzero(np.isnan(values)), strict=True)]
    if missing:
        patch_style: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": "#b5b5b5", "hatch": "////", "linewidth": 0}
        for x, y in missing:
            panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **patch_style))
        handles.append(Patch(**patch_style, label=chart.blank))
    cell_in = panel_in[0] / max(len(chart.columns), 1), panel_in[1] / max(len(chart.rows), 1)
    _cell_texts(panel, chart, scale, colors, cell_in)
    handles += _break_even(panel, chart)
    if chart.best is not None:
        x, y = chart.best
        for color, width in ((PAPER, 3.4), (INK, 1.6)):
            panel.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=color, linewidth=width, zorder=5))
        handles.append(Rectangle((0, 0), 1, 1, fill=False, edgecolor=INK, linewidth=1.6, label="best point"))
    handles += [Line2D([], [], linestyle="", label=f"{mark} = {meaning}") for mark, meaning in chart.legend]
    for side, labels, room, axis in (
        ("x", chart.columns, cell_in[0], panel.xaxis),
        ("y", chart.rows, cell_in[1], panel.yaxis),
    ):
        every = max(1, math.ceil(0.15 / room)) if side == "y" else 1
        turned = side == "x" and (max(map(len, labels), default=1) + 1) * LETTER_IN > room
        every = max(1, math.ceil(0.15 / room)) if turned else every
        axis.set_ticks(range(0, len(labels), every), [drawing.short(label, 20) for label in labels[::every]])
        if turned:
            panel.tick_params(axis="x", rotation=90)
    panel.tick_params(length=0, labelsize=NORMAL)
    for spine in panel.spines.values():
        spine.set_visible(False)
    panel.set_xlabel(chart.column_name, fontsize=NORMAL)
    panel.set_ylabel(chart.row_name, fontsize=NORMAL)
    drawing.title(panel, chart.title, panel_in[0])
    return handles


def _cell_texts(panel: Axes, chart: HeatMap, scale: Normalize, colors: Any, cell_in: tuple[float, float]) -> None:
    """Write the labels into the fields if there is room; smaller in small fields."""
    longest, most = (
        max(map(len, [line for row in chart.cells for cell in row for line in cell.label.split("\n")]), default=1),
        max((len(cell.label.split("\n")) for row in chart.cells for cell in row), default=1),
    )
    size = min(SMALL + 0.5, (cell_in[0] - 0.08) * 72 / (0.62 * max(longest, 1)), (cell_in[1] - 0.06) * 72 / (1.15 * most))
    if size < 4.2:
        return
    for y, row in enumerate(chart.cells):
        for x, cell in enumerate(row):
            if cell.value is not None:
                color = PAPER if drawing.is_dark(colors(scale(cell.value))[:3]) else INK
                panel.text(x, y, cell.label, color=color, ha="center", va="center", fontsize=size, linespacing=1.05)


def _break_even(panel: Axes, chart: HeatMap) -> list[Line2D]:
    """A line along the fields between those with a certain speedup, or a share below its limit, and those without."""
    kept_apart = chart.unit == "%"  # the outline of what is kept, closed at the edges of the map; else a line between speedups
    shape = len(chart.rows) + 2, len(chart.columns) + 2
    certain, known = np.full(shape, kept_apart), np.full(shape, kept_apart)
    certain[1:-1, 1:-1] = [[cell.certain for cell in row] for row in chart.cells]
    known[1:-1, 1:-1] = [[kept_apart or cell.value is not None for cell in row] for row in chart.cells]
    beside = (certain[:, 1:] != certain[:, :-1]) & known[:, 1:] & known[:, :-1]
    above = (certain[1:] != certain[:-1]) & known[1:] & known[:-1]
    up = [(x - 0.5, y - 1.5, y - 0.5) for y, x in np.argwhere(beside)]
    across = [(y - 0.5, x - 1.5, x - 0.5) for y, x in np.argwhere(above)]
    outline = [withStroke(linewidth=4.2, foreground=PAPER)]  # seen beside dark fields, in grey too
    line_style: dict[str, Any] = {"color": style("mark-break-even").light, "linewidth": 2.2, "path_effects": outline}
    if up:
        panel.vlines(*zip(*up, strict=True), **line_style, zorder=4, clip_on=False)
    if across:
        panel.hlines(*zip(*across, strict=True), **line_style, zorder=4, clip_on=False)
    return [Line2D([], [], **line_style, label=f"{chart.line}: {chart.line_meaning}")] if up or across else []


# --- several GPUs or runs -------------------------------------------------------------------------------------------------


def group_handles(groups: Groups) -> list[Patch]:
    """The legend: every recipe."""
    names = dict.fromkeys(recipe for _, values in groups for recipe, _ in values)
    return [Patch(**face(recipe_key(name, place)), label=name) for place, name in enumerate(names)]


def grouped_bars(
    panel: Axes,
    groups: Groups,
    unit: str,
    title: str,
    width_in: float,
    labels: Mapping[tuple[str, str], str],
    named: Mapping[str, str],
) -> None:
    """Draw a group of bars for each GPU or run, one for each recipe, with their intervals.

    `labels` are shown above the bars, the names in `named` below the groups.
    """
    names = list(dict.fromkeys(recipe for _, values in groups for recipe, _ in values))
    x, centers = 0.0, []
    slot_in = (width_in - 0.8) / max(sum(len(values) + 0.8 for _, values in groups), 1)
    size = min(SMALL, slot_in * 72 / (0.62 * max(map(len, labels.values()), default=1)))
    upright = size < LEAST
    tops: list[float] = []
    for group, values in groups:
        first = x
        for recipe, value in values:
            panel.bar(x, finite(value.value), width=0.86, **face(recipe_key(recipe, names.index(recipe))))
            if value.known:
                below, above = drawing.reach(value)
                drawing.whiskers(panel, [x], [finite(value.value)], ([finite(below)], [finite(above)]))
            text = labels.get((group, recipe), "")
            turned: dict[str, Any] = {"rotation": 90} if upright else {}
            panel.annotate(text, (x, drawing.top_of(value)), (0, 3), textcoords="offset points", ha="center", va="bottom",
                           fontsize=SMALL if upright else size, color=INK, bbox=drawing.CLEAR, **turned)  # fmt: skip
            tops.append(drawing.top_of(value))
            x += 1
        centers.append((first + x - 1) / 2)
        x += 0.8
    rooms = [max(6, int((len(values) + 0.6) * slot_in / LETTER_IN)) for _, values in groups]
    names_below = [named.get(name, name) for name, _ in groups]
    panel.set_xticks(centers, ["\n".join(_lines(name, room)) for name, room in zip(names_below, rooms, strict=True)])
    panel.set_xlim(-0.9, x - 0.9)
    panel.set_ylim(0, drawing.room_above(tops, 0.42 if upright else 0.2, 1.9))
    (drawing.speedup_axis if unit == "x" else drawing.numbers)(panel.yaxis)
    if unit == "x":
        panel.axhline(1, color=SOFT, linewidth=0.8, linestyle="--", zorder=0.9)
    panel.set_ylabel("speedup over BF16" if unit == "x" else unit, fontsize=NORMAL)
    drawing.grid(panel)
    drawing.title(panel, title, width_in)


def _lines(name: str, letters: int) -> list[str]:
    """A name in at most four lines of about `letters` characters."""
    kept = re.sub(r" (?=[KMGT]?B\b)", "\u00a0", name)  # a number keeps its unit
    return [
        drawing.short(line, max(letters, 8))
        for line in textwrap.wrap(kept, letters, break_long_words=False, break_on_hyphens=False)[:4]
    ]


def side_by_side(panel: Axes, rows: Sequence[tuple[str, str, dict[str, Interval]]], labels: Mapping[str, str]) -> list[Line2D]:
    """Draw the speedups of all runs, row by row: dots with their intervals. Returns the legend."""
    for place in range(0, len(rows), 2):
        panel.axhspan(place - 0.5, place + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    panel.axvline(1, color=SOFT, linewidth=0.8, linestyle="--", zorder=0.9)
    for index, key in enumerate(labels):
        shift = (index - (len(labels) - 1) / 2) * 0.8 / len(labels)
        known = [(place + shift, by_run[key]) for place, (_, _, by_run) in enumerate(rows) if key in by_run]
        if known:
            dot_style = {**dot(series_key(index), 4.2), "linestyle": "none"}
            y, x = [place for place, _ in known], [finite(value.value) for _, value in known]
            reaches = [tuple(map(finite, drawing.reach(value))) for _, value in known]
            panel.errorbar(x, y, xerr=list(zip(*reaches, strict=True)), **{**WHISKER, "ecolor": dot_style["color"]})
            panel.plot(x, y, **dot_style)
    panel.set_yticks(range(len(rows)), [f"{recipe}, {drawing.short(what, 30)}" for what, recipe, _ in rows], fontsize=NORMAL)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    drawing.speedup_axis(panel.xaxis)
    drawing.grid(panel, "x")
    panel.set_xlabel("speedup over BF16 on the same GPU", fontsize=NORMAL)
    return [
        Line2D([], [], **{**dot(series_key(place), 4.5), "linestyle": "none"}, label=drawing.short(label, 60))
        for place, label in enumerate(labels.values())
    ]
