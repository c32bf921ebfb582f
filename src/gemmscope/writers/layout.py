"""Tables as lines of text that fit a width: a wide table loses optional columns, or is folded. None overflows."""

import io
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from gemmscope.document.table import Cell, Head, Table

STYLES = {"error": "bold red", "warning": "yellow", "note": "", "": ""}
GAP = 2  # between columns
NARROWEST = 8  # of a column of text


def fitted(table: Table, width: int) -> Table:
    """The table without the optional columns that do not fit."""
    while sum(_widths(table)) + GAP * (len(table.columns) - 1) > width:
        place = max(range(len(table.columns)), key=lambda place: table.columns[place].drop)
        if not table.columns[place].drop or len(table.columns) == 1:
            return table
        table = _only(table, [other for other in range(len(table.columns)) if other != place])
    return table


def table_lines(table: Table, width: int) -> list[Text]:
    """Title, heads, rows, note. What does not fit side by side is folded: the first column is repeated below."""
    lines = wrapped(Text(table.title, "italic"), width)
    for number, part in enumerate(_folded(table, width) if table.columns else ()):
        lines += [Text()] if number else []
        lines += _grid(part, width)
    return [*lines, *(wrapped(Text(table.note, "dim"), width) if table.note else [])]


def _only(table: Table, places: Sequence[int]) -> Table:
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    return Table(table.title, tuple(table.columns[place] for place in places), rows, table.note)


def _widths(table: Table) -> list[int]:
    return [
        max(cell_len(column.name), *(cell_len(row[place].text) for row in table.rows), 1)
        for place, column in enumerate(table.columns)
    ]


def _folded(table: Table, width: int) -> list[Table]:
    """The table, or parts of it that key_width begin with its first columns of text."""
    widths = _widths(table)
    if sum(widths) + GAP * (len(widths) - 1) <= width or len(widths) < 2:
        return [table]
    keys = 1
    while keys < len(widths) - 1 and not table.columns[keys].numeric and sum(widths[: keys + 1]) + GAP * keys <= width // 2:
        keys += 1
    free = width - sum(min(key_width, max(width // 2, NARROWEST)) for key_width in widths[:keys]) - GAP * keys
    parts, used = list[list[int]]([[]]), 0
    for place in range(keys, len(widths)):
        wanted = min(widths[place], free)
        if parts[-1] and used + wanted + GAP > free:
            parts.append([])
            used = 0
        parts[-1].append(place)
        used += wanted + (GAP if used else 0)
    return [_only(table, [*range(keys), *part]) for part in parts]


def _grid(table: Table, width: int) -> list[Text]:
    """The heads, a rule, the rows. A column that is still too wide is wrapped."""
    widths = _widths(table)
    while sum(widths) + GAP * (len(widths) - 1) > width and max(widths) > NARROWEST:
        widest = max(range(len(widths)), key=lambda place: widths[place])
        over = sum(widths) + GAP * (len(widths) - 1) - width
        widths[widest] = max(NARROWEST, widths[widest] - over)
    head = tuple(Cell(column.name) for column in table.columns)
    rule = Text("─" * min(sum(widths) + GAP * (len(widths) - 1), width), "dim")
    lines = [*_row(head, table.columns, widths, bold=True), rule]
    return [*lines, *(line for row in table.rows for line in _row(row, table.columns, widths))]


def _row(cells: Sequence[Cell], columns: Sequence[Head], widths: Sequence[int], *, bold: bool = False) -> list[Text]:
    wrapped = [_pieces(cell.text, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped))):
        line = Text()
        for place, (cell, column, pieces, width) in enumerate(zip(cells, columns, wrapped, widths, strict=True)):
            piece = pieces[number] if number < len(pieces) else ""
            padded = " " * (width - cell_len(piece)) + piece if column.numeric else set_cell_size(piece, width)
            line.append((" " * GAP if place else "") + padded, "bold" if bold else STYLES[cell.level])
        line.rstrip()
        lines.append(line)
    return lines


def _pieces(text: str, width: int) -> list[str]:
    return [line.plain for line in wrapped(Text(text), width)] if cell_len(text) > width else [text]


def wrapped(text: Text, width: int) -> list[Text]:
    """A text in lines of this width."""
    if not text:
        return [text]
    lines = list(text.wrap(Console(file=io.StringIO(), width=width), width))
    for line in lines:
        line.rstrip()
    return lines
