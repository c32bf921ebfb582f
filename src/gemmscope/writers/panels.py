"""Stacked bars and waterfalls: panels of one figure share their scale, and have one legend."""

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Patch

from gemmscope import units
from gemmscope.document.charts import Bar, BarChart, WaterfallChart, axis_ends, legend, time_text
from gemmscope.writers import drawing
from gemmscope.writers.drawing import CLEAR, INK, LARGE, NORMAL, SMALL, SOFT, WHISKER, face, finite

BAR_WIDTH = 0.68
SLOT_IN = 0.56  # the least room for a bar with its labels
PANEL_IN = 2.25  # height of a panel of bars
MOST_COLUMNS = 4
LABELS_IN = 0.47  # height of what stands above a bar
ROTATED_IN = 0.5
FALL_IN = 0.2  # height of one bar of a waterfall
SIDE_IN = 0.62  # for the numbers beside a panel


def bars_size(charts: Sequence[BarChart], width_in: float) -> tuple[int, float]:
    """How many columns of panels have room, and the height of them all."""
    most = max((len(chart.bars) for chart in charts), default=1)
    columns = int((width_in - SIDE_IN) / (SLOT_IN * max(most, 2) + 0.25))
    columns = max(1, min(columns, MOST_COLUMNS, len(charts)))
    rows = -(-len(charts) // columns)
    columns = -(-len(charts) // rows)
    legend_in = 0.17 * -(-len(_handles(charts)) // 4)
    titles_in = 0.14 * max(len(chart.title) * columns / (width_in * 13) for chart in charts)
    return columns, rows * (PANEL_IN + 0.3 + titles_in) + legend_in + 0.15


def bars(figure: Any, charts: Sequence[BarChart], width_in: float) -> None:
    """Stacked bars, a panel for each chart, all with the same scale."""
    columns, _ = bars_size(charts, width_in)
    rows = -(-len(charts) // columns)
    widths = [max(len(charts[place].bars) for place in range(column, len(charts), columns)) for column in range(columns)]
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=[max(width, 1) for width in widths])
    tops = [bar.total_ms + bar.reach_ms[1] for chart in charts for bar in chart.bars]
    ends = 0.0, drawing.room_above(tops, LABELS_IN, PANEL_IN - 0.25)
    panel_in = (width_in - SIDE_IN) / columns
    slot_in = panel_in / max(*widths, 1 if len(widths) > 1 else 0, 2)
    longest = max((len(bar.label) for chart in charts for bar in chart.bars), default=0)
    turned = min(longest, drawing.LONGEST_LABEL) * 0.062 > slot_in
    for place, panel in enumerate(axes.flat):
        if place >= len(charts):
            panel.set_axis_off()
            continue
        chart = charts[place]
        _stacks(panel, chart.bars)
        for x, bar in enumerate(chart.bars):
            _labels(panel, x, bar, slot_in)
        names = [drawing.short(bar.label) for bar in chart.bars]
        panel.set_xticks(
            range(len(names)), names, **({"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if turned else {})
        )
        panel.set_xlim(-0.6, max(len(chart.bars), 2) - 0.4) if len(chart.bars) > 1 else panel.set_xlim(-1.6, 1.6)
        panel.set_ylim(*ends)
        drawing.numbers(panel.yaxis)
        drawing.grid(panel)
        drawing.title(panel, chart.title, panel_in)
        if place % columns == 0:
            panel.set_ylabel(chart.unit, fontsize=NORMAL)
        else:
            panel.tick_params(labelleft=False)
    drawing.legend(figure, _handles(charts), width_in)


def _stacks(panel: Any, stacks: Sequence[Bar]) -> None:
    """The segments of all bars, lines between them, and the intervals of the totals."""
    heights = [0.0] * len(stacks)
    drawn: dict[tuple[str, str, str], list[tuple[int, float, float]]] = {}
    edges: list[tuple[float, float]] = []
    for x, bar in enumerate(stacks):
        sums: dict[tuple[str, str, str], float] = {}  # small ops share a name
        for segment in bar.segments:
            key = segment.name, segment.color, segment.shade
            sums[key] = sums.get(key, 0.0) + finite(segment.time_ms)
        for key, time in sums.items():
            drawn.setdefault(key, []).append((x, heights[x], time))
            heights[x] += time
            edges.append((x, heights[x]))
    for (_, color, shade), boxes in drawn.items():
        places, bottoms, sizes = zip(*boxes, strict=True)
        panel.bar(places, sizes, bottom=bottoms, width=BAR_WIDTH, **face(color, "light" if shade == "light" else "plain"))
    if edges:
        panel.hlines([y for _, y in edges], [x - BAR_WIDTH / 2 for x, _ in edges], [x + BAR_WIDTH / 2 for x, _ in edges],
                     color="white", linewidth=0.5)  # fmt: skip
    known = [(x, heights[x], *map(finite, bar.reach_ms)) for x, bar in enumerate(stacks) if bar.segments and any(bar.reach_ms)]
    if known:
        places, tops, below, above = zip(*known, strict=True)
        panel.errorbar(places, tops, yerr=[below, above], **WHISKER)


def _labels(panel: Any, x: int, bar: Bar, slot_in: float) -> None:
    """Speedup, interval and time above a bar; why it is not there instead of it."""
    above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom", "annotation_clip": False}
    if not bar.segments:
        note = "\n".join(bar.note.split(" ")) if len(bar.note) * 0.05 > slot_in else bar.note
        panel.annotate(note, (x, 0), (0, 3), fontsize=SMALL, color=SOFT, bbox=CLEAR, **above)
        return
    top = finite(bar.total_ms) + finite(bar.reach_ms[1])
    small = time_text(bar.total_ms)
    if bar.speedup is not None and bar.speedup.known and not bar.alarm:
        small = f"{units.ends(bar.speedup, 2)[1:-1].replace(', ', '–')}\n{small}"
    panel.annotate(small, (x, top), (0, 2), fontsize=SMALL, color="#333333", linespacing=1.1, bbox=CLEAR, **above)
    if bar.head:
        color, size = (drawing.style("mark-alarm").light, NORMAL) if bar.alarm else (INK, LARGE + 0.5)
        lines = 3 + small.count("\n") * (SMALL + 1.4) + SMALL + 1.4
        panel.annotate(bar.head, (x, top), (0, lines), fontsize=size, fontweight="bold", color=color, bbox=CLEAR, **above)


def _handles(charts: Sequence[BarChart]) -> list[Patch]:
    """What is drawn, in the order it is stacked, and what the shades mean."""
    handles = [Patch(**face(key), label=name) for name, key in legend(charts).items()]
    if any(segment.shade == "light" for chart in charts for bar in chart.bars for segment in bar.segments):
        handles += [
            Patch(**face("mark-total"), label="fprop + dgrad"),
            Patch(**face("mark-total", "light"), label="wgrad (lighter)"),
        ]
    return handles


def waterfalls_size(charts: Sequence[WaterfallChart], width_in: float) -> tuple[int, float]:
    """How many columns of panels have room, and the height of them all."""
    columns = min(3 if _shared(charts) else 2, len(charts))
    rows = -(-len(charts) // columns)
    columns = -(-len(charts) // rows)
    most = max(len(chart.falls) for chart in charts) + 1
    return columns, rows * (0.75 + FALL_IN * most) + 0.1


def _shared(charts: Sequence[WaterfallChart]) -> bool:
    """Whether all panels have the same parts: their names stand once in each row then."""
    return len({tuple(fall.part for fall in chart.falls) for chart in charts}) == 1


def waterfalls(figure: Any, charts: Sequence[WaterfallChart], width_in: float) -> None:
    """From the speedup of the GEMMs to that of the step, a panel for each recipe, all with the same scale."""
    ends = [end for chart in charts if chart.total for end in (chart.total.low, chart.total.high) if end is not None]
    low, high = axis_ends([1.0, *(fall.speedup for chart in charts for fall in chart.falls), *ends])
    columns, _ = waterfalls_size(charts, width_in)
    rows = -(-len(charts) // columns)
    axes = figure.subplots(rows, columns, squeeze=False)
    panel_in = (width_in - 1.3) / columns
    for place, panel in enumerate(axes.flat):
        if place >= len(charts):
            panel.set_axis_off()
            continue
        chart = charts[place]
        panel.axvline(1, color=SOFT, linewidth=0.8, linestyle="--", zorder=0.9)
        _falls(panel, chart)
        names = [*(drawing.short(fall.part) for fall in chart.falls), "the step"]
        panel.set_yticks(range(len(names)), names)
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.set_xlim(low, high + (high - low) * 0.45 / panel_in)
        drawing.speedup_axis(panel.xaxis, 5)
        drawing.grid(panel, "x")
        drawing.title(panel, chart.title, panel_in)
        if place % columns and _shared(charts):
            panel.tick_params(labelleft=False)
        if place + columns >= len(charts):
            panel.set_xlabel(f"speedup over {drawing.short(chart.baseline)}", fontsize=NORMAL)


def _falls(panel: Any, chart: WaterfallChart) -> None:
    before = 1.0
    for place, fall in enumerate(chart.falls):
        key = "part-gemms" if place == 0 else "mark-loss" if fall.speedup <= before else "mark-gain"
        panel.barh(place, fall.speedup - before, left=before, height=0.66, **face(key))
        panel.plot([fall.speedup] * 2, [place - 0.33, place + 1.33], color=SOFT, linewidth=0.6)
        _value(panel, max(fall.speedup, before), place, fall.speedup)
        before = fall.speedup
    last = len(chart.falls)
    panel.barh(last, before - 1, left=1, height=0.66, **face("mark-total"))
    end = max(before, 1.0)
    if chart.total is not None and chart.total.known:
        below, above = drawing.reach(chart.total)
        panel.errorbar(before, last, xerr=[[below], [above]], **WHISKER)
        end = max(end, before + above)
    _value(panel, end, last, before, bold=True)


def _value(panel: Any, x: float, y: int, speedup: float, *, bold: bool = False) -> None:
    weight = "bold" if bold else "normal"
    panel.annotate(f"{speedup:.2f}x", (x, y), (4, 0), textcoords="offset points", va="center", fontsize=SMALL + 0.5,
                   color=INK, fontweight=weight, bbox=CLEAR)  # fmt: skip
