"""`gemmscope step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from gemmscope import app
from gemmscope.cli.bench_options import ChoiceOptions
from gemmscope.cli.options import GPUS, TOKENS, ModelOptions, RunOptions, number, takes
from gemmscope.cli.output import FigureOptions, check_targets, deliver, typed_command

EXAMPLES = """\b
Examples:
  gemmscope step --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --pp 4
  gemmscope step --config config.json --micro-batch-size 4 --sequence-length 4096 --recipes fp8current --verify
  gemmscope step --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --tokens 1e12 --gpus 256 --price 2.5

\b
Exit codes: 0 success, 1 nothing could be measured, 2 invalid input, 130 interrupted.
"""


@dataclass(frozen=True)
class StepOptions:
    """What to measure beside the step itself, how precisely, and the cost of the run."""

    verify: Annotated[bool, typer.Option("--verify", help="Also run the real model, as deep as memory allows.")] = False
    break_even: Annotated[
        bool, typer.Option("--break-even", help="Also run smaller batches, to find where each recipe starts to win.")
    ] = False
    hugging_face: Annotated[
        bool, typer.Option("--hugging-face", help="Run the config's own Hugging Face class, a few layers of it, with torchao.")
    ] = False
    precision: Annotated[float, typer.Option(metavar="SHARE", help="Measure until every speedup is known this precisely.")] = 0.01
    time_limit: Annotated[
        float, typer.Option("--time-limit", "--longest", metavar="SECONDS", help="Time limit of each measurement in seconds.")
    ] = 30.0
    observed_speedup: Annotated[
        float | None,
        typer.Option(parser=number, metavar="X", help="The speedup of your own run, to compare with the prediction."),
    ] = None
    tokens: Annotated[float | None, TOKENS] = None
    gpus: Annotated[int | None, GPUS] = None
    price: Annotated[float | None, typer.Option(parser=number, metavar="X", help="Price of one GPU-hour.")] = None


@takes(ModelOptions, RunOptions, ChoiceOptions, StepOptions, FigureOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    choice_options: ChoiceOptions,
    options: StepOptions,
    outputs: FigureOptions,
) -> None:
    """Predict the training step: forward, backward and optimizer of the whole model, in every recipe.

    The step runs at the model's own depth with the weights of at most four layers, at the clocks of sustained training,
    recipes in turn. A waterfall shows how much of the speedup of the GEMMs reaches the step, and a recommendation names the
    recipe to use and the layers to leave in BF16.
    """
    check_targets(outputs.targets(), model_options.files())
    budget = app.step.Budget.asked(options.tokens, options.gpus, options.price)
    result = app.step.run_step(
        run_options.of(model_options.load()),
        choices=choice_options.choices(),
        verify=options.verify,
        break_even=options.break_even,
        hugging_face=options.hugging_face,
        precision=options.precision,
        time_limit=options.time_limit,
        observed_speedup=options.observed_speedup,
        budget=budget,
        command=typed_command(),
        reporter=app.progress.Console(),
    )
    deliver(result, outputs)
    if result.interrupted or not result.step.recipes:
        raise typer.Exit(130 if result.interrupted else 1)
