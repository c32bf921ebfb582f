"""The functions of `commands/` with their options as keywords: `forecast(job, ["h200"], tokens=1e9)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from gemmscope.commands import bench as measuring
from gemmscope.commands import compare as comparing
from gemmscope.commands import explain as explaining
from gemmscope.commands import fleet as measuring_fleets
from gemmscope.commands import forecast as forecasting
from gemmscope.commands import numerics as computing
from gemmscope.commands import plan as planning
from gemmscope.commands import shapes as listing
from gemmscope.commands import sweep as sweeping
from gemmscope.job.load import ModelRun
from gemmscope.model.spec import ModelSource
from gemmscope.options.declare import Options
from gemmscope.options.estimating import ForecastOptions, NumericsOptions, PlanOptions, ShapesOptions
from gemmscope.options.measuring import BenchOptions, FleetOptions, StepOptions, SweepOptions
from gemmscope.options.reading import ExplainOptions
from gemmscope.results.bench import BenchResult
from gemmscope.results.compare import CompareResult
from gemmscope.results.explain import ExplainResult
from gemmscope.results.fleet import FleetResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.numerics import NumericsResult
from gemmscope.results.plan import PlanResult
from gemmscope.results.shapes import ShapesResult
from gemmscope.results.sweep import SweepResult
from gemmscope.run_context import RunContext

Group = TypeVar("Group", bound=Options)
OF_CONTEXT = [field.name for field in fields(RunContext)]


def split(group: type[Group], given: dict[str, Any]) -> tuple[Group, RunContext]:
    """Options and context from keywords."""
    context = {name: given.pop(name) for name in OF_CONTEXT if name in given}
    return group(**given), RunContext(**context)


def forecast(job: ModelRun | None, gpus: Sequence[str], **given: Any) -> ForecastResult:
    if "gpu_count" in given:
        given["gpus"] = given.pop("gpu_count")
    return forecasting.forecast(job, *split(ForecastOptions, {"gpu": list(gpus), **given}))


def forecast_sweep(model: dict[str, Any], run: dict[str, Any], axes: Any, gpus: Sequence[str], **given: Any) -> ForecastResult:
    return forecasting.sweep(model, run, *split(ForecastOptions, {"gpu": list(gpus), "sweep": axes, **given}))


def plan(source: ModelSource, gpu: str | list[str], gpus: int | None, **given: Any) -> PlanResult:
    """`restrict`: parts of the layout."""
    parts = given.pop("restrict", {})
    named = [gpu] if isinstance(gpu, str) else gpu
    return planning.plan(source, *split(PlanOptions, {"gpu": named, "gpus": gpus, **given, **parts}))


def explain(traces: Sequence[Any], job: ModelRun | None = None, **given: Any) -> ExplainResult:
    return explaining.explain(traces, *split(ExplainOptions, given), job=job)


def compare(runs: Sequence[Any], fail_if_slower: float | None = None) -> CompareResult:
    return comparing.compare(runs, fail_if_slower)


def shapes(job: ModelRun, **given: Any) -> ShapesResult:
    return listing.shapes(job, *split(ShapesOptions, given))


def run_numerics(recording: Any = None, job: ModelRun | None = None, **given: Any) -> NumericsResult:
    return computing.run_numerics(*split(NumericsOptions, {"recording": recording, **given}), job=job)


def run_bench(job: ModelRun | None = None, **given: Any) -> BenchResult:
    return measuring.run_bench(job, *split(BenchOptions, given))


def run_fleet(job: ModelRun | None = None, **given: Any) -> FleetResult:
    return measuring_fleets.run_fleet(job, *split(FleetOptions, given))


def bench_sweep(model: dict[str, Any], run: dict[str, Any], axes: Any, **given: Any) -> SweepResult:
    places = {name: given.pop(name) for name in ("gpus", "ray") if name in given}
    options, context = split(BenchOptions, given)
    return sweeping.bench_sweep(model, run, options, SweepOptions(sweep=axes, **places), context)


def step_sweep(model: dict[str, Any], run: dict[str, Any], axes: Any, **given: Any) -> SweepResult:
    options, context = split(StepOptions, given)
    return sweeping.step_sweep(model, run, options, SweepOptions(sweep=axes), context)
