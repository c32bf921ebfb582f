"""One op in one recipe and mode, from its measurements: time per pass, quantization, and the proof of its precision."""

from collections.abc import Mapping, Sequence
from typing import Any

from gemmscope.bench.attribution import AttributionError, Parts, attribute
from gemmscope.bench.evidence import evidence
from gemmscope.bench.measurements import Measurements, added
from gemmscope.engine.kernels import KernelRun
from gemmscope.engine.stats import time_interval
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import recipe
from gemmscope.results.bench import TaskResult
from gemmscope.results.linears import OpTime
from gemmscope.workload.cases import Case, Mode
from gemmscope.workload.ops import PASSES


def op_time(measurements: Measurements, case: Case, name: str, mode: Mode) -> OpTime | None:
    """The op's time; None where something failed or was not measured."""
    tasks = measurements.of(name, mode, case)
    if not tasks or not all(task.measured for task in tasks):
        return None
    return _autocast(measurements, tasks[0]) if mode == "autocast" else _pre_quantized(measurements, tasks)


def _autocast(measurements: Measurements, result: TaskResult) -> OpTime:
    """The measured time, split in the proportions of the profiled kernels."""
    task = result.task
    total = time_interval(measurements.pieces[task.key])
    split: dict[str, Any] = {}
    if result.kernels:
        try:
            parts = _parts(result, measurements.hello.versions)
        except AttributionError as error:
            split["not_split"] = str(error)
        else:
            scale, charged_us = total.value / parts.total_us, parts.charged_us()
            passes = [name for name in PASSES if name in task.case.passes]
            split = {
                "pass_ms": {name: Interval(charged_us[name] * scale) for name in passes},
                "quantize_ms": {label: time * scale for label, time in parts.quantize_us.items()},
                "evidence": {name: evidence(recipe(task.recipe), name, parts.kernels.get(name, ())) for name in passes},
            }
    return OpTime(
        op=task.case.op,
        recipe=task.recipe,
        mode=task.mode,
        total_ms=total,
        host_ms=float(result.facts.get("host_ms", 0.0)),
        left_in_baseline=str(result.facts.get("note", "")),
        **split,
    )


def _parts(result: TaskResult, versions: Mapping[str, str]) -> Parts:
    """The kernels of one run; a graph with several sets of buffers holds as many runs, of which the first is used."""
    requested = recipe(result.task.recipe)
    backend = next((name for name in requested.backends if name in versions), "")
    habits = requested.settings.get(backend, {})  # how the framework that was measured casts in this recipe
    runs = [KernelRun(*kernel) for kernel in result.kernels]
    facts, case = result.facts, result.task.case
    order = facts.get("order") or habits.get("order", ())
    return attribute(
        runs[: len(runs) // int(facts.get("copies", 1))],
        passes=tuple(order) if set(order) == set(case.passes) else case.passes,
        casts=habits.get("casts", "once"),
        weight_cached=bool(facts.get("cache_weights")),
        rows=case.rows,
    )


def _pre_quantized(measurements: Measurements, tasks: Sequence[TaskResult]) -> OpTime:
    """The passes were timed one by one, so each has its own interval."""
    task, by_pass = tasks[0].task, {name: result for name in PASSES for result in tasks if result.task.pass_name == name}
    return OpTime(
        op=task.case.op,
        recipe=task.recipe,
        mode=task.mode,
        total_ms=time_interval(added([(measurements.pieces[result.task.key], 1) for result in tasks])),
        pass_ms={name: time_interval(measurements.pieces[result.task.key]) for name, result in by_pass.items()},
        evidence={
            name: evidence(recipe(task.recipe), name, [kernel[0] for kernel in result.kernels])
            for name, result in by_pass.items()
            if result.kernels
        },
        left_in_baseline=next((str(note) for result in tasks if (note := result.facts.get("note"))), ""),
    )
