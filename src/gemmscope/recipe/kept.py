"""Mixes: a recipe with the first and last layers, or some ops in every layer, in a higher precision.

A mix is a recipe of its own, and its name describes it completely: `FP8Current (in BF16: first 1, last 2, MLP Down)`. Tables can
therefore list it like any other recipe, and a run file stores only the name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemmscope.roles import key_of, name_of

_NAME = re.compile(r"(?P<recipe>\S+) \(in (?P<higher>\S+): (?P<what>.+)\)", re.DOTALL)
_LAYERS = re.compile(r"(first|last) ([0-9]{1,5})")


@dataclass(frozen=True)
class KeptHigher:
    """What stays in the precision of `recipe`."""

    recipe: str
    first_layers: int = 0
    last_layers: int = 0
    ops: tuple[str, ...] = ()
    """In every layer: roles of linears, or the paths of a traced module."""

    @property
    def anything(self) -> bool:
        return bool(self.first_layers or self.last_layers or self.ops)

    def keeps_layer(self, layer: int, layers: int) -> bool:
        """Whether all linears of this layer, counted from 0, are kept.

        >>> [layer for layer in range(5) if KeptHigher("BF16", 1, 2).keeps_layer(layer, 5)]
        [0, 3, 4]
        """
        return layer < self.first_layers or layer >= layers - self.last_layers


def mixed_name(recipe: str, kept: KeptHigher) -> str:
    """The name of a mix; the name of the recipe itself if nothing is kept in higher precision.

    >>> mixed_name("FP8Current", KeptHigher("BF16", 1, 2, ("mlp-down",)))
    'FP8Current (in BF16: first 1, last 2, MLP Down)'
    """
    layers = [f"{end} {count}" for end, count in (("first", kept.first_layers), ("last", kept.last_layers)) if count]
    return f"{recipe} (in {kept.recipe}: {', '.join([*layers, *map(name_of, kept.ops)])})" if kept.anything else recipe


def split_name(name: str) -> tuple[str, KeptHigher] | None:
    """The recipe of a mix and what it keeps; None if this is not the name of a mix.

    >>> split_name("FP8Current (in BF16: first 1, MLP Down)")
    ('FP8Current', KeptHigher(recipe='BF16', first_layers=1, last_layers=0, ops=('mlp-down',)))
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layers, ops = {"first": 0, "last": 0}, []
    for part in match["what"].split(", "):
        if (counted := _LAYERS.fullmatch(part)) is not None:
            layers[counted[1]] = int(counted[2])
        else:
            ops.append(key_of(part))
    return match["recipe"], KeptHigher(match["higher"], layers["first"], layers["last"], tuple(ops))
