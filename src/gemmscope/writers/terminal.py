"""A Document on a terminal: colored there, plain and unfolded in a pipe."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gemmscope.document.model import Document, brief
from gemmscope.document.table import Table

STYLES = {"error": "bold red", "warning": "yellow", "note": "", "": ""}
LABELS = {"error": "error: ", "warning": "warning: ", "note": "note: "}
WIDEST = 200  # at least: tables are never folded or cut


def show(document: Document, *, detail: bool = False, console: Console | None = None) -> None:
    """Print the short view, or everything."""
    if console is None:
        console = Console(highlight=False, soft_wrap=True)
        console.width = max(console.width, WIDEST)
    shown = document if detail else brief(document)
    console.print(Text(shown.title, style="bold"))
    for line in shown.context:
        console.print(Text(line))
    console.print()
    console.print(Text(shown.answer, style="bold"))
    for line in shown.because:
        console.print(Text(line))
    for section in shown.sections:
        if detail:
            console.print()
            console.print(Text(section.title, style="bold underline"))
            if section.text:
                console.print(Text(section.text))
        for block in section.blocks:
            show_table(block if isinstance(block, Table) else block.table(), console)
    if shown.messages or shown.advice:
        console.print()
    for message in shown.messages:
        console.print(Text(LABELS[message.level] + message.text, style=STYLES[message.level]))
    _show_advice(shown, console)
    for heading, facts in shown.facts.items():
        console.print()
        console.print(Text(heading, style="bold underline"))
        for name, value in facts:
            console.print(Text(f"{name}: {value}"))
    if not detail:
        _show_next(document, shown, console)


def _show_advice(shown: Document, console: Console) -> None:
    if shown.advice is None:
        return
    console.print(Text(f"recommended: {shown.advice.text}", style="bold"))
    for framework, text in shown.advice.ready_to_paste.items():
        console.print()
        console.print(Text(f"{framework}:"))
        console.print(Text(text))


def _show_next(document: Document, shown: Document, console: Console) -> None:
    """What the short view leaves out, and what to do next."""
    notes = len(document.messages) - len(shown.messages)
    more = len(document.tables()) - len(shown.tables())
    parts = [f"{count} more {noun}{'s' if count > 1 else ''}" for count, noun in ((more, "table"), (notes, "note")) if count]
    console.print()
    if parts:
        console.print(Text(f"{' and '.join(parts)}: add --detail"))
    if document.next_command:
        console.print(Text(f"next: {document.next_command}"))


def show_table(table: Table, console: Console | None = None) -> None:
    """One table with its title."""
    console = console or Console(highlight=False, soft_wrap=True)
    texts = [[column.name, *(row[index].text for row in table.rows)] for index, column in enumerate(table.columns)]
    console.width = max(console.width, WIDEST, sum(max(map(len, column)) + 3 for column in texts))
    rich_table = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="italic", pad_edge=False)
    for column in table.columns:
        rich_table.add_column(Text(column.name), justify="right" if column.numeric else "left", no_wrap=True)
    for row in table.rows:
        rich_table.add_row(*(Text(cell.text, style=STYLES[cell.level]) for cell in row))
    console.print()
    console.print(rich_table)
    if table.note:
        console.print(Text(table.note, style="dim"))


def text(document: Document, *, detail: bool = True) -> str:
    """The same as plain text."""
    out = io.StringIO()
    show(document, detail=detail, console=Console(file=out, width=WIDEST, highlight=False, soft_wrap=True))
    return out.getvalue()
