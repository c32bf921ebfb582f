"""Predicts the training step: runs it at the real depth with the weights of a few layers, in every recipe, until the speedups
are known well enough. Where the whole depth does not fit into memory, two shallower stacks, and the line through them.

The parent's side; `worker.py` is the one that runs steps. Every message is journaled before it is used.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from gemmscope.errors import UserError
from gemmscope.measure.campaign import Keeper
from gemmscope.measure.link import Link
from gemmscope.measure.sampler import StoppingRule
from gemmscope.recipe.recipes import BASELINE
from gemmscope.step.plan import MOST_WEIGHTS, StackPlan
from gemmscope.step.recommend import Plan
from gemmscope.step.results import StepResults, Variant

SHRINK = 0.6  # of the depth, when memory does not suffice
LEAST_DEPTH = 2


@dataclass(frozen=True)
class StepSettings:
    """How to measure. A burst runs steps for `drop_ms`, then for `keep_ms` (and at least `least_steps`) that count."""

    backend: str
    drop_ms: float = 400.0
    keep_ms: float = 1000.0
    least_steps: int = 3
    max_rounds: int = 1_000_000  # as good as none: doubt and time decide
    host: bool = True  # also measure what launching takes the CPU
    silence_s: float = 180.0
    seed: int = field(default_factory=lambda: random.randrange(1 << 30))  # of the order of bursts


class _CrowdedError(Exception):
    """There is no room for all variants at this depth: whatever else the worker has to say is not needed."""


@dataclass
class StepRun:
    """A plan in several recipes. `real`: run the real model instead, as deep as memory allows (`--verify`)."""

    plan: StackPlan
    recipes: Sequence[str]
    settings: StepSettings
    rule: StoppingRule
    journal: Keeper
    command: Sequence[str] = ()
    real: bool = False
    mixed: Sequence[Plan] = ()  # plans that leave parts in BF16, measured beside the recipes
    config: Mapping[str, Any] | None = None  # of a Hugging Face model, which then runs its own layers, truncated to a few
    on_message: Callable[[dict[str, Any], StepResults], None] = lambda *_: None
    results: StepResults = field(init=False)
    seconds: float = field(init=False, default=0.0)  # that it took in all
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = StepResults(self._variants(self.first_depth), self.plan.depth)

    @property
    def first_depth(self) -> int:
        """To try: the whole one, where layers share weights."""
        return min(self.plan.depth, MOST_WEIGHTS) if self.config is not None else self.plan.depth

    def _variants(self, depth: int) -> list[Variant]:
        """Every recipe at this depth; if it is not the whole one, at half of it too."""
        depths = [depth] if self.real or depth == self.plan.depth else [depth, max(1, depth // 2)]
        plans = [*(Plan(recipe) for recipe in self.recipes), *self.mixed]
        return [Variant(plan.recipe, each, plan.left_out, real=self.real) for plan in plans for each in depths]

    @property
    def silence_s(self) -> float:
        """After so long without a word it is taken to hang: a step of many micro-batches says nothing for many times as long."""
        return self.settings.silence_s * max(1.0, self.plan.accumulation / 4)

    @property
    def counts(self) -> None:
        """There are no fixed numbers of steps."""
        return None

    @property
    def fingerprint(self) -> str:
        variants = [variant.to_json() for variant in self._variants(self.first_depth)]
        settings = {key: value for key, value in asdict(self.settings).items() if key != "seed"}
        content = json.dumps([settings, self.plan.to_json(), variants, self.config], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def run(self) -> StepResults:
        """Measure until the rule is content, at the largest depth that fits."""
        begin = time.monotonic()
        try:
            return self._run()
        finally:
            self.seconds = time.monotonic() - begin

    def _run(self) -> StepResults:
        number = self.journal.begin(self.fingerprint, list(self.command))
        depth = self.first_depth
        while not self._try(number, depth):
            if depth <= LEAST_DEPTH:
                raise UserError(
                    f"the model does not fit into this GPU's memory even with {depth} layer{'s' if depth > 1 else ''}",
                    "a smaller --micro-batch-size or --sequence-length fits, or --recompute full, or --tp to split it",
                )
            smaller = max(int(depth * SHRINK), LEAST_DEPTH)
            of = "of the real model " if self.real else ""
            self.notes.append(f"{depth} layers {of}do not fit into memory: measured with {smaller}")
            depth = smaller
            self.results = StepResults(self._variants(depth), self.plan.depth)
        self.journal.finish(number)
        return self.results

    def _try(self, number: int, depth: int) -> bool:
        """One depth. False as soon as memory does not suffice for one of them: all are then measured at another."""
        left = self._variants(depth)
        while left:
            with suppress(_CrowdedError), Link("gemmscope.step.worker") as link:
                death = link.converse(
                    self._request(left),
                    silence_s=self.silence_s,
                    note=lambda message: self._note(number, message),
                    enough=self._enough,
                )
            if self._crowded():
                return False
            if death is None:
                return True
            if self.rule.why and all(each.measured or each.failure for each in self.results.variants.values()):
                words = f"the kernels could not be looked at: {death.why}"  # all was timed, nothing more was asked of it
                self._note(number, {"type": "warning", "words": words})
                return True
            at = death.task or left[0].name
            if not self.results.variants[at].failure:
                self._note(number, {"type": "failed", "task": at, "why": death.why, "kind": death.kind})
            left = [variant for variant in left if not self.results.variants[variant.name].failure]
        return True

    def _request(self, variants: Sequence[Variant]) -> dict[str, Any]:
        plain = {key: value for key, value in asdict(self.settings).items() if key != "silence_s"}
        plain |= {"host": self.settings.host and not self.real, "look": not self.real}  # a real model is only timed
        config = dict(self.config) if self.config is not None else None
        return {**plain, "plan": self.plan.to_json(), "config": config, "variants": [each.to_json() for each in variants]}

    def _crowded(self) -> bool:
        return any(result.failure_kind == "out of memory" for result in self.results.variants.values())

    def _note(self, number: int, message: dict[str, Any]) -> None:
        if message["type"] == "samples" and not self.results.any_samples():
            self.rule.restart()  # loading and building are not measuring
        trouble = self.journal.write(number, message)
        for each in (message, *([{"type": "warning", "words": trouble}] if trouble else [])):
            self.results.take(each)
            self.on_message(each, self.results)
        if self._crowded():
            raise _CrowdedError

    def _enough(self) -> bool:
        return self.results.complete_rounds >= self.rule.least_rounds and self.rule.settle(self.widest())

    def widest(self) -> float | None:
        """The largest half-width among the speedups; with a baseline alone, of its own time."""
        others = [name for name in self.recipes if name != BASELINE]
        found = [self.results.speedup(name, real=self.real) for name in others]
        found += [self.results.speedup(plan.recipe, plan.left_out, real=self.real) for plan in self.mixed]
        if not others:
            found = [self.results.step(BASELINE, real=self.real)]
        return max((interval.half_width for interval in found if interval is not None), default=None)
