"""Which experts of a layer are sampled: a few stand for all, the same ones in all linears of the layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gemmscope.numerics.names import LinearName
from gemmscope.numerics.sample import random_for

EXPERTS = 2  # of each layer


def few_experts(names: Mapping[str, LinearName], seed: int) -> dict[str, int]:
    """The linears to sample: path → the number of experts that it stands for, 1 where it is not an expert.

    >>> from gemmscope.numerics.names import name_linears
    >>> paths = [f"layers.0.experts.{number}.up_proj" for number in range(8)] + ["layers.0.o_proj"]
    >>> names = name_linears(dict.fromkeys(paths, (64, 64)))
    >>> sorted(few_experts(names, seed=0).values())
    [1, 8, 8]
    """
    groups: dict[tuple[int | None, str], set[int]] = defaultdict(set)
    for name in names.values():
        if name.expert is not None:
            groups[_group(name)].add(name.expert)
    chosen = {}
    for group, numbers in groups.items():
        drawn = random_for(seed, group[0] or 0, group[1]).choice(sorted(numbers), min(EXPERTS, len(numbers)), replace=False)
        chosen[group] = set(drawn.tolist())
    return {
        path: 1 if name.expert is None else len(groups[_group(name)])
        for path, name in names.items()
        if name.expert is None or name.expert in chosen[_group(name)]
    }


def _group(name: LinearName) -> tuple[int | None, str]:
    return name.layer, name.linear.rpartition(".")[0]
