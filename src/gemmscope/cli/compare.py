"""`gemmscope compare`."""

from typing import Annotated

import typer

from gemmscope import app
from gemmscope.cli.options import takes
from gemmscope.cli.output import OutputOptions, check_targets, deliver, typed_command


def share(text: str) -> float:
    """`3%` or `0.03`. A plain 3 is rejected: who means 3% would get a limit of 300%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1:
        raise typer.BadParameter(f"must be a percentage such as 3%, or a share such as 0.03, got {text!r}")
    return value


@takes(OutputOptions)
def command(
    outputs: OutputOptions,
    files: Annotated[list[str], typer.Argument(metavar="RUNFILE", help="Run files of bench or step, the oldest first.")],
    fail_if_slower: Annotated[
        float | None,
        typer.Option(
            parser=share,
            metavar="SHARE",
            help="Exit with 1 if a row of the last run is slower than in the first beyond its interval, and may be by this much.",
        ),
    ] = None,
) -> None:
    """Compare run files row by row: faster, slower, or too close to call.

    Verdicts come from intervals that hold for all rows together and include the usual variation between runs: two runs of the
    same thing have no slower row. Differences in the environment are listed first.
    """
    check_targets(outputs.targets(), files)
    result = app.compare.compare(files, fail_if_slower=fail_if_slower, command=typed_command())
    deliver(result, outputs)
    if result.failing():
        raise typer.Exit(1)
