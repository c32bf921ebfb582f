"""`gemmscope fleet`: the same measurement on many GPUs, how they differ, and which of them are outliers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gemmscope.bench.choose import DEFAULT_CHOICES, Choices
from gemmscope.bench.timing import DEFAULT_TIMING, BenchTiming, Shape, check_shape
from gemmscope.commands.bench import run_bench
from gemmscope.commands.step import run_step
from gemmscope.engine.journal import fingerprint, not_resumed, open_journal
from gemmscope.errors import UserError, in_shell, option, shown
from gemmscope.files import write_text
from gemmscope.findings import Finding, finding
from gemmscope.fleet.gather import Run, fleet_result, read_runs
from gemmscope.fleet.rule import rule_data
from gemmscope.folders import temporary_folder
from gemmscope.gpu.environment import environment
from gemmscope.job.load import ModelRun
from gemmscope.pool.gpus import Launched, gpu_of_rank, open_pool
from gemmscope.pool.measure_unit import MeasureUnit
from gemmscope.pool.pool import Place, PlaceRefused, Unit
from gemmscope.pool.schedule import Outcomes, Schedule, UnitFailure
from gemmscope.progress import QUIET, Reporter
from gemmscope.results.bench import BenchResult
from gemmscope.results.fleet import FleetGpu, FleetResult
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult
from gemmscope.signals import defer_signals
from gemmscope.units import slug

SUMMARY = "gemmscope.fleet.gather:summary"
STATE = "XDG_STATE_HOME"
MOST_REPEATS = 100
TOLERANCE: float = rule_data()["tolerance"]
STEP_TIME_LIMIT = 30.0  # seconds, as of `gemmscope step`
STEP_OPTIONS = ("hugging_face", "compile", "optimizer")


@dataclass(frozen=True)
class FleetUnit:
    """What every GPU measures: a bench, or with `step` a training step of the model. `step_options`: further arguments of
    `run_step`, by name."""

    job: ModelRun | None = None
    step: bool = False
    shapes: Sequence[Shape] | None = None
    choices: Choices = DEFAULT_CHOICES
    timing: BenchTiming = DEFAULT_TIMING
    step_options: Mapping[str, Any] | None = None

    @property
    def kind(self) -> Literal["bench", "step"]:
        return "step" if self.step else "bench"

    def check(self) -> None:
        """A `UserError` for what does not go together."""
        self.choices.named_recipes()
        self.choices.chosen_modes()
        self.timing.check()
        for shape in self.shapes or ():
            check_shape(shape)
        if self.step and self.job is None:
            what = "a training step needs a model" if self.shapes is None else f"{option('shapes')} has no training step"
            raise UserError(what, f"name a model, for example {option('preset', 'llama-3.1-8b')}, or remove {option('step')}")
        if self.job is not None and self.shapes is not None:
            raise UserError(f"{option('shapes')} measures bare GEMMs, but a model was given", "use only one of them")
        if not self.step and (misplaced := [name for name, value in (self.step_options or {}).items() if value]):
            raise UserError(f"{option(misplaced[0])} applies only to training steps", f"add {option('step')}, or remove it")

    def arguments(self) -> dict[str, Any]:
        """The arguments of `run_bench` or `run_step`, `job` included."""
        if not self.step:
            return {"job": self.job, "shapes": self.shapes, "choices": self.choices, "timing": self.timing}
        limits = {"precision": self.timing.precision, "time_limit": self.timing.time_limit}
        return {"job": self.job, "choices": self.choices, **limits, **(self.step_options or {})}

    def mark(self) -> list[Any]:
        """What tells two such measurements apart: plain data."""
        source = self.job.source if self.job is not None else None
        model = [repr(source.model), source.origin, source.module, repr(self.job.run)] if source is not None and self.job else []
        choices = {**asdict(self.choices), "left_out": sorted(self.choices.left_out)}
        return [self.kind, model, self.shapes, choices, asdict(self.timing), dict(self.step_options or {})]


@dataclass(frozen=True)
class RunFile:
    """Writes the run file of one GPU into a folder, from wherever it is measured. If the folder does not exist, the measurement
    is still used, and the missing file is reported."""

    folder: str
    name: str

    def __call__(self, result: BenchResult | StepResult) -> None:
        try:
            write_text(Path(self.folder) / self.name, result.to_json())
        except UserError:
            return


def run_fleet(
    job: ModelRun | None = None,
    *,
    step: bool = False,
    shapes: Sequence[Shape] | None = None,
    gpus: str | Sequence[int] | None = None,
    ray: str | None = None,
    repeat: int = 1,
    tolerance: float = TOLERANCE,
    folder: str | Path | None = None,
    at_once: int | None = None,
    choices: Choices = DEFAULT_CHOICES,
    timing: BenchTiming = DEFAULT_TIMING,
    step_options: Mapping[str, Any] | None = None,
    command: str = "",
    resume: bool = False,
    reporter: Reporter = QUIET,
    deliver: Callable[[FleetResult], None] = lambda _: None,
) -> FleetResult:
    """Measure the linears of a model, bare GEMMs, or with `step` the training step, on every GPU of this machine (`gpus`: "all",
    or numbers) or of a Ray cluster (`ray`: its address).

    Each GPU is measured `repeat` times. Differences below `tolerance` are never called. `folder`: also write the run file of each
    GPU there. `at_once`: at most so many GPUs of one machine at the same time. Ctrl-C ends it early, with the GPUs measured until
    then; `resume` measures the others. `deliver` writes the result; the measurement is finished only after that.
    """
    unit = FleetUnit(job, step, shapes, choices, timing, step_options)
    unit.check()
    check_rule(repeat, tolerance)
    named = gpus if isinstance(gpus, str) or gpus is None else ",".join(map(str, gpus))
    if named is not None and ray is not None:
        raise UserError(
            f"{option('gpus')} names GPUs of this machine, but {option('ray')} uses those of a cluster", "use only one of them"
        )
    into = _create_folder(folder) if folder is not None else None
    chosen = named or ("all" if ray is None and not choices.on_cpu else None)
    pool = open_pool(gpus=chosen, ray=ray, on_cpu=choices.on_cpu, share_gpu=choices.share_gpu)
    mark = fingerprint("fleet", unit.mark(), repeat, named or "", ray or "")
    with (
        closing(open_journal()) as journal,
        journal.recording(mark, command, resume=resume) as recording,
        defer_signals() as signals,
    ):
        if resume and (warning := not_resumed(recording)) is not None:
            reporter.say(warning.text)
        with pool:
            schedule = Schedule(
                pool,
                recording=recording,
                reporter=reporter,
                units_of=lambda place: _units(unit, place, repeat, into),
                at_once=at_once,
                what="measurement" if repeat > 1 or _repeated(named) else "CPU" if choices.on_cpu else "GPU",
            )
            outcomes = schedule.run()
        result = fleet_result(
            _runs(outcomes, into),
            failed=_failed(outcomes),
            of=unit.kind,
            origin=job.source.origin if job is not None else "shapes",
            tolerance=tolerance,
            command=command,
            interrupted=outcomes.interrupted,
            findings=_findings(outcomes, into),
        )
        complete = not (outcomes.interrupted or outcomes.failed or outcomes.refused)  # `resume` tries the others again
        recording.deliver(lambda: deliver(result), complete=complete)
        signals.answered = True
    return result


def _repeated(gpus: str | None) -> bool:
    """Whether a GPU is named twice: its measuring processes take turns."""
    numbers = [number.strip() for number in (gpus or "").split(",")]
    return len(set(numbers)) < len(numbers)


def gather_fleet(paths: Sequence[str | Path], *, tolerance: float = TOLERANCE, command: str = "") -> FleetResult:
    """One result from the run files of single GPUs: folders of them, or files. They must be about the same thing."""
    if not paths:
        raise UserError("no run file is given", "give the folder with one run file per GPU")
    check_rule(1, tolerance)
    runs, findings = read_runs(paths)
    return fleet_result(runs, tolerance=tolerance, command=command, findings=findings)


def run_own_gpu(
    rank: Launched,
    job: ModelRun | None = None,
    *,
    folder: str | Path,
    step: bool = False,
    shapes: Sequence[Shape] | None = None,
    choices: Choices = DEFAULT_CHOICES,
    timing: BenchTiming = DEFAULT_TIMING,
    step_options: Mapping[str, Any] | None = None,
    command: str = "",
    resume: bool = False,
    reporter: Reporter = QUIET,
) -> tuple[BenchResult | StepResult | None, Path]:
    """One of many processes that srun or torchrun started: measures the GPU of its rank, and writes its run file into a folder
    that all of them share. Returns the result and the file; with `resume`, None for a GPU whose file is there already."""
    unit = FleetUnit(job, step, shapes, choices, timing, step_options)
    unit.check()
    into = _create_folder(folder)
    with gpu_of_rank(rank, on_cpu=choices.on_cpu) as gpu, local_state():
        uuid = gpu.uuid or "" if gpu is not None else ""
        file = into / file_name(environment().node, gpu.index if gpu is not None else None, uuid, rank=_cpu_rank(rank))
        if resume and _is_complete(file, command):
            return None, file

        unwritten: list[UserError] = []

        def deliver(result: BenchResult | StepResult) -> None:
            try:
                write_text(file, result.to_json(), f"{option('folder')} must be a folder that every process can write to")
            except UserError as error:  # raised below: the journal of this process is temporary, so nothing can be resumed
                unwritten.append(error)

        arguments = {**unit.arguments(), "command": command, "reporter": reporter, "deliver": deliver}
        measured = arguments.pop("job")
        result = (run_step if step else run_bench)(measured, **arguments)
    if unwritten:
        raise unwritten[0]
    return result, file


def _is_complete(file: Path, command: str) -> bool:
    """Whether the run file of this command is there, and its measurement was not cut short."""
    try:
        result = read_result(file, ("bench", "step"))
    except UserError:
        return False
    if not isinstance(result, (BenchResult, StepResult)) or result.interrupted:
        return False
    return not command or not result.command or _without_resume(result.command) == _without_resume(command)


def _without_resume(command: str) -> list[str]:
    """The parts of a command that say what is measured, in any order.

    >>> _without_resume("gemmscope fleet --shapes 4k --folder runs --resume")
    ['--shapes', '4k', 'fleet', 'gemmscope']
    """
    parts = [part for part in command.split() if part != "--resume"]
    if "--folder" in parts:
        at = parts.index("--folder")
        del parts[at : at + 2]
    return sorted(parts)


@contextmanager
def local_state() -> Iterator[None]:
    """Keep the journal on a local disk: many nodes may share a home folder over a network, where SQLite must not be."""
    before = os.environ.get(STATE)
    with temporary_folder() as folder:
        os.environ[STATE] = str(folder)
        try:
            yield
        finally:
            del os.environ[STATE]
            if before is not None:
                os.environ[STATE] = before


def check_rule(repeat: int, tolerance: float) -> None:
    """A `UserError` for an invalid number."""
    if not 1 <= repeat <= MOST_REPEATS:
        raise UserError(f"{option('repeat', repeat)} must be between 1 and {MOST_REPEATS}", f"for example {option('repeat', 3)}")
    if not 0 <= tolerance < 1:
        message = f"{option('tolerance', tolerance)} must be between 0 and 1, or a percentage such as 2%"
        raise UserError(message, f"for example {option('tolerance', '0.02')}")


def file_name(node: str, gpu: int | None, uuid: str = "", *, repeat: int = 1, rank: int = 0, turn: int = 1) -> str:
    """The name of the run file of one GPU. Where a process sees only its own GPU, that is number 0: the UUID tells GPUs apart.

    >>> file_name("node03.cluster", 5, "GPU-5c1f0a44-77b0"), file_name("node03", None, rank=2), file_name("a", 0, repeat=2)
    ('node03-cluster-gpu5-5c1f0a44.json', 'node03-cpu-2.json', 'a-gpu0-run2.json')
    """
    parts = [slug(node), "cpu" if gpu is None else f"gpu{gpu}", slug(uuid.removeprefix("GPU-")[:8]) if uuid else ""]
    parts += [str(rank) if rank and gpu is None else "", f"turn{turn}" if turn > 1 else "", f"run{repeat}" if repeat > 1 else ""]
    return f"{'-'.join(part for part in parts if part)}.json"


def _cpu_rank(rank: Launched) -> int:
    """The number that keeps the files of several processes on the CPU of one machine apart."""
    return rank.local_rank if rank.local_rank is not None else rank.rank


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


def _units(unit: FleetUnit, place: Place, repeat: int, folder: Path | None) -> list[Unit]:
    """What one GPU measures, as often as was asked for."""
    units = []
    for number in range(1, repeat + 1):
        arguments = unit.arguments()
        if folder is not None:
            arguments["deliver"] = RunFile(str(folder), _file_of(place, number))
        units.append(Unit(f"{place.key} {unit.kind} {number}", MeasureUnit(unit.kind, arguments, SUMMARY), place.key))
    return units


def _file_of(place: Place, number: int) -> str:
    """The run file of the measurement with this number. Places that share a GPU (`--gpus 0,0`) are numbered in their keys."""
    turn = place.key.rpartition(" #")[2]
    return file_name(place.node, place.gpu, place.uuid, repeat=number, turn=int(turn) if turn.isdigit() else 1)


def _runs(outcomes: Outcomes, folder: Path | None) -> list[Run]:
    runs = []
    for key, (place, outcome) in outcomes.done.items():
        number = int(key.rpartition(" ")[2])
        file = folder / _file_of(place, number) if folder is not None else None
        name = str(file) if file is not None and file.is_file() else ""
        runs.append(Run(outcome, place=place.name, node=place.node, index=place.gpu, uuid=place.uuid, file=name))
    return runs


def _failed(outcomes: Outcomes) -> list[FleetGpu]:
    """GPUs that were not measured at all, and why."""
    measured = {place.key for place, _ in outcomes.done.values()}
    failed: dict[str, FleetGpu] = {}
    for key, failure in outcomes.failed.items():
        place = outcomes.places.get(key.rsplit(" ", 2)[0])
        if place is not None and place.key not in measured:
            failed[place.key] = _gpu(place, _reason(failure))
    for refusal in outcomes.refused:
        place = outcomes.places.get(refusal.place)
        if place is not None and place.key not in measured:
            failed[place.key] = _gpu(place, _reason(refusal))
        elif place is None:
            node = refusal.name.rpartition(" GPU ")[0] or refusal.name.removesuffix(" CPU")
            for number in range(1, refusal.gpus + 1):  # 0: a node without GPUs, which the findings name
                name = refusal.name if refusal.gpus == 1 else f"{refusal.name} ({number} of {refusal.gpus})"
                failed[name] = FleetGpu(place=name, node=node, failure=_reason(refusal))
    return list(failed.values())


def _reason(failure: UnitFailure | PlaceRefused) -> str:
    """Why a GPU was not measured, and what to do about it."""
    return in_shell(f"{failure.why} ({failure.hint})" if failure.hint else failure.why)


def _gpu(place: Place, failure: str) -> FleetGpu:
    return FleetGpu(place=place.name, node=place.node, index=place.gpu, uuid=place.uuid, failure=failure)


def _findings(outcomes: Outcomes, folder: Path | None) -> list[Finding]:
    """Findings about the measurement. Places that refused are listed as GPUs not measured, except those without a GPU."""
    findings = [entry for entry in outcomes.findings if entry.code != "pool-places-refused"]
    findings += [
        finding("pool-places-refused", places=[place.name], reason=place.why) for place in outcomes.refused if not place.gpus
    ]
    measured, missing = {place.key for place, _ in outcomes.done.values()}, dict[str, list[str]]()
    for key, failure in outcomes.failed.items():
        if (place := outcomes.places.get(key.rsplit(" ", 2)[0])) is not None and place.key in measured:
            missing.setdefault(_reason(failure), []).append(place.name)
    findings += [
        finding("fleet-repeats-missing", places=list(dict.fromkeys(places)), reason=reason) for reason, places in missing.items()
    ]
    if outcomes.interrupted:
        findings.insert(0, finding("fleet-interrupted"))
    if folder is not None:
        names = {_file_of(place, int(key.rpartition(" ")[2])) for key, (place, _) in outcomes.done.items()}
        unwritten = [name for name in sorted(names) if not (folder / name).is_file()]
        if unwritten:
            findings.append(finding("fleet-files-missing", files=unwritten, folder=str(folder)))
    return findings


def unhealthy(result: FleetResult) -> list[str]:
    """The GPUs and nodes that a job should not use: slow ones, and those that were not measured, or not as often as requested."""
    slow = [outlier.where for outlier in result.outliers if outlier.side == "slow"]
    lists = [entry.facts["places"] for entry in result.findings if entry.code == "fleet-repeats-missing"]
    fewer = [place for places in lists if isinstance(places, list) for place in places]
    return [*slow, *(gpu.place for gpu in result.gpus if gpu.failure), *fewer]


def has_figures(result: BenchResult | StepResult) -> bool:
    """Whether anything was measured."""
    return bool(result.step.recipes if isinstance(result, StepResult) else result.linears.ops)


def with_step_limit(timing: BenchTiming, *, step: bool, given: bool) -> BenchTiming:
    """The time limit of a step, unless one was given."""
    return replace(timing, time_limit=STEP_TIME_LIMIT) if step and not given else timing
