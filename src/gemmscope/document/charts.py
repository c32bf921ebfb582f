"""Charts as data. Each can be drawn (by the page and by figures) and shown as a table (by every other writer)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemmscope import units
from gemmscope.document.table import NOTHING, Cell, Column, Facts, Table, share_cell, speedup_cell, time_cell
from gemmscope.interval import Interval

Shade = Literal["plain", "light", "hatched"]
GREY = -1  # the color of what has none of its own
SHADES: dict[Shade, str] = {"plain": "fprop + dgrad", "light": "wgrad", "hatched": ""}


@dataclass(frozen=True)
class Segment:
    """A part of a bar. `color` counts through the palette; `facts` are shown in a tooltip."""

    name: str
    time_ms: float
    color: int
    shade: Shade = "plain"
    facts: Facts = ()


@dataclass(frozen=True)
class Bar:
    """One recipe. Without segments it is a gap, and `note` says why; `alarm` stands where the speedup would."""

    label: str
    segments: tuple[Segment, ...] = ()
    speedup: Interval | None = None
    baseline: bool = False
    alarm: str = ""
    note: str = ""

    @property
    def total_ms(self) -> float:
        return sum(segment.time_ms for segment in self.segments)

    @property
    def head(self) -> str:
        """What stands above the bar: its speedup, or what is in its way."""
        if self.alarm or not self.segments:
            return self.alarm
        return f"{self.speedup.value:.2f}x" if self.speedup else "1.00x" if self.baseline else ""


@dataclass(frozen=True)
class BarChart:
    """Stacked bars, one for each recipe. Charts of one `unit` share an axis. `figure`: `-o` draws it, though it is not main."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    note: str = ""
    main: bool = False
    figure: bool = False

    def table(self) -> Table:
        """A row per segment, a column per bar, in milliseconds; of a single bar also the shares."""
        bars = [bar for bar in self.bars if bar.segments]
        passes = any(segment.shade == "light" for bar in bars for segment in bar.segments)
        shares = len(bars) == 1 and bars[0].total_ms > 0
        rows = []
        for name, shade in dict.fromkeys((segment.name, segment.shade) for bar in bars for segment in bar.segments):
            times = [sum(one.time_ms for one in bar.segments if (one.name, one.shade) == (name, shade)) for bar in bars]
            cells = [time_cell(time) if time else NOTHING for time in times]
            cells += [share_cell(times[0] / bars[0].total_ms)] if shares else []
            rows.append(_row(name, SHADES[shade], passes, cells))
        rows.append(
            _row("total", "", passes, [*(time_cell(bar.total_ms) for bar in bars), *([share_cell(1.0)] if shares else [])])
        )
        speedups = [Cell(bar.alarm, level="error") if bar.alarm else speedup_cell(bar.speedup) for bar in bars]
        if any(cell != NOTHING for cell in speedups):
            rows.append(_row("speedup", "", passes, [*speedups, *([NOTHING] if shares else [])]))
        heads = [Column("Part", numeric=False), *([Column("Pass", numeric=False)] if passes else [])]
        heads += [*(Column(bar.label) for bar in bars), *([Column("Share")] if shares else [])]
        return Table(f"{self.title} ({self.unit})", tuple(heads), tuple(rows), self.note, self.main)


def _row(name: str, part: str, passes: bool, cells: list[Cell]) -> tuple[Cell, ...]:
    return (Cell(name), *([Cell(part)] if passes else []), *cells)


def legend(charts: Sequence[BarChart]) -> dict[str, int]:
    """The names in plain or light shade with their colors, in the order they are stacked."""
    found: dict[str, int] = {}
    for bar in (bar for chart in charts for bar in chart.bars):
        for segment in bar.segments:
            if segment.shade != "hatched":
                found.setdefault(segment.name, segment.color)
    return found


@dataclass(frozen=True)
class Fall:
    """One part of a waterfall: its time on both sides, and the speedup of everything down to it."""

    part: str
    baseline_ms: float
    recipe_ms: float
    speedup: float


