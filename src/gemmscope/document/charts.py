"""Charts as data. Each can be drawn (by the page and by figures) and shown as a table (by every other writer)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

from gemmscope import units
from gemmscope.document.palette import recipe_key
from gemmscope.document.table import Cell, Column, Facts, Table, Value, across, difference_cell, table, write
from gemmscope.interval import Interval

Shade = Literal["plain", "light", "hatched"]
MOST_LINES = 7  # along an axis
SHADES: dict[Shade, str] = {"plain": "fprop + dgrad", "light": "wgrad", "hatched": ""}


@dataclass(frozen=True)
class Drawing:
    """What all charts have. `name`: that of its table. `main`: it belongs to the first screen. `figure`: `-o` draws it even if it
    is not main."""

    name: str
    title: str
    _: KW_ONLY
    note: str = ""
    main: bool = False
    figure: bool = False


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
    """One recipe. A bar without segments is a gap, and `note` says why; `alarm` is shown instead of the speedup.

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

    def time_of(self, name: str, shade: Shade) -> float | None:
        """The time of the segments of one name and shade; None if there are none."""
        return sum(segment.time_ms for segment in self.segments if (segment.name, segment.shade) == (name, shade)) or None

    @property
    def time(self) -> str:
        """The time above the bar, with the digits that its interval allows."""
        if self.total is None or not self.total.known or not self.total.value > 0 or not self.segments:
            return time_text(self.total_ms) if self.segments else ""
        return f"{units.rounded(self.total_ms, self.total.half_width)} ms" if self.total_ms >= 100 else time_text(self.total_ms)

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
        """The text above the bar: its alarm, or its speedup."""
        if self.alarm or not self.segments:
            return self.alarm
        return units.ratio(self.speedup) if self.speedup else "1.00x" if self.baseline else ""


BarRow = tuple[str, str, Callable[[Bar], Value]]
"""A row of a chart's table: the part, the pass, and the value of each bar."""


@dataclass(frozen=True)
class BarChart(Drawing):
    """Stacked bars, one for each recipe. Charts of one `unit` share an axis."""

    unit: str
    bars: tuple[Bar, ...]

    def table(self) -> Table:
        """A row per segment, a column per bar, in milliseconds; for a single bar also the shares."""
        bars = [bar for bar in self.bars if bar.segments]
        shades = dict.fromkeys((segment.name, segment.shade) for bar in bars for segment in bar.segments)
        whole_ms = bars[0].total_ms if len(bars) == 1 else 0.0
        rows: list[BarRow] = [(name, SHADES[shade], partial(Bar.time_of, name=name, shade=shade)) for name, shade in shades]
        rows.append(("total", "", lambda bar: bar.total_ms))
        if any(bar.alarm or bar.speedup for bar in bars):
            rows.append(("speedup", "", lambda bar: Cell(bar.alarm, level="error") if bar.alarm else write(bar.speedup, "x")))

        def share(row: BarRow) -> float | None:
            time_ms = row[2](bars[0])
            return time_ms / whole_ms if isinstance(time_ms, float) else None

        return table(
            self.name,
            f"{self.title} ({self.unit})",
            rows,
            Column("Part", lambda row: row[0]),
            Column("Pass", lambda row: row[1], when=any(shade == "light" for _, shade in shades)),
            *across(bars, lambda row, bar: row[2](bar), "ms", head=lambda bar: bar.label),
            Column("Share", share, "%", when=whole_ms > 0),
            note=self.note,
        )


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
    """One part of a waterfall: its time in the baseline and in the recipe, and the speedup of all parts up to this one."""

    part: str
    baseline_ms: float
    recipe_ms: float
    speedup: float


@dataclass(frozen=True)
class WaterfallChart(Drawing):
    """How the speedup changes from the GEMMs alone to the whole step. `total` is the speedup of the step, with its interval."""

    recipe: str
    baseline: str
    falls: tuple[Fall, ...]
    total: Interval | None = None

    def table(self) -> Table:
        """A row per part of the step."""
        return table(
            self.name,
            self.title,
            self.falls,
            Column("Part", lambda fall: fall.part),
            Column(f"{self.baseline} ms", lambda fall: fall.baseline_ms, ".2f"),
            Column(f"{self.recipe} ms", lambda fall: fall.recipe_ms, ".2f"),
            Column("Speedup so far", lambda fall: Cell(f"{fall.speedup:.3f}x", fall.speedup), "x"),
            note=self.note,
        )


