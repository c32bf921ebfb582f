"""Builds the linears part of a result from a measurement: of every op its time per pass, its quantization, and the proof of its
precision; then sums, speedups, winners, memory.

A GEMM that ran in another precision, as kernel names show it, is a fallback, and is never counted as a speedup. Workers do not
import this file, because loading the result types takes a moment.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

from gemmscope.bench.attribution import AttributionError, Parts, attribute
from gemmscope.bench.measurements import Measurements, added
from gemmscope.choices import Mode
from gemmscope.engine.kernels import KernelRun, classify
from gemmscope.engine.stats import ratio_interval, time_interval
from gemmscope.interval import Interval
from gemmscope.recipe.frameworks import frameworks
from gemmscope.recipe.recipes import BASELINE, Recipe, recipe
from gemmscope.results.bench import TaskResult
from gemmscope.results.linears import Evidence, Linears, LinearsTotal, Memory, OpTime, Speedup, Winner, find_winner, linears_total
from gemmscope.workload.cases import Case
from gemmscope.workload.ops import ELEMENT_BYTES, PASSES, Pass


def memory(cases: Sequence[Case], name: str, backend: str = "transformer_engine", capability: str = "") -> Memory:
    """Add up the linears. On Blackwell one copy of a tensor-scaled weight serves both directions.

    >>> up = [Case("MLP Up", 1024, 4096, 16384, 24)]
    >>> memory(up, "FP8Block").copies_bytes / memory(up, "BF16").weights_bytes
    1.03
    """
    facts = recipe(name)
    copy_bytes, kept_bytes = facts.weight_copy_bytes, facts.kept_bytes
    if frameworks()[backend].casts_again:
        copy_bytes, kept_bytes = 0.0, ELEMENT_BYTES
    elif facts.one_copy(capability):
        copy_bytes /= 2
    weights = sum(case.weights * case.count for case in cases)
    reading = [case for case in cases if "wgrad" in case.passes or len(case.passes) == 1]  # a frozen linear keeps no input
    inputs = sum(case.tokens * case.inputs * case.count * (kept_bytes if case.quantized else ELEMENT_BYTES) for case in reading)
    copies = sum(case.weights * case.count * copy_bytes for case in cases if case.quantized)
    return Memory(recipe=name, weights_bytes=weights * ELEMENT_BYTES, copies_bytes=copies, kept_bytes=inputs)


def evidence(recipe: Recipe, pass_name: Pass, names: Sequence[str]) -> Evidence:
    """Compare the GEMMs that ran in a pass with what the recipe asks for there.

    >>> from gemmscope.recipe.recipes import recipe
    >>> proof = evidence(recipe("FP8Rowwise"), "fprop", ["nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN"])
    >>> proof.verdict, proof.requested, proof.ran
    ('fallback', 'e4m3 x e4m3, scales: row', 'bf16 x bf16')
    """
    gemms = tuple(dict.fromkeys(name for name in names if classify(name).kernel_class == "gemm"))
    operands, (own, *instead) = recipe.operands[pass_name], recipe.scales_of(pass_name)
    requested = _format(operands, own)
    ran = [classify(name) for name in gemms if "reduce" not in name.lower()]
    if not gemms or any(facts.operands is None for facts in ran):
        return Evidence(verdict="unproven", requested=requested, ran="", kernels=gemms)
    wrong = next((facts for facts in ran if sorted(facts.operands or ()) != sorted(operands)), None)
    if wrong is not None:
        return Evidence(verdict="fallback", requested=requested, ran=_format(wrong.operands or (), wrong.scales), kernels=gemms)
    other = next((facts.scales for facts in ran if facts.scales not in (None, own, *instead)), None)
    if other is not None:
        return Evidence(verdict="emulated", requested=requested, ran=_format(operands, other), kernels=gemms)
    outside = ", applied outside of the GEMM" if any(facts.scales in instead for facts in ran) else ""
    return Evidence(verdict="as requested", requested=requested, ran=requested + outside, kernels=gemms)


def _format(operands: Sequence[str], scales: str | None) -> str:
    return " x ".join(operands) + (f", scales: {scales}" if scales not in (None, "none") else "")


def op_time(measurements: Measurements, case: Case, name: str, mode: Mode) -> OpTime | None:
    """The op's time; None where something failed or was not measured."""
    tasks = measurements.of(name, mode, [case])
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


