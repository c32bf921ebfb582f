"""What a recipe leaves in a higher precision: the first and last layers, and ops in every layer.

A mix is a recipe of its own, whose name says all of it: `FP8Current (in BF16: first 1, last 2, MLP Down)`. So it is a row beside
other recipes wherever these are rows, and a run file needs no more than the name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"(?P<recipe>\S+) \(in (?P<higher>\S+): (?P<what>.+)\)", re.DOTALL)
_LAYERS = re.compile(r"(first|last) ([0-9]{1,5})")


@dataclass(frozen=True)
class KeptHigher:
    """What stays in the precision of `recipe`."""

    recipe: str
    first_layers: int = 0
    last_layers: int = 0
    ops: tuple[str, ...] = ()
    """In every layer: linears as `gemmscope shapes` names them."""

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
    """The name of a recipe that keeps something higher; the recipe's own where it keeps nothing.

    >>> mixed_name("FP8Current", KeptHigher("BF16", 1, 2, ("MLP Down",)))
    'FP8Current (in BF16: first 1, last 2, MLP Down)'
    """
    layers = [f"{end} {count}" for end, count in (("first", kept.first_layers), ("last", kept.last_layers)) if count]
    return f"{recipe} (in {kept.recipe}: {', '.join([*layers, *kept.ops])})" if kept.anything else recipe


def split_name(name: str) -> tuple[str, KeptHigher] | None:
    """The recipe of a mix and what it keeps; None if this is not the name of one.

    >>> split_name("FP8Current (in BF16: first 1, MLP Down)")
    ('FP8Current', KeptHigher(recipe='BF16', first_layers=1, last_layers=0, ops=('MLP Down',)))
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    layers, ops = {"first": 0, "last": 0}, []
    for part in found["what"].split(", "):
        if (counted := _LAYERS.fullmatch(part)) is not None:
            layers[counted[1]] = int(counted[2])
        else:
            ops.append(part)
    return found["recipe"], KeptHigher(found["higher"], layers["first"], layers["last"], tuple(ops))
