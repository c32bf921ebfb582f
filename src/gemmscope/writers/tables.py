"""Every table of a Document, numbers not rounded: in one CSV file, or as pandas DataFrames. pandas is imported when it is used.

A CSV file has one header; its first two columns have the short name of the table and its title, and a row has values in its own
table's columns only.
A number with an interval has two more columns, `<name> low` and `<name> high`. To get one table with pandas:
``df[df.table == "memory"].dropna(axis=1, how="all")``.
"""

import csv
import io
from importlib import import_module
from typing import Any

from gemmscope.document.model import Document
from gemmscope.document.table import Table
from gemmscope.errors import UserError, closest, shown
from gemmscope.text import csv_cell


def csv_text(document: Document) -> str:
    """The CSV file of a document."""
    tables = [(table, columns(table, empty="")) for table in document.tables()]
    names = dict.fromkeys(name for _, own in tables for name in own)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(csv_cell, ["table", "title", *names]))
    for table, own in tables:
        for place in range(len(table.rows)):
            values = [table.name, table.title, *(own[name][place] if name in own else "" for name in names)]
            writer.writerow([csv_cell(value) if isinstance(value, str) else value for value in values])
    return out.getvalue()


def frame(document: Document, name: str = "") -> Any:
    """The main table, the one with this name, or the first whose title contains it."""
    tables = _tables(document)
    if not tables:
        raise UserError(f"this {document.kind} result has no table")
    if not name:
        return _frame(next(iter(tables.values())))
    titled = (one for one in tables.values() if name.lower() in one.title.lower())
    if (table := tables.get(name) or next(titled, None)) is None:
        raise UserError(f"there is no table {shown(name)}", f"tables: {', '.join(closest(name, tables, cutoff=0.1) or tables)}")
    return _frame(table)


def frames(document: Document) -> dict[str, Any]:
    """Every table by its name, the main one first."""
    return {name: _frame(table) for name, table in _tables(document).items()}


def _tables(document: Document) -> dict[str, Table]:
    """Every table by its name, that of the short view first."""
    return {table.name: table for table in (*([document.summary] if document.summary is not None else []), *document.tables())}


def columns(table: Table, *, empty: str | None = None) -> dict[str, list[Any]]:
    """Names and values. Numbers are plain; one with an interval has two more columns, `NAME low` and `NAME high`.

    A cell without a number is None in a column of numbers, even if its text says why; with `empty`, it is this text, or its own.
    """
    result: dict[str, list[Any]] = {}
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        texts = [cell.text if cell.text != "-" else empty for cell in cells]
        numbers = column.numeric and any(cell.value is not None for cell in cells)
        values = [cell.value for cell in cells]
        pairs = zip(values, texts, strict=True)
        if numbers and empty is not None:
            result[column.plain] = [_whole([value])[0] if value is not None else text for value, text in pairs]
        else:
            result[column.plain] = _whole(values) if numbers else texts
        if any(cell.low is not None or cell.high is not None for cell in cells):
            result[f"{column.plain} low"] = [empty if cell.low is None else cell.low for cell in cells]
            result[f"{column.plain} high"] = [empty if cell.high is None else cell.high for cell in cells]
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