@dataclass(frozen=True)
class Point:
    """A value somewhere along a curve, with its interval. `mark` flags it: an `x` in figures."""

    at: str
    value: Interval
    facts: Facts = ()
    mark: str = ""


@dataclass(frozen=True)
class CurveChart(Drawing):
    """Values against a size. `series`: recipe → points.

    `unit` "x" means speedups: the line at 1 is drawn. A unit that begins with "%" has percentages as values.
    """

    axis: str
    series: Mapping[str, tuple[Point, ...]]
    unit: str = "x"
    limit: float | None = None
    """The largest size that is possible: the axis is linear, and ends there."""

    def color(self, name: str) -> str:
        """The key of the style of a recipe."""
        return recipe_key(name, list(self.series).index(name))

    @property
    def places(self) -> list[str]:
        """The sizes along the axis, in the order of the run."""
        return list(dict.fromkeys(point.at for points in self.series.values() for point in points))

    def table(self) -> Table:
        """A row per size, a column per recipe."""
        points = {(name, point.at): point for name, series in self.series.items() for point in series}

        unit = "" if self.unit == "x" else f" ({self.unit})"
        return table(
            self.name,
            f"{self.title}{unit}",
            self.places,
            Column[str](self.axis, str),
            *across(self.series, lambda at, name: self._cell(points.get((name, at))), "x"),
            note=self.note,
        )

    def _cell(self, point: Point | None) -> Cell | None:
        if point is None:
            return None
        value = point.value
        text = units.speedup(value) if self.unit == "x" else units.tflops(value.value)
        text = units.percent(value.value / 100) if self.unit.startswith("%") else text
        return Cell(f"{text} {point.mark}" if point.mark else text, value.value, value.low, value.high)


@dataclass(frozen=True)
class HeatCell:
    """One field of a heat map: the best recipe, its speedup, and whether that is certain."""

    label: str = ""
    value: float | None = None
    certain: bool = True  # faster than BF16 beyond the interval: on this side of the break-even line
    text: str = ""
    may_not_fit: bool = False


