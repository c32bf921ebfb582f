"""Measures the training step: at the real depth with the weights of a few layers, in every recipe, until the speedups are precise
enough. Where the whole depth does not fit into memory, it runs shallower stacks and extrapolates.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gemmscope.engine.campaign import Attempt, Campaign
from gemmscope.engine.journal import fingerprint
from gemmscope.engine.rule import Uncertainty
from gemmscope.errors import DoesNotFitError, option
from gemmscope.findings import Finding, finding
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.step import StepSettings, Variant
from gemmscope.step.answer import PartialRecipe
from gemmscope.step.module_plan import LEAST_DEPTH, ModulePlan
from gemmscope.step.stack_plan import StackPlan
from gemmscope.step.step_measurements import StepMeasurements

SHRINK = 0.6  # of the depth, when memory is not enough
TUNING = 5.0  # factor on the allowed silence: dozens of configurations of a dozen kernels are compiled
OUT_OF_MEMORY = "out of memory"
ROUNDS_OF_LATE = 5


@dataclass(kw_only=True)
class StepCampaign(Campaign[StepMeasurements]):
    """A plan in several recipes. `real`: run the real model instead, as deep as memory allows (`--verify`)."""

    worker = "gemmscope.step.worker"
    ends_itself = True  # it profiles one step of each variant last

    plan: StackPlan | ModulePlan
    recipes: Sequence[str]
    settings: StepSettings
    real: bool = False
    captured_depth: int | None = None  # run so many layers as a CUDA graph
    mixed: Sequence[PartialRecipe] = ()  # plans that leave parts in BF16, measured beside the recipes
    most_layers: int | None = None  # of a live model that fit into memory; None: all, as far as is known
    seconds: float = field(init=False, default=0.0)  # of the whole run
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.results = self._empty(self.first_depth)

    @property
    def first_depth(self) -> int:
        """The depth to try first: the whole one, or what is expected to fit."""
        if self.captured_depth is not None:
            return self.captured_depth
        return self.plan.depth if self.most_layers is None else min(self.plan.depth, self.most_layers)

    def _empty(self, depth: int) -> StepMeasurements:
        """Every recipe at this depth; if it is not the whole one, at the depths that the whole one is extrapolated from."""
        weights = {depth: 1.0} if self.real else self.plan.weights(depth)
        plans = [*(PartialRecipe(recipe) for recipe in self.recipes), *self.mixed]
        captured = self.captured_depth is not None
        variants = [Variant(plan.recipe, layers, plan.left_out, self.real, captured) for plan in plans for layers in weights]
        return StepMeasurements(variants, self.plan.depth, weights)

    @property
    def silence_s(self) -> float:
        """A step of many micro-batches takes longer; and Triton tunes the kernels of mixers when they first run."""
        layers = self.plan.model.layers if isinstance(self.plan, StackPlan) else ()
        tuning = TUNING if any(layer.mixer is not None for layer in layers) else 1.0
        return self.settings.silence_s * max(tuning, self.plan.accumulation / 4)

    @property
    def part(self) -> str:
        variants = [result.variant.to_json() for result in self._empty(self.first_depth).tasks.values()]
        return fingerprint_of(self.plan, self.settings, variants)

    def run(self) -> StepMeasurements:
        """Measure until the rule is met, at the largest depth that fits."""
        began = time.monotonic()
        try:
            return super().run()
        finally:
            self.seconds = time.monotonic() - began

    def attempts(self) -> Iterator[Attempt]:
        """All variants at one depth; if memory does not suffice for one of them, all at a smaller depth."""
        depth = self.first_depth
        while True:
            yield Attempt(list(self.results.tasks), ends_at=OUT_OF_MEMORY)
            if not any(result.failure_kind == OUT_OF_MEMORY for result in self.results.tasks.values()):
                return
            depth = self._shallower(depth)

    def _shallower(self, depth: int) -> int:
        """The next depth to try, when memory does not suffice for this one."""
        if depth <= LEAST_DEPTH:
            layers = f" even with {depth} of its layers" if depth else ""
            raise DoesNotFitError(
                f"the model does not fit in this GPU's memory{layers}",
                f"use a smaller {option('micro_batch_size')} or {option('sequence_length')}, {option('recompute', 'full')}, "
                f"or split it with {option('tp')}",
            )
        smaller = max(int(depth * SHRINK), LEAST_DEPTH)
        whole = 2 * getattr(self.plan, "period", 1)  # so that every kind of layer has its share in this stack and in half of it
        smaller -= smaller % whole if 2 < whole <= smaller else 0
        code = "real-model-shallower" if self.real else "stack-shallower"
        self.findings.append(finding(code, depth=depth, smaller=smaller))
        self.results = self._empty(smaller)
        return smaller

    def request(self, tasks: Sequence[str]) -> dict[str, Any]:
        timed_only = self.real or self.captured_depth is not None
        return {
            **asdict(self.settings),
            "host": self.settings.host and not timed_only,
            "profile": not timed_only,
            "plan": asdict(self.plan),
            "live": isinstance(self.plan, ModulePlan),
            "variants": [self.results.tasks[name].variant.to_json() for name in tasks],
        }

    def uncertainties(self, tasks: Sequence[str]) -> list[Uncertainty]:  # noqa: ARG002
        """The uncertainty of every speedup; if only the baseline is run, that of its time. Where the CPU is late, a few rounds
        are enough."""
        plans = [*(PartialRecipe(name) for name in self.recipes if name != BASELINE), *self.mixed]
        intervals = [(plan, self.results.speedup(plan.recipe, plan.left_out)) for plan in plans]
        if not plans:
            intervals = [(PartialRecipe(BASELINE), self.results.step(BASELINE))]
        known = [(plan, interval) for plan, interval in intervals if interval is not None]
        return [Uncertainty(0.0 if self._late(plan) else interval.half_width) for plan, interval in known]

    def _late(self, plan: PartialRecipe) -> bool:
        """Whether the rounds of this plan, or of the baseline, show how late the CPU is."""
        seen = [self.results.late_rounds(plan.recipe, plan.left_out), self.results.late_rounds(BASELINE)]
        return any(late and rounds >= ROUNDS_OF_LATE for late, rounds in seen)


def fingerprint_of(plan: StackPlan | ModulePlan, settings: StepSettings, what: object) -> str:
    """A key that is equal for steps that are measured in the same way; the order of bursts may differ."""
    return fingerprint("step", {**asdict(settings), "seed": 0}, asdict(plan), what)
