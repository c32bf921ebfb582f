"""When to stop: on doubt, not on a count. A small object that can be swapped, and tested without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gemmscope.measure.results import Results
from gemmscope.measure.stats import time_interval
from gemmscope.measure.task import Case, Mode
from gemmscope.recipe.recipes import BASELINE


@dataclass
class StoppingRule:
    """Go on until every recipe's speedup is known to within `target`, within a least number of rounds and a longest time.

    >>> StoppingRule(target=0.01).least_rounds
    3
    """

    target: float = 0.01
    least_rounds: int = 3
    longest_s: float = 120.0
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    why: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew: the time limit counts from here."""
        self.started = self.clock()

    def done(self, results: Results, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None = None) -> bool:
        """Whether it is enough; `why` says which limit was met. `cases`: those that are being measured, if not all are."""
        return results.complete_rounds >= self.least_rounds and self.settle(self.widest(results, recipes, modes, cases))

    def settle(self, widest: float | None) -> bool:
        """Decide from the largest doubt (None: nothing is known at all), the least number of rounds being there."""
        if widest is not None and widest <= self.target:
            self.why = f"known to ±{self.target:.1%}"
            return True
        if self.clock() - self.started >= self.longest_s:
            doubt = f"speedups are known to ±{widest:.1%} only" if widest is not None else "no speedup could be formed"
            self.why = f"the time limit of {self.longest_s:g} s came first: {doubt}"
            return True
        return False

    def widest(
        self, results: Results, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None = None
    ) -> float | None:
        """The largest half-width among the speedups, of every op and of all together; with a baseline alone, of its own time."""
        wanted = [None, *([case] for case in results.cases())] if cases is None else [[case] for case in cases]
        if list(recipes) == [BASELINE]:
            totals = [results.totals(BASELINE, mode) for mode in modes]
            return max((time_interval(total, results.noise()).half_width for total in totals if total is not None), default=None)
        found = [
            interval.half_width
            for recipe in recipes
            for mode in modes
            for some in wanted
            if recipe != BASELINE and (interval := results.speedup(recipe, mode, some)) is not None
        ]
        return max(found, default=None)
