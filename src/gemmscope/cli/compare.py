"""`gemmscope compare`: runs of the same thing, row by row, for people and for CI."""

from __future__ import annotations

from typing import Annotated

import typer

from gemmscope.cli.output import check_targets, write
from gemmscope.errors import UserError

EXAMPLES = """\b
Examples:
  gemmscope compare before.json after.json
  gemmscope compare main.json branch.json --fail-if-slower 3% --markdown comment.md
  gemmscope compare monday.json tuesday.json wednesday.json --csv over_time.csv

\b
Exit codes:
  0  compared; with --fail-if-slower: no row is slower by that much
  1  --fail-if-slower: at least one row is
  2  a file cannot be read, or the runs are not of the same thing
"""


def share(text: str) -> float:
    """`3%` or `0.03`. A plain 3 is refused: whoever means 3% would be let through by a limit of 300%."""
    in_percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if in_percent else 1)
    except ValueError:
        value = float("nan")
    if not 0 <= value < (10 if in_percent else 1):
        raise typer.BadParameter(f"{text!r} is no share: for example 3% or 0.03")
    return value


def command(
    files: Annotated[list[str], typer.Argument(metavar="RUNFILE", help="Run files of bench or step, the oldest first.")],
    fail_if_slower: Annotated[
        float | None,
        typer.Option(
            parser=share,
            metavar="SHARE",
            help="Exit with 1 if a row of the last file is slower than in the first beyond doubt, and may be by so much (3%).",
        ),
    ] = None,
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the tables as Markdown.")] = None,
    csv: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write every row with plain numbers.")] = None,
) -> None:
    """Hold runs against each other: every row is faster, slower, or too close to call.

    Verdicts come from intervals, which hold for all rows together and include what the same measurement moves by from run to run:
    two runs of the same thing have no row that is slower. What differs in the environment stands first.
    """
    from gemmscope.compare.rows import compare
    from gemmscope.report import compare as report
    from gemmscope.report import formats
    from gemmscope.store.read import read_run

    if len(files) < 2:
        raise UserError("one run file has nothing to be compared with", "gemmscope compare before.json after.json")
    places = {"--markdown": markdown, "--csv": csv}
    check_targets({option: place for option, place in places.items() if place is not None}, files)
    found = compare([read_run(path) for path in files], files)
    made, above, below = report.tables(found), report.above(found), report.below(found, fail_if_slower)
    if csv is not None:
        write(csv, report.as_csv(found))
    if markdown is not None:
        write(markdown, formats.markdown(made, above, below))
    if "-" not in (markdown, csv):
        formats.print_tables(made, above, below)
    if fail_if_slower is not None and found.failing(fail_if_slower):
        raise typer.Exit(1)
