"""`gemmscope compare`."""

import typer

from gemmscope import commands
from gemmscope.cli.codes import CHECK_FAILED, TOO_NOISY
from gemmscope.cli.options import takes
from gemmscope.cli.output import OutputOptions, check_targets, deliver, typed_command


@takes(OutputOptions)
def command(outputs: OutputOptions, files: list[str], fail_if_slower: float | None = None) -> None:
    """Compare run files row by row."""
    check_targets(outputs.targets(), files)
    result = commands.compare.compare(files, fail_if_slower=fail_if_slower, command=typed_command())
    deliver(result, outputs)
    if result.failing():
        raise typer.Exit(CHECK_FAILED)
    if result.unresolved():
        raise typer.Exit(TOO_NOISY)
