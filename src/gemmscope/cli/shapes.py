"""`gemmscope shapes`."""

from __future__ import annotations

from typing import Annotated

import typer

from gemmscope import app, writers
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import OutputOptions, check_targets, deliver, typed_command

EXAMPLES = """\b
Examples:
  gemmscope shapes --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --tp 2
  gemmscope shapes --config config.json --micro-batch-size 4 --sequence-length 4096 --check
  gemmscope shapes --config pretrain_llama.sh --json shapes.json
  gemmscope shapes --module my_model.py:build --micro-batch-size 1 --sequence-length 2048

\b
Exit codes: 0 success, 1 --check found differences, 2 invalid input, 130 interrupted.
"""


@takes(ModelOptions, RunOptions, OutputOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    outputs: OutputOptions,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="List the presets and exit.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare with a trace of the live model (needs torch and transformers); exit with 1 if they differ.",
        ),
    ] = False,
) -> None:
    """List the GEMMs of one training step, with their FLOPs.

    Shows every GEMM that one rank runs for one micro-batch: three for each linear (fprop, dgrad, wgrad), as
    MxKxN = tokens x input features x output features, and the other work of the step. --config takes Hugging Face,
    Megatron-LM, torchtitan and Megatron-Bridge files.
    """
    if list_presets:
        writers.terminal.show_table(app.model.preset_table())
        return
    check_targets(outputs.targets(), model_options.files())
    result = app.shapes.shapes(
        run_options.of(model_options.load()), check=check, command=typed_command(), reporter=app.progress.Console()
    )
    deliver(result, outputs)
    if result.check is not None and not result.check.equal:
        raise typer.Exit(1)
