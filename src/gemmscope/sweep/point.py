"""Reduces the result of a bench or a step to a point of a sweep: plain data, made where the point was measured."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gemmscope.choices import Mode
from gemmscope.gpu.specs import GB
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.base import Samples
from gemmscope.results.bench import BenchResult
from gemmscope.results.linears import Linears, Speedup, Winner, find_winner
from gemmscope.results.step import StepResult

BENCH_POINT, STEP_POINT = f"{__name__}:bench_point", f"{__name__}:step_point"
LIMITS = ("time-limit-reached", "time-limit-no-interval", "time-limit-no-speedup")


def bench_point(result: BenchResult) -> dict[str, Any]:
    """The linears at one point, or one GEMM: by mode."""
    linears = result.linears
    return {"modes": {mode: _linears_point(result, linears, mode) for mode in linears.modes}, **_about(result)}


def step_point(result: StepResult) -> dict[str, Any]:
    """The training step at one point."""
    step = result.step
    ratios = {(ratio.recipe, ratio.over): ratio.speedup for ratio in step.speedups}
    times = {time.recipe: time.step_ms for time in step.recipes}
    speedups = {time.recipe: time.speedup for time in step.recipes if time.speedup is not None}
    winner = find_winner(speedups, lambda *pair: ratios.get(pair))
    time = step.of(winner.best)
    failed = {
        outcome.variant.recipe: outcome for outcome in result.variants if outcome.failure and outcome.variant.recipe not in times
    }
    point = {
        **_ranked(times, speedups, winner),
        **_failures(failed),
        "host_bound": [of_recipe.recipe for of_recipe in step.recipes if of_recipe.host_bound],
        "fallbacks": [of_recipe.recipe for of_recipe in step.recipes if of_recipe.fell_back],
        "tokens_per_s": time.tokens_per_s if time is not None and step.unit == "tokens" else None,
        "memory_gb": time.peak_bytes / GB if time is not None and time.peak_bytes else None,
    }
    return {"modes": {"": point}, **_about(result)}


def _linears_point(result: BenchResult, linears: Linears, mode: Mode) -> dict[str, Any]:
    op = linears.cases[0].op if linears.bare else ""
    names = linears.columns(mode)
    cells = {name: linears.op_time(op, name, mode) if op else linears.total(name, mode) for name in names}
    times = {name: cell.total_ms for name, cell in cells.items() if cell is not None}
    speedups = {name: gain for name in names if (gain := linears.speedup(name, mode, op)) is not None}
    ratios = _both_ways(ratio for ratio in linears.speedups if (ratio.mode, ratio.op, ratio.pass_name) == (mode, op, ""))
    winner = find_winner(speedups, lambda *pair: ratios.get(pair))
    point = {
        **_ranked(times, speedups, winner),
        **_failures({task.task.recipe: task for task in result.tasks if task.task.mode == mode and task.failure}),
        "host_bound": [name for name in times if _host_bound(linears, name, mode)],
        "fallbacks": [name for name in names if linears.falls_back(name, mode)],
    }
    if op and (time := times.get(winner.best)) is not None:
        point["tflops"] = linears.cases[0].flops / time.value / 1e9
    return point


def _both_ways(speedups: Iterable[Speedup]) -> dict[tuple[str, str], Interval]:
    ratios = {}
    for ratio in speedups:
        ratios[ratio.recipe, ratio.over] = ratio.speedup
        ratios[ratio.over, ratio.recipe] = ratio.speedup.inverse()
    return ratios


def _ranked(times: Mapping[str, Interval], speedups: Mapping[str, Interval], winner: Winner) -> dict[str, Any]:
    """Times, speedups and the winner; no winner without a time in BF16, which everything is compared with."""
    return {
        "times_ms": {name: asdict(time) for name, time in times.items()},
        "speedups": {name: asdict(gain) for name, gain in speedups.items()},
        "winner": winner.model_dump(mode="json") if BASELINE in times else None,
    }


def _failures(failed: Mapping[str, Samples]) -> dict[str, Any]:
    return {
        "not_possible": {name: outcome.failure for name, outcome in failed.items() if not outcome.out_of_memory},
        "unfit": [name for name, outcome in failed.items() if outcome.out_of_memory],
    }


def _host_bound(linears: Linears, name: str, mode: Mode) -> bool:
    """Launching all linears takes the CPU longer than running them takes the GPU."""
    cells = [(cell, case.count) for case in linears.cases if (cell := linears.op_time(case.op, name, mode)) is not None]
    return mode == "autocast" and sum(cell.host_ms * count for cell, count in cells) > sum(
        cell.total_ms.value * count for cell, count in cells
    )


def _about(result: BenchResult | StepResult) -> dict[str, Any]:
    """Facts about a point besides its numbers: the machine, the findings, whether the precision was reached."""
    device = result.device
    return {
        "device": {name: device[name] for name in ("name", "power_limit_w") if device.get(name) is not None},
        "versions": {**({"driver": result.environment.driver} if result.environment.driver else {}), **result.versions},
        "backend": result.settings.backend,
        "inputs": result.run.inputs if result.run is not None else None,
        "model": result.model.model_dump(mode="json") if result.model is not None else None,
        "limit_reached": any(result.has(code) for code in LIMITS),
        "interrupted": result.interrupted,
        "findings": result.model_dump(mode="json", include={"findings"})["findings"],
    }
