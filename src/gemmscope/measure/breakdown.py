"""What was measured of one op in one recipe: time per pass, what quantization takes, and the proof of its precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemmscope.measure.attribution import TENSOR_PASSES, AttributionError, Parts, attribute
from gemmscope.measure.kernels import Evidence, KernelRun, evidence
from gemmscope.measure.results import Results, TaskResult
from gemmscope.measure.stats import Interval, per_round, time_interval
from gemmscope.measure.task import Case, Mode
from gemmscope.recipe.recipes import recipe
from gemmscope.workload.ops import PASSES


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one execution. Autocast: `pass_ms` holds each pass with its share of the quantization, and they sum to
    `total`; `quantize_ms` is that share by tensor. Pre-quantized: the products alone."""

    case: Case
    recipe: str
    mode: Mode
    total: Interval
    pass_ms: dict[str, float]
    quantize_ms: dict[str, float]
    evidence: dict[str, Evidence]
    host_ms: float
    note: str = ""

    def product_ms(self) -> dict[str, float]:
        """The passes without their share of the quantization."""
        shares = {
            name: sum(self.quantize_ms.get(tensor, 0.0) / 2 for tensor, passes in TENSOR_PASSES.items() if name in passes)
            for name in self.pass_ms
        }
        return {name: time - shares[name] for name, time in self.pass_ms.items()}

    @property
    def host_bound(self) -> bool:
        """Dispatching it takes longer than running it: without CUDA graphs the GPU waits."""
        return self.mode == "autocast" and self.host_ms > self.total.value

    @property
    def fallback(self) -> str:
        """Which pass did not run in the precision asked for, in words; empty if all did."""
        return "; ".join(f"{name}: {found.words}" for name, found in self.evidence.items() if found.verdict == "fallback")


def breakdown(results: Results, case: Case, recipe_name: str, mode: Mode) -> Breakdown | None:
    """Put together one cell of the tables; None where something failed or was not measured."""
    found = results.of(recipe_name, mode, case)
    if not found or not all(result.measured for result in found):
        return None
    return _autocast(found[0]) if mode == "autocast" else _products(found)


def _autocast(result: TaskResult) -> Breakdown:
    """Split the measured time in the proportions that the profiler saw."""
    task, total = result.task, time_interval(result.rounds)
    proofs: dict[str, Evidence] = {}
    pass_ms, quantize_ms, note = {}, {}, ""
    if result.kernels:
        try:
            parts = _parts(result)
        except AttributionError as error:
            note = f"not split into passes: {error}"
        else:
            scale = total.value / parts.total_us
            pass_ms = {name: time * scale for name, time in parts.charged_us().items()}
            quantize_ms = {name: time * scale for name, time in parts.quantize_us.items()}
            proofs = {name: evidence(recipe(task.recipe), name, parts.kernels.get(name, ())) for name in PASSES}
    host_ms = float(result.facts.get("host_ms", 0.0))
    return Breakdown(task.case, task.recipe, task.mode, total, pass_ms, quantize_ms, proofs, host_ms, note)


def _parts(result: TaskResult) -> Parts:
    """The kernels of one run; a graph with several sets of buffers holds as many runs, of which the first serves."""
    runs = [KernelRun(*kernel) for kernel in result.kernels]
    copies = int(result.facts.get("copies", 1))
    return attribute(runs[: len(runs) // copies], products_per_pass=max(len(result.task.case.rows), 1))


def _products(found: list[TaskResult]) -> Breakdown:
    """The three passes were timed one by one."""
    task = found[0].task
    pass_ms = {result.task.pass_name: time_interval(result.rounds).value for result in found}
    rounds = min(len(result.rounds) for result in found)
    summed = [[time] for time in np.sum([per_round(result.rounds[:rounds]) for result in found], axis=0)]
    proofs = {
        result.task.pass_name: evidence(recipe(task.recipe), result.task.pass_name, [kernel[0] for kernel in result.kernels])
        for result in found
        if result.kernels
    }
    return Breakdown(task.case, task.recipe, task.mode, time_interval(summed), pass_ms, {}, proofs, host_ms=0.0)
