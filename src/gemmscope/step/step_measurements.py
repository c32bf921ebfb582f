"""What was measured of training steps so far.

Where the whole depth does not fit into memory, each recipe is run at several depths, and the step of the whole model is the sum
of their steps, each times a weight: on the line through two depths, or so that the layers of every kind add up.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from gemmscope.engine.messages import Launch, Message, Profile
from gemmscope.engine.stats import Bursts, Floats, Noise, interval_of, noise_of
from gemmscope.engine.store import ResultStore
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import Variant, VariantResult


class StepMeasurements(ResultStore[VariantResult]):
    """All variants of a step by their name."""

    def __init__(self, variants: Iterable[Variant], layers: int, weights: Mapping[int, float] | None = None) -> None:
        super().__init__({variant.name: VariantResult(variant) for variant in variants})
        self.layers = layers  # of the whole model
        self.weights = weights  # of each depth in the whole model; None: on the line through the two deepest

    def take(self, message: Message) -> None:
        """Record one message of the worker."""
        match message:
            case Profile(name, parts, busy_ms):
                self.tasks[name].parts = [(part, way, [list(kernel) for kernel in kernels]) for part, way, kernels in parts]
                self.tasks[name].busy_ms = busy_ms
            case Launch(name, host_ms):
                self.tasks[name].host_ms = host_ms
            case _:
                super().take(message)

    def empty(self, key: str) -> VariantResult:
        return VariantResult(self.tasks[key].variant)

    def noise(self) -> Noise:
        """The noise, estimated from everything that was measured. Negative correlation within a burst is not used: a prediction
        must hold for the steps of another process too, which begin in another state."""
        return noise_of((self.pieces[name] for name, result in self.tasks.items() if result.measured), swings=False)

    def of(self, recipe: str, left_out: tuple[str, ...] = (), *, real: bool = False) -> list[VariantResult]:
        """The variants of one plan, the deepest first."""
        chosen = [
            result
            for result in self.tasks.values()
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
        measured = [result for result in self.of(recipe) if result.measured]
        weights = self._weights([result.variant for result in measured])
        values = [quantity(result) for result in measured[: len(weights)]]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return sum(weight * value for weight, value in zip(weights, known, strict=True))

    def _line(self, results: list[VariantResult]) -> tuple[list[Bursts], list[float]]:
        """What to add up, with which weights, to get the whole model's step; nothing if a part is missing."""
        if not results or not all(result.measured for result in results):
            return [], []
        weights = self._weights([result.variant for result in results])
        return [self.pieces[result.variant.name] for result in results[: len(weights)]], weights

    def _weights(self, variants: Sequence[Variant]) -> list[float]:
        """The weights of the first of these variants, the deepest first; those beyond are not needed."""
        depths = [variant.depth for variant in variants]
        if len(variants) < 2 or variants[0].real or depths[0] == self.layers:
            return [1.0][: len(variants)]
        if self.weights is not None and set(depths) == set(self.weights):
            return [self.weights[depth] for depth in depths]
        beyond = (self.layers - depths[0]) / (depths[0] - depths[1])
        return [1 + beyond, -beyond]


def _weighted(weights: Sequence[float], means: Sequence[Floats]) -> Floats:
    total: Floats = np.sum([weight * mean for weight, mean in zip(weights, means, strict=True)], axis=0)
    return total
