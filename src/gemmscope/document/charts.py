"""Charts as data. Each can be drawn (by the page and by figures) and shown as a table (by every other writer)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gemmscope import units
from gemmscope.document.palette import recipe_key
from gemmscope.document.table import NOTHING, Cell, Facts, Table, columns, number, share_cell, speedup_cell, time_cell
from gemmscope.interval import Interval

Shade = Literal["plain", "light", "hatched"]
SHADES: dict[Shade, str] = {"plain": "fprop + dgrad", "light": "wgrad", "hatched": ""}


@dataclass(frozen=True)
class Segment:
    """A part of a bar. `color` is the key of a style in the palette; `facts` are shown in a tooltip."""

    name: str
    time_ms: float
    color: str
    shade: Shade = "plain"
    facts: Facts = ()


@dataclass(frozen=True)
class Bar:
    """One recipe. Without segments it is a gap, and `note` says why; `alarm` stands where the speedup would.

    `total`: the time of the whole bar with its interval, where that is known.
    """

    label: str
    segments: tuple[Segment, ...] = ()
    speedup: Interval | None = None
    baseline: bool = False
    alarm: str = ""
    note: str = ""
    total: Interval | None = None

    @property
    def total_ms(self) -> float:
        return sum(segment.time_ms for segment in self.segments)

    @property
    def reach_ms(self) -> tuple[float, float]:
        """How far the interval of the time reaches below and above the bar; zero where there is none."""
        if self.total is None or self.total.low is None or self.total.high is None or not self.total.value > 0:
            return 0.0, 0.0
        scale = self.total_ms / self.total.value
        below, above = self.total.value - max(self.total.low, 0.0), self.total.high - self.total.value
        return max(below * scale, 0.0), max(above * scale, 0.0)

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
        segments = [segment for bar in bars for segment in bar.segments]
        passes = any(segment.shade == "light" for segment in segments)
        shares = len(bars) == 1 and bars[0].total_ms > 0

        def row(name: str, part: str, cells: Iterable[Cell], share: Cell) -> tuple[Cell, ...]:
            return (Cell(name), *([Cell(part)] if passes else []), *cells, *([share] if shares else []))

        rows = []
        for name, shade in dict.fromkeys((segment.name, segment.shade) for segment in segments):
            times = [sum(one.time_ms for one in bar.segments if (one.name, one.shade) == (name, shade)) for bar in bars]
            share = share_cell(times[0] / bars[0].total_ms if shares else None)
            rows.append(row(name, SHADES[shade], (time_cell(time) if time else NOTHING for time in times), share))
        rows.append(row("total", "", (time_cell(bar.total_ms) for bar in bars), share_cell(1.0)))
        speedups = [Cell(bar.alarm, level="error") if bar.alarm else speedup_cell(bar.speedup) for bar in bars]
        if any(cell != NOTHING for cell in speedups):
            rows.append(row("speedup", "", speedups, NOTHING))
        heads = columns(["Part", "Pass"] if passes else ["Part"], [*(bar.label for bar in bars), *(["Share"] if shares else [])])
        return Table(f"{self.title} ({self.unit})", heads, tuple(rows), self.note)


def time_text(time_ms: float) -> str:
    """A time as a label in a chart: three digits, never with an exponent.

    >>> time_text(1240.4), time_text(70.01), time_text(0.0123), time_text(0.0000123)
    ('1,240 ms', '70.0 ms', '0.0123 ms', '12.3 ns')
    """
    if 0 < time_ms < 0.001:
        return f"{time_ms * 1e6:.3g} ns"
    return f"{time_ms:,.0f} ms" if not time_ms < 99.95 else f"{time_ms:#.3g} ms"


def legend(charts: Sequence[BarChart]) -> dict[str, str]:
    """The names of all segments with their styles, in the order they are stacked."""
    segments = [segment for chart in charts for bar in chart.bars for segment in bar.segments]
    ordered = sorted(segments, key=lambda segment: segment.shade == "hatched")  # which is on top of every bar
    return {segment.name: segment.color for segment in ordered}


@dataclass(frozen=True)
class Fall:
    """One part of a waterfall: its time on both sides, and the speedup of everything down to it."""

    part: str
    baseline_ms: float
    recipe_ms: float
    speedup: float


@dataclass(frozen=True)
class WaterfallChart:
    """From the speedup of the GEMMs alone to that of the step; `total` is that of the step, with its interval."""

    title: str
    recipe: str
    baseline: str
    falls: tuple[Fall, ...]
    note: str = ""
    main: bool = False
    figure: bool = False
    total: Interval | None = None

    def table(self) -> Table:
        """A row per part of the step."""
        rows = tuple(
            (
                Cell(fall.part),
                *(number(time_ms, f"{time_ms:.2f}") for time_ms in (fall.baseline_ms, fall.recipe_ms)),
                number(fall.speedup, f"{fall.speedup:.3f}x"),
            )
            for fall in self.falls
        )
        heads = columns(("Part",), (f"{self.baseline} ms", f"{self.recipe} ms", "Speedup so far"))
        return Table(self.title, heads, rows, self.note)


@dataclass(frozen=True)
class Point:
    """A value somewhere along a curve, with its interval. `mark` flags it: an `x` in figures."""

    at: str
    value: Interval
    facts: Facts = ()
    mark: str = ""


@dataclass(frozen=True)
class CurveChart:
    """Values against a size. `series`: recipe → points.

    `unit` "x" means speedups: the line at 1 is drawn. `figure`: `-o` draws it, though it is not main.
    """

    title: str
    axis: str
    series: Mapping[str, tuple[Point, ...]]
    unit: str = "x"
    note: str = ""
    main: bool = False
    figure: bool = False

    def color(self, name: str) -> str:
        """The key of its style."""
        return recipe_key(name, list(self.series).index(name))

    @property
    def places(self) -> list[str]:
        """Along the axis, in the order of the run."""
        return list(dict.fromkeys(point.at for points in self.series.values() for point in points))

    def table(self) -> Table:
        """A row per size, a column per recipe."""
        points = {(name, point.at): point for name, series in self.series.items() for point in series}
        rows = tuple((Cell(at), *(self._cell(points.get((name, at))) for name in self.series)) for at in self.places)
        unit = "" if self.unit == "x" else f" ({self.unit})"
        return Table(f"{self.title}{unit}", columns((self.axis,), list(self.series)), rows, self.note)

    def _cell(self, point: Point | None) -> Cell:
        if point is None:
            return NOTHING
        value = point.value
        text = units.speedup(value) if self.unit == "x" else units.tflops(value.value)
        return Cell(f"{text} {point.mark}" if point.mark else text, value.value, value.low, value.high)


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
    legend: Facts = ()

    @property
    def best(self) -> tuple[int, int] | None:
        """Column and row of the largest certain speedup."""
        found = [
            (cell.value, x, y) for y, row in enumerate(self.cells) for x, cell in enumerate(row) if cell.value and cell.certain
        ]
        return max(found)[1:] if found else None

    def table(self) -> Table:
        """The plane itself."""
        heads = columns((self.row_name,), [f"{self.column_name}={name}" for name in self.columns])
        rows = tuple(
            (Cell(name), *(Cell(cell.text or "-", cell.value) for cell in cells))
            for name, cells in zip(self.rows, self.cells, strict=True)
        )
        return Table(self.title, heads, rows, self.note)


Chart = BarChart | WaterfallChart | CurveChart | HeatMap


def axis_ends(values: Iterable[float]) -> tuple[float, float]:
    """Round ends around all values.

    >>> axis_ends([1.0, 1.963])
    (0.9, 2.1)
    """
    finite = [value for value in values if math.isfinite(value)] or [1.0]
    return math.floor(min(finite) * 10 - 0.5) / 10, math.ceil(max(finite) * 10 + 0.5) / 10
