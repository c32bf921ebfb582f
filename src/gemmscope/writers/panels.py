"""Stacked bars and waterfalls: panels of one figure share their scale, and have one legend."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch

from gemmscope import units
from gemmscope.document.charts import Bar, BarChart, WaterfallChart, axis_ends, legend, time_text
from gemmscope.document.table import grouped
from gemmscope.writers import drawing
from gemmscope.writers.drawing import CLEAR, INK, LARGE, LETTER_IN, NORMAL, SMALL, SOFT, WHISKER, face, finite

BAR_WIDTH = 0.68
SLOT_IN = 0.46  # the least room for a bar with its labels
PANEL_IN = 2.25  # height of a panel of bars
MOST_COLUMNS = 4
LABELS_IN = 0.47  # height of the labels above a bar
WIDEST_SLOT_IN = 1.3
OTHER_SCALE = 5.0  # panels with bars higher by this factor get their own scale, or the other panels would be unreadable
FALL_IN = 0.2  # height of one bar of a waterfall
LEAST_SHARE = 0.006  # of the highest bar: a thinner segment cannot be seen, and is not in the legend
SIDE_IN = 0.62  # for the numbers beside a panel


@dataclass(frozen=True)
class Layout:
    """Panels in rows and columns: the bars of each column, the room for each bar, their labels, and whether these are rotated."""

    rows: int
    bars: tuple[int, ...]
    bar_in: float
    named: Mapping[str, str]
    turned: bool
    height_in: float


def layout(charts: Sequence[BarChart], width_in: float) -> Layout:
    """The panels in as many columns as have room for the labels of the bars."""
    columns = int((width_in - SIDE_IN) / (SLOT_IN * max(max((len(chart.bars) for chart in charts), default=1), 2) + 0.25))
    rows, columns = drawing.rows_of(len(charts), max(1, min(columns, MOST_COLUMNS)))
    bars = tuple(max([1, *(len(charts[at].bars) for at in range(column, len(charts), columns))]) for column in range(columns))
    bar_in = (width_in - SIDE_IN) / sum(bars)
    named, longest = _names(charts, bar_in)
    turned = longest * LETTER_IN > bar_in - 0.06
    handles = [] if _is_single(charts) else _handles(charts)
    title_lines = max(1 + len(chart.title) * columns / (width_in * 13) for chart in charts)
    labels_in = 0.1 + (longest * LETTER_IN / 2 if turned else 0.24)
    return Layout(
        rows,
        bars,
        bar_in,
        named,
        turned,
        (rows * (PANEL_IN + 0.14 * title_lines + labels_in) + drawing.legend_size(handles, width_in) + 0.1),
    )


def _names(charts: Sequence[BarChart], bar_in: float) -> tuple[dict[str, str], int]:
    """The labels below the bars, and the letters of the longest line: names of recipes on two lines where one is too narrow."""
    names = {bar.label: drawing.short(bar.label) for chart in charts for bar in chart.bars}
    if max(map(len, names.values()), default=0) * LETTER_IN > bar_in - 0.06:
        lines = {label: re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "\n", name) for label, name in names.items()}
        longest = max(len(line) for name in lines.values() for line in name.split("\n"))
        if longest * LETTER_IN <= bar_in - 0.02:
            return lines, min(longest, int((bar_in - 0.06) / LETTER_IN))
    return names, max(map(len, names.values()), default=0)


def bars(figure: FigureBase, charts: Sequence[BarChart], width_in: float) -> None:
    """Stacked bars, a panel for each chart, all with the same scale."""
    plan = layout(charts, width_in)
    columns = len(plan.bars)
    axes = figure.subplots(plan.rows, columns, squeeze=False, width_ratios=plan.bars)
    scales = _scales(charts)
    single = _is_single(charts)
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if plan.turned else {}
    for place, panel, chart in drawing.panels(axes, charts):
        panel_in = plan.bar_in * plan.bars[place % columns]
        _stacks(panel, chart.bars)
        for x, bar in enumerate(chart.bars):
            _labels(panel, x, bar, min(plan.bar_in, WIDEST_SLOT_IN))
        names = [plan.named[bar.label] for bar in chart.bars]
        panel.set_xticks(range(len(names)), names, **turned)
        middle, wide = (len(names) - 1) / 2, max(len(names) + 0.2, panel_in * 0.95 / WIDEST_SLOT_IN)
        panel.set_xlim((-0.7, 0.7) if single else (middle - wide / 2, middle + wide / 2))
        panel.set_ylim(0, scales[place])
        drawing.numbers(panel.yaxis)
        drawing.grid(panel)
        drawing.title(panel, chart.title, panel_in)
        if place % columns == 0 or scales[place] != scales[place - 1]:
            panel.set_ylabel(chart.unit + (" (other scale)" if scales[place] != scales[0] else ""), fontsize=NORMAL)
        else:
            panel.tick_params(labelleft=False)
    if single:
        figure.legend(
            handles=_with_shares(charts[0].bars[0])[::-1],
            loc="outside right center",
            frameon=False,
            fontsize=NORMAL,
            handlelength=1.6,
        )
    else:
        drawing.legend(figure, _handles(charts), width_in)


def _scales(charts: Sequence[BarChart]) -> list[float]:
    """The end of each panel's axis: the same for all, unless some bars are so high that the others could not be read."""
    tops = [max((finite(bar.total_ms + bar.reach_ms[1]) for bar in chart.bars), default=0.0) for chart in charts]
    lowest = min((top for top in tops if top > 0), default=0.0)
    high = [top > lowest * OTHER_SCALE for top in tops]
    ends = {
        side: drawing.room_above([top for top, own in zip(tops, high, strict=True) if own is side], LABELS_IN, PANEL_IN - 0.25)
        for side in (False, True)
    }
    return [ends[side] for side in high]


