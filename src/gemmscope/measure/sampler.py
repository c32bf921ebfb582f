"""When to stop: on doubt, not on a count. A small object that can be swapped, and tested without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

from gemmscope.interval import Interval
from gemmscope.measure.results import Results
from gemmscope.measure.stats import time_interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.workload.cases import Case, Mode

Group = tuple[str, Mode]  # a recipe in a mode: what is measured in one burst
ALIKE = 0.8


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
    rounds_before: int = field(init=False, default=0)
    open: tuple[Group, ...] = field(init=False, default=())
    why: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, rounds: int = 0) -> None:
        """Begin anew, after so many rounds: the time limit and the least number of rounds count from here, and of what is to be
        measured now nothing is known to be in doubt."""
        self.started, self.rounds_before, self.open = self.clock(), rounds, ()

    def done(self, results: Results, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None = None) -> bool:
        """Whether it is enough; `why` says which limit was met, `open` what speedups depend on that are not known well enough,
        the worst first. It is there one round early: the next burst is launched before the last one is over.

        `cases`: those that are being measured, if not all are.
        """
        rounds = results.complete_rounds - self.rounds_before
        if rounds < self.least_rounds - 1:
            return False
        doubts = sorted(self._doubts(results, recipes, modes, cases), key=lambda each: -each[0])
        self.open = tuple(dict.fromkeys(group for doubt, groups in doubts if doubt > self.target for group in groups))
        return rounds >= self.least_rounds and self.settle(doubts[0][0] if doubts else None)

    def settle(self, widest: float | None) -> bool:
        """Decide from the largest doubt (None: nothing is known at all), the least number of rounds being there."""
        if widest is not None and widest <= self.target:
            self.why = f"known to ±{self.target:.1%}"
            return True
        if self.clock() - self.started >= self.longest_s:
            self.why = f"the time limit of {self.longest_s:g} s came first: {_in_words(widest)}"
            return True
        return False

    def widest(
        self, results: Results, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None = None
    ) -> float | None:
        """The largest half-width among the speedups; where none can be formed, of the times."""
        return max((doubt for doubt, _ in self._doubts(results, recipes, modes, cases)), default=None)

    def _doubts(
        self, results: Results, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None
    ) -> Iterator[tuple[float, tuple[Group, ...]]]:
        """The half-width of every speedup, and the groups that it is formed of: of each op and of all together over the
        baseline, of all together also over each other. In a mode where no speedup can be formed any more, of each time."""
        wanted = [None, *([case] for case in results.cases())] if cases is None else [[case] for case in cases]
        for mode in modes:
            formed = list(self._speedups(results, recipes, mode, wanted))
            yield from formed or self._times(results, recipes, mode, wanted)

    def _speedups(
        self, results: Results, recipes: Sequence[str], mode: Mode, wanted: Sequence[list[Case] | None]
    ) -> Iterator[tuple[float, tuple[Group, ...]]]:
        for index, recipe in enumerate(recipes):
            for over in recipes[:index]:
                for some in wanted if over == BASELINE else wanted[:1]:
                    speedup = results.speedup(recipe, mode, some, over)
                    if speedup is not None:
                        yield speedup.half_width, self._behind(results, speedup, ((recipe, mode), (over, mode)), some)

    def _times(
        self, results: Results, recipes: Sequence[str], mode: Mode, wanted: Sequence[list[Case] | None]
    ) -> Iterator[tuple[float, tuple[Group, ...]]]:
        """One recipe alone, or the others failed. While something is still to come, nothing is told."""
        if any(result.awaited for recipe in recipes for some in wanted for result in results.among(recipe, mode, some)):
            return
        for recipe in recipes:
            for some in wanted:
                total = results.totals(recipe, mode, some)
                if total is not None:
                    yield time_interval(total, results.noise(some)).half_width, ((recipe, mode),)

    def _behind(
        self, results: Results, speedup: Interval, sides: tuple[Group, ...], cases: Sequence[Case] | None
    ) -> tuple[Group, ...]:
        """The side that a speedup's doubt comes from, if it is too large: more of that is wanted; both, where they are alike."""
        if speedup.half_width <= self.target:
            return sides
        totals = {side: results.totals(*side, cases) for side in sides}
        noise = results.noise(cases)
        doubts = {side: time_interval(total, noise).half_width for side, total in totals.items() if total is not None}
        return tuple(side for side, doubt in doubts.items() if doubt >= ALIKE * max(doubts.values()))


def _in_words(widest: float | None) -> str:
    """What is known where time ran out.

    >>> _in_words(0.023), _in_words(float("inf"))
    ('speedups are known to ±2.3% only', 'some speedups have no interval that says anything')
    """
    if widest is None:
        return "no speedup could be formed"
    return (
        f"speedups are known to ±{widest:.1%} only" if isfinite(widest) else "some speedups have no interval that says anything"
    )
