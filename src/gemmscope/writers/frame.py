"""The tables of a Document as pandas DataFrames. pandas is optional: it is imported when a frame is asked for."""

from importlib import import_module
from typing import Any

from gemmscope.document.model import Document
from gemmscope.document.table import Table
from gemmscope.errors import UserError, closest, shown


def frame(document: Document, title: str = "") -> Any:
    """The main table, or the first whose title contains `title`."""
    tables = _tables(document)
    if not tables:
        raise UserError(f"this {document.kind} result has no table")
    if not title:
        return _frame(next(iter(tables.values())))
    for known, table in tables.items():
        if title.lower() in known.lower():
            return _frame(table)
    similar = closest(title, tables, cutoff=0.1) or list(tables)[:3]
    raise UserError(f"no table has {shown(title)} in its title", f"titles such as: {'; '.join(similar)}")


def frames(document: Document) -> dict[str, Any]:
    """Every table by its title, the main one first."""
    return {title: _frame(table) for title, table in _tables(document).items()}


def _tables(document: Document) -> dict[str, Table]:
    """Every table by its title, that of the short view first. The full table replaces a short one with the same title."""
    first = [document.summary] if document.summary is not None else []
    return {table.title: table for table in (*first, *document.tables())}


def columns(table: Table) -> dict[str, list[Any]]:
    """Names and values. Numbers are plain; one with an interval has two more columns, `NAME low` and `NAME high`.

    A cell without a number is None in a column of numbers, even if its text says why.
    """
    result: dict[str, list[Any]] = {}
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        if not column.numeric or not any(cell.value is not None for cell in cells):
            result[column.name] = [cell.text if cell.text != "-" else None for cell in cells]
            continue
        result[column.name] = _whole([cell.value for cell in cells])
        if any(cell.low is not None or cell.high is not None for cell in cells):
            result[f"{column.name} low"] = [cell.low for cell in cells]
            result[f"{column.name} high"] = [cell.high for cell in cells]
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
