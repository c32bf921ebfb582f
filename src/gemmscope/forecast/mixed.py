"""The linears of a mix: which of them run in which recipe, and which run in the same recipe in two mixes.

A linear that both sides of a speedup run in the same recipe has the same error in both, which hardly moves the ratio: it counts
as a part of the step that does not depend on the precision.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt

from gemmscope.forecast.estimate import Estimate
from gemmscope.grouping import grouped
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.kept import KeptHigher
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.workload.cases import Case
from gemmscope.workload.derive import Workload, layers_by_section
from gemmscope.workload.ops import Linear
from gemmscope.workload.sharding import stage_layers

CountedCase = tuple[Case, int, float]  # a linear, how often it runs, and how often forward does
Assigned = Mapping[str, int]
"""Recipe → how many of the layers' linears run in it."""


def without_misaligned(counts: Assigned, sizes: Mapping[str, int]) -> Assigned:
    """Move linears to BF16 whose sizes do not fit their recipe."""
    result: dict[str, int] = {}
    for name, count in counts.items():
        runs = name if not recipe(name).quantizes or not recipe(name).misaligned(sizes) else BASELINE
        result[runs] = result.get(runs, 0) + count
    return result


def assigned(
    model: ModelSpec | None, run: RunSpec, workload: Workload, ops: Sequence[Linear], base: str, kept: KeptHigher
) -> list[Assigned]:
    """How many of each op run in the base recipe of a mix, and how many in its higher precision."""
    shares = _kept_layers(model, run, workload, ops, kept)
    result: list[Assigned] = []
    for op in ops:
        if op.key in kept.ops:
            result.append({kept.recipe: op.count})
            continue
        high, layers = shares.get(op.section if model is not None else op.key, (0, 1))
        count = round(op.count * high / layers)
        result.append({base: op.count - count, kept.recipe: count})
    return result


def _kept_layers(
    model: ModelSpec | None, run: RunSpec, workload: Workload, ops: Sequence[Linear], kept: KeptHigher
) -> dict[str, tuple[int, int]]:
    """How many layers are kept of how many, by section. The layers of a traced module are assumed to be alike."""
    if model is None:
        numbered = {op.key: op.count for op in ops if "*" in op.key}
        layers = min(numbered.values(), default=1)
        return {name: (min(kept.first_layers + kept.last_layers, layers), layers) for name in numbered}
    first, last = stage_layers(model, run)[workload.stage]
    total = len(model.layers)
    return {
        section: (sum(kept.keeps_layer(layer, total) for layer in layers), len(layers))
        for section, layers in layers_by_section(model, first, last).items()
    }


def by_recipe(linears: Sequence[CountedCase], chosen: Iterable[Assigned]) -> dict[str, list[CountedCase]]:
    """The linears of every recipe."""
    return grouped(
        (name, (case, count, runs))
        for (case, _, runs), counts in zip(linears, chosen, strict=True)
        for name, count in counts.items()
        if count
    )


def alike(one: Iterable[Assigned], other: Iterable[Assigned]) -> list[Assigned]:
    """The linears that two mixes run in the same recipe; the kept layers of one are among those of the other.

    >>> alike([{"FP8Current": 30, "BF16": 2}], [{"BF16": 32}])
    [{'BF16': 2}]
    """
    return [
        {name: min(count, second[name]) for name, count in first.items() if name in second}
        for first, second in zip(one, other, strict=True)
    ]


def kept_share(chosen: Iterable[Assigned], base: str) -> float:
    """The share of all linears that do not run in the base recipe."""
    counts = [(count, name) for assignment in chosen for name, count in assignment.items()]
    every = sum(count for count, _ in counts)
    return sum(count for count, name in counts if name != base) / every if every else 0.0


def without(whole: Estimate, part: Estimate) -> Estimate:
    """What is left of a sum without one of its parts: the inverse of `total`.

    >>> without(Estimate(3.0, own=0.1, shared=0.2), Estimate(3.0, own=0.1, shared=0.2))
    Estimate(value=0.0, own=0.0, shared=0.0)
    """
    value = whole.value - part.value
    if value <= 1e-9 * whole.value:
        return Estimate(0.0)
    squares = (whole.value * whole.own) ** 2 - (part.value * part.own) ** 2
    shared = whole.value * whole.shared - part.value * part.shared
    return Estimate(value, sqrt(max(squares, 0.0)) / value, max(shared, 0.0) / value)
