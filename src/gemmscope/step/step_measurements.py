"""What was measured of training steps so far.

Where the whole depth does not fit into memory, each recipe is run at several depths, and the step of the whole model is the sum
of their steps, each times a weight: on the line through two depths, or so that the layers of every kind add up.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import mul
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmscope.engine.messages import Launch, Message, Profile
from gemmscope.engine.stats import Bursts, Floats, Noise, interval_of, noise_of
from gemmscope.engine.store import ResultStore
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import Variant, VariantResult

LATE_SHARE = 0.1  # of the steps of a burst


class StepMeasurements(ResultStore[VariantResult]):
    """All variants of a step by their name. `layers`: of the whole model; `weights`: of each depth in its step, if several are
    run."""

    def __init__(self, variants: Iterable[Variant], layers: int, weights: Mapping[int, float] = MappingProxyType({})) -> None:
        super().__init__({variant.name: VariantResult(variant) for variant in variants})
        self.layers, self.weights = layers, weights

    def take(self, message: Message) -> None:
        """Record one message of the worker."""
        match message:
            case Profile(name, parts, busy_ms, each_ms):
                self.tasks[name].parts = [(part, way, [list(kernel) for kernel in kernels]) for part, way, kernels in parts]
                self.tasks[name].busy_ms, self.tasks[name].busy_each_ms = busy_ms, list(each_ms)
            case Launch(name, host_ms, each_ms):
                self.tasks[name].host_ms, self.tasks[name].host_each_ms = host_ms, list(each_ms)
            case _:
                super().take(message)

    def empty(self, key: str) -> VariantResult:
        return VariantResult(self.tasks[key].variant)

    def noise(self) -> Noise:
        """The noise, estimated from everything that was measured. Negative correlation within a burst is not used: a prediction
        must hold for the steps of another process too, which begin in another state."""
        return noise_of((self._timely(result) for result in self.tasks.values() if result.measured), swings=False)

    def _timely(self, result: VariantResult) -> list[list[float]]:
        """The bursts of a variant in which the CPU was never late."""
        bursts = zip(self.pieces[result.variant.name], result.states, strict=True)
        return [burst for burst, state in bursts if not is_late(state)]

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
        """The step of this very variant as launched, at its own depth."""
        if any(map(is_late, result.states)):
            return median(map(median, result.rounds_ms))
        flat = [piece for burst in self.pieces[result.variant.name] for piece in burst]
        return sum(flat) / len(flat)

    def late_rounds(self, recipe: str, left_out: tuple[str, ...] = ()) -> tuple[int, int]:
        """In how many rounds the CPU launched this plan's step too late, and how many rounds there are."""
        late = [list(map(is_late, result.states)) for result in self.of(recipe, left_out)]
        rounds = [any(states) for states in zip(*late, strict=False)]
        return sum(rounds), len(rounds)

    def sm_mhz(self, recipe: str) -> float | None:
        """The median clock of the GPU while a recipe's steps ran; None where the driver does not tell."""
        clocks = [state["sm_mhz"] for result in self.of(recipe) for state in result.states if state.get("sm_mhz")]
        return float(median(clocks)) if clocks else None

    def step(self, recipe: str, left_out: tuple[str, ...] = ()) -> Interval | None:
        """Milliseconds of the whole model's step as launched. Where the CPU was late, it is the median of the rounds, and the
        interval is their range."""
        if not self.late_rounds(recipe, left_out)[0]:
            return self.timely_step(recipe, left_out)
        rounds = self._rounds(recipe, left_out)
        return Interval(median(rounds), *range_of(rounds)) if rounds else None

    def timely_step(self, recipe: str, left_out: tuple[str, ...] = ()) -> Interval | None:
        """The same, from the rounds in which the CPU was never late: the GPU was the limit."""
        bursts, weights = self._summands(recipe, left_out)
        return interval_of(bursts, lambda means: _weighted(weights, means), self.noise(), 0) if bursts else None

    def speedup(
        self, recipe: str, left_out: tuple[str, ...] = (), *, over: str = BASELINE, over_left_out: tuple[str, ...] = ()
    ) -> Interval | None:
        """The step's speedup over another plan, as launched."""
        if not (self.late_rounds(recipe, left_out)[0] or self.late_rounds(over, over_left_out)[0]):
            return self.timely_speedup(recipe, left_out, over=over, over_left_out=over_left_out)
        slow, fast = self._rounds(over, over_left_out), self._rounds(recipe, left_out)
        if not slow or not fast:
            return None
        value = median(slow) / median(fast)
        low, high = range_of(one / other for one, other in zip(slow, fast, strict=False))
        return Interval(value, min(low, value), max(high, value))

    def timely_speedup(
        self, recipe: str, left_out: tuple[str, ...] = (), *, over: str = BASELINE, over_left_out: tuple[str, ...] = ()
    ) -> Interval | None:
        """The same, from the rounds in which the CPU was never late."""
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
        """What to add up, with which weights, to get the whole model's step: the timely bursts of every depth. Nothing if a depth
        is missing, or was late in most rounds."""
        results = self.of(recipe, left_out)
        bursts: list[Bursts] = [self._timely(result) for result in results]
        enough = [2 * len(timely) > len(result.states) for timely, result in zip(bursts, results, strict=True)]
        if not all(result.measured for result in results) or not all(enough):
            return [], []
        return bursts, [self._weight(result) for result in results]

    def _rounds(self, recipe: str, left_out: tuple[str, ...]) -> list[float]:
        """The whole model's step in every round: the median of its steps, at each depth times its weight."""
        results = self.of(recipe, left_out)
        if not all(result.measured for result in results):
            return []
        weights = [self._weight(result) for result in results]
        rounds = zip(*([median(burst) for burst in result.rounds_ms] for result in results), strict=False)
        return [sum(map(mul, weights, depths)) for depths in rounds]

    def _weight(self, result: VariantResult) -> float:
        return self.weights.get(result.variant.depth, 1.0)


def is_late(state: Mapping[str, Any]) -> bool:
    """Whether the CPU launched more than a few steps of a burst too late."""
    return float(state.get("late", 0.0)) > LATE_SHARE


def range_of(values: Iterable[float]) -> tuple[float, float]:
    """The range of 90% of the values: with fewer than twenty, of all.

    >>> range_of([1.0, 4.0, 2.0])
    (1.0, 4.0)
    """
    ordered = sorted(values)
    outside = len(ordered) // 20
    return ordered[outside], ordered[-1 - outside]


def _weighted(weights: Sequence[float], means: Sequence[Floats]) -> Floats:
    total: Floats = np.sum([weight * mean for weight, mean in zip(weights, means, strict=True)], axis=0)
    return total
