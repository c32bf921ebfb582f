"""Which linears and which first or last layers to keep in a higher precision, so that the error stays below a bound.

A mix is a recipe for most cells (a cell is one linear of one layer) and a second recipe with a smaller error for the rest: all
linears of the first and the last layers, and some linears in every layer. Frameworks can be configured this way, but not cell by
cell.

The error of a mix is the root mean square over its cells, weighted by their damage (`error_table.py`); its time is a sum over
them (`speeds.py`). Its cost is its time, and half a percent of the time in BF16 for every part that must be configured: a
linear, the first layers, the last layers, a second recipe. Without that cost, the best mix would keep a dozen parts in higher
precision for a thousandth of the time, less than any speedup can resolve.

All of this follows from sums over rows and columns of a table, so that all mixes are tried: every pair of recipes, `MOST_ENDS`
first and as many last layers, every set of linears. With more than `MOST_LISTED` linears the sets are not listed. They are built
up linear by linear, and a set that another one beats in both error and cost is dropped, because whatever is added to both keeps
their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmscope import units
from gemmscope.findings import Finding, finding
from gemmscope.grouping import grouped
from gemmscope.numerics.evaluation.error_table import ErrorTable, Values, error_table, recipe_errors
from gemmscope.numerics.evaluation.speeds import SpeedResult, Speeds, nominal_speeds, speeds_of
from gemmscope.paste.mix import mix_to_paste
from gemmscope.recipe.recipes import BASELINE
from gemmscope.recipe.support import run_together
from gemmscope.results.base import ModelSummary
from gemmscope.results.numerics import LinearError, Mix, MixedPrecision, NumericsResult, ProbedDamage
from gemmscope.roles import role_named

MOST_ENDS = 16  # first layers, and last layers; with more, it is simpler to keep a linear
MOST_LISTED = 12  # linears whose sets are all listed: 4096 of them
MOST_SETS = 20_000  # that are kept while they are built up; see `_thinned`
MOST_SHOWN = 20  # mixes of the frontier
PART_COST = 0.005  # of the time in BF16, for each part of a mix
CLOSE, DIGITS = 1e-9, 12  # sums of the same numbers in another order are equal
Sets = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MixPlan:
    """A mix by its parts. `kept`: one truth value for each linear."""

    recipe: str
    higher: str
    first: int = 0
    last: int = 0
    kept: tuple[bool, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """Whether anything is kept in higher precision."""
        return self.first > 0 or self.last > 0 or any(self.kept)

    def mask(self, table: ErrorTable) -> Values:
        """1 for the cells that are kept in higher precision, else 0."""
        kept = np.zeros(table.flops.shape)
        kept[:, np.array(self.kept or (False,) * len(table.linears), dtype=bool)] = 1.0
        kept[: self.first] = 1.0
        kept[len(kept) - self.last :] = 1.0
        return kept


ScoredPlan = tuple[MixPlan, float, float]
"""A mix, its squared error and its cost."""


def recommend_mix(table: ErrorTable, speeds: Speeds, bound: float | None) -> MixedPrecision:
    """The mix of least cost below the bound, and the frontier of error and cost over all mixes, the fastest first.

    Of mixes that cost the same, the one with the smaller error.
    """
    frontier, least = list[MixPlan](), np.inf
    for plan, square, _ in sorted(_all_plans(table, speeds), key=lambda scored: (_near(scored[2]), _near(scored[1]))):
        if square < least * (1 - CLOSE):
            frontier.append(plan)
            least = square
    chosen = None
    if bound is not None:
        chosen = next((plan for plan in frontier if _mix(plan, table, speeds).error <= bound * (1 + CLOSE)), None)
    shown = [(plan, _mix(plan, table, speeds)) for plan in _shown(frontier, chosen)]
    return MixedPrecision(
        bound=bound,
        cost="bits" if speeds.of is None else "time",
        chosen=next((mix for plan, mix in shown if plan == chosen), None),
        frontier=tuple(mix for _, mix in sorted(shown, key=lambda pair: _time(pair[0], table, speeds))),
    )


def _time(plan: MixPlan, table: ErrorTable, speeds: Speeds) -> float:
    return speeds.time(_parts(plan, plan.mask(table)))


def _parts(plan: MixPlan, kept: Values) -> dict[str, Values]:
    """Recipe → the cells that run in it."""
    return {plan.recipe: 1 - kept, **({plan.higher: kept} if plan.is_mixed else {})}


def _near(value: float) -> float:
    """A rounded value that is equal for two sums of the same numbers."""
    return float(f"{value:.9e}")


def _shown(frontier: list[MixPlan], chosen: MixPlan | None) -> list[MixPlan]:
    """Whole recipes, the chosen mix, and others evenly spread between them."""
    step = max(len(frontier) / MOST_SHOWN, 1.0)
    places = {int(number * step) for number in range(MOST_SHOWN)}
    return [plan for place, plan in enumerate(frontier) if place in places or not plan.is_mixed or plan == chosen]


def _mix(plan: MixPlan, table: ErrorTable, speeds: Speeds) -> Mix:
    """The plan with its error and speedup, summed cell by cell."""
    kept = plan.mask(table)
    return Mix(
        recipe=plan.recipe,
        higher=plan.higher,
        first_layers=plan.first,
        last_layers=plan.last,
        linears=tuple(name for name, one in zip(table.linears, plan.kept, strict=False) if one),
        **table.figures(_parts(plan, kept)),
        kept_share=float((table.flops * kept).sum()),
        speedup=speeds.speedup(_parts(plan, kept)) if plan.recipe != BASELINE else None,
    )


def _all_plans(table: ErrorTable, speeds: Speeds) -> Iterator[ScoredPlan]:
    """Every recipe in all cells, then every pair of a recipe and one with a smaller error that some GPU runs both of."""
    names = [name for name in table.recipes if name in speeds.savings]
    for name in names:
        plan = MixPlan(name, BASELINE)
        yield plan, float(table.squares[name].sum()), _time(plan, table, speeds)
    for place, name in enumerate(names):
        for higher in names[:place]:
            possible = speeds.of is not None or run_together(name, higher)  # speeds are those of one GPU
            if possible and table.error(higher) < table.error(name):
                yield from _pair(table, speeds, name, higher)


def _pair(table: ErrorTable, speeds: Speeds, recipe: str, higher: str) -> Iterator[ScoredPlan]:
    """All mixes of two recipes that no other one of them beats."""
    gains = table.squares[recipe] - table.squares[higher]  # of squared error, if a cell is kept in higher precision
    saved = speeds.savings[recipe].by_cell
    costs = saved - speeds.savings[higher].by_cell  # of time
    layers, linears = gains.shape
    listed = _listed(linears) if linears <= MOST_LISTED else None
    ends = list(_ends(layers)) if table.contiguous else [(0, 0)]
    fronts = list[tuple[npt.NDArray[Any], ...]]()
    for place, (first, last) in enumerate(ends):
        inner = slice(first, layers - last)
        column_gains, column_costs = gains[inner].sum(axis=0), costs[inner].sum(axis=0) + PART_COST
        sets = listed if listed is not None else _built(column_gains, column_costs)
        sums = -(sets @ column_gains), sets @ column_costs
        front = _front(*sums)
        less_error = sums[0][front] - gains[:first].sum() - gains[layers - last :].sum()
        parts = PART_COST * ((first > 0) + (last > 0) + (higher != BASELINE))
        more_cost = sums[1][front] + costs[:first].sum() + costs[layers - last :].sum() + parts
        fronts.append((less_error, more_cost, sets[front], np.full(len(front), place)))
    less_error, more_cost, kept, of_ends = (np.concatenate(parts) for parts in zip(*fronts, strict=True))
    squares, sums_of_costs = table.squares[recipe].sum() + less_error, 1 - saved.sum() + more_cost
    for place in _front(squares, sums_of_costs):
        first, last = ends[of_ends[place]]
        plan = MixPlan(recipe, higher, first, last, tuple(map(bool, kept[place])))
        yield plan, float(squares[place]), float(sums_of_costs[place])


def _ends(layers: int) -> Iterator[tuple[int, int]]:
    """Numbers of first and last layers that leave at least one layer, the fewest first."""
    numbers = range(min(layers, MOST_ENDS + 1))
    yield from sorted(((first, last) for first in numbers for last in numbers if first + last < layers), key=sum)


def _listed(linears: int) -> Sets:
    """Every set of linears except the full one, the smallest first."""
    sets = (np.arange(2**linears - 1)[:, None] >> np.arange(linears)) & 1
    return (sets[np.argsort(sets.sum(axis=1), kind="stable")]).astype(bool)


def _built(gains: Values, costs: Values) -> Sets:
    """The sets of linears that no other one beats in both error and cost: those without the next linear, and those with it."""
    sets = np.zeros((1, len(gains)), dtype=bool)
    for place in range(len(gains)):
        added = sets.copy()
        added[:, place] = True
        sets = np.concatenate([sets, added])
        sums = -(sets @ gains), sets @ costs
        sets = sets[_thinned(*sums)]
    return sets


def _thinned(squares: Values, costs: Values) -> npt.NDArray[np.intp]:
    """The front, thinned to `MOST_SETS` points: the cheapest one in each interval of errors."""
    front = _front(squares, costs)
    if len(front) <= MOST_SETS:
        return front
    spread = squares[front] - squares[front].min()
    _, places = np.unique(np.floor(spread / spread.max() * MOST_SETS), return_index=True)
    return front[np.sort(places)]


def _front(squares: Values, costs: Values) -> npt.NDArray[np.intp]:
    """The indices of the points that no other point beats in both error and cost, by cost; of equal points, the first."""
    squares, costs = (np.round(values / max(np.abs(values).max(), 1e-300), DIGITS) for values in (squares, costs))
    order = np.lexsort((squares, costs))
    least = np.minimum.accumulate(np.concatenate([[np.inf], squares[order][:-1]]))
    return order[squares[order] < least]


def with_mix(
    result: NumericsResult, speed: SpeedResult | None = None, bound: float | None = None, gpu: str = ""
) -> NumericsResult:
    """The result with its recipes, the smallest error first, and the recommended mix. `speed`: a result with times; `gpu`: which
    of its GPUs."""
    linears, table = result.linears, error_table(result.linears)
    if table is None:
        return result
    speeds = nominal_speeds(table) if speed is None else speeds_of(speed, table, gpu)
    findings = [*result.findings, *_stays_in_baseline(table), *speeds.findings]
    if speed is not None and speed.model is not None and (reason := mismatch(linears, speed.model)):
        findings.append(finding("numerics-other-model", model=speed.model.name, reason=reason))
    mixed = recommend_mix(table, speeds, bound)
    if mixed.chosen is not None:
        in_layers = any(linear.layer is not None for linear in linears)
        settings = mix_to_paste(mixed.chosen, table.linears, len(table.layers), in_layers=in_layers)
        mixed = mixed.model_copy(update={"settings": settings})
    elif bound is not None:
        findings.append(finding("numerics-no-mix", bound=bound, baseline=BASELINE))
    recipes = tuple(
        row.model_copy(update={"speedup": speeds.speedups.get(row.recipe), "rivals": speeds.rivals.get(row.recipe, ())})
        for row in recipe_errors(linears, table)
    )
    return result.model_copy(
        update={
            "recipes": recipes,
            "mixed": mixed,
            "probed": tuple(one.model_copy(update={"predicted": predicted_damage(table, one)}) for one in result.probed),
            "findings": tuple(findings),
            "speed_origin": speeds.origin,
            "speed_of": speeds.of,
            "speed_gpu": speeds.gpu,
        }
    )


def predicted_damage(table: ErrorTable, probed: ProbedDamage) -> float | None:
    """The predicted damage of what a probe measured; None where it is not known."""
    if probed.recipe not in table.damage or probed.layer not in (None, *table.layers):
        return None
    damage = table.damage[probed.recipe]
    return float(damage.sum() if probed.layer is None else damage[table.layers.index(probed.layer)].sum())


def _stays_in_baseline(table: ErrorTable) -> Iterator[Finding]:
    """One finding for all recipes without errors for the same linears. A recipe that has no errors at all is in no table."""
    for linears, recipes in grouped((table.missing(name), name) for name in table.skipped).items():
        yield finding("numerics-stays-in-baseline", recipes=recipes, linears=list(linears), baseline=BASELINE)


def mismatch(every: Sequence[LinearError], model: ModelSummary) -> str:
    """What linears of layers and a model disagree in; empty where they agree, as far as it is known. SYNTHETIC linears have
    smaller sizes, and no layers."""
    linears = [linear for linear in every if linear.layer is not None]
    if not linears:
        return ""
    sizes = {size for linear in linears for size in (linear.inputs, linear.outputs) if size}
    layers = max(linear.layer or 0 for linear in linears) + 1
    if model.hidden_size is not None and sizes and model.hidden_size not in sizes:
        return f"with hidden size {model.hidden_size}, but none of the linears with errors has that size"
    if model.num_hidden_layers is not None and layers > model.num_hidden_layers:
        return f"with {units.counted(model.num_hidden_layers, 'layer')}, but the errors are those of {layers} layers"
    of_experts = any((known := role_named(linear.op)) is not None and known.block == "experts" for linear in linears)
    if model.layers == f"{model.num_hidden_layers} dense" and of_experts:
        return "which has no experts, but some errors are those of experts"
    return ""
