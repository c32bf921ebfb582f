"""`gemmscope bench --sweep` and `gemmscope step --sweep`: the same measurement at every point of one size or two.

A point is one unit of a pool: one GPU measures it in all recipes, so that both sides of every speedup share a chip. The points
are spread over the GPUs that were asked for; every outcome is in the journal before anything else happens to it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gemmscope.app.bench import DEFAULT_CHOICES, BenchTiming, Shape, check_shape, not_resumed
from gemmscope.app.choose import Choices, choose
from gemmscope.app.launched import launched
from gemmscope.app.live import for_live
from gemmscope.app.model import ModelRun, linear_cases
from gemmscope.app.pools import local_gpus, open_pool
from gemmscope.app.progress import QUIET, Reporter
from gemmscope.app.sweep_assembly import Assembly, point_key
from gemmscope.app.sweep_axes import MEASURED_SIZES, Axes, check_axes, combinations, configurations
from gemmscope.app.sweep_point import BENCH_POINT, STEP_POINT
from gemmscope.app.sweep_stream import SweepStream
from gemmscope.app.units import MeasureUnit
from gemmscope.engine.journal import fingerprint, open_journal
from gemmscope.engine.pool.schedule import Outcomes, Schedule
from gemmscope.engine.pool.units import Pool, Unit
from gemmscope.engine.rule import check_limits
from gemmscope.errors import UserError, in_python, option
from gemmscope.gpu.environment import environment
from gemmscope.model.spec import RunSpec
from gemmscope.results.base import ModelSummary
from gemmscope.results.step import Compile, Optimizer
from gemmscope.results.sweep import SweepResult
from gemmscope.signals import DeferredSignals, defer_signals
from gemmscope.step.stack_plan import plan_step
from gemmscope.units import counted
from gemmscope.workload.derive import derive
from gemmscope.workload.sharding import check

PRECISION, TIME_LIMIT_S = 0.02, 20.0  # of one point: a sweep shows trends, so single points can be less precise
GEMM_SIZES = ("m", "k", "n")
ALL_SIZES = (*MEASURED_SIZES, *GEMM_SIZES, "global_batch", "vp", "dp", "zero", "fsdp")
"""Everything that a user may name as a size to vary. Sizes that do not affect a measurement on one GPU are rejected."""
MOST_POINTS = 5000

Deliver = Callable[[SweepResult], None]


@dataclass(frozen=True)
class Places:
    """Where points are measured: GPUs of this machine (`gpus`: "all", "0,1,5"; None: one), or those of a Ray cluster."""

    gpus: str | None = None
    ray: str | None = None


@dataclass(frozen=True)
class StepRun:
    """How every step is run, as in `run_step`."""

    hugging_face: bool = False
    compile: Compile | None = None
    optimizer: Optimizer | None = None


HERE, PLAIN_STEP, DEFAULT_TIMING = Places(), StepRun(), BenchTiming(precision=PRECISION, time_limit=TIME_LIMIT_S)


def bench_sweep(
    model: Mapping[str, Any],
    run: Mapping[str, Any],
    axes: Axes,
    *,
    choices: Choices = DEFAULT_CHOICES,
    timing: BenchTiming = DEFAULT_TIMING,
    places: Places = HERE,
    resume: bool = False,
    command: str = "",
    reporter: Reporter = QUIET,
    deliver: Deliver = lambda _: None,
    stream: Deliver | None = None,
) -> SweepResult:
    """The linears of a model at every point of one size or two, each as `run_bench` measures them.

    `model` and `run` are the arguments of `load_model` and `model_run`; `axes` gives a size of either its values. `timing` holds
    for each point. `stream` gets the points that are there, every few seconds; `deliver` writes the result.
    """
    timing.check()
    if "gradient_accumulation" in axes:
        problem = "the linears of one micro-batch do not depend on gradient_accumulation"
        raise UserError(problem, "vary it with gemmscope step, or vary another size")
    sizes = [name for name in MEASURED_SIZES if name != "gradient_accumulation"]
    check_axes(axes, sizes, model, MOST_POINTS)

    def unit(job: ModelRun) -> MeasureUnit:
        _check_model(job, axes)
        if job.source.model is not None and not linear_cases(derive(job.source.model, job.run)).cases:
            raise UserError(f"{job.source.model.name} has no linear layers to measure", "gemmscope shapes lists what it runs")
        return MeasureUnit("bench", {"job": _plain(job), "choices": choices, "timing": timing, "command": command}, BENCH_POINT)

    sweep = _Sweep("bench", axes, choices, places, *_limits(timing), resume, command, reporter, deliver, stream)
    return sweep.run(lambda signals: configurations(model, run, axes, unit, signals), cache_weights=timing.cache_weights)


def gemm_sweep(
    shape: Shape,
    axes: Axes,
    *,
    choices: Choices = DEFAULT_CHOICES,
    timing: BenchTiming = DEFAULT_TIMING,
    places: Places = HERE,
    resume: bool = False,
    command: str = "",
    reporter: Reporter = QUIET,
    deliver: Deliver = lambda _: None,
    stream: Deliver | None = None,
) -> SweepResult:
    """One bare GEMM of (M, K, N) with one or two of its sizes varied."""
    timing.check()
    check_axes(axes, GEMM_SIZES, {}, MOST_POINTS)
    if timing.cache_weights:
        raise UserError(f"{option('cache_weights')} applies only to the linears of a model", f"remove {option('cache_weights')}")

    def points(_: DeferredSignals) -> tuple[list[tuple[dict[str, int], MeasureUnit]], list[tuple[dict[str, int], str]]]:
        possible, impossible = [], []
        for values in combinations(axes):
            m, k, n = (values.get(name, size) for name, size in zip(GEMM_SIZES, shape, strict=True))
            arguments = {"shapes": [(m, k, n)], "choices": choices, "timing": timing, "command": command}
            try:
                check_shape((m, k, n))
                possible.append((values, MeasureUnit("bench", arguments, BENCH_POINT)))
            except UserError as error:
                impossible.append((values, in_python(error.message)))
        if not possible:
            raise UserError(impossible[0][1], "for example m=1024,2048")
        return possible, impossible

    sweep = _Sweep("bench", axes, choices, places, *_limits(timing), resume, command, reporter, deliver, stream)
    return sweep.run(points, shape=shape)


def step_sweep(
    model: Mapping[str, Any],
    run: Mapping[str, Any],
    axes: Axes,
    *,
    choices: Choices = DEFAULT_CHOICES,
    step: StepRun = PLAIN_STEP,
    precision: float = PRECISION,
    time_limit: float = TIME_LIMIT_S,
    places: Places = HERE,
    resume: bool = False,
    command: str = "",
    reporter: Reporter = QUIET,
    deliver: Deliver = lambda _: None,
    stream: Deliver | None = None,
) -> SweepResult:
    """The training step at every point of one size or two, each as `run_step` measures it: in the recipes alone, without mixed
    plans. Arguments as in `bench_sweep`."""
    check_limits(precision, time_limit)
    check_axes(axes, MEASURED_SIZES, model, MOST_POINTS)
    limits = {"precision": precision, "time_limit": time_limit, "try_mixed": False}

    def unit(job: ModelRun) -> MeasureUnit:
        _check_model(job, axes)
        if step.hugging_face or job.source.module is not None:
            for_live(job, choices, verify=False, break_even=False, cuda_graphs=False)
        elif job.source.model is not None:
            plan_step(job.source.model, job.run)
        arguments = {"job": _plain(job), "choices": choices, "command": command, **limits, **asdict(step)}
        return MeasureUnit("step", arguments, STEP_POINT)

    sweep = _Sweep("step", axes, choices, places, precision, time_limit, resume, command, reporter, deliver, stream)
    return sweep.run(lambda signals: configurations(model, run, axes, unit, signals))


def _limits(timing: BenchTiming) -> tuple[float | None, float | None]:
    """Precision and seconds of every point; none with fixed counts."""
    return (timing.precision, timing.time_limit) if timing.counts() is None else (None, None)


def _check_model(job: ModelRun, axes: Axes) -> None:
    """A `UserError` if this point cannot be run."""
    source = job.source
    if source.model is not None:
        check(source.model, job.run)
        return
    if others := [name for name in axes if name not in ("micro_batch_size", "sequence_length")]:
        raise UserError(
            f"{source.origin} is measured as it is, so {others[0]} cannot be varied", "vary micro_batch_size or sequence_length"
        )


def _plain(job: ModelRun) -> ModelRun:
    """The job as a plain `ModelRun`, without the additions of a subclass: it is pickled."""
    return ModelRun(job.source, job.run, job.findings, job.settled)


Points = Callable[[DeferredSignals], tuple[list[tuple[dict[str, int], MeasureUnit]], list[tuple[dict[str, int], str]]]]


@dataclass(frozen=True)
class _Sweep:
    """One measured sweep."""

    of: Literal["bench", "step"]
    axes: Axes
    choices: Choices
    places: Places
    precision: float | None
    time_limit: float | None
    resume: bool
    command: str
    reporter: Reporter
    deliver: Deliver
    stream: Deliver | None

    def run(self, points: Points, *, cache_weights: bool = False, shape: Shape | None = None) -> SweepResult:
        """Measure all points that the journal does not have yet."""
        self._check_choices(cache_weights=cache_weights)
        pool = self._pool()
        with defer_signals() as signals:
            possible, impossible = points(signals)
            if signals.first is not None:
                raise signals.interruption()
            units = [Unit(point_key(values), unit) for values, unit in possible]
            assembly = Assembly(
                of=self.of,
                sizes=tuple(self.axes),
                possible=[values for values, _ in possible],
                impossible=impossible,
                about={**_about(possible, self.axes), "shape": shape},
                settings={"command": self.command, "precision": self.precision, "time_limit_s": self.time_limit},
                bare=shape is not None,
            )
            with (
                closing(open_journal()) as journal,
                journal.recording(_mark(self.of, possible), self.command, resume=self.resume) as recording,
            ):
                if self.resume and (warning := not_resumed(recording)) is not None:
                    self.reporter.say(warning.text)
                self.reporter.say(self._plan(len(units), len(recording.outcomes())))
                with pool:
                    stream = SweepStream(self.reporter, lambda: self._stream(assembly, schedule.outcomes))
                    schedule = Schedule(pool, units, recording, stream.on_outcome, stream, what="point")
                    outcomes = schedule.run()
                result = assembly.result(outcomes, interrupted=outcomes.interrupted)
                if not outcomes.done and outcomes.interrupted:
                    raise signals.interruption()
                if not outcomes.done and outcomes.refused:
                    refused = outcomes.refused[0]
                    raise UserError(f"nothing can be measured: {refused.name}: {refused.why}", refused.hint)
                complete = not outcomes.interrupted and not outcomes.failed
                recording.deliver(lambda: self.deliver(result), complete=complete)
                signals.answered = True
        return result

    def _stream(self, assembly: Assembly, outcomes: Outcomes) -> None:
        if self.stream is not None and len(outcomes.done) + len(outcomes.failed) < len(assembly.possible):
            self.stream(assembly.result(outcomes, interrupted=True))

    def _plan(self, points: int, earlier: int) -> str:
        """What will be done, in one line."""
        if earlier:
            if earlier == points:
                return f"all {counted(points, 'point')} were measured earlier"
            were = "was" if earlier == 1 else "were"
            return f"{earlier} of {counted(points, 'point')} {were} measured earlier; measuring the rest …"
        prefix = "each " if points > 1 else ""
        limit = f", {prefix}for at most {self.time_limit:g} s" if self.time_limit is not None else ""
        return f"measuring {counted(points, 'point')}{limit} …"

    def _check_choices(self, *, cache_weights: bool) -> None:
        """A `UserError` for recipes that do not exist, or that this machine cannot measure; nodes of a cluster say so later."""
        self.choices.named_recipes()
        self._check_alone()
        self.choices.chosen_modes()
        if self.of == "step":
            self.choices.check_for_step()
        if self.places.ray is None:
            machine = environment()
            if self.places.gpus is not None and not self.choices.on_cpu:
                machine = replace(machine, gpus=tuple(local_gpus(self.places.gpus, machine)[:1]), visible_devices=None)
            choose(replace(self.choices, share_gpu=True), machine, cache_weights=cache_weights)

    def _check_alone(self) -> None:
        """A `UserError` in one of many processes that srun or torchrun started: each would measure every point."""
        rank = launched() if self.places == HERE else None
        if rank is not None and (rank.rank or rank.world is not None):
            count = "several" if rank.world is None else rank.world
            raise UserError(
                f"{rank.by} started {count} processes, and each of them would measure every point of {option('sweep')}",
                f"start one process with {option('gpus', 'all')}, or with Ray inside the job and {option('ray', 'auto')}",
            )

    def _pool(self) -> Pool:
        return open_pool(gpus=self.places.gpus, ray=self.places.ray, on_cpu=self.choices.on_cpu, share_gpu=self.choices.share_gpu)


def _about(possible: Sequence[tuple[dict[str, int], MeasureUnit]], axes: Axes) -> dict[str, Any]:
    """The fields of the result that name the model; without the sizes that vary."""
    job: ModelRun | None = possible[0][1].arguments.get("job")
    if job is None:
        return {"origin": "shapes"}
    source = job.source
    summary = ModelSummary.of(source.model, source.model.name if source.model is not None else source.origin, source.origin)
    if any(name not in RunSpec.__dataclass_fields__ for name in axes):
        summary = summary.model_copy(update={"hidden_size": None, "num_hidden_layers": None, "description": ""})
    return {"origin": source.origin, "model": summary, "run": job.run if source.model is not None else None}


def _mark(of: str, possible: Sequence[tuple[dict[str, int], MeasureUnit]]) -> str:
    """A key that is equal for sweeps of the same points, on any GPUs and at any precision."""
    content = []
    for values, unit in possible:
        arguments = dict(unit.arguments)
        job: ModelRun | None = arguments.pop("job", None)
        timing: BenchTiming | None = arguments.pop("timing", None)
        for name in ("command", "precision", "time_limit"):
            arguments.pop(name, None)
        source = job.source if job is not None else None
        about = [source.origin, repr(source.model), source.module, source.config] if source is not None else []
        settings = {**asdict(timing), "precision": 0, "time_limit": 0} if timing is not None else {}
        content.append([values, about, repr(job.run) if job is not None else "", repr(sorted(arguments.items())), settings])
    return fingerprint("sweep", of, content)
