"""`gemmscope fleet`: the same measurement on many GPUs, how they differ, and which of them are outliers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from gemmscope.bench.choose import chosen_modes, named_recipes
from gemmscope.bench.timing import check_bare, check_timing
from gemmscope.commands.bench import run_bench
from gemmscope.commands.step import run_step
from gemmscope.engine.journal import fingerprint
from gemmscope.errors import UserError, option, reject, shown
from gemmscope.fleet.gather import fleet_result, read_runs
from gemmscope.fleet.measured import MeasuredFleet, Measurement, file_name
from gemmscope.fleet.rule import rule_data
from gemmscope.folders import temporary_folder
from gemmscope.gpu.environment import environment
from gemmscope.job.load import ModelRun, identity
from gemmscope.options.declare import shared
from gemmscope.options.measuring import BenchOptions, FleetOptions, StepOptions
from gemmscope.pool.gpus import Launched, gpu_of_rank, open_pool
from gemmscope.pool.measure_unit import MeasureUnit
from gemmscope.pool.pool import Place, Unit
from gemmscope.pool.schedule import Schedule
from gemmscope.results.bench import BenchResult
from gemmscope.results.fleet import FleetResult
from gemmscope.results.keep import WritePath, write_run_file
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.signals import defer_signals

SUMMARY = "gemmscope.fleet.summaries:summary"
MOST_REPEATS = 100
TOLERANCE: float = rule_data()["tolerance"]
EVERY_GPU = FleetOptions()
STEP_OPTIONS = ("hugging_face", "compile", "optimizer")
NOT_MEASURED = ("resume", "folder", "at_once", "tolerance", "gpus")
"""Options that do not change what a GPU measures."""


def unit_of(job: ModelRun | None, options: FleetOptions) -> MeasureUnit:
    """What every GPU measures: a bench, or with `step` a training step. A `UserError` for what does not go together."""
    named_recipes(options)
    chosen_modes(options)
    check_timing(options)
    check_bare(options.shapes, model=job is not None)
    if options.step and job is None:
        what = "a training step needs a model" if options.shapes is None else f"{option('shapes')} has no training step"
        raise UserError(what, f"name a model, for example {option('preset', 'llama-3.1-8b')}, or remove {option('step')}")
    if not options.step and (misplaced := [name for name in STEP_OPTIONS if getattr(options, name)]):
        raise UserError(f"{option(misplaced[0])} applies only to training steps", f"add {option('step')}, or remove it")
    alone = options.but(resume=False)
    return MeasureUnit(shared(alone, StepOptions) if options.step else shared(alone, BenchOptions), job, reduce=SUMMARY)


def mark_of(job: ModelRun | None, options: FleetOptions, gpus: str) -> str:
    """A key that is equal for measurements of the same things on the same GPUs."""
    asked = {name: value for name, value in options.given().items() if name not in NOT_MEASURED}
    return fingerprint("fleet", identity(job), {**asked, "left_out": sorted(options.left_out)}, gpus)


def write_from_gpu(path: str, result: BenchResult | StepResult) -> None:
    """Write the run file of one GPU, from wherever it is measured. If its folder does not exist, the measurement is still used,
    and the missing file is reported."""
    with suppress(UserError):
        write_run_file(result, Path(path))


def run_fleet(job: ModelRun | None, options: FleetOptions = EVERY_GPU, context: RunContext = PLAIN) -> FleetResult:
    """Measure the linears of a model, bare GEMMs, or with `step` the training step, on every GPU of this machine or of a Ray
    cluster. Ctrl-C ends it early, with the GPUs measured until then; `resume` measures the others."""
    unit, tolerance = unit_of(job, options), TOLERANCE if options.tolerance is None else options.tolerance
    check_rule(options.repeat, tolerance)
    gpus, ray = options.gpus, options.ray
    named = gpus if isinstance(gpus, str) or gpus is None else ",".join(map(str, gpus))
    if named is not None and ray is not None:
        raise UserError(
            f"{option('gpus')} names GPUs of this machine, but {option('ray')} uses those of a cluster", "use only one of them"
        )
    into = _create_folder(options.folder) if options.folder is not None else None
    chosen = named or ("all" if ray is None and not options.on_cpu else None)
    pool = open_pool(gpus=chosen, ray=ray, on_cpu=options.on_cpu, share_gpu=options.share_gpu)
    mark = mark_of(job, options, named or "")
    with context.recording(mark, resume=options.resume) as recording, defer_signals() as signals:
        with pool:
            schedule = Schedule(
                pool,
                recording=recording,
                reporter=context.reporter,
                units_of=lambda place: [_unit(unit, place, number, into) for number in range(1, options.repeat + 1)],
                at_once=options.at_once,
                what="measurement" if options.repeat > 1 or _repeated(named) else "CPU" if options.on_cpu else "GPU",
            )
            outcomes = schedule.run()
        measured = MeasuredFleet(outcomes, unit.kind, options.repeat, into)
        result = fleet_result(
            measured.runs(),
            failed=measured.failed(),
            of=unit.kind,
            origin=job.source.origin if job is not None else "shapes",
            tolerance=tolerance,
            command=context.command,
            interrupted=outcomes.interrupted,
            findings=measured.findings(),
        )
        complete = not (outcomes.interrupted or outcomes.failed or outcomes.refused)  # `resume` tries the others again
        context.finish(recording, result, complete=complete)
        signals.answered = True
    return result


def _repeated(gpus: str | None) -> bool:
    """Whether a GPU is named twice: its measuring processes take turns."""
    numbers = [number.strip() for number in (gpus or "").split(",")]
    return len(set(numbers)) < len(numbers)


def gather_fleet(paths: Sequence[str | Path], tolerance: float | None = None, context: RunContext = PLAIN) -> FleetResult:
    """One result from the run files of single GPUs: folders of them, or files. They must be about the same thing."""
    tolerance = TOLERANCE if tolerance is None else tolerance
    if not paths:
        raise UserError("no run file is given", "give the folder with one run file per GPU")
    check_rule(1, tolerance)
    runs, findings = read_runs(paths)
    return fleet_result(runs, tolerance=tolerance, command=context.command, findings=findings)


def run_own_gpu(
    rank: Launched, job: ModelRun | None, options: FleetOptions, context: RunContext = PLAIN
) -> tuple[BenchResult | StepResult | None, WritePath]:
    """One of many processes that srun or torchrun started: measures the GPU of its rank, and writes its run file into a folder
    that all of them share. Returns the result and where it is; with `resume`, None for a GPU whose file is there already."""
    unit = unit_of(job, options)
    assert options.folder is not None
    into = _create_folder(options.folder)
    with gpu_of_rank(rank, on_cpu=options.on_cpu) as gpu, temporary_folder() as local:
        uuid = gpu.uuid or "" if gpu is not None else ""
        on_machine = rank.local_rank if rank.local_rank is not None else rank.rank  # tells files of its CPU's processes apart
        file = into / file_name(environment().node, gpu.index if gpu is not None else None, uuid, rank=on_machine)
        mark = mark_of(job, options, "")
        if options.resume and _is_complete(file, mark):
            return None, WritePath(file)

        unwritten: list[UserError] = []
        written: list[WritePath] = []

        def deliver(result: BenchResult | StepResult) -> None:
            try:
                hint = f"{option('folder')} must be a folder that every process can write to"
                written.append(write_run_file(result.model_copy(update={"fingerprint": mark}), file, hint))
            except UserError as error:  # raised below: the journal of this process is temporary, so nothing can be resumed
                unwritten.append(error)

        alone = replace(context, deliver=deliver, state=local)  # a disk that many nodes share is not for SQLite
        measure: Callable[..., BenchResult | StepResult] = run_step if options.step else run_bench
        result = measure(job, unit.options, alone)
    if unwritten:
        raise unwritten[0]
    return result, written[-1]


def _is_complete(file: Path, mark: str) -> bool:
    """Whether the run file of this measurement is there, and was not cut short."""
    try:
        result = read_result(file, ("bench", "step"))
    except UserError:
        return False
    return isinstance(result, (BenchResult, StepResult)) and result.fingerprint == mark and not result.interrupted


def check_rule(repeat: int, tolerance: float) -> None:
    """A `UserError` for an invalid number."""
    many = f"{option('repeat', repeat)} must be between 1 and {MOST_REPEATS}"
    wide = f"{option('tolerance', tolerance)} must be between 0 and 1, or a percentage such as 2%"
    reject(
        (not 1 <= repeat <= MOST_REPEATS, many, f"for example {option('repeat', 3)}"),
        (not 0 <= tolerance < 1, wide, f"for example {option('tolerance', '0.02')}"),
    )


def _create_folder(folder: str | Path) -> Path:
    """The folder, created if it does not exist. A `UserError` if files cannot be written there."""
    path, given = Path(folder).absolute(), f"{option('folder')} {shown(str(folder))}"
    if not str(folder):
        raise UserError(f"{option('folder')} is empty", f"give the name of a folder, for example {option('folder', 'runs')}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # also a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{given} cannot be created: {reason}", "give a folder that can be written") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{given}: no permission to write files there", "give a folder that can be written")
    return path


def _unit(unit: MeasureUnit, place: Place, number: int, folder: Path | None) -> Unit:
    """What one GPU measures. `number`: which of its repeats."""
    measurement = Measurement(place, unit.kind, number)
    file = partial(write_from_gpu, str(folder / measurement.file)) if folder is not None else None
    return Unit(measurement.key, replace(unit, deliver=file), place.key)


def unhealthy(result: FleetResult) -> list[str]:
    """The GPUs and nodes that a job should not use: slow ones, and those that were not measured, or not as often as requested."""
    slow = [outlier.where for outlier in result.outliers if outlier.side == "slow"]
    lists = [entry.facts["places"] for entry in result.findings if entry.code == "fleet-repeats-missing"]
    return [
        *slow,
        *(gpu.place for gpu in result.gpus if gpu.failure),
        *[place for places in lists if isinstance(places, list) for place in places],
    ]


def has_figures(result: BenchResult | StepResult) -> bool:
    """Whether anything was measured."""
    return bool(result.step.recipes if isinstance(result, StepResult) else result.linears.ops)