def _is_single(charts: Sequence[BarChart]) -> bool:
    """Whether there is only one bar: then its parts are named beside it, with their times."""
    return len(charts) == 1 and len(charts[0].bars) == 1 and len(charts[0].bars[0].segments) > 1


def _with_shares(bar: Bar) -> list[Patch]:
    whole = bar.total_ms or 1.0
    return [
        Patch(**face(segment.color), label=f"{name}: {time_text(segment.time_ms)}, {units.percent(segment.time_ms / whole)}")
        for name, segment in {segment.name: segment for segment in bar.segments}.items()
    ]


def _stacks(panel: Axes, stacks: Sequence[Bar]) -> None:
    """The segments of all bars, lines between them, and the intervals of the totals."""
    heights, drawn, edges = [0.0] * len(stacks), list[tuple[Any, tuple[int, float, float]]](), list[tuple[int, float]]()
    for x, bar in enumerate(stacks):
        # small ops share a name
        sums = grouped(((part.name, part.color, part.shade), finite(part.time_ms)) for part in bar.segments)
        for own, times in sums.items():
            drawn.append((own, (x, heights[x], sum(times))))
            heights[x] += sum(times)
            edges.append((x, heights[x]))
        edges = edges[:-1] if sums else edges
    for (_, color, shade), boxes in grouped(drawn).items():
        places, bottoms, sizes = zip(*boxes, strict=True)
        panel.bar(places, sizes, bottom=bottoms, width=BAR_WIDTH, **face(color, "light" if shade == "light" else "plain"))
    if edges:
        panel.hlines([y for _, y in edges], [x - BAR_WIDTH / 2 for x, _ in edges], [x + BAR_WIDTH / 2 for x, _ in edges],
                     color="white", linewidth=0.5)  # fmt: skip
    known = [(x, heights[x], *map(finite, bar.reach_ms)) for x, bar in enumerate(stacks) if bar.segments and any(bar.reach_ms)]
    if known:
        places, tops, below, above = zip(*known, strict=True)
        drawing.whiskers(panel, places, tops, (below, above))


def _labels(panel: Axes, x: int, bar: Bar, slot_in: float) -> None:
    """Draw the speedup, interval and time above a bar; for a missing bar, the reason."""
    above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom", "annotation_clip": False}
    if not bar.segments:
        note = "\n".join(bar.note.split(" ")) if len(bar.note) * 0.05 > slot_in else bar.note
        panel.annotate(note, (x, 0), (0, 3), fontsize=SMALL, color=SOFT, bbox=CLEAR, **above)
        return
    top = finite(bar.total_ms) + finite(bar.reach_ms[1])
    small = bar.time
    if bar.speedup is not None and bar.speedup.known and not bar.alarm:
        small = f"{units.ends(bar.speedup, 2)[1:-1].replace(', ', '–')}\n{small}"
    panel.annotate(small, (x, top), (0, 2), fontsize=SMALL, color="#333333", linespacing=1.1, bbox=CLEAR, **above)
    if bar.head:
        color, size = (drawing.style("mark-alarm").light, NORMAL) if bar.alarm else (INK, LARGE + 0.5)
        lines = 3 + small.count("\n") * (SMALL + 1.4) + SMALL + 1.4
        panel.annotate(bar.head, (x, top), (0, lines), fontsize=size, fontweight="bold", color=color, bbox=CLEAR, **above)


