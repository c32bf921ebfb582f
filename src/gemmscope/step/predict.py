"""Predicts the training step: runs it at the real depth with the weights of a few layers, in every recipe, until the speedups
are precise enough. Where the whole depth does not fit into memory, it runs two shallower stacks and extrapolates.

This is the parent's side; `worker.py` runs the steps. Every message is journaled before it is used.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding
from gemmscope.measure.journal import Journal
from gemmscope.measure.link import Link
from gemmscope.measure.sampler import StoppingRule
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import StepSettings, Variant
from gemmscope.step.measurements import StepMeasurements
from gemmscope.step.plan import MOST_WEIGHTS, StackPlan
from gemmscope.step.recommend import Plan

SHRINK = 0.6  # of the depth, when memory does not suffice
LEAST_DEPTH = 2


class _CrowdedError(Exception):
    """Memory does not suffice for all variants at this depth: the other messages of the worker are not needed."""


@dataclass
class StepRun:
    """A plan in several recipes. `real`: run the real model instead, as deep as memory allows (`--verify`)."""

    plan: StackPlan
    recipes: Sequence[str]
    settings: StepSettings
    rule: StoppingRule
    journal: Journal
    command: Sequence[str] = ()
    real: bool = False
    mixed: Sequence[Plan] = ()  # plans that leave parts in BF16, measured beside the recipes
    config: Mapping[str, Any] | None = None  # of a Hugging Face model, which then runs its own layers, truncated to a few
    on_message: Callable[[dict[str, Any], StepMeasurements], None] = lambda *_: None
    results: StepMeasurements = field(init=False)
    seconds: float = field(init=False, default=0.0)  # of the whole run
    counts: None = field(init=False, default=None)  # a step has no fixed number of runs
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = StepMeasurements(self._variants(self.first_depth), self.plan.depth)

    @property
    def first_depth(self) -> int:
        """The depth to try first: the whole one, where layers share weights."""
        return min(self.plan.depth, MOST_WEIGHTS) if self.config is not None else self.plan.depth

    def _variants(self, depth: int) -> list[Variant]:
        """Every recipe at this depth; if it is not the whole one, also at half of it."""
        depths = [depth] if self.real or depth == self.plan.depth else [depth, max(1, depth // 2)]
        plans = [*(Plan(recipe) for recipe in self.recipes), *self.mixed]
        return [Variant(plan.recipe, layers, plan.left_out, real=self.real) for plan in plans for layers in depths]

    @property
    def silence_s(self) -> float:
        """A worker that sends nothing for this long is considered hung; a step of many micro-batches takes longer."""
        return self.settings.silence_s * max(1.0, self.plan.accumulation / 4)

    @property
    def fingerprint(self) -> str:
        variants = [variant.to_json() for variant in self._variants(self.first_depth)]
        settings = {key: value for key, value in asdict(self.settings).items() if key != "seed"}
        content = json.dumps([settings, asdict(self.plan), variants, self.config], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def run(self) -> StepMeasurements:
        """Measure until the rule is met, at the largest depth that fits."""
        begin, depth = time.monotonic(), self.first_depth
        try:
            number = self.journal.begin(self.fingerprint, list(self.command))
            while not self._try(number, depth):
                depth = self._shallower(depth)
            self.journal.finish(number)
        finally:
            self.seconds = time.monotonic() - begin
        return self.results

    def _shallower(self, depth: int) -> int:
        """The next depth to try, when memory does not suffice for this one."""
        if depth <= LEAST_DEPTH:
            raise UserError(
                f"the model does not fit into this GPU's memory even with {depth} of its layers",
                f"use a smaller {option('micro_batch_size')} or {option('sequence_length')}, {option('recompute', 'full')}, "
                f"or split it with {option('tp')}",
            )
        smaller = max(int(depth * SHRINK), LEAST_DEPTH)
        code = "real-model-shallower" if self.real else "stack-shallower"
        self.findings.append(finding(code, depth=depth, smaller=smaller))
        self.results = StepMeasurements(self._variants(smaller), self.plan.depth)
        return smaller

    def _try(self, number: int, depth: int) -> bool:
        """Measure one depth. False if memory does not suffice for one variant: all are then measured at another depth."""
        left = self._variants(depth)
        while left:
            with suppress(_CrowdedError), Link("gemmscope.step.worker") as link:
                death = link.converse(
                    self._request(left), silence_s=self.silence_s, note=partial(self._note, number), enough=self._enough
                )
            if self._crowded():
                return False
            if death is None:
                return True
            if self.rule.ended and all(result.measured or result.failure for result in self.results.variants.values()):
                # everything was timed; only the profile is missing
                self._note(number, _finding_message("kernels-not-profiled", death.why))
                return True
            at = death.task or left[0].name
            if not self.results.variants[at].failure:
                self._note(number, {"type": "failed", "task": at, "why": death.why, "kind": death.kind})
            left = [variant for variant in left if not self.results.variants[variant.name].failure]
        return True

    def _request(self, variants: Sequence[Variant]) -> dict[str, Any]:
        plain = {key: value for key, value in asdict(self.settings).items() if key != "silence_s"}
        plain |= {"host": self.settings.host and not self.real, "profile": not self.real}  # a real model is only timed
        config = dict(self.config) if self.config is not None else None
        return {**plain, "plan": asdict(self.plan), "config": config, "variants": [variant.to_json() for variant in variants]}

    def _crowded(self) -> bool:
        return any(result.failure_kind == "out of memory" for result in self.results.variants.values())

    def _note(self, number: int, message: dict[str, Any]) -> None:
        if message["type"] == "samples" and not self.results.any_samples():
            self.rule.restart()  # the time limit does not include loading and building
        problem = self.journal.write(number, message)
        for received in (message, *([_finding_message("journal-incomplete", problem)] if problem else [])):
            self.results.take(received)
            self.on_message(received, self.results)
        if self._crowded():
            raise _CrowdedError

    def _enough(self) -> bool:
        return self.results.complete_rounds >= self.rule.least_rounds and self.rule.settle(self.widest())

    def widest(self) -> float | None:
        """The largest half-width among the speedups; of the baseline alone, of its time."""
        others = [name for name in self.recipes if name != BASELINE]
        intervals = [self.results.speedup(name, real=self.real) for name in others]
        intervals += [self.results.speedup(plan.recipe, plan.left_out, real=self.real) for plan in self.mixed]
        if not others:
            intervals = [self.results.step(BASELINE, real=self.real)]
        return max((interval.half_width for interval in intervals if interval is not None), default=None)


def _finding_message(code: str, reason: str) -> dict[str, Any]:
    """A finding as the worker sends them, so that it is recorded as theirs are."""
    return {"type": "finding", "code": code, "facts": {"reason": reason}}
