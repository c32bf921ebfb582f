"""What was measured of training steps so far.

Where the whole depth does not fit into memory, each recipe is run at several depths, and the step of the whole model is the sum
of their steps, each times a weight: on the line through two depths, or so that the layers of every kind add up.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from gemmscope.engine.messages import Launch, Message, Profile
from gemmscope.engine.stats import Bursts, Floats, Noise, interval_of, noise_of
from gemmscope.engine.store import ResultStore
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import Variant, VariantResult


class StepMeasurements(ResultStore[VariantResult]):
    """All variants of a step by their name. `layers`: of the whole model; `weights`: of each depth in its step, if several are
    run."""

    def __init__(self, variants: Iterable[Variant], layers: int, weights: Mapping[int, float] = MappingProxyType({})) -> None:
        super().__init__({variant.name: VariantResult(variant) for variant in variants})
        self.layers, self.weights = layers, weights

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

    def of(self, recipe: str, left_out: tuple[str, ...] = ()) -> list[VariantResult]:
        """The variants of one plan, the deepest first."""
        chosen = [one for one in self.tasks.values() if (one.variant.recipe, one.variant.left_out) == (recipe, left_out)]
        return sorted(chosen, key=lambda result: -result.variant.depth)

    def failure(self, recipe: str) -> str:
        """Why a recipe has no step; empty if that is not known."""
        return next((result.failure for result in self.of(recipe) if result.failure), "")

    def deepest(self, recipe: str) -> VariantResult | None:
        """The deepest variant of a recipe that was measured."""
        return next((result for result in self.of(recipe) if result.measured), None)

    def mean_ms(self, result: VariantResult) -> float:
        """The measured step of this very variant, at its own depth."""
        flat = [piece for burst in self.pieces[result.variant.name] for piece in burst]
        return sum(flat) / len(flat)

    def step(self, recipe: str, left_out: tuple[str, ...] = ()) -> Interval | None:
        """Milliseconds of the whole model's step."""
        bursts, weights = self._summands(recipe, left_out)
        return interval_of(bursts, lambda means: _weighted(weights, means), self.noise(), 0) if bursts else None

    def speedup(
        self, recipe: str, left_out: tuple[str, ...] = (), *, over: str = BASELINE, over_left_out: tuple[str, ...] = ()
    ) -> Interval | None:
        """The step's speedup over another plan."""
        slow, slow_weights = self._summands(over, over_left_out)
        fast, fast_weights = self._summands(recipe, left_out)
        if not slow or not fast:
            return None
        split = len(slow)

        def ratio(means: list[Floats]) -> Floats:
            return _weighted(slow_weights, means[:split]) / _weighted(fast_weights, means[split:])

        return interval_of([*slow, *fast], ratio, self.noise(), 0)

    def extrapolated(self, recipe: str, quantity: Callable[[VariantResult], float | None]) -> float | None:
        """A quantity of the whole model, from those of the depths that were run; None if one of them is missing."""
        terms = [(self._weight(result), quantity(result)) for result in self.of(recipe)]
        known = [weight * value for weight, value in terms if value is not None]
        return sum(known) if known and len(known) == len(terms) else None

    def _summands(self, recipe: str, left_out: tuple[str, ...]) -> tuple[list[Bursts], list[float]]:
        """What to add up, with which weights, to get the whole model's step; nothing if a part is missing."""
        results = self.of(recipe, left_out)
        if not all(result.measured for result in results):
            return [], []
        return [self.pieces[result.variant.name] for result in results], [self._weight(result) for result in results]

    def _weight(self, result: VariantResult) -> float:
        return self.weights.get(result.variant.depth, 1.0)


def _weighted(weights: Sequence[float], means: Sequence[Floats]) -> Floats:
    total: Floats = np.sum([weight * mean for weight, mean in zip(weights, means, strict=True)], axis=0)
    return total
