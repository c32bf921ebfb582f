"""Tables: columns, and rows of cells. A cell has its text, its number for sorting and CSV, and its interval."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gemmscope import units
from gemmscope.findings import Level
from gemmscope.interval import Interval

Facts = tuple[tuple[str, str], ...]
"""Names and values, as a list or a tooltip shows them."""


@dataclass(frozen=True)
class Cell:
    """`text` is what people read; `value` the plain number, if it is one; `level` marks what must not be overlooked."""

    text: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    level: Level | Literal[""] = ""


@dataclass(frozen=True)
class Column:
    """A column's name; numbers are aligned right. Where a table is too wide, columns of the highest `drop` go first; 0 stays."""

    name: str
    numeric: bool = True
    drop: int = 0


@dataclass(frozen=True)
class Table:
    """`note` is a sentence below the title."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):  # a damaged run file
            raise ValueError("a row has more or fewer cells than the table has columns")


NOTHING = Cell("-")


def first_rows(table: Table, most: int) -> Table:
    """The table with at most `most` rows; if it has more, its note says so."""
    more = len(table.rows) - most
    if more <= 0:
        return table
    note = f"The first {most:,} of {len(table.rows):,} rows: --csv and --json write them all."
    return replace(table, rows=table.rows[:most], note=f"{table.note} {note}".strip())


def without_empty(table: Table) -> Table:
    """The table without columns that have no text in any row; as it is, if it has no rows."""
    if not table.rows:
        return table
    kept = [place for place in range(len(table.columns)) if any(row[place].text.strip("-") for row in table.rows)]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)


def columns(text: Sequence[str], numeric: Sequence[str], drop: Mapping[str, int] = {}) -> tuple[Column, ...]:
    """Text columns first, then numbers. `drop`: which columns are left out if there is no room, the highest number first."""
    texts = (Column(name, numeric=False, drop=drop.get(name, 0)) for name in text)
    return (*texts, *(Column(name, drop=drop.get(name, 0)) for name in numeric))


def number(value: float | None, text: str | None = None) -> Cell:
    """A plain number; a dash where there is none."""
    return NOTHING if value is None else Cell(text if text is not None else f"{value:g}", float(value))


def time_cell(value: float | Interval | None) -> Cell:
    """A time in milliseconds, with its interval if it has one; a dash where there is none."""
    if isinstance(value, Interval):
        return Cell(units.milliseconds(value), value.value, value.low, value.high)
    return NOTHING if value is None else Cell(units.milliseconds(value), value)


def range_cell(value: Interval | None) -> Cell:
    """Milliseconds with their error bar in brackets."""
    if value is None:
        return NOTHING
    return Cell(units.time_range(value), value.value, value.low, value.high)


def share_cell(value: float | None, half_width: float = 0.0) -> Cell:
    """A share as a percentage, with the digits that its relative uncertainty allows; its number is the share itself."""
    if value is None:
        return NOTHING
    whole = units.decimals(100 * value * half_width) < 1
    return Cell(f"{100 * value:.0f}%" if whole else units.percent(value), value)


def bytes_cell(value: float | None) -> Cell:
    """Bytes with a prefix."""
    return NOTHING if value is None else Cell(units.si(value, "B"), float(value))


def rate_cell(value: float, half_width: float) -> Cell:
    """A rate such as tokens/s, with the digits that its relative uncertainty allows."""
    return Cell(units.rounded(value, half_width), value)


def speedup_cell(ratio: Interval | None, text: Callable[[Interval], str] = units.speedup) -> Cell:
    """A speedup with its interval, marked where it is a slowdown or too close to call."""
    if ratio is None:
        return NOTHING
    level: Level | Literal[""] = "warning" if ratio.below_one or ratio.includes_one else ""
    return Cell(text(ratio), ratio.value, ratio.low, ratio.high, level)


def difference_cell(ratio: Interval | None, level: Level | Literal[""] = "") -> Cell:
    """A ratio as its difference from one: -9.8%. Its number is the ratio."""
    return NOTHING if ratio is None else Cell(units.difference(ratio.value), ratio.value, ratio.low, ratio.high, level)


def called_cell(ratio: Interval | None) -> Cell:
    """A speedup, and whether it is too close to call."""
    cell = speedup_cell(ratio)
    return replace(cell, text=f"{cell.text} too close to call") if ratio is not None and ratio.includes_one else cell


def amount_cell(estimate: Interval | None) -> Cell:
    """Days, GPU-hours or money with their interval."""
    if estimate is None:
        return NOTHING
    return Cell(units.amount(estimate), estimate.value, estimate.low, estimate.high)


BASELINE_CELL = Cell("1x", 1.0)
FALLBACK_CELL = Cell("FALLBACK", None, level="error")
