"""Tables: columns, and rows of cells. A cell has its text, its number for sorting and CSV, and its interval."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from gemmscope import grouping, units
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


Value = Cell | Interval | float | str | None
Row = TypeVar("Row")
Outer = TypeVar("Outer")
Key = TypeVar("Key")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Head:
    """The head of a column; numbers are aligned right. Where there is no room, those of the highest `drop` go first; 0 stays."""

    name: str
    numeric: bool = True
    drop: int = 0

    @property
    def plain(self) -> str:
        """Its name in CSV files and DataFrames, without a note in brackets."""
        return self.name.partition(" [")[0]


@dataclass(frozen=True)
class Table:
    """`name` is short and stays the same from version to version: CSV files and DataFrames are found by it. `note` is a sentence
    below the title; `marked` are the places of the rows that the answer recommends."""

    name: str
    title: str
    columns: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    marked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):  # a damaged run file
            raise ValueError("a row has more or fewer cells than the table has columns")

    def of(self, gpu: str) -> "Table":
        """The same table, named as that of one GPU of several."""
        return replace(self, name=_named(f"{gpu} {self.name}"))

    def only(self, places: Sequence[int]) -> "Table":
        """The table with only the columns at these places."""
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in places), rows=rows)


def _named(text: str) -> str:
    """The name of a table.

    >>> _named("points autocast"), _named("hidden_size 4096: front")
    ('points_autocast', 'hidden_size_4096_front')
    """
    return "_".join(re.findall(r"\w+", text.lower()))


NOTHING = Cell("-")


def estimated(text: str, estimate: Interval, level: Level | Literal[""] = "") -> Cell:
    """An estimate with its interval, written as this text."""
    return Cell(text, estimate.value, estimate.low, estimate.high, level)


def share_cell(value: float | None, half_width: float = 0.0) -> Cell:
    """A share as a percentage, with the digits that its relative uncertainty allows; its number is the share itself."""
    if value is None:
        return NOTHING
    return Cell(f"{100 * value:.0f}%" if (units.decimals(100 * value * half_width) < 1) else units.percent(value), value)


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
    return estimated(text(ratio), ratio, "warning" if ratio.below_one or ratio.includes_one else "")


def difference_cell(ratio: Interval | None, level: Level | Literal[""] = "") -> Cell:
    """A ratio as its difference from one: -9.8%. Its number is the ratio."""
    return NOTHING if ratio is None else estimated(units.difference(ratio.value), ratio, level)


def ends_text(ratio: Interval | None, unknown: str | None = None) -> str | None:
    """Both ends of a ratio as differences from one: -3.0% to 1.2%; `unknown` where it has no interval."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return None if ratio is None else unknown
    return f"{units.difference(ratio.low)} to {units.difference(ratio.high)}"


def called_cell(ratio: Interval | None) -> Cell:
    """A speedup, and whether it is too close to call."""
    cell = speedup_cell(ratio)
    return replace(cell, text=f"{cell.text} too close to call") if ratio is not None and ratio.includes_one else cell


