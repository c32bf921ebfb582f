"""What a run of steps has found so far, gathered from the worker's messages, live or out of the journal.

A *variant* is a recipe, with the parts that are left in BF16, at a depth. Where the whole depth does not fit into memory, each
recipe is run at two depths, and the whole model's step follows from the line through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gemmscope.interval import Interval
from gemmscope.measure.stats import Bursts, Floats, Noise, interval_of, noise_of, pieces
from gemmscope.recipe.recipes import BASELINE


@dataclass(frozen=True)
class Variant:
    """`real`: every layer has weights of its own, as in training; else they share those of a few."""

    recipe: str
    depth: int
    left_out: tuple[str, ...] = ()
    real: bool = False

    @property
    def plan_name(self) -> str:
        """The precision in words: the recipe, and what it leaves out."""
        return self.recipe + (f" without {', '.join(self.left_out)}" if self.left_out else "")

    @property
    def name(self) -> str:
        return f"{self.plan_name} / {self.depth} layers" + (" / real" if self.real else "")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name}


Part = tuple[str, str, list[list[Any]]]  # part, direction, its kernels (name, microseconds, stream)


@dataclass
class VariantResult:
    """One variant: its bursts, and what is known of it."""

    variant: Variant
    rounds: list[list[float]] = field(default_factory=list)
    pieces: list[list[float]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    busy_ms: float | None = None
    host_ms: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    failure_kind: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.rounds) and not self.failure


class StepResults:
    """All variants of a run by their name."""

    def __init__(self, variants: Iterable[Variant], layers: int) -> None:
        self.variants = {variant.name: VariantResult(variant) for variant in variants}
        self.layers = layers  # of the whole model
        self.hello: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.complete_rounds = 0

    def prepared(self) -> tuple[int, int]:
        """How many variants are ready, or will never be; of how many."""
        return sum(bool(result.facts) or bool(result.failure) for result in self.variants.values()), len(self.variants)

    def take(self, message: dict[str, Any]) -> None:
        """Note one message of the worker."""
        kind = message["type"]
        found = self.variants.get(str(message.get("task", "")))
        if kind == "hello":
            self.hello = message
        elif kind == "warning":
            self.warnings.append(message["words"])
        elif kind == "round":
            self.complete_rounds += 1
        elif kind == "samples":
            for name, burst in message["times_ms"].items():
                self.variants[name].rounds.append(burst)
                self.variants[name].pieces.append(pieces(burst, sum(burst)))
                self.variants[name].states.append(message["state"])
        elif found is not None and kind == "ready":
            found.facts = {key: value for key, value in message.items() if key not in ("type", "task")}
        elif found is not None and kind == "failed":
            found.failure, found.failure_kind = message["why"], message["kind"]
        elif found is not None and kind == "profile":
            found.parts = [(part, way, kernels) for part, way, kernels in message["parts"]]
            found.busy_ms = message["busy_ms"]
        elif found is not None and kind == "host":
            found.host_ms = message["host_ms"]

    def any_samples(self) -> bool:
        return any(result.rounds for result in self.variants.values())

    def noise(self) -> Noise:
        """What everything that was measured tells of the noise. That pieces of a burst make up for each other is not counted on:
        a prediction has to hold for another process's steps, too, which begin in a state of their own."""
        return noise_of((result.pieces for result in self.variants.values() if result.measured), swings=False)

    def of(self, recipe: str, left_out: tuple[str, ...] = (), *, real: bool = False) -> list[VariantResult]:
        """The variants of one precision, the deepest first."""
        chosen = [
            result
            for result in self.variants.values()
            if (result.variant.recipe, result.variant.left_out, result.variant.real) == (recipe, left_out, real)
        ]
        return sorted(chosen, key=lambda result: -result.variant.depth)

    def step(self, recipe: str, left_out: tuple[str, ...] = (), *, real: bool = False) -> Interval | None:
        """Milliseconds of the whole model's step (`real`: of the depth that was really run)."""
        bursts, weights = self._line(self.of(recipe, left_out, real=real))
        if not bursts:
            return None
        return interval_of(bursts, lambda means: _weighted(weights, means), self.noise(), 0)

    def speedup(
        self, recipe: str, left_out: tuple[str, ...] = (), *, over: str = BASELINE, real: bool = False
    ) -> Interval | None:
        """How many times faster than the other's step."""
        slow, slow_weights = self._line(self.of(over, (), real=real))
        fast, fast_weights = self._line(self.of(recipe, left_out, real=real))
        if not slow or not fast:
            return None
        split = len(slow)

        def ratio(means: list[Floats]) -> Floats:
            return _weighted(slow_weights, means[:split]) / _weighted(fast_weights, means[split:])

        return interval_of([*slow, *fast], ratio, self.noise(), 0)

    def extrapolated(self, recipe: str, figure: Callable[[VariantResult], float | None]) -> float | None:
        """A figure of the whole model: as it was measured, or on the line through two depths."""
        found = [result for result in self.of(recipe) if result.measured]
        values = [figure(result) for result in found]
        if not values or any(value is None for value in values):
            return None
        known = [value for value in values if value is not None]
        if found[0].variant.depth == self.layers or len(found) == 1:
            return known[0]
        depths = [result.variant.depth for result in found]
        return known[0] + (known[0] - known[1]) * (self.layers - depths[0]) / (depths[0] - depths[1])

    def _line(self, found: list[VariantResult]) -> tuple[list[Bursts], list[float]]:
        """What to add up, and how often each, to get the whole model's step; nothing if a part is missing."""
        if not found or not all(result.measured for result in found):
            return [], []
        deep = found[0].variant
        if deep.real or deep.depth == self.layers or len(found) == 1:
            return [found[0].pieces], [1.0]
        beyond = (self.layers - deep.depth) / (deep.depth - found[1].variant.depth)
        return [found[0].pieces, found[1].pieces], [1 + beyond, -beyond]


def _weighted(weights: Sequence[float], means: Sequence[Floats]) -> Floats:
    total: Floats = np.sum([weight * mean for weight, mean in zip(weights, means, strict=True)], axis=0)
    return total