def _handles(charts: Sequence[BarChart]) -> list[Patch]:
    """The legend: the segments in the order they are stacked, and the shades."""
    shades = [Patch(**face("mark-total"), label="fprop + dgrad"), Patch(**face("mark-total", "light"), label="wgrad (lighter)")]
    segments = [segment for chart in charts for bar in chart.bars for segment in bar.segments]
    shaded = any(segment.shade == "light" for segment in segments)
    least_ms = LEAST_SHARE * max((bar.total_ms for chart in charts for bar in chart.bars), default=0.0)
    seen = {segment.name for segment in segments if not segment.time_ms < least_ms}
    handles = [Patch(**face(key), label=drawing.short(name, 40)) for name, key in legend(charts).items() if name in seen]
    return handles + shades if shaded else handles


def waterfalls_height(charts: Sequence[WaterfallChart], _: float) -> float:
    """The height of all panels."""
    rows, _columns = drawing.rows_of(len(charts), 3)
    return rows * (0.75 + FALL_IN * (len(_parts(charts)) + 1)) + 0.1


def _parts(charts: Sequence[WaterfallChart]) -> list[str]:
    """The parts of all panels, in their order: their names are shown once in each row."""
    places = grouped((fall.part, place) for chart in charts for place, fall in enumerate(chart.falls))
    return sorted(places, key=lambda part: max(places[part]))


def waterfalls(figure: FigureBase, charts: Sequence[WaterfallChart], width_in: float) -> None:
    """Draw how the speedup changes from the GEMMs to the whole step, a panel for each recipe, all with the same scale."""
    ends = [end for chart in charts if chart.total for end in (chart.total.low, chart.total.high) if end is not None]
    low, high = axis_ends([1.0, *(fall.speedup for chart in charts for fall in chart.falls), *ends])
    rows, columns = drawing.rows_of(len(charts), 3)
    panel_in = (width_in - 1.3) / columns
    parts = _parts(charts)
    for place, panel, chart in drawing.panels(figure.subplots(rows, columns, squeeze=False), charts):
        panel.axvline(1, color=SOFT, linewidth=0.8, linestyle="--", zorder=0.9)
        _falls(panel, chart, parts)
        names = [*(drawing.short(part) for part in parts), "the step"]
        panel.set_yticks(range(len(names)), names)
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.set_xlim(low, high + (high - low) * 0.45 / panel_in)
        drawing.speedup_axis(panel.xaxis, 5)
        drawing.grid(panel, "x")
        drawing.title(panel, chart.title, panel_in)
        if place % columns:
            panel.tick_params(labelleft=False)
        if place + columns >= len(charts):
            panel.set_xlabel(f"speedup over {drawing.short(chart.baseline)}", fontsize=NORMAL)


def _falls(panel: Axes, chart: WaterfallChart, parts: Sequence[str]) -> None:
    """Draw one waterfall. A part that its recipe does not have is a gap."""
    before, last = 1.0, len(parts)
    places = [*(parts.index(fall.part) for fall in chart.falls), last]
    for fall, place, below in zip(chart.falls, places, places[1:], strict=False):
        key = "part-gemms" if place == 0 else "mark-loss" if fall.speedup <= before else "mark-gain"
        panel.barh(place, fall.speedup - before, left=before, height=0.66, **face(key))
        panel.plot([fall.speedup] * 2, [place - 0.33, below + 0.33], color=SOFT, linewidth=0.6)
        _value(panel, max(fall.speedup, before), place, fall.speedup)
        before = fall.speedup
    panel.barh(last, before - 1, left=1, height=0.66, **face("mark-total"))
    end = max(before, 1.0)
    if chart.total is not None and chart.total.known:
        shorter, longer = drawing.reach(chart.total)
        panel.errorbar(before, last, xerr=[[shorter], [longer]], **WHISKER)
        end = max(end, before + longer)
    _value(panel, end, last, before, bold=True)


def _value(panel: Axes, x: float, y: int, speedup: float, *, bold: bool = False) -> None:
    panel.annotate(f"{speedup:.2f}x", (x, y), (4, 0), textcoords="offset points", va="center", fontsize=SMALL + 0.5,
                   color=INK, fontweight=("bold" if bold else "normal"), bbox=CLEAR)  # fmt: skip
