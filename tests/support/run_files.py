"""Results of `bench` and `shapes`, and run files of them: recorded on an H200, or made of kernels recorded there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemmscope.bench.findings import linear_findings, measurement_findings
from gemmscope.bench.linears import measured_linears
from gemmscope.bench.measurements import Measurements
from gemmscope.choices import MODES
from gemmscope.engine.messages import Hello, Kernels, Ready, Round, Sampled
from gemmscope.findings import finding
from gemmscope.job.load import model_run
from gemmscope.model.spec import ModelSource, ModelSpec, RunSpec
from gemmscope.results.base import Result
from gemmscope.results.bench import BenchResult, BenchSettings
from gemmscope.results.read import read_result
from gemmscope.results.shapes import ShapesResult
from support.bench_results import RECIPES, SQUARES, recorded_measurements
from support.commands import shapes
from support.machines import machine

DATA = Path(__file__).parent.parent / "data"
BENCHES = ("first", "again", "third", "fourth", "fallback")


def recorded_bench(name: str = "first") -> BenchResult:
    """A bench of the worked example on an H200: one of `BENCHES`."""
    result = read_result(DATA / f"h200_bench_{name}.json.gz", ["bench"])
    assert isinstance(result, BenchResult)
    return result


def replayed(result: BenchResult) -> Measurements:
    """The samples and kernels of a bench, taken in again as the worker's messages brought them."""
    measurements = Measurements([task.task for task in result.tasks])
    measurements.take(Hello(result.versions, result.device))
    groups = {task.task.key: task.task.group for task in result.tasks}
    bursts: dict[
        tuple[str, str, int], tuple[dict[str, list[float]], dict[str, Any]]
    ] = {}  # the tasks of one recipe and mode share a burst
    for task in result.tasks:
        measurements.take(Ready(task.task.key, {**task.facts}))
        measurements.take(Kernels(task.task.key, task.kernels))
        for number, (times_ms, state) in enumerate(zip(task.rounds_ms, task.states, strict=True)):
            group = groups[task.facts.get("sum_of", [task.task.key])[0]]  # a sum was measured with its parts
            bursts.setdefault((*group, number), ({}, state))[0][task.task.key] = times_ms
    for burst in bursts.values():
        measurements.take(Sampled(*burst))
    for number in range(result.rounds):
        measurements.take(Round(number))
    return measurements


def bench_result(measurements: Measurements, **about: Any) -> BenchResult:
    """The result of these measurements; `about`: what `measured_linears` takes beside them."""
    linears = measured_linears(measurements, RECIPES, MODES, **about)
    ended = finding("precision-reached", precision=0.01)
    return BenchResult(
        command="gemmscope bench",
        origin="shapes",
        findings=(*linear_findings(linears), *measurement_findings(measurements, linears), ended),
        settings=BenchSettings("transformer_engine", seed=0),
        precision=0.01,
        time_limit_s=120.0,
        environment=machine(),
        device=dict(measurements.hello.device),
        versions=dict(measurements.hello.versions),
        rounds=measurements.complete_rounds,
        linears=linears,
        tasks=tuple(measurements.tasks.values()),
    )


def squares(**how: Any) -> BenchResult:
    """Bare GEMMs of four sizes, made of recorded kernels."""
    return bench_result(recorded_measurements(SQUARES, **how))


def derived(model: ModelSpec, run: RunSpec) -> ShapesResult:
    """The result of `gemmscope shapes`."""
    job = model_run(ModelSource(origin="command line", model=model), **vars(run))
    return shapes(job, command="gemmscope shapes")


def put(folder: Path, name: str, result: Result) -> Path:
    """Write it as `--json` does."""
    path = folder / name
    path.write_text(result.to_json(), encoding="utf-8")
    return path
