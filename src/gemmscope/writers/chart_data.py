"""Charts as the JSON that `assets/page.js` draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemmscope import units
from gemmscope.document.charts import (
    Bar,
    BarChart,
    Chart,
    CurveChart,
    HeatMap,
    Segment,
    WaterfallChart,
    axis_ends,
    legend,
)
from gemmscope.document.model import Document
from gemmscope.document.table import Facts
from gemmscope.interval import Interval

ChartData = dict[str, Any]


@dataclass(frozen=True)
class Axes:
    """Axes that charts of one page share, so that they can be compared: the highest bar by unit, the range of speedups."""

    tops: Mapping[str, float] = field(default_factory=dict)
    speedups: tuple[float, float] = (0.9, 1.1)


def axes_of(documents: Sequence[Document]) -> Axes:
    """Around everything that the documents show."""
    tops: dict[str, float] = {}
    values = [1.0]
    for chart in (chart for document in documents for chart in document.charts()):
        if isinstance(chart, BarChart):
            tops[chart.unit] = max([tops.get(chart.unit, 0.0), *(bar.total_ms for bar in chart.bars)])
        elif isinstance(chart, WaterfallChart):
            values += [fall.speedup for fall in chart.falls]
        elif isinstance(chart, CurveChart) and chart.unit == "x":
            values += [end for points in chart.series.values() for point in points for end in _ends(point.value)]
    return Axes(tops, axis_ends(values))


def _ends(found: Interval) -> list[float]:
    return [end for end in (found.value, found.low, found.high) if end is not None]


def chart_data(chart: Chart, axes: Axes) -> ChartData:
    """The data of one chart."""
    if isinstance(chart, BarChart):
        return _bars(chart, axes)
    if isinstance(chart, WaterfallChart):
        return _waterfall(chart, axes)
    return _curve(chart, axes) if isinstance(chart, CurveChart) else _heat(chart)


def _bars(chart: BarChart, axes: Axes) -> ChartData:
    shades = {segment.shade for bar in chart.bars for segment in bar.segments}
    hatched = [segment.name for bar in chart.bars for segment in bar.segments if segment.shade == "hatched"]
    return {
        "type": "bars",
        "unit": chart.unit,
        "top": _number(axes.tops.get(chart.unit, 0.0)),
        "legend": [[name, color] for name, color in legend([chart]).items()],
        "passes": "light" in shades,
        "hatched": hatched[0] if hatched else "",
        "bars": [_bar(bar) for bar in chart.bars],
    }


def _bar(bar: Bar) -> ChartData:
    return {
        "label": bar.label,
        "head": bar.head,
        "interval": units.ends(bar.speedup, 2) if bar.speedup and bar.speedup.known else "",
        "time": f"{bar.total_ms:.0f} ms" if bar.total_ms >= 100 else f"{bar.total_ms:.3g} ms" if bar.segments else "",
        "alarm": bool(bar.alarm),
        "note": bar.note,
        "segments": [_segment(segment) for segment in bar.segments],
    }


def _segment(segment: Segment) -> ChartData:
    style = {"colour": segment.color, "shade": segment.shade}
    return {"name": segment.name, "value": _number(segment.time_ms), **style, "facts": _facts(segment.facts)}


def _waterfall(chart: WaterfallChart, axes: Axes) -> ChartData:
    """Every part as the way from one speedup to the next; the step at the end."""
    rows, before = [], 1.0
    for index, fall in enumerate(chart.falls):
        kind = "start" if index == 0 else "down" if fall.speedup <= before else "up"
        facts = [[chart.baseline, f"{fall.baseline_ms:.2f} ms"], [chart.recipe, f"{fall.recipe_ms:.2f} ms"]]
        facts.append(["speedup so far", f"{fall.speedup:.3f}x"])
        rows.append({"name": fall.part, "from": _number(before), "to": _number(fall.speedup), "kind": kind, "facts": facts})
        before = fall.speedup
    total = [
        [chart.baseline, f"{sum(fall.baseline_ms for fall in chart.falls):.2f} ms"],
        [chart.recipe, f"{sum(fall.recipe_ms for fall in chart.falls):.2f} ms"],
        ["speedup", f"{before:.3f}x"],
    ]
    rows.append({"name": "the step", "from": 1.0, "to": _number(before), "kind": "end", "facts": total})
    return {"type": "waterfall", "rows": rows, "low": axes.speedups[0], "high": axes.speedups[1]}


def _curve(chart: CurveChart, axes: Axes) -> ChartData:
    places = chart.places
    ends = [end for points in chart.series.values() for point in points for end in _ends(point.value)]
    low, high = axes.speedups if chart.unit == "x" else (0.0, max(ends, default=1.0) * 1.05)
    return {
        "type": "curve",
        "axis": chart.axis,
        "unit": chart.unit,
        "places": places,
        "low": _number(low),
        "high": _number(high),
        "series": [
            {
                "name": name,
                "colour": chart.color(name),
                "points": [
                    {"at": places.index(point.at), **_interval(point.value), "facts": _facts(point.facts)} for point in points
                ],
            }
            for name, points in chart.series.items()
        ],
    }


def _heat(chart: HeatMap) -> ChartData:
    values = [cell.value for row in chart.cells for cell in row if cell.value is not None]
    return {
        "type": "heat",
        "row": chart.row_name,
        "column": chart.column_name,
        "rows": list(chart.rows),
        "columns": list(chart.columns),
        "high": _number(max([1.05, *values])),
        "legend": _facts(chart.legend),
        "cells": [
            {
                "at": [column, row],
                "value": _number(cell.value),
                "label": cell.label,
                "text": cell.text,
                "certain": cell.certain and cell.value is not None,
                "facts": [["best", cell.text]] if cell.text else [],
            }
            for row, cells in enumerate(chart.cells)
            for column, cell in enumerate(cells)
        ],
    }


def side_by_side_data(rows: Sequence[tuple[str, str, dict[str, Interval]]], runs: Sequence[str]) -> ChartData:
    """Every speedup of every run as a dot with its interval, those of one thing below one another."""
    low, high = axis_ends([1.0, *(end for _, _, by_run in rows for found in by_run.values() for end in _ends(found))])
    made = []
    for what, recipe, by_run in rows:
        dots = [
            {"run": run, **_interval(found), "facts": [[f"run {run}", units.speedup(found)]]} for run, found in by_run.items()
        ]
        made.append({"what": what, "recipe": recipe, "dots": dots})
    return {"type": "gains", "rows": made, "low": low, "high": high, "runs": list(runs)}


def _interval(found: Interval) -> dict[str, float | None]:
    return {"value": _number(found.value), "low": _number(found.low), "high": _number(found.high)}


def _facts(facts: Facts) -> list[list[str]]:
    return [[name, value] for name, value in facts]


def _number(value: float | None) -> float | None:
    """Six digits are enough to draw; what is not a number is a gap."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
