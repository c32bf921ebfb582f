"""One table, three forms: rich for a terminal, Markdown for a pull request, CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gemmscope.report.shapes import TEXT_COLUMNS, Table
from gemmscope.workload.derive import Workload

if TYPE_CHECKING:
    from rich.console import Console


def print_tables(tables: Iterable[Table], above: Iterable[str], below: Iterable[str], console: Console | None = None) -> None:
    """To standard output: coloured on a terminal, plain (and never folded) when piped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    if console is None:
        console = Console(highlight=False, soft_wrap=True)
        console.width = max(console.width, 200)  # a limit, not a width to fill: shapes are never cut short
    for index, line in enumerate(above):
        console.print(Text(line, style="bold" if index == 0 else ""))
    for table in tables:
        rich_table = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="italic", pad_edge=False)
        for column in table.columns:
            rich_table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right", no_wrap=True)
        for row in table.rows:
            rich_table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        console.print()
        console.print(rich_table)
    for line in below:
        console.print(Text(line, style=_style(line)))


def _style(text: str) -> str:
    """What must not be overlooked is coloured; a terminal without colours, or a pipe, shows the plain words."""
    if "FALLBACK" in text:
        return "bold red"
    return (
        "yellow"
        if text.startswith(("warning: ", "does not fit: ", "HOST-BOUND: ", "not measured: ", "unproven: ", "emulated: "))
        else ""
    )


def markdown(tables: Iterable[Table], above: Iterable[str], below: Iterable[str]) -> str:
    """Headings, pipe tables, and the totals as a list."""
    first, *rest = above
    parts = [f"## {_escape(first)}", "  \n".join(map(_escape, rest))]
    for table in tables:
        header = f"| {' | '.join(table.columns)} |"
        rule = "|" + "|".join(" --- " if column in TEXT_COLUMNS else " ---: " for column in table.columns) + "|"
        body = [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in table.rows]
        parts += [f"**{table.title}**", "\n".join([header, rule, *body])]
    parts.append("\n".join(f"- {_escape(line)}" for line in below))
    return "\n\n".join(part for part in parts if part) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def gemms_csv(workload: Workload) -> str:
    """One line per GEMM with plain numbers: op, pass, m, k, n, groups, count, flops."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["op", "pass", "m", "k", "n", "groups", "count", "flops"])
    for gemm in workload.gemms():
        writer.writerow([gemm.op, gemm.pass_name, gemm.m, gemm.k, gemm.n, gemm.groups, gemm.count, gemm.flops])
    return out.getvalue()
