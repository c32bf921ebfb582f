"""Which precision to use, and which linears to leave in BF16: from the measured times of every part, proven by measuring it.

A part (the QKV projection, the output projection, the MLP) loses if its products, casts and norms take longer in low precision
than in BF16. The best recipe without the parts that lose is a candidate; it is run against the best single recipe, and wins only
if it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmscope.interval import Interval
from gemmscope.measure.findings import known
from gemmscope.recipe.recipes import BASELINE
from gemmscope.step.answer import RecipeAnswer, StepAnswer
from gemmscope.step.results import StepResults
from gemmscope.step.waterfall import LINEARS, place

LEAVABLE = ("qkv", "attn out", "mlp")  # modules that can be told to stay in BF16
MODULE_OF = {"experts": "mlp", "shared expert": "mlp"}  # parts that go with another's module
MARGIN = 0.02  # a part that takes longer by less does not lose: two profiled steps differ by as much


@dataclass(frozen=True)
class Plan:
    """A recipe, and the parts of every layer that stay in BF16."""

    recipe: str
    left_out: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return self.recipe + (f", with {' and '.join(self.left_out)} in {BASELINE}" if self.left_out else "")


@dataclass(frozen=True)
class PartGain:
    """One part of all layers: milliseconds of a step in BF16 and in the recipe."""

    part: str
    baseline_ms: float
    recipe_ms: float

    @property
    def loses(self) -> bool:
        return self.recipe_ms > self.baseline_ms * (1 + MARGIN)


@dataclass(frozen=True)
class Recommendation:
    """What to use. `rival` is the next best plan; `certain` is False where the two are too close to call."""

    plan: Plan
    speedup: Interval | None
    rival: Plan | None
    certain: bool

    @property
    def words(self) -> str:
        doubt = f"; too close to call against {self.rival.words}" if self.rival and not self.certain else ""
        if self.plan.recipe == BASELINE:
            return f"stay with {BASELINE}: no precision that was measured is faster{doubt}"
        gain = f" ({self.speedup.value:.2f}x {_ends(self.speedup)})" if self.speedup else ""
        return f"use {self.plan.words}{gain}{doubt}"


def _ends(found: Interval) -> str:
    return f"[{max(found.low, 0.0):.2f}, {found.high:.2f}]" if known(found) else "[?]"


def part_gains(results: StepResults, recipe: str) -> list[PartGain]:
    """Every part of the layers, forward and backward, in BF16 and in the recipe; nothing where kernels were not seen."""
    sides = []
    for name in (BASELINE, recipe):
        found = next((result for result in results.of(name) if result.parts), None)
        if found is None:
            return []
        sums: dict[str, float] = {}
        for kernel in place(found.parts):
            if kernel.part in LINEARS:
                part = MODULE_OF.get(kernel.part, kernel.part)
                sums[part] = sums.get(part, 0.0) + kernel.time_us / 1000
        sides.append(sums)
    return [PartGain(part, sides[0][part], sides[1].get(part, 0.0)) for part in LEAVABLE if part in sides[0]]


def as_asked(found: StepAnswer) -> list[RecipeAnswer]:
    """The precisions whose products ran in them: a fallback is no speedup, and is never recommended."""
    return [each for each in found.recipes if not each.fell_back]


def best_recipe(found: StepAnswer) -> str:
    """The one with the shortest step."""
    return min(as_asked(found), key=lambda each: each.step.value).recipe


def candidate(results: StepResults, found: StepAnswer) -> Plan | None:
    """A mixed plan that could beat every single recipe; None if no part loses, or all do."""
    others = [each for each in as_asked(found) if each.recipe != BASELINE]
    if not others:
        return None
    best = min(others, key=lambda each: each.step.value).recipe  # if BF16 is faster, it may still win without the parts that lose
    losing = tuple(gain.part for gain in part_gains(results, best) if gain.loses and gain.part in LEAVABLE)
    return Plan(best, losing) if losing and len(losing) < len(LEAVABLE) else None


def recommend(results: StepResults, plans: Sequence[Plan]) -> Recommendation | None:
    """Among what was measured: the plan with the shortest step, and whether that is sure; None if nothing was."""
    timed = [(plan, step) for plan in plans if (step := results.step(plan.recipe, plan.left_out)) is not None]
    if not timed:
        return None
    timed.sort(key=lambda pair: pair[1].value)
    best, best_step = timed[0]
    rival, rival_step = timed[1] if len(timed) > 1 else (None, None)
    certain = rival_step is None or best_step.high < rival_step.low
    gain = results.speedup(best.recipe, best.left_out) if best.recipe != BASELINE else None
    return Recommendation(best, gain, rival, certain)
