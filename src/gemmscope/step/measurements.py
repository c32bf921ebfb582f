"""What a run of steps has measured so far, collected from the worker's messages, live or out of the journal.

Where the whole depth does not fit into memory, each recipe is run at two depths, and the step of the whole model follows from the
line through them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gemmscope.findings import Finding, finding
from gemmscope.interval import Interval
from gemmscope.measure.stats import Bursts, Floats, Noise, interval_of, noise_of, pieces
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import Variant, VariantResult


class StepMeasurements:
    """All variants of a run by their name. `pieces`: the bursts of each, cut into pieces as statistics need them."""

    def __init__(self, variants: Iterable[Variant], layers: int) -> None:
        self.variants = {variant.name: VariantResult(variant) for variant in variants}
        self.pieces: dict[str, list[list[float]]] = {name: [] for name in self.variants}
        self.layers = layers  # of the whole model
        self.hello: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.complete_rounds = 0

    def prepared(self) -> tuple[int, int]:
        """How many variants are ready or have failed; of how many."""
        return sum(bool(result.facts) or bool(result.failure) for result in self.variants.values()), len(self.variants)

    def take(self, message: dict[str, Any]) -> None:
        """Record one message of the worker."""
        kind = message["type"]
        result = self.variants.get(str(message.get("task", "")))
        if kind == "hello":
            self.hello = message
        elif kind == "finding":
            self.findings.append(finding(message["code"], **message["facts"]))
        elif kind == "round":
            self.complete_rounds += 1
        elif kind == "samples":
            for name, burst in message["times_ms"].items():
                self.variants[name].rounds_ms.append(burst)
                self.variants[name].states.append(message["state"])
                self.pieces[name].append(pieces(burst, sum(burst)))
        elif result is not None and kind == "ready":
            result.facts = {key: value for key, value in message.items() if key not in ("type", "task")}
        elif result is not None and kind == "failed":
            result.failure, result.failure_kind = message["why"], message["kind"]
        elif result is not None and kind == "profile":
            result.parts = [(part, direction, kernels) for part, direction, kernels in message["parts"]]
            result.busy_ms = message["busy_ms"]
        elif result is not None and kind == "host":
            result.host_ms = message["host_ms"]

    def any_samples(self) -> bool:
        return any(result.rounds_ms for result in self.variants.values())

    def noise(self) -> Noise:
        """The noise, estimated from everything that was measured. Negative correlation within a burst is not used: a prediction
        must hold for the steps of another process too, which begin in another state."""
        return noise_of((self.pieces[name] for name, result in self.variants.items() if result.measured), swings=False)

    def of(self, recipe: str, left_out: tuple[str, ...] = (), *, real: bool = False) -> list[VariantResult]:
        """The variants of one plan, the deepest first."""
        chosen = [
            result
            for result in self.variants.values()
            if (result.variant.recipe, result.variant.left_out, result.variant.real) == (recipe, left_out, real)
        ]
        return sorted(chosen, key=lambda result: -result.variant.depth)

    def deepest(self, recipe: str) -> VariantResult | None:
        """The deepest variant of a recipe that was measured."""
        return next((result for result in self.of(recipe) if result.measured), None)

    def mean_ms(self, result: VariantResult) -> float:
        """The measured step of this very variant, at its own depth."""
        flat = [piece for burst in self.pieces[result.variant.name] for piece in burst]
        return sum(flat) / len(flat)

    def step(self, recipe: str, left_out: tuple[str, ...] = (), *, real: bool = False) -> Interval | None:
        """Milliseconds of the whole model's step (`real`: of the depth that was run)."""
        bursts, weights = self._line(self.of(recipe, left_out, real=real))
        return interval_of(bursts, lambda means: _weighted(weights, means), self.noise(), 0) if bursts else None

    def speedup(
        self,
        recipe: str,
        left_out: tuple[str, ...] = (),
        *,
        over: str = BASELINE,
        over_left_out: tuple[str, ...] = (),
        real: bool = False,
    ) -> Interval | None:
        """The step's speedup over another plan."""
        slow, slow_weights = self._line(self.of(over, over_left_out, real=real))
        fast, fast_weights = self._line(self.of(recipe, left_out, real=real))
        if not slow or not fast:
            return None
        split = len(slow)

        def ratio(means: list[Floats]) -> Floats:
            return _weighted(slow_weights, means[:split]) / _weighted(fast_weights, means[split:])

        return interval_of([*slow, *fast], ratio, self.noise(), 0)

    def extrapolated(self, recipe: str, quantity: Callable[[VariantResult], float | None]) -> float | None:
        """A quantity of the whole model: as it was measured, or on the line through two depths."""
        points = [(result.variant.depth, quantity(result)) for result in self.of(recipe) if result.measured]
        known = [(depth, value) for depth, value in points if value is not None]
        if not points or len(known) < len(points):
            return None
        deep, at_deep = known[0]
        if deep == self.layers or len(known) == 1:
            return at_deep
        shallow, at_shallow = known[1]
        return at_deep + (at_deep - at_shallow) * (self.layers - deep) / (deep - shallow)

    def _line(self, results: list[VariantResult]) -> tuple[list[Bursts], list[float]]:
        """What to add up, with which weights, to get the whole model's step; nothing if a part is missing."""
        if not results or not all(result.measured for result in results):
            return [], []
        deep = results[0].variant
        first = self.pieces[deep.name]
        if deep.real or deep.depth == self.layers or len(results) == 1:
            return [first], [1.0]
        shallow = results[1].variant
        beyond = (self.layers - deep.depth) / (deep.depth - shallow.depth)
        return [first, self.pieces[shallow.name]], [1 + beyond, -beyond]


def _weighted(weights: Sequence[float], means: Sequence[Floats]) -> Floats:
    total: Floats = np.sum([weight * mean for weight, mean in zip(weights, means, strict=True)], axis=0)
    return total
