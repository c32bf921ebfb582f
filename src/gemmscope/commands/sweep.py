"""`gemmscope bench --sweep` and `gemmscope step --sweep`: the same measurement at every point of one size or two.

A point is one unit of a pool: one GPU measures it in all recipes, so that both sides of every speedup share a chip. The points
are spread over the GPUs that were asked for; every outcome is in the journal before anything else happens to it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from gemmscope.bench.timing import check_shape, check_timing, counts_of, limits
from gemmscope.engine.rule import check_limits
from gemmscope.errors import UserError, option
from gemmscope.job.load import ModelRun
from gemmscope.job.rank_workload import linear_cases
from gemmscope.options.declare import with_defaults
from gemmscope.options.measuring import BenchOptions, StepOptions, SweepOptions
from gemmscope.options.values import GEMM_SIZES, Shape
from gemmscope.pool.measure_unit import MeasureUnit
from gemmscope.results.read import read_result
from gemmscope.results.sweep import SweepResult
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.step.live_settings import for_live
from gemmscope.step.stack_plan import plan_step
from gemmscope.sweep.axes import LINEAR_SIZES, MEASURED_SIZES, Axes, check_axes, configurations, possible_points
from gemmscope.sweep.point import BENCH_POINT, STEP_POINT
from gemmscope.sweep.run import PRECISION, TIME_LIMIT_S, MeasuredSweepRun
from gemmscope.workload.derive import derive
from gemmscope.workload.sharding import check

MOST_POINTS = 5000
Measured = TypeVar("Measured", BenchOptions, StepOptions)


def bench_sweep(
    model: Mapping[str, Any], run: Mapping[str, Any], options: BenchOptions, sweep: SweepOptions, context: RunContext = PLAIN
) -> SweepResult:
    """The linears of a model at every point of one size or two, each as `run_bench` measures them.

    `model` and `run` are the arguments of `load_model` and `model_run`.
    """
    check_timing(options)
    axes = sweep.sweep or {}
    if "gradient_accumulation" in axes:
        raise UserError(
            "the linears of one micro-batch do not depend on gradient_accumulation",
            "vary it with gemmscope step, or vary another size",
        )
    check_axes(axes, LINEAR_SIZES, model, MOST_POINTS)
    options = _of_point(options)

    def unit(job: ModelRun) -> MeasureUnit:
        _check_model(job, axes)
        if job.source.model is not None and not linear_cases(derive(job.source.model, job.run)).cases:
            raise UserError(f"{job.source.model.name} has no linear layers to measure", "gemmscope shapes lists what it runs")
        return MeasureUnit(options, _plain(job), context.command, reduce=BENCH_POINT)

    return MeasuredSweepRun(options, sweep, context).run(lambda signals: configurations(model, run, axes, unit, signals))


def gemm_sweep(shape: Shape, options: BenchOptions, sweep: SweepOptions, context: RunContext = PLAIN) -> SweepResult:
    """One bare GEMM of (M, K, N) with one or two of its sizes varied."""
    check_timing(options)
    axes = sweep.sweep or {}
    check_axes(axes, GEMM_SIZES, {}, MOST_POINTS)
    if options.cache_weights:
        raise UserError(f"{option('cache_weights')} applies only to the linears of a model", f"remove {option('cache_weights')}")
    options = _of_point(options)

    def unit(values: Mapping[str, int]) -> MeasureUnit:
        m, k, n = (values.get(name, size) for name, size in zip(GEMM_SIZES, shape, strict=True))
        check_shape((m, k, n))
        return MeasureUnit(options.but(shapes=[(m, k, n)]), None, context.command, reduce=BENCH_POINT)

    return MeasuredSweepRun(options, sweep, context).run(lambda signals: possible_points(axes, unit, signals), shape=shape)


def step_sweep(
    model: Mapping[str, Any], run: Mapping[str, Any], options: StepOptions, sweep: SweepOptions, context: RunContext = PLAIN
) -> SweepResult:
    """The training step at every point of one size or two, each as `run_step` measures it: in the recipes alone, without mixed
    plans. Arguments as in `bench_sweep`."""
    options, axes = _of_point(options).but(try_mixed=False), sweep.sweep or {}
    check_limits(*limits(options))
    check_axes(axes, MEASURED_SIZES, model, MOST_POINTS)

    def unit(job: ModelRun) -> MeasureUnit:
        _check_model(job, axes)
        if options.hugging_face or job.source.module is not None:
            for_live(job, options)
        elif job.source.model is not None:
            plan_step(job.source.model, job.run)
        return MeasureUnit(options, _plain(job), context.command, reduce=STEP_POINT)

    return MeasuredSweepRun(options, sweep, context).run(lambda signals: configurations(model, run, axes, unit, signals))


def continues(result: SweepResult, path: Path) -> bool:
    """Whether the file holds an unfinished run of the same sweep, with no more points than this result."""
    try:
        old = read_result(path, ["sweep"])
    except UserError:  # not a run file of this sweep
        return False
    assert isinstance(old, SweepResult)
    return _subject(old) == _subject(result) and old.interrupted and old.sample_count <= result.sample_count


def _subject(result: SweepResult) -> tuple[Any, ...]:
    """What tells two sweeps apart."""
    return (
        result.of,
        result.origin,
        result.model,
        result.run,
        result.shape,
        result.wanted,
        [sweep.sizes for sweep in result.sweeps[:1]],
    )


def _of_point(options: Measured) -> Measured:
    """The options of one point: less precise than a single measurement, unless counts are fixed."""
    if isinstance(options, BenchOptions) and counts_of(options) is not None:
        return options
    return with_defaults(options, precision=PRECISION, time_limit=TIME_LIMIT_S)


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
