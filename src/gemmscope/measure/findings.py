"""What a campaign's results say: the time of every op, the speedups that may be formed, and which must not be.

Run files, tables and pictures are all made from it. A number that was not measured is None here and a dash there, never a zero.
What ran in another precision than asked for has a time but no speedup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gemmscope.interval import Interval
from gemmscope.measure.breakdown import Breakdown, breakdown
from gemmscope.measure.memory import Memory, memory
from gemmscope.measure.results import Results
from gemmscope.measure.stats import time_interval
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.workload.cases import Case, Mode
from gemmscope.workload.ops import PASSES


@dataclass(frozen=True)
class Layer:
    """One of the model's layers, where all are alike: how many there are, and how often one runs each case."""

    layers: int
    counts: Mapping[Case, int]


class Findings:
    """Everything that can be said about a campaign's results."""

    interval_name = "95% interval"
    kind = ""  # what to call the numbers where they are not measured

    def __init__(
        self,
        results: Results,
        recipes: Sequence[str],
        modes: Sequence[Mode],
        *,
        layer: Layer | None = None,
        backend: str = "transformer_engine",
        cache_weights: bool = False,
    ) -> None:
        self.results, self.recipes, self.modes = results, list(recipes), list(modes)
        self.layer, self.backend, self.cache_weights = layer, backend, cache_weights
        self.cases = results.cases()
        self._cells = {
            (case, name, mode): breakdown(results, case, name, mode)
            for case in self.cases
            for name in self.recipes
            for mode in self.modes
        }
        self._speedups: dict[tuple[str, Mode, Case | None, str], Interval | None] = {}

    @property
    def bare(self) -> bool:
        """Whether these are products of sizes that someone typed, and no model's linears."""
        return all(case.passes == PASSES[:1] for case in self.cases)

    @property
    def capability(self) -> str:
        """The GPU's compute capability, as far as the worker said it."""
        return str(self.results.hello.get("device", {}).get("compute_capability", ""))

    def memory(self) -> dict[str, Memory]:
        """Bytes by recipe, computed; none for bare products, which are no model's."""
        if self.bare or self.backend == "torch":  # products alone, by a backend that trains nothing
            return {}
        return {name: memory(self.cases, name, self.backend, self.capability) for name in self.recipes}

    def cells(self) -> list[Breakdown]:
        """Everything that was measured."""
        return [cell for cell in self._cells.values() if cell is not None]

    def cell(self, case: Case, name: str, mode: Mode) -> Breakdown | None:
        """One op in one recipe. A recipe with another's products shows that one's, in pre-quantized mode."""
        return self._cells.get((case, self.measured_as(name, mode), mode))

    def measured_as(self, name: str, mode: Mode) -> str:
        other = recipe(name).same_kernels_as
        return other if mode == "pre-quantized" and other in self.recipes else name

    def columns(self, mode: Mode) -> list[str]:
        """The recipes that have numbers of their own in this mode."""
        return [name for name in self.recipes if self.measured_as(name, mode) == name]

    def left_as_is(self, case: Case, name: str, mode: Mode) -> str:
        """What the framework did otherwise than asked, on purpose and in its own words; empty if nothing."""
        cell = self.cell(case, name, mode)
        return cell.left_as_is if cell is not None else ""

    def fallback(self, case: Case, name: str, mode: Mode) -> str:
        """Which pass ran in another precision than asked for, in words; empty if none, or if the framework meant it."""
        cell = self.cell(case, name, mode)
        return cell.fallback if cell is not None else ""

    def falls_back(self, name: str, mode: Mode, case: Case | None = None) -> bool:
        """Whether any op (or this one) fell back."""
        return any(self.fallback(each, name, mode) for each in ([case] if case else self.cases))

    def speedup(self, name: str, mode: Mode, case: Case | None = None, over: str = BASELINE) -> Interval | None:
        """How many times faster than `over`: one op, or all together as often as the model runs them.

        None where it was not measured, where either side fell back, for an op that the framework left in high precision, and
        between recipes that run the same kernels.
        """
        key = (name, mode, case, over)
        if key not in self._speedups:
            self._speedups[key] = self._speedup(*key)
        return self._speedups[key]

    def _speedup(self, name: str, mode: Mode, case: Case | None, over: str) -> Interval | None:
        sides = [self.measured_as(name, mode), self.measured_as(over, mode)]
        if sides[0] == sides[1] or any(self.falls_back(side, mode, case) for side in sides):
            return None
        if case is not None and any(self.left_as_is(case, side, mode) for side in sides):
            return None
        return self.results.speedup(sides[0], mode, [case] if case else None, over=sides[1])

    def total(self, name: str, mode: Mode) -> Interval | None:
        """Milliseconds of one micro-batch's linears."""
        totals = self.results.totals(self.measured_as(name, mode), mode)
        return time_interval(totals, self.results.noise()) if totals is not None else None

    def counts(self) -> Mapping[Case, int]:
        """How often one layer runs each case; where layers differ, how often the model does."""
        return self.layer.counts if self.layer else {case: case.count for case in self.cases}

    def layer_ms(self, name: str, mode: Mode) -> float | None:
        """One layer's linears; None where layers differ or something is missing."""
        return _sum(self.layer.counts, lambda case: _total(self.cell(case, name, mode))) if self.layer else None

    def pass_ms(self, name: str, mode: Mode) -> dict[str, float | None]:
        """Each pass summed over the ops of a layer (where layers differ, of the model)."""
        return {each: self._pass_ms(name, mode, each) for each in PASSES}

    def _pass_ms(self, name: str, mode: Mode, pass_name: str) -> float | None:
        return _sum(self.counts(), lambda case: _of_pass(self.cell(case, name, mode), pass_name))

    def quantizing_ms(self, name: str, mode: Mode) -> float:
        """What quantizing takes in one micro-batch, of the ops for which that is known."""
        cells = [cell for case in self.cases if (cell := self.cell(case, name, mode))]
        return sum(sum(cell.quantize_ms.values()) * cell.case.count for cell in cells)


def _sum(counts: Mapping[Case, int], time_ms: Callable[[Case], float | None]) -> float | None:
    """Over all cases, each as often as it runs; None if one is missing."""
    parts = [(time_ms(case), count) for case, count in counts.items()]
    known = [time * count for time, count in parts if time is not None]
    return sum(known) if len(known) == len(parts) else None


def _total(cell: Breakdown | None) -> float | None:
    return cell.total.value if cell is not None else None


def _of_pass(cell: Breakdown | None, pass_name: str) -> float | None:
    return cell.pass_ms.get(pass_name) if cell is not None else None


def known(found: Interval) -> bool:
    """Whether there is an interval: one round alone has none."""
    return math.isfinite(found.high)


def too_close(found: Interval) -> bool:
    """Whether it cannot be told which side is faster, for all that was measured; without an interval there is nothing to tell."""
    return known(found) and found.low <= 1 <= found.high
