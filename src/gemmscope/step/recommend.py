"""Which recipe to use, and which linears to leave in BF16: from the measured times of every block, proven by measuring it.

A block (the QKV projection, the output projection, the MLP) loses if its GEMMs, casts and norms take longer in low precision than
in BF16. The best recipe without the blocks that lose is a candidate; it is run beside the best single recipe, and is recommended
only if it wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gemmscope.interval import Interval
from gemmscope.paste.emit import ready_to_paste
from gemmscope.paste.mix import mix_to_paste
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.numerics import Mix
from gemmscope.results.step import Recommendation, StepTimes
from gemmscope.results.winner import find_winner
from gemmscope.roles import name_of
from gemmscope.step.measurements import StepMeasurements
from gemmscope.step.waterfall import LINEARS, place

LEAVABLE = ("qkv", "attn out", "mlp")  # modules that can be told to stay in BF16
MODULE_OF = {"experts": "mlp", "shared expert": "mlp"}  # blocks that go with another's module
MARGIN = 0.02  # a block that takes longer by less does not lose: two profiled steps differ by as much


@dataclass(frozen=True)
class Plan:
    """A recipe, and the blocks of every layer that stay in BF16."""

    recipe: str
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In words.

        >>> Plan("FP8Current", ("qkv", "attn out")).name
        'FP8Current with qkv and attn out in BF16'
        """
        return self.recipe + (f" with {' and '.join(self.left_out)} in {BASELINE}" if self.left_out else "")


def block_ms(measurements: StepMeasurements, recipe: str) -> dict[str, float]:
    """Milliseconds of every block of all layers, forward and backward; nothing where kernels were not profiled."""
    result = next((result for result in measurements.of(recipe) if result.parts), None)
    sums: dict[str, float] = {}
    for kernel in place(result.parts) if result is not None else ():
        if kernel.block in LINEARS:
            block = MODULE_OF.get(kernel.block, kernel.block)
            sums[block] = sums.get(block, 0.0) + kernel.time_us / 1000
    return sums


def losing_blocks(measurements: StepMeasurements, recipe: str) -> tuple[str, ...]:
    """The blocks that take longer in the recipe than in BF16."""
    baseline_ms, recipe_ms = block_ms(measurements, BASELINE), block_ms(measurements, recipe)
    return tuple(block for block in LEAVABLE if recipe_ms.get(block, 0.0) > baseline_ms.get(block, inf) * (1 + MARGIN))


def candidate(measurements: StepMeasurements, times: StepTimes) -> Plan | None:
    """A mixed plan that could beat every single recipe; None if no block loses, or all do. A fallback is never its recipe."""
    others = [time for time in times.recipes if recipe(time.recipe).quantizes and not time.fell_back]
    others = [time for time in others if recipe(time.recipe).kept is None]
    if not others:
        return None
    best = min(others, key=lambda time: time.step_ms.value).recipe  # though BF16 is faster, it may win without blocks that lose
    losing = losing_blocks(measurements, best)
    return Plan(best, losing) if losing and len(losing) < len(LEAVABLE) else None


def recommend(measurements: StepMeasurements, plans: Sequence[Plan]) -> Recommendation | None:
    """Among what was measured: the fastest plan, and those too close to call against it; None if BF16 was not measured."""
    if measurements.step(BASELINE) is None:
        return None
    by_name = {plan.name: plan for plan in plans}

    def ratio(name: str, over: str) -> Interval | None:
        plan, other = by_name[name], by_name[over]
        return measurements.speedup(plan.recipe, plan.left_out, over=other.recipe, over_left_out=other.left_out)

    speedups = {name: measurements.speedup(plan.recipe, plan.left_out) for name, plan in by_name.items() if name != BASELINE}
    winner = find_winner({name: speedup for name, speedup in speedups.items() if speedup is not None}, ratio)
    best = by_name.get(winner.best, Plan(winner.best))
    texts = _to_paste(best, measurements.layers)
    return Recommendation(
        recipe=best.recipe, left_out=best.left_out, speedup=winner.speedup, rivals=winner.rivals, ready_to_paste=texts
    )


def _to_paste(plan: Plan, layers: int) -> dict[str, str]:
    """The settings of a plan in every framework that can express it."""
    chosen = recipe(plan.recipe)
    if chosen.kept is None:
        return ready_to_paste(plan.recipe, plan.left_out)
    kept = chosen.kept
    mix = Mix(
        recipe=chosen.base,
        higher=kept.recipe,
        first_layers=kept.first_layers,
        last_layers=kept.last_layers,
        linears=tuple(map(name_of, kept.ops)),
        error=0.0,
    )
    return mix_to_paste(mix, mix.linears, layers)