def runs_cell(count: float) -> Cell:
    """Runs per step: whole, unless they are few and differ between steps."""
    return Cell(
        "<0.1" if 0 < count < 0.05 else (f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"), float(count)
    )


def error_text(error: float) -> str:
    """A relative error.

    >>> error_text(0.0373), error_text(0.00168), error_text(0.0)
    ('3.7%', '0.17%', '0%')
    """
    return "0%" if error == 0 else f"{100 * error:.1f}%" if error >= 0.00995 else f"{100 * error:.2g}%"


def error_cell(error: float | Interval) -> Cell:
    """A relative error, with its interval if it has one; its number is the share itself."""
    estimate = error if isinstance(error, Interval) else Interval(error)
    return estimated(error_text(estimate.value), estimate)


UNITS: dict[str, Callable[[Any], Cell]] = {
    "ms": lambda time: estimated(units.milliseconds(time), time if isinstance(time, Interval) else Interval(time)),
    "ms, range": lambda time: estimated(units.time_range(time), time),
    "x": speedup_cell,
    "x, called": called_cell,
    "of 1": difference_cell,
    "%": share_cell,
    "%, whole": lambda value: share_cell(value, 1.0),
    "runs": runs_cell,
    "runs, decimal": lambda value: Cell(f"{value:,.0f}" if value >= 10 else f"{value:.1f}", float(value)),
    "B": bytes_cell,
    "GB": lambda size: Cell(units.memory(size), float(size)),
    "error": error_cell,
    "FLOP": lambda value: Cell(units.si(value, "FLOP"), float(value)),
    "TFLOP/s": lambda value: Cell(units.tflops(value), float(value)),
    "amount": lambda amount: estimated(units.amount(amount), amount),
}
"""How the value of a cell is written, by the unit of its column."""


def write(value: Value, unit: str = "") -> Cell:
    """A value as a cell: text as it is, a number in its unit or format, None as a dash."""
    if value is None or isinstance(value, Cell):
        return NOTHING if value is None else value
    if isinstance(value, str) or not unit:
        return Cell(str(value))
    return UNITS[unit](value) if unit in UNITS else Cell(format(value, unit), float(value))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of the rows of one type: its head, the value in a row, and the unit that says how a value is written.

    Without a unit it holds text. A unit is one of `UNITS`, or the format of a number, such as ",.0f". A value that is a `Cell`
    is taken as it is; None is a dash. `drop`: see `Head`. `when`: whether the table has this column at all.
    """

    head: str
    cell: Callable[[Row], Value]
    unit: str = ""
    drop: int = 0
    when: bool = True

    def of(self, part: Callable[[Outer], Row | None]) -> "Column[Outer]":
        """The same column of rows that have such a row as a part, or have none."""

        def value(row: Outer) -> Value:
            own = part(row)
            return None if own is None else self.cell(own)

        return Column(self.head, value, self.unit, self.drop, self.when)


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, tuple[Item, ...]]:
    """The items of each key, in their order.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': (1, 3), 'b': (2,)}
    """
    return {key: tuple(items) for key, items in grouping.grouped(pairs).items()}


def across(
    keys: Iterable[Key], cell: Callable[[Row, Key], Value], unit: str = "", drop: int = 0, *, head: Callable[[Key], str] = str
) -> Iterator[Column[Row]]:
    """A column for each key: `cell` gives the value of a row in it, `head` its head."""
    return (Column(head(key), partial(lambda key, row: cell(row, key), key), unit, drop) for key in keys)


def table(
    name: str,
    title: str,
    rows: Iterable[Row],
    *columns: Column[Row],
    note: str = "",
    more: Iterable[Mapping[str, Value]] = (),
    sparse: bool = False,
    recommended: Callable[[Row], bool] | None = None,
) -> Table:
    """A table with a row for each of `rows`. `more`: rows below them, with values for some columns, by their heads.

    `sparse`: leave out the columns without text in any row. `recommended`: whether the answer recommends what a row is about.

    >>> table("", "Squares", [1], Column("n", str), Column("n²", lambda n: n**2, "d"), more=[{"n": "all", "n²": 5}]).rows[-1]
    (Cell(text='all', value=None, low=None, high=None, level=''), Cell(text='5', value=5.0, low=None, high=None, level=''))
    """
    shown = [column for column in columns if column.when]
    listed = list(rows)
    lines = [tuple(write(column.cell(row), column.unit) for column in shown) for row in listed]
    lines += [tuple(write(row.get(column.head), column.unit) for column in shown) for row in more]
    marked = tuple(place for place, row in enumerate(listed) if recommended is not None and recommended(row))
    whole = Table(
        _named(name), title, tuple(Head(one.head, bool(one.unit), one.drop) for one in shown), tuple(lines), note, marked
    )
    if not sparse or not lines:
        return whole
    return whole.only([place for place in range(len(shown)) if any(line[place].text.strip("-") for line in lines)])


BASELINE_CELL = Cell("1x", 1.0)
FALLBACK_CELL = Cell("FALLBACK", None, level="error")
