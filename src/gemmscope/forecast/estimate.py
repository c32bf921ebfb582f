"""A forecast number with its uncertainty, and how uncertainties combine in sums, ratios and comparisons of recipes.

Each number has two uncertainties, both logarithmic half-widths of a 90% error bar. Its `own` error goes up for one part and down
for another, so it shrinks in a sum. The `shared` error goes the same way in all parts (the library's version, a GPU that was not
measured), so it does not shrink; but where both sides of a speedup have it, part of it cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import exp, hypot, sqrt
from typing import NamedTuple

from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Winner, winner_among


class Estimate(NamedTuple):
    """One number with its uncertainties. A plain tuple, because sweeps create millions of them."""

    value: float
    own: float = 0.0
    shared: float = 0.0

    @property
    def uncertainty(self) -> float:
        return hypot(self.own, self.shared)

    def interval(self) -> Interval:
        """The value with its 90% error bar.

        >>> Estimate(100.0, own=0.03, shared=0.04).interval().high.__round__(1)
        105.1
        """
        return Interval(self.value, self.value * exp(-self.uncertainty), self.value * exp(self.uncertainty))

    def times(self, factor: float) -> Estimate:
        """The estimate multiplied by a factor."""
        return Estimate(self.value * factor, self.own, self.shared)


def total(parts: Iterable[Estimate]) -> Estimate:
    """The sum of estimates, with its uncertainties.

    >>> total([Estimate(1.0, own=0.1), Estimate(1.0, own=0.1)]).own.__round__(3)
    0.071
    """
    value = squares = shared = 0.0
    for part_value, part_own, part_shared in parts:
        value += part_value
        squares += (part_value * part_own) ** 2
        shared += part_value * part_shared
    return Estimate(value, sqrt(squares) / value, shared / value) if value else Estimate(0.0)


def ratio(slow: Estimate, fast: Estimate, in_common: float) -> Estimate:
    """The speedup of `fast` over `slow`. `in_common` is the share of the shared uncertainties that both sides have in common.

    >>> ratio(Estimate(2.0, shared=0.1), Estimate(1.0, shared=0.1), in_common=1.0)
    Estimate(value=2.0, own=0.0, shared=0.0)
    """
    shared = slow.shared**2 + fast.shared**2 - 2 * in_common * slow.shared * fast.shared
    return Estimate(slow.value / fast.value, hypot(slow.own, fast.own), sqrt(max(shared, 0.0)))


def pairwise(names: Iterable[str], speedup: Callable[[str, str], Interval]) -> dict[tuple[str, str], Interval]:
    """The speedup of every recipe except BF16 over every other recipe."""
    listed = list(names)
    return {(name, over): speedup(name, over) for name in listed for over in listed if BASELINE != name != over}


def winner_of(pairs: Mapping[tuple[str, str], Interval], unfit: Collection[str] = ()) -> Winner | None:
    """The winner, by the rule that all commands share, among the recipes that fit in memory; None if none fits. `pairs`:
    (recipe, over another one) → speedup."""
    gains = {name: interval for (name, over), interval in pairs.items() if over == BASELINE}
    return winner_among(gains, lambda name, over: pairs.get((name, over)), unfit)