@dataclass(frozen=True)
class HeatMap(Drawing):
    """Values over two axes: the best recipe, or errors. Cells are `cells[row][column]`. A line, called `line`, separates certain
    cells from the rest.

    `measure` is what color shows: a speedup, from 1 on, or with `unit` "%" a share, from 0 on. `turned`: the table has a row for
    each column, because there are many columns. Rows are drawn from the bottom up; `top_first`: the table begins with the top.
    """

    row_name: str
    column_name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatCell, ...], ...]
    legend: Facts = ()
    measure: str = "speedup over BF16, best recipe"
    unit: Literal["x", "%"] = "x"
    line: str = "break-even line"
    line_meaning: str = "beyond it, the speedup is certain"
    blank: str = "no result"  # what cells without a value mean
    turned: bool = False
    top_first: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the color scale: no speedup, or no error, and the largest value."""
        values = [cell.value for row in self.cells for cell in row if cell.value is not None and math.isfinite(cell.value)]
        return (1.0, max([1.05, *values])) if self.unit == "x" else (0.0, max(values, default=0.0) or 1.0)

    @property
    def best(self) -> tuple[int, int] | None:
        """Column and row of the largest certain speedup, of those that fit if any does; None for a map of errors."""
        if self.unit != "x":
            return None
        cells = [(cell, x, y) for y, row in enumerate(self.cells) for x, cell in enumerate(row)]
        certain = [(not cell.may_not_fit, cell.value, x, y) for cell, x, y in cells if cell.value and cell.certain]
        return max(certain)[2:] if certain else None

    def table(self) -> Table:
        """The cells as a table, a row for each row; if it is `turned`, for each column."""
        if self.turned:
            head, rows, heads = self.column_name, self.columns, self.rows[::-1]  # the last row is on top
            lines = list(zip(*self.cells[::-1], strict=True))
        else:
            head, rows, lines = self.row_name, self.rows, list(self.cells)
            # a name, or a size
            heads = tuple(name if name[0].isalpha() else f"{self.column_name}={name}" for name in self.columns)

        pairs = list(zip(rows, lines, strict=True))
        return table(
            self.name,
            self.title,
            pairs[::-1] if self.top_first else pairs,
            Column(head, lambda row: row[0]),
            *across(
                range(len(heads)),
                lambda row, at: Cell(row[1][at].text or "-", row[1][at].value),
                self.unit,
                head=heads.__getitem__,
            ),
            note=self.note,
        )


@dataclass(frozen=True)
class Dot:
    """A speedup with its interval, and an error (a share). `facts` are shown in a tooltip."""

    name: str
    speedup: Interval
    error: float
    facts: Facts = ()


@dataclass(frozen=True)
class ScatterChart(Drawing):
    """Speed against error: a dot for each recipe; mixes of them as a line of dots; the one to use has a mark.

    `bound`: the largest error that is allowed, a dashed line.
    """

    dots: tuple[Dot, ...]
    mixes: tuple[Dot, ...] = ()
    chosen: Dot | None = None
    bound: float | None = None

    def color(self, name: str) -> str:
        """The key of the style of a recipe."""
        return recipe_key(name, [dot.name for dot in self.dots].index(name))

    def table(self) -> Table:
        """A row per dot."""
        known = {(dot.speedup, dot.error) for dot in self.dots}  # a recipe in all linears is not listed twice
        mixes = [self.chosen] if self.chosen is not None and (self.chosen.speedup, self.chosen.error) not in known else []

        return table(
            self.name,
            self.title,
            (*self.dots, *mixes),
            Column("Recipe", lambda dot: dot.name),
            Column("Speedup", lambda dot: dot.speedup, "x"),
            Column("Error", lambda dot: dot.error, "%"),
            note=self.note,
        )


@dataclass(frozen=True)
class Ranked:
    """One item of a ranking: its rank, from the lowest value on, and its value over the median. Outliers have a `label`."""

    name: str
    rank: int
    value: Interval
    label: str = ""
    facts: Facts = ()


@dataclass(frozen=True)
class RankChart(Drawing):
    """Values in ascending order, relative to their median, which is 1. `points` may be a selection of all `count` values.

    `limit`: outliers are further from the median than this; None if there is no such limit. `axis` names what is ranked.
    """

    axis: str
    points: tuple[Ranked, ...]
    count: int
    limit: float | None = None

    @property
    def ends(self) -> tuple[float, float, float]:
        """Rounded ends around all values and the limit, and the distance between grid lines, one of which is the median."""
        reach = self.limit or 0.0
        values = [
            end for point in self.points for end in (point.value.value, point.value.low, point.value.high) if end is not None
        ]
        known = [1 - reach * 1.1, 1 + reach * 1.1, *(value for value in values if math.isfinite(value))]
        width = max(max(known) - min(known), 0.004)
        unit = 10 ** math.floor(math.log10(width / MOST_LINES))
        step = next(unit * factor for factor in (1, 2, 5, 10) if width / (unit * factor) <= MOST_LINES)
        return 1 - math.ceil((1 - min(known)) / step) * step, 1 + math.ceil((max(known) - 1) / step) * step, step

    def table(self) -> Table:
        """A row for each point."""
        return table(
            self.name,
            self.title,
            self.points,
            Column(self.axis, lambda point: point.name),
            Column("Rank", lambda point: point.rank, ",d"),
            Column("Difference from the median", lambda one: difference_cell(one.value, "warning" if one.label else ""), "of 1"),
            note=self.note,
        )


Chart = BarChart | WaterfallChart | CurveChart | HeatMap | ScatterChart | RankChart


def axis_ends(values: Iterable[float]) -> tuple[float, float]:
    """Rounded ends of an axis with all values.

    >>> axis_ends([1.0, 1.963])
    (0.9, 2.1)
    """
    finite = [value for value in values if math.isfinite(value)] or [1.0]
    return math.floor(min(finite) * 10 - 0.5) / 10, math.ceil(max(finite) * 10 + 0.5) / 10
