"""Every table of a Document, numbers not rounded: in one CSV file, or as pandas DataFrames. pandas is imported when it is used.

A CSV file has one header; its first two columns have the short name of the table and its title, and a row has values in its own
table's columns only.
A number with an interval has two more columns, `<name> low` and `<name> high`. To get one table with pandas:
``df[df.table == "memory"].dropna(axis=1, how="all")``.
"""

import csv
import io
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from gemmscope.document.model import Document
from gemmscope.document.table import Cell, Table
from gemmscope.errors import UserError, closest, shown
from gemmscope.text import csv_cell


def csv_text(document: Document) -> str:
    """The CSV file of a document."""
    tables = document.tables()
    names = dict.fromkeys(name for table in tables for name in _columns(table))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(csv_cell, ["table", "title", *names]))
    for table in tables:
        for row in table.rows:
            values = dict(_values(table, row))
            writer.writerow(
                [
                    csv_cell(cell) if isinstance(cell, str) else cell
                    for cell in [table.name, table.title, *(values.get(name, "") for name in names)]
                ]
            )
    return out.getvalue()


def _columns(table: Table) -> Iterator[str]:
    for index, column in enumerate(table.columns):
        yield column.plain
        if any(row[index].low is not None or row[index].high is not None for row in table.rows):
            yield from (f"{column.plain} low", f"{column.plain} high")


def _values(table: Table, row: tuple[Cell, ...]) -> Iterator[tuple[str, object]]:
    """The values of a row by column: numbers are not rounded, and a dash becomes empty text."""
    for column, cell in zip(table.columns, row, strict=True):
        if cell.value is not None and column.numeric:
            yield column.plain, int(cell.value) if float(cell.value).is_integer() else cell.value
        else:
            yield column.plain, "" if cell.text == "-" else cell.text
        if cell.low is not None:
            yield f"{column.plain} low", cell.low
        if cell.high is not None:
            yield f"{column.plain} high", cell.high


def frame(document: Document, name: str = "") -> Any:
    """The main table, the one with this name, or the first whose title contains it."""
    tables = _tables(document)
    if not tables:
        raise UserError(f"this {document.kind} result has no table")
    if not name:
        return _frame(next(iter(tables.values())))
    titled = (table for table in tables.values() if name.lower() in table.title.lower())
    if (found := tables.get(name) or next(titled, None)) is None:
        raise UserError(f"there is no table {shown(name)}", f"tables: {', '.join(closest(name, tables, cutoff=0.1) or tables)}")
    return _frame(found)


def frames(document: Document) -> dict[str, Any]:
    """Every table by its name, the main one first."""
    return {name: _frame(table) for name, table in _tables(document).items()}


def _tables(document: Document) -> dict[str, Table]:
    """Every table by its name, that of the short view first."""
    return {table.name: table for table in (*([document.summary] if document.summary is not None else []), *document.tables())}


def columns(table: Table) -> dict[str, list[Any]]:
    """Names and values. Numbers are plain; one with an interval has two more columns, `NAME low` and `NAME high`.

    A cell without a number is None in a column of numbers, even if its text says why.
    """
    result: dict[str, list[Any]] = {}
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        if not column.numeric or not any(cell.value is not None for cell in cells):
            result[column.plain] = [cell.text if cell.text != "-" else None for cell in cells]
            continue
        result[column.plain] = _whole([cell.value for cell in cells])
        if any(cell.low is not None or cell.high is not None for cell in cells):
            result[f"{column.plain} low"] = [cell.low for cell in cells]
            result[f"{column.plain} high"] = [cell.high for cell in cells]
    return result


def _whole(values: list[float | None]) -> list[Any]:
    """Counts and sizes as whole numbers, where all of them are."""
    whole = all(value is not None and float(value).is_integer() for value in values)
    return [int(value) for value in values if value is not None] if whole else values


def _frame(table: Table) -> Any:
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise UserError("DataFrames need pandas, which is not installed", "pip install pandas") from None
    return pandas.DataFrame(columns(table))