@dataclass(frozen=True)
class WaterfallChart:
    """From the speedup of the GEMMs alone to that of the step."""

    title: str
    recipe: str
    baseline: str
    falls: tuple[Fall, ...]
    note: str = ""
    main: bool = False

    def table(self) -> Table:
        """A row per part of the step."""
        rows = tuple(
            (Cell(fall.part), _ms(fall.baseline_ms), _ms(fall.recipe_ms), Cell(f"{fall.speedup:.3f}x", fall.speedup))
            for fall in self.falls
        )
        columns = (
            Column("Part", numeric=False),
            Column(f"{self.baseline} ms"),
            Column(f"{self.recipe} ms"),
            Column("Speedup so far"),
        )
        return Table(self.title, columns, rows, self.note, self.main)


def _ms(time_ms: float) -> Cell:
    return Cell(f"{time_ms:.2f}", time_ms)


@dataclass(frozen=True)
class Point:
    """A value somewhere along a curve, with its interval. `mark` flags it: an `x` in figures."""

    at: str
    value: Interval
    facts: Facts = ()
    mark: str = ""


@dataclass(frozen=True)
class CurveChart:
    """Values against a size. `series`: recipe → points; `order` gives each recipe its color in all charts of a run.

    `unit` "x" means speedups: the line at 1 is drawn. `figure`: `-o` draws it, though it is not main.
    """

    title: str
    axis: str
    series: Mapping[str, tuple[Point, ...]]
    unit: str = "x"
    order: tuple[str, ...] = ()
    note: str = ""
    main: bool = False
    figure: bool = False

    def color(self, name: str) -> int:
        return self.order.index(name) if name in self.order else list(self.series).index(name)

    @property
    def places(self) -> list[str]:
        """Along the axis, in the order of the run."""
        return list(dict.fromkeys(point.at for points in self.series.values() for point in points))

    def table(self) -> Table:
        """A row per size, a column per recipe."""
        points = {(name, point.at): point for name, series in self.series.items() for point in series}
        rows = []
        for at in self.places:
            cells = [self._cell(points.get((name, at))) for name in self.series]
            rows.append((Cell(at), *cells))
        columns = (Column(self.axis, numeric=False), *(Column(name) for name in self.series))
        unit = "" if self.unit == "x" else f" ({self.unit})"
        return Table(f"{self.title}{unit}", columns, tuple(rows), self.note, self.main)

    def _cell(self, point: Point | None) -> Cell:
        if point is None:
            return NOTHING
        mark = f" {point.mark}" if point.mark else ""
        value = point.value
        text = units.speedup(value) if self.unit == "x" else units.tflops(value.value)
        return Cell(text + mark, value.value, value.low, value.high)


@dataclass(frozen=True)
class HeatCell:
    """One field of a heat map: the best recipe, its speedup, and whether that is certain."""

    label: str = ""
    value: float | None = None
    certain: bool = True  # faster than BF16 beyond the interval: on this side of the break-even line
    text: str = ""


@dataclass(frozen=True)
class HeatMap:
    """The best recipe over a plane of two sizes. `cells[row][column]`; a line separates certain speedups from the rest."""

    title: str
    row_name: str
    column_name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatCell, ...], ...]
    note: str = ""
    main: bool = False
    legend: Facts = field(default=())

    def table(self) -> Table:
        """The plane itself."""
        heads = (Column(self.row_name, numeric=False), *(Column(f"{self.column_name}={name}") for name in self.columns))
        rows = tuple(
            (Cell(name), *(Cell(cell.text or "-", cell.value) for cell in cells))
            for name, cells in zip(self.rows, self.cells, strict=True)
        )
        return Table(self.title, heads, rows, self.note, self.main)


Chart = BarChart | WaterfallChart | CurveChart | HeatMap


def axis_ends(values: Iterable[float]) -> tuple[float, float]:
    """Round ends around all values.

    >>> axis_ends([1.0, 1.963])
    (0.9, 2.1)
    """
    found = [value for value in values if math.isfinite(value)] or [1.0]
    return math.floor(min(found) * 10 - 0.5) / 10, math.ceil(max(found) * 10 + 0.5) / 10
