"""Where a measurement stands, on one live line of standard error; nothing where that is not a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmscope.measure.campaign import Counts
    from gemmscope.measure.sampler import StoppingRule

STAGES = {
    "compiling": "compiling kernels",
    "looking at the kernels": "looking at the kernels",
    "launching": "timing what launching takes the CPU",
}


class Found(Protocol):
    """What was measured so far."""

    complete_rounds: int

    def prepared(self) -> tuple[int, int]:
        """How many are ready to be measured, or will never be; of how many."""


class Measuring(Protocol):
    """Something that goes on round by round until it is known well enough: a campaign, or a run of steps."""

    rule: StoppingRule

    @property
    def recipes(self) -> Sequence[str]:
        """The precisions."""

    @property
    def counts(self) -> Counts | None:
        """Fixed numbers instead of the rule."""

    def widest(self) -> float | None:
        """The largest doubt."""


def rounds_left(rounds: int, half_width: float | None, target: float, least: int) -> float | None:
    """How many rounds are missing: doubt falls with the root of their number. None if that cannot be told yet.

    >>> rounds_left(4, 0.02, 0.01, least=4), rounds_left(1, 0.01, 0.01, least=4), rounds_left(2, None, 0.01, least=4)
    (12.0, 3.0, None)
    """
    if half_width is None or not math.isfinite(half_width):
        return None
    return max(rounds * ((half_width / target) ** 2 - 1), float(least - rounds), 0.0)


class Estimate:
    """Seconds left, from the rounds that were seen and how fast they came."""

    def __init__(self, campaign: Measuring, clock: Callable[[], float] = time.monotonic) -> None:
        self._campaign, self._clock = campaign, clock
        self._since: float | None = None
        self._rounds_then = 0

    def begin(self, rounds: int) -> None:
        """Rounds begin now; `rounds` were there before (resumed, or of a worker that died)."""
        if self._since is None:
            self._since, self._rounds_then = self._clock(), rounds

    def seconds_left(self, rounds: int, half_width: float | None) -> float | None:
        """None if it cannot be told."""
        rule, counts = self._campaign.rule, self._campaign.counts
        seen = rounds - self._rounds_then
        if self._since is None or seen < 1:
            return None
        per_round = (self._clock() - self._since) / seen
        if counts is not None:
            return max(counts.rounds - seen, 0) * per_round
        missing = rounds_left(rounds, half_width, rule.target, rule.least_rounds)
        limit = max(rule.longest_s - (self._clock() - rule.started), (rule.least_rounds - rounds) * per_round, 0.0)
        if missing is None:
            return limit if math.isfinite(limit) else None
        return min(missing * per_round, limit)


class Progress:
    """A context that gives the function to call after each message of the worker."""

    def __init__(self, campaign: Measuring) -> None:
        self._campaign, self._estimate = campaign, Estimate(campaign)
        self._live: Any = None
        self._stage = "loading the framework"

    def __enter__(self) -> Callable[[dict[str, Any], Found], None]:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn())
            self._live = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._live.start()
            self._live.add_task(self._stage, total=None)
        return self.show

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, message: dict[str, Any], results: Found) -> None:
        """Redraw, if the message changes what is to be said."""
        if self._live is None:
            return
        text = self.text(message, results)
        if text:
            self._live.update(self._live.task_ids[0], description=text)

    def text(self, message: dict[str, Any], results: Found) -> str:
        """What the line says after this message; empty if nothing new."""
        kind, rounds = message["type"], results.complete_rounds
        if kind == "begin" and message.get("what") == "measuring":
            self._estimate.begin(rounds)
            return "" if rounds else "first round"
        if kind == "begin":
            return STAGES.get(str(message.get("what")), "")
        if kind in ("hello", "ready", "failed") and not rounds:
            done, every = results.prepared()
            return f"preparing {done} of {every}"
        return self._measuring(results) if kind == "round" else ""

    def _measuring(self, results: Found) -> str:
        widest = self._campaign.widest()
        left = self._estimate.seconds_left(results.complete_rounds, widest)
        what = "speedups" if len(self._campaign.recipes) > 1 else "times"
        known = f", {what} known to ±{widest:.1%}" if widest is not None and math.isfinite(widest) else ""
        return f"round {results.complete_rounds}{known}" + (f", about {left:.0f} s left" if left is not None else "")
