"""A Document on a terminal: the answer on one screen, or everything with `--detail`. Colored there, plain in a pipe."""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import IO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from gemmscope import units
from gemmscope.document.model import Document, decisive, visible
from gemmscope.document.table import Cell, Head, Table
from gemmscope.text import terminal_variables

LABELS = {"error": "error: ", "warning": "warning: ", "note": "note: "}
MOST_ROWS = 1000  # of a table: more take seconds to lay out, and nobody reads them here
SCREEN_LINES = 30  # of the short view
SCREEN_WIDTH = 100  # where the width is not known
UNLIMITED = 100_000
NARROWEST = 20
NARROWEST_COLUMN = 8  # of text
GAP = 2  # between columns
MARK = " ←"  # after the rows that the answer recommends
STYLES = {"error": "bold red", "warning": "yellow", "note": "", "": ""}
MOST_CARDS = 3
IN_ASCII = str.maketrans({"─": "-", "±": "+-", "…": "...", "·": "-", "–": "-", "→": "->", "←": "<", "°": " ", "“": '"', "”": '"'})


class Screen(Console):
    """Standard output, or `out`. If its width is not known, it is 100 columns."""

    def __init__(self, out: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(file=out, width=width, highlight=False, _environ=terminal_variables())
        if width is None and not self.is_terminal and not terminal_variables().get("COLUMNS", "").isdigit():
            self.width = SCREEN_WIDTH
        self.width = max(self.width, NARROWEST)

    def on_broken_pipe(self) -> None:
        """Raise the error if the reader of the output is gone: `cli` handles it. (Rich would exit with code 1.)"""
        raise


def show(document: Document, *, detail: bool = False, console: Console | None = None) -> None:
    """Print the short view, or everything. In a pipe, the tables of `detail` are not wrapped."""
    console = console or Screen()
    if detail and not console.is_terminal and not terminal_variables().get("COLUMNS", "").isdigit():
        console.width = UNLIMITED
    _print(_detail(document, console.width) if detail else _screen(document, console.width), console)


def _print(lines: Iterable[Text], console: Console) -> None:
    """Print the lines; with similar ASCII characters if the terminal cannot show every character."""
    plain = not console.encoding.lower().startswith("utf")
    for line in lines:
        console.print(Text(line.plain.translate(IN_ASCII)) if plain else line, soft_wrap=True)


def _screen(document: Document, width: int) -> list[Text]:
    """The short view: what was asked, the answer, the table, what changes the decision, what to do next."""
    head = [Text(document.title, "bold"), *map(Text, document.context), Text()]
    top = [
        line for text in (*head, *[Text(document.answer, "bold"), *map(Text, document.because)]) for line in wrapped(text, width)
    ]
    table = table_lines(fitted(document.summary, width), width) if document.summary is not None else []
    end = [line for text in _next(document) for line in wrapped(Text(text, "dim"), width)]
    end += [Text(line, "dim") for line in _pasteable(document.next_command, width)]
    remedies = [line for text in _remedies(document) for line in wrapped(text, width)]
    messages = _messages(document, width, max((SCREEN_LINES - len(top) - len(table) - len(end) - len(remedies) - 4), 2))
    return [line for block in [top, table, remedies, messages, end] if block for line in (*block, Text())][:-1]


def _messages(document: Document, width: int, room: int) -> list[Text]:
    """The messages that there is room for; then how many more there are."""
    lines, messages = list[Text](), decisive(document)
    for place, message in enumerate(messages):
        these = wrapped(Text(LABELS[message.level] + message.text, STYLES[message.level]), width)
        if lines and len(lines) + len(these) > room:
            return [*lines, Text(f"{units.counted(len(messages) - place, 'more warning')}: add --detail", "dim")]
        lines += these
    return lines


def _remedies(document: Document) -> Iterator[Text]:
    """The first remedy of each cause; by its number if the table lists the causes."""
    listed = {row[0].text for row in document.summary.rows} if document.summary is not None else set()
    for number, card in enumerate(document.cards[:MOST_CARDS], start=1):
        numbered = f"{number}. {card.title}" in listed
        if card.remedy and card.remedy[0] not in document.answer:
            cause = str(number) if numbered else f"“{card.title}” ({card.cost}, {card.speedup} if fixed)"
            yield Text(f"to fix {cause}: {card.remedy[0]}")


def _next(document: Document) -> Iterator[str]:
    """What the short view leaves out, and what to do next."""
    if document.advice is not None and document.advice.ready_to_paste:
        yield f"--detail: every table and note, and the settings for {units.names(document.advice.ready_to_paste)}"
    else:
        yield "--detail: every table and note"
    if document.next_purpose:
        yield f"next: {document.next_purpose}{':' if document.next_command else ''}"


def _detail(document: Document, width: int) -> Iterator[Text]:
    """The whole document."""

    def lines(*texts: str, style: str = "") -> list[Text]:
        return [line for text in texts for line in wrapped(Text(text, style), width)]

    def headed(heading: str, *texts: str) -> list[Text]:
        return [Text(), *lines(heading, style="bold underline"), *lines(*texts)]

    yield from (*lines(document.title, style="bold"), *lines(*document.context), Text())
    yield from (*lines(document.answer, style="bold"), *lines(*document.because))
    if document.summary is not None:
        yield from (Text(), *_table(document.summary, width))
    for section in document.sections:
        yield from headed(section.title, *filter(None, [section.text]))
        for table in section.tables():
            yield from (Text(), *_table(table, width))
    if document.messages or document.advice:
        yield Text()
    for message in document.messages:
        yield from lines(LABELS[message.level] + message.text, style=STYLES[message.level])
    if document.advice is not None:
        yield from lines(f"recommended: {document.advice.text}", style="bold")
        yield from (Text(f"\n{framework}:\n{text}") for framework, text in document.advice.ready_to_paste.items())
    for heading, facts in document.facts.items():
        yield from headed(heading, *(f"{name}: {value}" for name, value in facts))


def _table(table: Table, width: int) -> Iterator[Text]:
    yield from table_lines(replace(table, rows=table.rows[:MOST_ROWS]), width)
    if len(table.rows) > MOST_ROWS:
        yield Text(f"… and {len(table.rows) - MOST_ROWS:,} more rows: --csv and --json write them all", "dim")


def _pasteable(command: str, width: int) -> list[str]:
    """A command in lines that a shell joins again."""
    lines, parts = list[str](), command.replace(" --", "\n--").split("\n") if command else []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else f"  {part}")
    return [*(f"{line} \\" for line in lines[:-1]), *lines[-1:]]


