"""A comparison as tables: what differs in the environment, then every row."""

from __future__ import annotations

import csv
import io

from gemmscope.compare.rows import Change, Comparison, Line
from gemmscope.report.shapes import Table


def tables(found: Comparison) -> list[Table]:
    """Environment first: a time that moved with the driver is not the code's doing."""
    made = []
    if found.environment:
        rows = [(name, *(value or "-" for value in values)) for name, values in found.environment]
        made.append(Table("what differs beside the times", ("Row", *_columns(found)), tuple(rows)))
    if len(found.names) == 2:
        columns = ("Row", *(f"{name} ms" for name in _columns(found)), "change", "interval", "Verdict")
        made.append(Table("row by row", columns, tuple(_pair(line) for line in found.lines)))
    else:
        columns = ("Row", *(f"{name} ms" for name in _columns(found)), "since the first", "interval", "Verdict")
        made.append(Table("over time", columns, tuple(_pair(line) for line in found.lines)))
    return made


def _columns(found: Comparison) -> list[str]:
    """Letters for files: paths are long, and stand above the tables."""
    return [chr(ord("A") + number) if number < 26 else f"run {number + 1}" for number in range(len(found.names))]


def _pair(line: Line) -> tuple[str, ...]:
    last = line.changes[-1]
    times = ("-" if time is None else f"{time:.4g}" for time in line.times_ms)
    return (str(line.key), *times, percent_change(last), _interval(last), last.verdict)


def percent_change(change: Change) -> str:
    """Of the time: plus is slower."""
    return "" if change.verdict == "missing" else f"{100 * (change.ratio - 1):+.1f}%"


def _interval(change: Change) -> str:
    if change.verdict == "missing":
        return ""
    if change.high == float("inf"):
        return "not known"
    return f"{100 * (change.low - 1):+.1f}% to {100 * (change.high - 1):+.1f}%"


def above(found: Comparison) -> list[str]:
    """Which letter is which file, and the answer in one line."""
    lettered = zip(_columns(found), found.names, strict=True)
    return [summary(found), *(f"{letter}: {name}" for letter, name in lettered)]


def summary(found: Comparison) -> str:
    """How many rows moved."""
    verdicts = [line.changes[-1].verdict for line in found.lines]
    counts = {verdict: verdicts.count(verdict) for verdict in ("slower", "faster", "too close to call", "missing")}
    if not counts["slower"] and not counts["faster"]:
        told = f"no difference: {counts['too close to call']} rows, all too close to call"
    else:
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count and verdict != "missing")
    return told + (f"; {counts['missing']} not in both" if counts["missing"] else "")


def below(found: Comparison, limit: float | None) -> list[str]:
    """What the verdicts mean, and whether the limit holds."""
    lines = [
        "change: of the time, plus is slower; intervals hold for all rows together with 95%, the spread between runs included",
    ]
    if limit is not None:
        failing = found.failing(limit)
        worst = max(failing, key=lambda line: line.changes[-1].ratio, default=None)
        if worst is None:
            lines.append(f"passed: no row is slower beyond doubt that may be slower by {100 * limit:.3g}%")
        else:
            told = f"{len(failing)} rows, worst {worst.key} {percent_change(worst.changes[-1])}"
            lines.append(f"FAILED --fail-if-slower {100 * limit:.3g}%: {told}")
    return lines


def as_csv(found: Comparison) -> str:
    """One line per row and run after the first, with plain numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["what", "recipe", "mode", "first_ms", "run", "run_ms", "ratio", "low", "high", "verdict"])
    for line in found.lines:
        for number, change in enumerate(line.changes, start=1):
            key = line.key
            cells = [line.times_ms[0], found.names[number], line.times_ms[number], change.ratio, change.low, change.high]
            writer.writerow([key.what, key.recipe, key.mode, *cells, change.verdict])
    return out.getvalue()
