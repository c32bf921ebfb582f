"""When to stop: on precision, not on a count. The rule knows how precisely things are known, not what they are."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from gemmscope.engine.messages import Group
from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding


class Uncertainty(NamedTuple):
    """How precisely one speedup or time is known, and the groups of which more samples would help."""

    half_width: float
    groups: tuple[Group, ...] = ()


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
    """Continue until everything is known to within `target`, with a least number of rounds and a limit on the time for sampling.

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

    @property
    def decides(self) -> bool:
        """False where a fixed number of samples was asked for, and no precision."""
        return isfinite(self.longest_s)

    def restart(self, rounds: int = 0) -> None:
        """Start again after `rounds` rounds: the time limit and the least number of rounds count from here."""
        self.rounds_before, self.open, self.ended = rounds, (), None
        self.start_clock()

    def start_clock(self) -> None:
        """The time limit counts from now: from the first sample, not from the loading of frameworks."""
        self.started = self.clock()

    def done(self, all_rounds: int, uncertainties: Callable[[], Iterable[Uncertainty]]) -> bool:
        """Whether enough was measured after so many rounds. `ended` then says which limit was reached; `open` are the groups of
        which more is needed, the worst first. It is set one round early: the next burst is launched before the last one is
        over."""
        rounds = all_rounds - self.rounds_before
        if rounds < self.least_rounds - 1:
            return False
        widths = sorted(uncertainties(), key=lambda uncertainty: -uncertainty.half_width)
        self.open = tuple(dict.fromkeys(group for width, groups in widths if width > self.target for group in groups))
        widest = widths[0].half_width if widths else None
        return rounds >= self.least_rounds and self._settle(widest, self.clock() - self.started)

    def conclude(self, uncertainties: Iterable[Uncertainty]) -> None:
        """Set why a resumed measurement had already ended: it reached the precision, or else the time limit."""
        if self.decides:
            self._settle(max((uncertainty.half_width for uncertainty in uncertainties), default=None), self.longest_s)

    def _settle(self, widest: float | None, seconds: float) -> bool:
        """Decide from the widest half-width (None: nothing was measured) after so many seconds."""
        if widest is not None and widest <= self.target:
            self.ended = finding("precision-reached", precision=self.target)
        elif seconds >= self.longest_s:
            self.ended = _at_time_limit(self.longest_s, widest)
        return self.ended is not None


def _at_time_limit(seconds: float, widest: float | None) -> Finding:
    """The finding when the time is up.

    >>> _at_time_limit(60.0, 0.023).code, _at_time_limit(60.0, float("inf")).code, _at_time_limit(60.0, None).code
    ('time-limit-reached', 'time-limit-no-interval', 'time-limit-no-speedup')
    """
    if widest is None:
        return finding("time-limit-no-speedup", seconds=seconds)
    if not isfinite(widest):
        return finding("time-limit-no-interval", seconds=seconds)
    return finding("time-limit-reached", seconds=seconds, reached=widest)