def show_table(table: Table) -> None:
    """Print one table with its title."""
    console = Screen()
    _print([Text(), *_table(visible(table), console.width)], console)  # it may come without a Document


def show_texts(texts: Iterable[str]) -> None:
    """Print sentences, wrapped to the width of the screen."""
    console = Screen()
    _print([line for text in texts for line in wrapped(Text(visible(text)), console.width)], console)


def text(document: Document, *, detail: bool = True, width: int | None = None) -> str:
    """The document as plain text."""
    out = io.StringIO()
    show(document, detail=detail, console=Screen(out, width))
    return out.getvalue()


# --- tables as lines that fit a width: a wide one loses optional columns, or is folded -------------------------------------


def fitted(table: Table, width: int) -> Table:
    """The table without the optional columns that do not fit."""
    while sum(_widths(table)) + GAP * (len(table.columns) - 1) > width - len(MARK) * bool(table.marked):
        place = max(range(len(table.columns)), key=lambda place: table.columns[place].drop)
        if not table.columns[place].drop or len(table.columns) == 1:
            return table
        table = table.only([other for other in range(len(table.columns)) if other != place])
    return table


def table_lines(table: Table, width: int) -> list[Text]:
    """Title, heads, rows, note. What does not fit side by side is folded: the first column is repeated below."""
    lines, room = wrapped(Text(table.title, "italic"), width), width - len(MARK) * bool(table.marked)
    for number, part in enumerate(_folded(table, room) if table.columns else ()):
        lines += [Text()] if number else []
        lines += _grid(part, room)
    return [*lines, *(wrapped(Text(table.note, "dim"), width) if table.note else [])]


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
    free = width - sum(min(key_width, max(width // 2, NARROWEST_COLUMN)) for key_width in widths[:keys]) - GAP * keys
    parts, used = list[list[int]]([[]]), 0
    for place in range(keys, len(widths)):
        wanted = min(widths[place], free)
        if parts[-1] and used + wanted + GAP > free:
            parts.append([])
            used = 0
        parts[-1].append(place)
        used += wanted + (GAP if used else 0)
    return [table.only([*range(keys), *part]) for part in parts]


def _grid(table: Table, width: int) -> list[Text]:
    """The heads, a rule, the rows. A column that is still too wide is wrapped."""
    widths = _widths(table)
    while sum(widths) + GAP * (len(widths) - 1) > width and max(widths) > NARROWEST_COLUMN:
        widest = max(range(len(widths)), key=lambda place: widths[place])
        widths[widest] = max(NARROWEST_COLUMN, widths[widest] - (sum(widths) + GAP * (len(widths) - 1) - width))
    head = tuple(Cell(column.name) for column in table.columns)
    rule = Text("─" * min(sum(widths) + GAP * (len(widths) - 1), width), "dim")
    return [
        *[*_row(head, table.columns, widths, bold=True), rule],
        *(
            line
            for place, row in enumerate(table.rows)
            for line in _row(row, table.columns, widths, bold=place in table.marked, mark=MARK * (place in table.marked))
        ),
    ]


def _row(
    cells: Sequence[Cell], columns: Sequence[Head], widths: Sequence[int], *, bold: bool = False, mark: str = ""
) -> list[Text]:
    wrapped = [_pieces(cell.text, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped))):
        line = Text()
        for place, (cell, column, pieces, width) in enumerate(zip(cells, columns, wrapped, widths, strict=True)):
            piece = pieces[number] if number < len(pieces) else ""
            padded = " " * (width - cell_len(piece)) + piece if column.numeric else set_cell_size(piece, width)
            line.append((" " * GAP if place else "") + padded, f"{'bold ' * bold}{STYLES[cell.level] or 'green' * bool(mark)}")
        line.rstrip()
        line.append(mark * (not number), "bold green")
        lines.append(line)
    return lines


def _pieces(text: str, width: int) -> list[str]:
    return [line.plain for line in wrapped(Text(text), width)] if cell_len(text) > width else [text]


def wrapped(text: Text, width: int) -> list[Text]:
    """A text in lines of this width."""
    if not text:
        return [text]
    lines = list(text.wrap(Console(file=io.StringIO(), width=width, _environ={}), width))
    for line in lines:
        line.rstrip()
    return lines
