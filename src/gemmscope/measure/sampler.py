"""When to stop: on precision, not on a count. A small object that can be swapped, and tested without a GPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite

from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding
from gemmscope.interval import Interval
from gemmscope.measure.measurements import Measurements
from gemmscope.measure.stats import time_interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.workload.cases import Case, Mode

Group = tuple[str, Mode]  # a recipe in a mode: what is measured in one burst
ALIKE = 0.8


def check_limits(precision: float, longest: float) -> None:
    """A `UserError` for a stopping rule that would never stop, or measure nothing."""
    if not 0 < precision < 1:
        raise UserError(
            f"{option('precision')} must be between 0 and 1, got {precision:g}",
            f"for example {option('precision', 0.01)} for ±1%",
        )
    if not longest > 0:
        raise UserError(
            f"{option('time_limit')} must be more than 0 seconds, got {longest:g}", f"for example {option('time_limit', 60)}"
        )


@dataclass
class StoppingRule:
    """Continue until every recipe's speedup is known to within `target`, with a least number of rounds and a time limit.

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
    ended: Finding | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, rounds: int = 0) -> None:
        """Start again after `rounds` rounds: the time limit and the least number of rounds count from here."""
        self.started, self.rounds_before, self.open = self.clock(), rounds, ()

    def done(
        self, results: Measurements, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None = None
    ) -> bool:
        """Whether it is enough. `ended` then says which limit was reached; `open` are the groups behind the speedups that are
        not precise enough, the worst first. It is set one round early: the next burst is launched before the last one is over.

        `cases`: those that are being measured, if not all are.
        """
        rounds = results.complete_rounds - self.rounds_before
        if rounds < self.least_rounds - 1:
            return False
        widths = sorted(self._half_widths(results, recipes, modes, cases), key=lambda pair: -pair[0])
        self.open = tuple(dict.fromkeys(group for width, groups in widths if width > self.target for group in groups))
        return rounds >= self.least_rounds and self.settle(widths[0][0] if widths else None)

    def settle(self, widest: float | None) -> bool:
        """Decide from the widest half-width (None: nothing is known at all), after the least number of rounds."""
        if widest is not None and widest <= self.target:
            self.ended = finding("precision-reached", precision=self.target)
            return True
        if self.clock() - self.started >= self.longest_s:
            self.ended = _at_time_limit(self.longest_s, widest)
            return True
        return False

    def widest(
        self, results: Measurements, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None = None
    ) -> float | None:
        """The largest half-width among the speedups; where none can be formed, of the times."""
        return max((width for width, _ in self._half_widths(results, recipes, modes, cases)), default=None)

    def _half_widths(
        self, results: Measurements, recipes: Sequence[str], modes: Sequence[Mode], cases: Sequence[Case] | None
    ) -> Iterator[tuple[float, tuple[Group, ...]]]:
        """The half-width of every speedup, and the groups that it is formed of: of each op and of all together over the
        baseline, of all together also over each other. In a mode where no speedup can be formed any more (one recipe alone, or
        the others failed), of each time; but nothing is decided while samples are still to come."""
        wanted = [None, *([case] for case in results.cases())] if cases is None else [[case] for case in cases]
        for mode in modes:
            formed = False
            for index, recipe in enumerate(recipes):
                for over in recipes[:index]:
                    for some in wanted if over == BASELINE else wanted[:1]:
                        speedup = results.speedup(recipe, mode, some, over)
                        if speedup is not None:
                            formed = True
                            yield speedup.half_width, self._behind(results, speedup, ((recipe, mode), (over, mode)), some)
            pairs = [(recipe, some) for recipe in recipes for some in wanted]
            if formed or any(result.pending for recipe, some in pairs for result in results.among(recipe, mode, some)):
                continue
            for recipe, some in pairs:
                total = results.totals(recipe, mode, some)
                if total is not None:
                    yield time_interval(total, results.noise(some)).half_width, ((recipe, mode),)

    def _behind(
        self, results: Measurements, speedup: Interval, sides: tuple[Group, ...], cases: Sequence[Case] | None
    ) -> tuple[Group, ...]:
        """The side that makes a speedup too uncertain, if it is: more of it is wanted; both sides, if they are alike."""
        if speedup.half_width <= self.target:
            return sides
        totals = {side: results.totals(*side, cases) for side in sides}
        noise = results.noise(cases)
        widths = {side: time_interval(total, noise).half_width for side, total in totals.items() if total is not None}
        return tuple(side for side, width in widths.items() if width >= ALIKE * max(widths.values()))


def _at_time_limit(seconds: float, widest: float | None) -> Finding:
    """What is known when the time is up.

    >>> _at_time_limit(60.0, 0.023).code, _at_time_limit(60.0, float("inf")).code, _at_time_limit(60.0, None).code
    ('time-limit-reached', 'time-limit-no-interval', 'time-limit-no-speedup')
    """
    if widest is None:
        return finding("time-limit-no-speedup", seconds=seconds)
    if not isfinite(widest):
        return finding("time-limit-no-interval", seconds=seconds)
    return finding("time-limit-reached", seconds=seconds, reached=widest)
