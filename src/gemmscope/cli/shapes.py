"""`gemmscope shapes`."""

import typer

from gemmscope import commands, writers
from gemmscope.cli.codes import CHECK_FAILED
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import OutputOptions, check_targets, deliver, typed_command


@takes(ModelOptions, RunOptions, OutputOptions)
def command(
    model_options: ModelOptions, run_options: RunOptions, outputs: OutputOptions, list_presets: bool = False, check: bool = False
) -> None:
    """List the GEMMs of one training step."""
    if list_presets:
        writers.terminal.show_table(commands.shapes.preset_table())
        return
    check_targets(outputs.targets(), model_options.files())
    job = run_options.of(model_options.load())
    result = commands.shapes.shapes(job, check=check, command=typed_command(), reporter=commands.Console())
    deliver(result, outputs)
    if result.check is not None and not result.check.equal:
        raise typer.Exit(CHECK_FAILED)
