"""What was measured of one op in one recipe: time per pass, what quantization takes, and the proof of its precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemmscope.interval import Interval
from gemmscope.measure.attribution import AttributionError, Parts, attribute, quantization_by_pass
from gemmscope.measure.kernels import Evidence, KernelRun, evidence
from gemmscope.measure.results import Results, TaskResult, added
from gemmscope.measure.stats import time_interval
from gemmscope.recipe.recipes import recipe
from gemmscope.workload.cases import Case, Mode


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one execution. Autocast: `pass_ms` holds each pass with its share of the quantization, and they sum to
    `total`; `quantize_ms` is that share by what is quantized. Both are empty where it cannot be told, and `note` says why.
    Pre-quantized: the products alone. `left_as_is` is what the framework did otherwise than asked, on purpose; also in `note`."""

    case: Case
    recipe: str
    mode: Mode
    total: Interval
    pass_ms: dict[str, float]
    quantize_ms: dict[str, float]
    evidence: dict[str, Evidence]
    host_ms: float
    note: str = ""
    left_as_is: str = ""

    def product_ms(self) -> dict[str, float]:
        """The passes without their share of the quantization."""
        shares = quantization_by_pass(self.quantize_ms, self.pass_ms)
        return {name: time - shares[name] for name, time in self.pass_ms.items()}

    @property
    def host_bound(self) -> bool:
        """Dispatching it takes longer than running it: without CUDA graphs the GPU waits."""
        return self.mode == "autocast" and self.host_ms > self.total.value

    @property
    def fallback(self) -> str:
        """Which pass did not run in the precision asked for, in words; empty if all did, or if the framework says so itself."""
        if self.left_as_is:
            return ""
        return "; ".join(f"{name}: {found.words}" for name, found in self.evidence.items() if found.verdict == "fallback")

    @property
    def counts(self) -> bool:
        """Whether its speedup is one of the recipe asked for."""
        return not self.left_as_is and not self.fallback


def breakdown(results: Results, case: Case, recipe_name: str, mode: Mode) -> Breakdown | None:
    """Put together one cell of the tables; None where something failed or was not measured."""
    found = results.of(recipe_name, mode, case)
    if not found or not all(result.measured for result in found):
        return None
    return _autocast(found[0], _habits(results, recipe_name)) if mode == "autocast" else _products(found)


def _habits(results: Results, recipe_name: str) -> Mapping[str, Any]:
    """What is known of the recipe in the framework that was measured: when it casts. Its version tells which one that was."""
    asked, versions = recipe(recipe_name), results.hello.get("versions", {})
    backend = next((name for name in asked.backends if name in versions), "")
    habits: Mapping[str, Any] = asked.settings.get(backend, {})
    return habits


def _autocast(result: TaskResult, habits: Mapping[str, Any]) -> Breakdown:
    """Split the measured time in the proportions that the profiler saw."""
    task, total = result.task, time_interval(result.pieces)
    proofs: dict[str, Evidence] = {}
    pass_ms, quantize_ms, unsplit = {}, {}, ""
    left_as_is = str(result.facts.get("note", ""))
    if result.kernels:
        try:
            parts = _parts(result, habits)
        except AttributionError as error:
            unsplit = f"not split into passes: {error}"
        else:
            scale, charged_us = total.value / parts.total_us, parts.charged_us()
            pass_ms = {name: charged_us[name] * scale for name in task.case.passes}
            quantize_ms = {name: time * scale for name, time in parts.quantize_us.items()}
            asked = recipe(task.recipe)
            proofs = {name: evidence(asked, name, parts.kernels.get(name, ())) for name in task.case.passes}
    return Breakdown(
        task.case,
        task.recipe,
        task.mode,
        total,
        pass_ms,
        quantize_ms,
        proofs,
        host_ms=float(result.facts.get("host_ms", 0.0)),
        note="; ".join(filter(None, (left_as_is, unsplit))),
        left_as_is=left_as_is,
    )


def _parts(result: TaskResult, habits: Mapping[str, Any]) -> Parts:
    """The kernels of one run; a graph with several sets of buffers holds as many runs, of which the first serves."""
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


def _products(found: list[TaskResult]) -> Breakdown:
    """The passes were timed one by one."""
    task = found[0].task
    pass_ms = {result.task.pass_name: time_interval(result.pieces).value for result in found}
    proofs = {
        result.task.pass_name: evidence(recipe(task.recipe), result.task.pass_name, [kernel[0] for kernel in result.kernels])
        for result in found
        if result.kernels
    }
    note = next((str(note) for result in found if (note := result.facts.get("note"))), "")
    total = time_interval(added([(result.pieces, 1) for result in found]))
    return Breakdown(task.case, task.recipe, task.mode, total, pass_ms, {}, proofs, host_ms=0.0, note=note, left_as_is=note)
