"""Charts as the data that `assets/page.js` draws, and as tables for those who cannot see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gemmscope.report.bench import digits
from gemmscope.report.page.parts import Bar, Bars, Cell, Curve, Estimate, Facts, Report, Segment, Shade, Table, Waterfall

ORDER = ("training step", "linears")  # of what stands side by side; the rest follows
PARTS: dict[Shade, str] = {"plain": "fprop + dgrad", "light": "wgrad", "hatched": ""}


def bars_chart(found: Bars, top_ms: float) -> dict[str, Any]:
    """Stacked bars; `top_ms` makes the axes of neighbours alike."""
    return {
        "type": "bars",
        "unit": found.unit,
        "top": _number(top_ms),
        "bars": [
            {
                "label": bar.label,
                "head": head(bar),
                "interval": f"[{bar.gain.low:.2f}, {bar.gain.high:.2f}]" if bar.gain and bar.gain.low and bar.gain.high else "",
                "time": f"{_short_ms(bar.total_ms)}" if bar.segments else "",
                "alarm": bool(bar.alarm),
                "note": bar.note,
                "segments": [_segment(one) for one in bar.segments],
            }
            for bar in found.bars
        ],
    }  # fmt: skip


def _segment(one: Segment) -> dict[str, Any]:
    look = {"colour": one.colour, "shade": one.shade}
    return {"name": one.name, "value": _number(one.time_ms), **look, "facts": _facts(one.facts)}


def head(bar: Bar) -> str:
    """What stands above a bar: its speedup, or what is in its way."""
    if bar.alarm or not bar.segments:
        return bar.alarm
    return f"{bar.gain.value:.2f}x" if bar.gain else "1.00x" if bar.baseline else ""


def _short_ms(time_ms: float) -> str:
    return f"{time_ms:.0f} ms" if time_ms >= 100 else f"{time_ms:.3g} ms"


def waterfall_chart(found: Waterfall, lowest: float, highest: float) -> dict[str, Any]:
    """Every row as the way from one speedup to the next; the step at the end."""
    rows, before = [], 1.0
    for index, fall in enumerate(found.falls):
        kind = "start" if index == 0 else "down" if fall.speedup <= before else "up"
        rows.append(
            {"name": fall.row, "from": _number(before), "to": _number(fall.speedup), "kind": kind, "facts": _facts(fall.facts)}
        )
        before = fall.speedup
    last = found.falls[-1]
    total = [["baseline", f"{sum(fall.baseline_ms for fall in found.falls):.2f} ms"]]
    total += [[found.recipe, f"{sum(fall.recipe_ms for fall in found.falls):.2f} ms"], ["speedup", f"{last.speedup:.3f}x"]]
    rows.append({"name": "the step", "from": 1.0, "to": _number(last.speedup), "kind": "end", "facts": total})
    return {"type": "waterfall", "rows": rows, "low": _number(lowest), "high": _number(highest)}


def curve_chart(found: Curve, lowest: float, highest: float) -> dict[str, Any]:
    """Speedups with their intervals against a size."""
    return {
        "type": "curve",
        "axis": found.axis,
        "places": found.places,
        "low": _number(lowest),
        "high": _number(highest),
        "series": [
            {
                "name": name,
                "colour": found.colour(name),
                "points": [
                    {"at": found.places.index(point.at), **_estimate(point.gain), "facts": _facts(point.facts)}
                    for point in points
                ],
            }
            for name, points in found.series.items()
        ],
    }


def gain_rows(report: Report) -> list[tuple[str, str, dict[str, Estimate]]]:
    """What, in which recipe, and the speedup of every run that has one: the step first, then linears, then products."""
    found: dict[tuple[str, str], dict[str, Estimate]] = {}
    for run in report.runs:
        for gain in run.gains:
            found.setdefault((gain.what, gain.recipe), {})[report.letter(run)] = gain.gain
    rows = [(what, recipe, by_run) for (what, recipe), by_run in found.items()]
    return sorted(rows, key=lambda row: next((place for place, word in enumerate(ORDER) if word in row[0]), len(ORDER)))


def gains_chart(report: Report) -> dict[str, Any] | None:
    """Every speedup of every run as a dot with its interval, those of one thing below one another."""
    rows = gain_rows(report)
    if not rows:
        return None
    every = [gain for _, _, by_run in rows for gain in by_run.values()]
    low, high = axis_ends([1.0, *(end for gain in every for end in (gain.low, gain.high, gain.value) if end is not None)])
    made = []
    for what, recipe, by_run in rows:
        dots = [{"run": run, **_estimate(gain), "facts": [[f"run {run}", gain.times]]} for run, gain in by_run.items()]
        made.append({"what": what, "recipe": recipe, "dots": dots})
    return {"type": "gains", "rows": made, "low": low, "high": high, "runs": [report.letter(run) for run in report.runs]}


def axis_ends(values: Iterable[float]) -> tuple[float, float]:
    """Round ends around all values.

    >>> axis_ends([1.0, 1.963])
    (0.9, 2.1)
    """
    found = [value for value in values if math.isfinite(value)] or [1.0]
    return math.floor(min(found) * 10 - 0.5) / 10, math.ceil(max(found) * 10 + 0.5) / 10


def _estimate(found: Estimate) -> dict[str, float | None]:
    return {"value": _number(found.value), "low": _number(found.low), "high": _number(found.high)}


def _facts(facts: Facts) -> list[list[str]]:
    return [[name, value] for name, value in facts]


def _number(value: float | None) -> float | None:
    """Six digits are enough to draw; what is no number is a gap."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


