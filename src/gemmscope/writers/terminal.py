"""A Document on a terminal: colored there, plain and unfolded in a pipe."""

import io
from collections.abc import Iterator
from typing import IO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gemmscope.document.model import Document, brief, visible
from gemmscope.document.table import Table

STYLES = {"error": "bold red", "warning": "yellow", "note": "", "": ""}
LABELS = {"error": "error: ", "warning": "warning: ", "note": "note: "}
MOST_ROWS = 1000  # of a table: more take seconds to lay out, and nobody reads them here
WIDEST = 200  # at least: tables are never folded or cut


class Screen(Console):
    """Standard output, or `out`."""

    def __init__(self, out: IO[str] | None = None) -> None:
        super().__init__(file=out, width=WIDEST if out else None, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Whoever read this has gone: for the command line to handle. (Rich would end the process with exit code 1.)"""
        raise


def show(document: Document, *, detail: bool = False, console: Console | None = None) -> None:
    """Print the short view, or everything."""
    console = console or Screen()
    view = document if detail else brief(document)

    def line(text: str = "", style: str = "") -> None:
        console.print(Text(text, style=style))

    line(view.title, "bold")
    for text in view.context:
        line(text)
    line()
    line(view.answer, "bold")
    for text in view.because:
        line(text)
    for section in view.sections:
        if detail:
            line()
            line(section.title, "bold underline")
            if section.text:
                line(section.text)
        for block in section.blocks:
            show_table(block if isinstance(block, Table) else block.table(), console)
    if view.messages or view.advice:
        line()
    for message in view.messages:
        line(LABELS[message.level] + message.text, STYLES[message.level])
    if view.advice is not None:
        line(f"recommended: {view.advice.text}", "bold")
        for framework, text in view.advice.ready_to_paste.items():
            line(f"\n{framework}:\n{text}")
    for heading, facts in view.facts.items():
        line()
        line(heading, "bold underline")
        for name, value in facts:
            line(f"{name}: {value}")
    if not detail:
        line()
        for text in _next_lines(document, view):
            line(text)


def _next_lines(document: Document, view: Document) -> Iterator[str]:
    """What the short view leaves out, and what to do next."""
    left_out = {"table": len(document.tables()) - len(view.tables()), "note": len(document.messages) - len(view.messages)}
    parts = [f"{count} more {noun}{'s' if count > 1 else ''}" for noun, count in left_out.items() if count]
    if parts:
        yield f"{' and '.join(parts)}: add --detail"
    if document.next_command:
        yield f"next: {document.next_command}"


def show_table(table: Table, console: Console | None = None) -> None:
    """One table with its title."""
    console = console or Screen()
    table = visible(table)  # it may come without a Document
    texts = [[column.name, *(row[index].text for row in table.rows)] for index, column in enumerate(table.columns)]
    console.width = max(console.width, WIDEST, sum(max(map(cell_len, column)) + 3 for column in texts))
    title = Text(table.title)  # a plain string would be parsed as markup
    rich_table = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="italic", pad_edge=False)
    for column in table.columns:
        rich_table.add_column(Text(column.name), justify="right" if column.numeric else "left", no_wrap=True)
    for row in table.rows[:MOST_ROWS]:
        rich_table.add_row(*(Text(cell.text, style=STYLES[cell.level]) for cell in row))
    console.print()
    console.print(rich_table)
    if len(table.rows) > MOST_ROWS:
        console.print(Text(f"… and {len(table.rows) - MOST_ROWS:,} more rows: --csv and --json write them all", style="dim"))
    if table.note:
        console.print(Text(table.note, style="dim"))


def text(document: Document, *, detail: bool = True) -> str:
    """The same as plain text."""
    out = io.StringIO()
    show(document, detail=detail, console=Screen(out))
    return out.getvalue()