def measured_linears(
    measurements: Measurements,
    recipes: Sequence[str],
    modes: Sequence[Mode],
    *,
    layers: int | None = None,
    layer_counts: Mapping[str, int] | None = None,
    backend: str = "transformer_engine",
    cache_weights: bool = False,
    as_te_benchmark: bool = False,
) -> Linears:
    """Everything about the linears that follows from the measurements. `recipes`: those to show, measured or not."""
    cases = tuple(measurements.cases())
    linears = Linears(
        origin="measured",
        cases=cases,
        recipes=tuple(recipes),
        modes=tuple(modes),
        layers=layers,
        layer_counts=dict(layer_counts or {}),
        as_te_benchmark=as_te_benchmark,
        cache_weights=cache_weights,
        ops=tuple(
            time
            for case in cases
            for name in recipes
            for mode in modes
            if (time := op_time(measurements, case, name, mode)) is not None
        ),
    )
    capability = str(measurements.hello.device.get("compute_capability", ""))
    counted = not linears.bare and not as_te_benchmark and not frameworks()[backend].gemms_only
    return linears.model_copy(
        update={
            "speedups": tuple(_speedups(measurements, linears)),
            "totals": () if linears.bare else tuple(_totals(measurements, linears)),
            "memory": tuple(memory(cases, name, backend, capability) for name in recipes) if counted else (),
            "winners": {} if linears.bare else _winners(measurements, linears),
        }
    )


def _speedup(
    measured: Measurements, linears: Linears, mode: Mode, name: str, over: str = BASELINE, case: Case | None = None
) -> Interval | None:
    """One op, or all together as often as the model runs them; None where no speedup may be formed."""
    if name == over or any(linears.falls_back(side, mode, case.op if case else "") for side in (name, over)):
        return None
    if case is not None:
        sides = [linears.op_time(case.op, side, mode) for side in (name, over)]
        if any(side is not None and side.left_in_baseline for side in sides):
            return None
    return measured.speedup(name, mode, [case] if case else None, over=over)


def _speedups(measured: Measurements, linears: Linears) -> Iterator[Speedup]:
    """The speedups of ops, and of passes timed by themselves, over the baseline; of all linears over every earlier recipe, or
    of bare GEMMs of each."""
    for mode in linears.modes:
        names = linears.columns(mode)
        for index, name in enumerate(names):
            earlier = names[:index]
            of_ops = product(dict.fromkeys([BASELINE, *earlier]) if linears.bare else [BASELINE], linears.cases)
            for over, case in chain(of_ops, product([] if linears.bare else earlier, [None])):
                speedup = _speedup(measured, linears, mode, name, over, case)
                if speedup is not None:
                    yield Speedup(recipe=name, over=over, mode=mode, op=case.op if case else "", speedup=speedup)
                    if case is not None and over == BASELINE:
                        yield from _of_passes(measured, name, mode, case)


def _of_passes(measured: Measurements, name: str, mode: Mode, case: Case) -> Iterator[Speedup]:
    pieces = {task.task.pass_name: measured.pieces[task.task.key] for task in measured.of(BASELINE, mode, [case])}
    for task in measured.of(name, mode, [case]):
        pass_name = task.task.pass_name
        if pass_name and len(case.passes) > 1:
            ratio = ratio_interval(pieces[pass_name], measured.pieces[task.task.key])
            yield Speedup(recipe=name, over=BASELINE, mode=mode, op=case.op, pass_name=pass_name, speedup=ratio)


def _totals(measured: Measurements, linears: Linears) -> Iterator[LinearsTotal]:
    """The time of all linears, for every mode and recipe that has all its parts."""
    for mode in linears.modes:
        for name in linears.columns(mode):
            bursts = measured.totals(name, mode)
            if bursts is not None:
                ops = {time.op: time for time in linears.ops if (time.recipe, time.mode) == (name, mode)}
                total = time_interval(bursts, measured.noise())
                yield linears_total(name, mode, total, linears.cases, ops, linears.layer_counts)


def _winners(measured: Measurements, linears: Linears) -> dict[Mode, Winner]:
    """The fastest recipe of each mode that has speedups."""
    speedups = {
        mode: {name: gain for name in linears.columns(mode) if (gain := _speedup(measured, linears, mode, name)) is not None}
        for mode in linears.modes
    }
    return {mode: find_winner(own, partial(_speedup, measured, linears, mode)) for mode, own in speedups.items() if own}
