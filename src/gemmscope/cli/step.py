"""`gemmscope step`."""

from dataclasses import dataclass
from typing import Any

import typer

from gemmscope import commands
from gemmscope.cli.bench_options import ChoiceOptions
from gemmscope.cli.codes import NOTHING_MEASURED, POINTS_LOST
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import PageOptions, check_targets, deliver, typed_command
from gemmscope.cli.streaming import StreamedFiles
from gemmscope.cli.sweep_options import SweepOptions
from gemmscope.errors import UserError, option

SEPARATE = ("tokens", "price", "precision", "time_limit")
OF_ONE_RUN = ("verify", "break_even", "cuda_graphs", "mix", "keep_higher", "observed_speedup", "tokens", "price", "fleet")


@dataclass(frozen=True)
class StepOptions:
    """What to measure besides the step itself, how precisely, and the cost of the run."""

    verify: bool = False
    break_even: bool = False
    cuda_graphs: bool = False
    hugging_face: bool = False
    mix: str | None = None
    keep_higher: str | None = None
    compile: str | None = None
    optimizer: str | None = None
    precision: float | None = None
    time_limit: float | None = None
    resume: bool = False
    observed_speedup: float | None = None
    tokens: float | None = None
    price: float | None = None
    fleet: str | None = None

    def limits(self) -> dict[str, float]:
        """Precision and time limit, where they were given."""
        given = {"precision": self.precision, "time_limit": self.time_limit}
        return {name: value for name, value in given.items() if value is not None}


@takes(SweepOptions, ModelOptions, RunOptions, ChoiceOptions, StepOptions, PageOptions)
def command(
    sweep_options: SweepOptions,
    model_options: ModelOptions,
    run_options: RunOptions,
    choice_options: ChoiceOptions,
    options: StepOptions,
    outputs: PageOptions,
) -> None:
    """Predict the training step in every recipe."""
    reads = [path for path in (options.mix, options.fleet) if path is not None]
    check_targets(outputs.targets(), [*model_options.files(), *reads])
    if sweep_options.sweep:
        _sweep(sweep_options, model_options, run_options, choice_options, options, outputs)
        return
    sweep_options.check_alone()
    budget = commands.step.Budget.asked(options.tokens, sweep_options.gpu_count(), options.price)
    asked: dict[str, Any] = {name: value for name, value in vars(options).items() if name not in SEPARATE}
    asked |= {
        **options.limits(),
        "command": typed_command(),
        "reporter": commands.Console(),
        "choices": choice_options.choices(),
        "budget": budget,
    }
    job = run_options.of(model_options.load())
    choice_options.explain_no_fp8()
    result = commands.step.run_step(job, **asked, deliver=lambda result: deliver(result, outputs))
    if not result.step.recipes:
        raise typer.Exit(NOTHING_MEASURED)


def _sweep(
    sweep_options: SweepOptions,
    model_options: ModelOptions,
    run_options: RunOptions,
    choice_options: ChoiceOptions,
    options: StepOptions,
    outputs: PageOptions,
) -> None:
    """Every point of a sweep, as many at a time as there are GPUs."""
    if unused := [name for name in OF_ONE_RUN if getattr(options, name)]:
        hint = "vary micro_batch_size or sequence_length instead" if unused[0] == "break_even" else "remove one of them"
        raise UserError(f"{option('sweep')} measures many points, but {option(unused[0])} applies to a single run", hint)
    choice_options.explain_no_fp8()
    files = StreamedFiles(outputs)
    result = commands.sweep.step_sweep(
        model_options.given(),
        run_options.given(),
        sweep_options.axes(),
        choices=choice_options.choices(),
        step=commands.sweep.StepRun(options.hugging_face, options.compile, options.optimizer),  # type: ignore[arg-type]
        **options.limits(),
        places=sweep_options.places(),
        resume=options.resume,
        command=typed_command(),
        reporter=commands.Console(),
        deliver=lambda result: deliver(result, outputs),
        stream=files.write,
    )
    files.finish()
    if not result.sample_count:
        raise typer.Exit(NOTHING_MEASURED)
    if result.has("sweep-point-lost"):
        raise typer.Exit(POINTS_LOST)