# --- the same as tables ----------------------------------------------------------------------------------------------------


def bars_table(found: Bars) -> Table:
    """A row per segment, a column per recipe."""
    bars = [bar for bar in found.bars if bar.segments]
    passes = any(one.shade == "light" for bar in bars for one in bar.segments)

    def row(name: str, part: str, *cells: Cell) -> tuple[Cell, ...]:
        return (Cell(name), *([Cell(part)] if passes else []), *cells)

    rows = []
    for name, shade in dict.fromkeys((one.name, one.shade) for bar in bars for one in bar.segments):
        times = [sum(one.time_ms for one in bar.segments if (one.name, one.shade) == (name, shade)) for bar in bars]
        rows.append(row(name, PARTS[shade], *(Cell(digits(time), time) if time else Cell("-") for time in times)))
    rows.append(row("in all", "", *(Cell(digits(bar.total_ms), bar.total_ms) for bar in bars)))
    gains = [Cell(bar.alarm or (bar.gain.times if bar.gain else head(bar)), None, "alarm" if bar.alarm else "") for bar in bars]
    if any(cell.text for cell in gains):
        rows.append(row("speedup", "", *gains))
    columns = {"What": False, **({"Part": False} if passes else {}), **{bar.label: True for bar in bars}}
    return Table(f"{found.title} ({found.unit})", columns, tuple(rows))


def waterfall_table(found: Waterfall) -> Table:
    """A row per part of the step."""
    rows = tuple(
        (Cell(fall.row), Cell(f"{fall.baseline_ms:.2f}", fall.baseline_ms), Cell(f"{fall.recipe_ms:.2f}", fall.recipe_ms),
         Cell(f"{fall.speedup:.3f}x", fall.speedup))
        for fall in found.falls
    )  # fmt: skip
    columns = {"Part": False, f"{found.baseline} ms": True, f"{found.recipe} ms": True, "Speedup so far": True}
    return Table(f"From products to the step: {found.recipe}", columns, rows)


def curve_table(found: Curve) -> Table:
    """A row per size, a column per recipe."""
    points = {(name, point.at): point.gain for name, series in found.series.items() for point in series}
    rows = []
    for at in found.places:
        gains = [points.get((name, at)) for name in found.series]
        rows.append((Cell(at), *(Cell(gain.times, gain.value) if gain else Cell("-") for gain in gains)))
    return Table(f"{found.title}: {found.words}", {found.axis: False, **dict.fromkeys(found.series, True)}, tuple(rows))


def gains_table(report: Report) -> Table:
    """Every speedup, a column per run; for two runs, how far they are apart."""
    letters = [report.letter(run) for run in report.runs]
    rows = []
    for what, recipe, by_run in gain_rows(report):
        cells = [Cell(by_run[letter].times, by_run[letter].value) if letter in by_run else Cell("-") for letter in letters]
        rows.append((Cell(what), Cell(recipe), *cells, *(_apart(by_run, letters))))
    columns = {"What": False, "Recipe": False, **dict.fromkeys(letters, True)}
    columns |= {f"{letters[1]} against {letters[0]}": True} if len(letters) == 2 else {}
    return Table("Speedups of all runs", columns, tuple(rows))


def _apart(by_run: dict[str, Estimate], letters: Sequence[str]) -> list[Cell]:
    """The second against the first, and whether their intervals meet."""
    if len(letters) != 2:
        return []
    first, second = (by_run.get(letter) for letter in letters)
    if first is None or second is None:
        return [Cell("-")]
    ratio = second.value / first.value - 1
    ends = (first.low, first.high, second.low, second.high)
    meet = None not in ends and (second.low or 0) <= (first.high or 0) and (first.low or 0) <= (second.high or 0)
    return [Cell(f"{ratio:+.1%}".replace("-", "−") + (", intervals meet" if meet else ""), ratio)]
