"""`gemmscope step`."""

from dataclasses import dataclass
from typing import Any

import typer

from gemmscope import app
from gemmscope.cli.bench_options import ChoiceOptions
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import FigureOptions, check_targets, deliver, typed_command


@dataclass(frozen=True)
class StepOptions:
    """What to measure beside the step itself, how precisely, and the cost of the run."""

    verify: bool = False
    break_even: bool = False
    cuda_graphs: bool = False
    hugging_face: bool = False
    compile: str | None = None
    optimizer: str | None = None
    precision: float = 0.01
    time_limit: float = 30.0
    resume: bool = False
    observed_speedup: float | None = None
    tokens: float | None = None
    gpus: int | None = None
    price: float | None = None


@takes(ModelOptions, RunOptions, ChoiceOptions, StepOptions, FigureOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    choice_options: ChoiceOptions,
    options: StepOptions,
    outputs: FigureOptions,
) -> None:
    """Predict the training step in every recipe."""
    check_targets(outputs.targets(), model_options.files())
    budget = app.step.Budget.asked(options.tokens, options.gpus, options.price)
    asked: dict[str, Any] = {name: value for name, value in vars(options).items() if name not in ("tokens", "gpus", "price")}
    asked |= {
        "command": typed_command(),
        "reporter": app.progress.Console(),
        "choices": choice_options.choices(),
        "budget": budget,
    }
    job = run_options.of(model_options.load())
    choice_options.explain_no_fp8()
    result = app.step.run_step(job, **asked, deliver=lambda result: deliver(result, outputs))
    if not result.step.recipes:
        raise typer.Exit(1)
