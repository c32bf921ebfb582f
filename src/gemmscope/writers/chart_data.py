"""Charts as the JSON that `assets/charts.js` draws: their own fields, and the axes that they share."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gemmscope import units
from gemmscope.document import palette
from gemmscope.document.charts import (
    Bar,
    BarChart,
    Chart,
    CurveChart,
    HeatMap,
    RankChart,
    ScatterChart,
    WaterfallChart,
    axis_ends,
    legend,
)
from gemmscope.document.model import Document
from gemmscope.document.table import grouped
from gemmscope.interval import Interval

ChartData = dict[str, Any]


@dataclass(frozen=True)
class Axes:
    """Axes that charts of one page share, so that they can be compared: the highest bar by unit, the range of speedups."""

    tops: Mapping[str, float] = field(default_factory=dict)
    speedups: tuple[float, float] = (0.9, 1.1)


def axes_of(documents: Sequence[Document]) -> Axes:
    """The axes that include every value of the documents."""
    charts = [chart for document in documents for chart in document.charts()]
    times = grouped((chart.unit, bar.total_ms) for chart in charts if isinstance(chart, BarChart) for bar in chart.bars)
    falls = [fall.speedup for chart in charts if isinstance(chart, WaterfallChart) for fall in chart.falls]
    curves = [chart for chart in charts if isinstance(chart, CurveChart) and chart.unit == "x"]
    ends = [end for chart in curves for points in chart.series.values() for point in points for end in _ends(point.value)]
    return Axes({unit: max(own) for unit, own in times.items()}, axis_ends([1.0, *falls, *ends]))


def _ends(estimate: Interval) -> list[float]:
    return [end for end in (estimate.value, estimate.low, estimate.high) if end is not None]


def chart_data(chart: Chart, axes: Axes) -> ChartData:
    """The fields of one chart, and what is computed from them."""
    name, computed = DATA[type(chart)]
    return {"type": name, **asdict(chart), **computed(chart, axes)}


def _bars(chart: BarChart, axes: Axes) -> ChartData:
    styles = legend([chart])
    return {
        "top": axes.tops.get(chart.unit, 0.0),
        "legend": list(styles.items()),
        "shapes": palette.shapes(list(styles.values())),
        "bars": [_bar(bar) for bar in chart.bars],
    }


def _curves(chart: CurveChart, axes: Axes) -> ChartData:
    highest = max((end for points in chart.series.values() for point in points for end in _ends(point.value)), default=1.0)
    low, high = axes.speedups if chart.unit == "x" else (0.0, highest * 1.05)
    return {"places": chart.places, "low": low, "high": high, **_colors(chart, chart.series)}


def _ends_of(chart: HeatMap | RankChart) -> ChartData:
    return dict(zip(("low", "high", "step"), chart.ends, strict=False))


def _scatter(chart: ScatterChart, _: Axes) -> ChartData:
    every = [*chart.dots, *chart.mixes, *([chart.chosen] if chart.chosen is not None else [])]
    low, high = axis_ends([end for dot in every for end in _ends(dot.speedup)])
    top = max([chart.bound or 0.0, *(dot.error for dot in every)]) * 1.08 or 1.0
    return {"low": low, "high": high, "top": top, **_colors(chart, [dot.name for dot in chart.dots])}


def _colors(chart: CurveChart | ScatterChart, names: Iterable[str]) -> ChartData:
    colors = {name: chart.color(name) for name in names}
    return {"colors": colors, "shapes": palette.shapes(list(colors.values()))}


DATA: dict[type[Any], tuple[str, Callable[[Any, Axes], ChartData]]] = {
    BarChart: ("bars", _bars),
    WaterfallChart: ("waterfall", lambda _, axes: {"low": axes.speedups[0], "high": axes.speedups[1]}),
    CurveChart: ("curve", _curves),
    HeatMap: ("heat", lambda chart, _: _ends_of(chart) | {"stops": palette.heat_stops(), "best": chart.best}),
    ScatterChart: ("scatter", _scatter),
    RankChart: ("ranks", lambda chart, _: _ends_of(chart)),
}
"""The type of a chart → its name in `charts.js`, and what is computed for it."""


def _bar(bar: Bar) -> ChartData:
    return {
        **asdict(bar),
        "head": bar.head,
        "interval": (units.ends(bar.speedup, 2) if bar.speedup and bar.speedup.known else ""),
        "time": bar.time,
    }


def side_by_side_data(rows: Sequence[tuple[str, str, dict[str, Interval]]], runs: Sequence[str]) -> ChartData:
    """Every speedup of every run as a dot with its interval, in a row for each op and recipe."""
    low, high = axis_ends([1.0, *(end for _, _, by_run in rows for speedup in by_run.values() for end in _ends(speedup))])
    dotted = [
        {
            "what": what,
            "recipe": recipe,
            "dots": [
                {"run": run, **asdict(speedup), "facts": [[f"run {run}", units.speedup(speedup)]]}
                for run, speedup in by_run.items()
            ],
        }
        for what, recipe, by_run in rows
    ]
    colors = {run: palette.series_key(place) for place, run in enumerate(runs)}
    shapes = palette.shapes(list(colors.values()))
    return {"type": "gains", "rows": dotted, "low": low, "high": high, "runs": list(runs), "colors": colors, "shapes": shapes}


def rounded(data: Any) -> Any:
    """The data with numbers of six digits, which are enough to draw. NaN and infinity become None, a gap.

    >>> rounded({"value": [1.23456789, float("nan")]})
    {'value': [1.23457, None]}
    """
    if isinstance(data, dict):
        return {name: rounded(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [rounded(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.6g}") if math.isfinite(data) else None
    return data
