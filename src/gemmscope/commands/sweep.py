"""`gemmscope bench --sweep` and `gemmscope step --sweep`: the same measurement at every point of one size or two.

A point is one unit of a pool: one GPU measures it in all recipes, so that both sides of every speedup share a chip. The points
are spread over the GPUs that were asked for; every outcome is in the journal before anything else happens to it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gemmscope.bench.choose import DEFAULT_CHOICES, Choices
from gemmscope.bench.timing import BenchTiming, Shape, check_shape
from gemmscope.engine.rule import check_limits
from gemmscope.errors import UserError, in_python, option
from gemmscope.job.load import ModelRun
from gemmscope.job.rank_workload import linear_cases
from gemmscope.pool.measure_unit import MeasureUnit
from gemmscope.progress import QUIET, Reporter
from gemmscope.results.step import Compile, Optimizer
from gemmscope.results.sweep import SweepResult
from gemmscope.signals import DeferredSignals
from gemmscope.step.live_settings import for_live
from gemmscope.step.stack_plan import plan_step
from gemmscope.sweep.axes import MEASURED_SIZES, Axes, check_axes, combinations, configurations
from gemmscope.sweep.point import BENCH_POINT, STEP_POINT
from gemmscope.sweep.run import HERE, PRECISION, TIME_LIMIT_S, Deliver, MeasuredSweepRun, Places
from gemmscope.workload.derive import derive
from gemmscope.workload.sharding import check

GEMM_SIZES = ("m", "k", "n")
ALL_SIZES = (*MEASURED_SIZES, *GEMM_SIZES, "global_batch", "vp", "dp", "zero", "fsdp")
"""Everything that a user may name as a size to vary. Sizes that do not affect a measurement on one GPU are rejected."""
MOST_POINTS = 5000


@dataclass(frozen=True)
class StepRun:
    """How every step is run, as in `run_step`."""

    hugging_face: bool = False
    compile: Compile | None = None
    optimizer: Optimizer | None = None


PLAIN_STEP, DEFAULT_TIMING = StepRun(), BenchTiming(precision=PRECISION, time_limit=TIME_LIMIT_S)


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

    sweep = MeasuredSweepRun("bench", axes, choices, places, *_limits(timing), resume, command, reporter, deliver, stream)
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

    sweep = MeasuredSweepRun("bench", axes, choices, places, *_limits(timing), resume, command, reporter, deliver, stream)
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

    sweep = MeasuredSweepRun("step", axes, choices, places, precision, time_limit, resume, command, reporter, deliver, stream)
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
