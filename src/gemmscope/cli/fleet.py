"""`gemmscope fleet`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from gemmscope import commands
from gemmscope.cli.bench_options import ChoiceOptions, ShapesCommand, TimingOptions, parse_shapes
from gemmscope.cli.codes import NOTHING_MEASURED, OUTLIERS, UNWRITTEN
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import PageOptions, check_targets, deliver, say, typed_command
from gemmscope.errors import UserError, option

if TYPE_CHECKING:
    from gemmscope.results.fleet import FleetResult

WHEN_GATHERING = ("runs", "tolerance", "fail_if_outlier")
Command = ShapesCommand


@dataclass(frozen=True)
class FleetOptions:
    """Which GPUs, what they measure, and when one is an outlier."""

    runs: list[str] | None = None
    step: bool = False
    shapes: str | None = None
    gpus: str | None = None
    ray: str | None = None
    repeat: int = 1
    at_once: int | None = None
    folder: str | None = None
    tolerance: float = 0.02
    fail_if_outlier: bool = False
    hugging_face: bool = False
    compile: str | None = None
    optimizer: str | None = None

    def given(self) -> list[str]:
        """The options that were given and have no meaning for run files."""
        return [name for name in _given(self) if name not in WHEN_GATHERING]

    def step_options(self) -> dict[str, Any]:
        """The options of a training step that were given."""
        given = {name: getattr(self, name) for name in commands.fleet.STEP_OPTIONS}
        return {name: value for name, value in given.items() if value}


@takes(FleetOptions, ModelOptions, RunOptions, ChoiceOptions, TimingOptions, PageOptions)
def command(
    options: FleetOptions,
    model_options: ModelOptions,
    run_options: RunOptions,
    choice_options: ChoiceOptions,
    timing_options: TimingOptions,
    outputs: PageOptions,
) -> None:
    """Measure every GPU in the same way, and find outliers."""
    runs = options.runs or []
    check_targets(outputs.targets(), [*runs, *model_options.files()])
    if runs:
        given = [*options.given(), *model_options.given(), *run_options.given(), *choice_options.given(), *_given(timing_options)]
        if given:
            listed = ", ".join(map(option, given))
            raise UserError(
                f"{listed} {'applies' if len(given) == 1 else 'apply'} only to measuring, but run files were given",
                f"remove {'it' if len(given) == 1 else 'them'}, or the run files",
            )
        result = commands.fleet.gather_fleet(runs, tolerance=options.tolerance, command=typed_command())
        deliver(result, outputs)
        _exit(result, strict=options.fail_if_outlier)
        return
    named = [*model_options.given(), *run_options.given()]
    if named and options.shapes is not None:
        raise UserError(
            f"{option('shapes')} measures bare GEMMs, but {', '.join(map(option, named))} describes a model",
            f"remove {option('shapes')}, or use it without them",
        )
    measured: dict[str, Any] = {
        "step": options.step,
        "shapes": parse_shapes(options.shapes) if options.shapes is not None else None,
        "choices": choice_options.choices(),
        "timing": commands.fleet.with_step_limit(
            timing_options.bench_timing(), step=options.step, given=timing_options.time_limit is not None
        ),
        "step_options": options.step_options(),
        "command": typed_command(),
        "resume": timing_options.resume,
        "reporter": commands.Console(),
    }
    job = run_options.of(model_options.load()) if named else None
    rank = commands.launched() if options.gpus is None and options.ray is None else None  # else one process drives them all
    if rank is not None:
        _own_gpu(rank, job, options, outputs, measured)
        return
    choice_options.explain_no_fp8()
    result = commands.fleet.run_fleet(
        job,
        gpus=options.gpus,
        ray=options.ray,
        repeat=options.repeat,
        tolerance=options.tolerance,
        folder=options.folder,
        at_once=options.at_once,
        deliver=lambda result: deliver(result, outputs),
        **measured,
    )
    _exit(result, strict=options.fail_if_outlier)


def _given(options: FleetOptions | TimingOptions) -> list[str]:
    """The options whose values are not the defaults."""
    usual = type(options)()
    return [name for name, value in vars(options).items() if value != getattr(usual, name)]


def _own_gpu(
    rank: commands.Launched,
    job: commands.ModelRun | None,
    options: FleetOptions,
    outputs: PageOptions,
    measured: dict[str, Any],
) -> None:
    """One of the processes that srun or torchrun started measures its own GPU."""
    started = f"{rank.by} started {'several' if rank.world is None else rank.world} processes"
    if options.folder is None:
        raise UserError(
            f"{started}, and each needs a folder for the run file of its GPU",
            f"add {option('folder', 'OUT')}, a folder that all of them share; then run: gemmscope fleet OUT",
        )
    for_one = [*(["at_once"] if options.at_once is not None else []), *(["repeat"] if options.repeat > 1 else [])]
    if for_one:
        raise UserError(
            f"{started}, one for each GPU, but {', '.join(map(option, for_one))} applies to one process that measures many GPUs",
            f"remove it, or start one process per node with {option('gpus', 'all')}",
        )
    if targets := outputs.targets():
        listed = ", ".join(map(option, targets))
        raise UserError(f"{started}: {listed} would be written by each of them", f"run: gemmscope fleet {options.folder} …")
    result, file = commands.fleet.run_own_gpu(rank, job, folder=options.folder, **measured)
    say(f"wrote {file}" if result is not None else f"{file} exists: this GPU is not measured again")
    if result is not None and not commands.fleet.has_figures(result):
        raise typer.Exit(NOTHING_MEASURED)


def _exit(result: FleetResult, *, strict: bool) -> None:
    """The exit code: nothing measured; with --fail-if-outlier, slow GPUs or GPUs that were not measured; run files of --folder
    that could not be written."""
    if not result.measured:
        raise typer.Exit(NOTHING_MEASURED)
    if strict and commands.fleet.unhealthy(result):
        raise typer.Exit(OUTLIERS)
    if result.has("fleet-files-missing"):
        raise typer.Exit(UNWRITTEN)
