"""Charts as data. Each can be drawn (by the page and by figures) and shown as a table (by every other writer)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gemmscope import units
from gemmscope.document.table import NOTHING, Cell, Facts, Table, columns, number, share_cell, speedup_cell, time_cell
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


def legend(charts: Sequence[BarChart]) -> dict[str, int]:
    """The names in plain or light shade with their colors, in the order they are stacked."""
    colors: dict[str, int] = {}
    for segment in (segment for chart in charts for bar in chart.bars for segment in bar.segments):
        if segment.shade != "hatched":
            colors.setdefault(segment.name, segment.color)
    return colors


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
