"""Made-up sweeps: kernels and a step that were recorded on an H200, scaled to other sizes, with an invented overhead on small
batches and invented faults. They go through the code that makes points of results. Nothing was measured at these sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from gemmscope.interval import Interval
from gemmscope.job.load import load_model, model_run
from gemmscope.pool.pool import Outcomes, Place, UnitFailure, UnitOutcome
from gemmscope.results.base import ModelSummary
from gemmscope.results.sweep import SweepResult
from gemmscope.sweep.assembly import Assembly, point_key
from gemmscope.sweep.point import bench_point, step_point
from gemmscope.workload.cases import bare_gemms
from support.bench_results import LAYER, MODEL, recorded_measurements
from support.forecast_files import OPTIONS, SIZES
from support.run_files import bench_result
from support.step_files import recorded_step

PLACES = [Place(f"node01 GPU-{n}", "node01", n, f"GPU-0000000{n}-aaaa-bbbb-cccc-000000000000") for n in range(2)]
COMMAND = (
    f"gemmscope bench {OPTIONS} --sweep micro_batch_size=1,2,4,8 --sweep sequence_length=1k,2k,4k --gpus 0,1 --json sweep.json"
)


def linears_at(micro_batch_size: int, sequence_length: int) -> dict[str, Any]:
    """The outcome of a point of the worked example, as the journal has it."""
    outcome: dict[str, Any] = json.loads(_linears_of(micro_batch_size * sequence_length))
    return outcome


@cache
def _linears_of(tokens: int) -> str:
    """Low precision costs more than it gains on few tokens."""
    cases = [replace(case, tokens=tokens) for case in MODEL]
    slower = {name: 1 + share * 4096 / tokens for name, share in (("FP8Current", 0.3), ("FP8Delayed", 0.35), ("FP8Block", 0.2))}
    return json.dumps(bench_point(bench_result(recorded_measurements(cases, slower=slower), **LAYER)))


def _about() -> dict[str, Any]:
    job = model_run(load_model(**SIZES), micro_batch_size=1, sequence_length=1024)
    assert job.source.model is not None
    return {"origin": "command line", "model": ModelSummary.of(job.source.model, "transformer", "command line"), "run": job.run}


def assembled(
    of: Any, outcomes: Outcomes, values: list[dict[str, int]], *, interrupted: bool = False, **about: Any
) -> SweepResult:
    """The result of these outcomes."""
    assembly = Assembly(
        of=of,
        sizes=tuple(values[0]),
        possible=values,
        impossible=about.pop("impossible", []),
        about=about.pop("about", None) or _about(),
        settings={"command": about.pop("command", COMMAND), "precision": 0.02, "time_limit_s": 20.0},
        **about,
    )
    return assembly.result(outcomes, interrupted=interrupted)


@cache
def measured_plane(*, interrupted: bool = False, with_impossible: bool = True) -> SweepResult:
    """Linears over two sizes on two GPUs. At one point FP8Block ran out of memory, and at one nothing could be measured. With
    `with_impossible`, one point has a size that is not possible."""
    values = [{"micro_batch_size": size, "sequence_length": length} for size in (1, 2, 4, 8) for length in (1024, 2048, 4096)]
    outcomes = Outcomes()
    for number, point in enumerate(values[: 5 if interrupted else None]):
        outcomes.done[point_key(point)] = UnitOutcome(PLACES[number % 2], linears_at(**point))
    if not interrupted:
        largest = point_key(values[-1])
        del outcomes.done[largest]
        outcomes.failed[largest] = UnitFailure("node01 GPU 1", "lost 3 times; the last reason: signal 9")
        before = outcomes.done[point_key(values[-2])].outcome
        for data in before["modes"].values():
            data |= {"unfit": ["FP8Block"]}
            for part in ("times_ms", "speedups"):
                data[part].pop("FP8Block", None)
    impossible = [({"micro_batch_size": 0, "sequence_length": 1024}, "micro_batch_size must be at least 1, got 0")]
    return assembled("bench", outcomes, values, interrupted=interrupted, impossible=impossible if with_impossible else [])


@cache
def measured_line() -> SweepResult:
    """The training step over one size: a recorded one, and what is derived from it."""
    recorded = recorded_step("gpt1b").model_copy(update={"findings": ()})
    outcomes, values = Outcomes(), [{"micro_batch_size": size} for size in (1, 2, 4, 8)]
    for point in values:
        share = point["micro_batch_size"] / 8
        outcomes.done[point_key(point)] = UnitOutcome(PLACES[0], _shrunk(step_point(recorded), share))
    command = f"gemmscope step {OPTIONS} --sequence-length 1024 --sweep micro_batch_size=1,2,4,8"
    return assembled("step", outcomes, values, command=command)


def _shrunk(point: dict[str, Any], share: float) -> dict[str, Any]:
    """The point of a smaller batch: less time, and less gain."""
    [data] = point["modes"].values()

    def scaled(interval: Mapping[str, float], factor: float) -> dict[str, float]:
        return vars(Interval(**interval).times(factor))

    data["times_ms"] = {name: scaled(time, share) for name, time in data["times_ms"].items()}
    data["speedups"] = {name: scaled(gain, 0.75 + share / 4) for name, gain in data["speedups"].items()}
    if data["winner"]["speedup"] is not None:
        data["winner"]["speedup"] = scaled(data["winner"]["speedup"], 0.75 + share / 4)
    return point


@cache
def measured_gemm() -> SweepResult:
    """One bare GEMM with its M varied."""
    outcomes, values = Outcomes(), [{"m": side} for side in (1024, 2048, 4096, 8192)]
    for point in values:
        result = bench_result(recorded_measurements(bare_gemms([(point["m"], 4096, 14336)]), spread=0.0005))
        outcomes.done[point_key(point)] = UnitOutcome(PLACES[0], bench_point(result))
    about = {"origin": "shapes", "shape": (1024, 4096, 14336)}
    return assembled("bench", outcomes, values, about=about, command="gemmscope bench --shapes 1kx4kx14k --sweep m=1k,2k,4k,8k")
