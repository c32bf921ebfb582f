"""Every table of a Document in one CSV file with one header, numbers not rounded.

The first column names the table. A row has values in its own table's columns only; a number with an interval has two more
columns, `<name> low` and `<name> high`. To get one table with pandas: ``df[df.table == title].dropna(axis=1, how="all")``.
"""

import csv
import io
from collections.abc import Iterator

from gemmscope.document.model import Document
from gemmscope.document.table import Cell, Table
from gemmscope.text import csv_cell


def csv_text(document: Document) -> str:
    """The CSV file of a document."""
    tables = document.tables()
    names = dict.fromkeys(name for table in tables for name in _columns(table))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(csv_cell, ["table", *names]))
    for table in tables:
        for row in table.rows:
            values = dict(_values(table, row))
            cells = [table.title, *(values.get(name, "") for name in names)]
            writer.writerow([csv_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return out.getvalue()


def _columns(table: Table) -> Iterator[str]:
    for index, column in enumerate(table.columns):
        yield column.name
        if any(row[index].low is not None or row[index].high is not None for row in table.rows):
            yield from (f"{column.name} low", f"{column.name} high")


def _values(table: Table, row: tuple[Cell, ...]) -> Iterator[tuple[str, object]]:
    """The values of a row by column: numbers are not rounded, and a dash becomes empty text."""
    for column, cell in zip(table.columns, row, strict=True):
        if cell.value is not None and column.numeric:
            yield column.name, int(cell.value) if float(cell.value).is_integer() else cell.value
        else:
            yield column.name, "" if cell.text == "-" else cell.text
        if cell.low is not None:
            yield f"{column.name} low", cell.low
        if cell.high is not None:
            yield f"{column.name} high", cell.high
