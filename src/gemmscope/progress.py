"""Progress of long work, for whoever runs it: a live line on a terminal's standard error, or nothing.

A `Reporter` is handed to every application function; a plain one says nothing. The command line uses `Console`; Python uses it
too, so that a notebook or a script says what it is waiting for.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from gemmscope.engine.messages import Begin, Failed, Hello, Ready, Round
from gemmscope.say import SafeStandardError, say
from gemmscope.text import terminal_variables
from gemmscope.units import counted

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

    from gemmscope.engine.campaign import Campaign, OnMessage
    from gemmscope.engine.messages import Message
    from gemmscope.engine.store import ResultStore

STAGES = {"compiling": "compiling kernels", "profiling": "profiling the kernels", "launching": "timing CPU launches"}
SHOWN_AFTER_S = 0.5
MINUTE_S = 60.0


@dataclass(frozen=True)
class PoolProgress:
    """How far a schedule is."""

    done: int
    failed: int
    total: int
    places: int
    """That can be used now."""
    busy: int
    nodes: int
    seconds_left: float | None
    last: str
    """What happened last: a place was lost, a unit failed."""
    doing: str = ""
    """What the only place that measures says; empty if there are several."""
    kind: str = "GPU"
    """What a place is: a GPU, or a machine that measures on its CPU."""


class Reporter:
    """Where an application function reports its progress."""

    def say(self, text: str) -> None:
        """One line of information beside the result."""

    @contextmanager
    def measuring(self, campaign: Campaign[Any]) -> Iterator[OnMessage]:  # noqa: ARG002
        """Follow a measurement; gives the function to call after each message of the worker."""
        yield lambda *_: None

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int], None]]:  # noqa: ARG002
        """Follow the computation of many things; gives the function to call with how many are done."""
        yield lambda _: None

    @contextmanager
    def spreading(self, what: str) -> Iterator[Callable[[PoolProgress], None]]:  # noqa: ARG002
        """Follow the work of many places; gives the function to call with its progress. `what`: the name of one unit."""
        yield lambda _: None


QUIET = Reporter()


class Console(Reporter):
    """Lines on standard error; a live one while measuring, if that is a terminal."""

    def say(self, text: str) -> None:
        """Print it."""
        say(text)

    @contextmanager
    def measuring(self, campaign: Campaign[Any]) -> Iterator[OnMessage]:
        """A spinner with the stage, the precision reached and the time left."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield lambda *_: None
            return
        from rich import progress

        line = ProgressLine(campaign)
        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.TimeElapsedColumn(),
        )
        with progress.Progress(*columns, console=_console(), transient=True) as live:
            task = live.add_task("loading the framework", total=None)

            def on_message(message: Message, results: ResultStore[Any]) -> None:
                if text := line.text(message, results):
                    live.update(task, description=text)

            yield on_message

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """How many are done and the time left, once it has taken a moment. Without a thread: processes are forked meanwhile."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield lambda _: None
            return
        from rich.live import Live

        begin = time.monotonic()
        with Live(console=_console(), auto_refresh=False, transient=True) as live:

            def show(done: int) -> None:
                seconds = time.monotonic() - begin
                if seconds > SHOWN_AFTER_S and done:
                    left = seconds * (total - done) / done
                    live.update(f"{done:,} of {total:,} {what}, about {left:.0f} s left", refresh=True)

            yield show

    @contextmanager
    def spreading(self, what: str) -> Iterator[Callable[[PoolProgress], None]]:
        """How many units are done, the time left, how many places there are, and what happened last. Not on a terminal, a line
        for every tenth of the work."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield Tenths(what, self.say)
            return
        from rich import progress

        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.TimeElapsedColumn(),
        )
        with progress.Progress(*columns, console=_console(), transient=True) as live:
            task = live.add_task("starting", total=None)
            yield lambda state: live.update(task, description=spread_text(state, what))


def spread_text(state: PoolProgress, what: str) -> str:
    """The progress of many places in one line.

    >>> spread_text(PoolProgress(12, 1, 200, 8, 7, 2, 250.0, "node03 GPU 5 lost: signal 9"), "point")
    '12 of 200 points done, 1 failed, about 4 min left; 7 of 8 GPUs on 2 machines busy; node03 GPU 5 lost: signal 9'
    """
    if not state.places and not state.done:
        return "; ".join(filter(None, ["starting", state.last]))
    done = f"{state.done:,} of {counted(state.total, what)} done" + (f", {state.failed:,} failed" if state.failed else "")
    left = f", about {duration(state.seconds_left)} left" if state.seconds_left is not None and state.done < state.total else ""
    machines = f" on {state.nodes:,} machines" if state.nodes > 1 and state.kind == "GPU" else ""
    busy = f"{state.busy:,} of {counted(state.places, state.kind)}{machines} busy" if state.places else ""
    return "; ".join(filter(None, [done + left, busy, state.doing, state.last]))


def duration(seconds: float) -> str:
    """A time to wait.

    >>> duration(40.2), duration(250), duration(8000)
    ('40 s', '4 min', '2.2 h')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Tenths:
    """Says a line whenever another tenth of the work is done, and at most one a minute where less is done."""

    def __init__(self, what: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._say, self._clock = what, say, clock
        self._tenth, self._last, self._said = 0, "", clock()

    def __call__(self, state: PoolProgress) -> None:
        finished = state.done + state.failed
        tenth = 10 * finished // state.total if state.total else 0
        waited = self._clock() - self._said > MINUTE_S
        if tenth > self._tenth or (waited and state.last != self._last) or (state.last != self._last and not finished):
            self._say(spread_text(state, self._what))
            self._tenth, self._last, self._said = max(tenth, self._tenth), state.last, self._clock()


def _console() -> RichConsole:
    """Standard error as rich writes to it. No text is markup, and a terminal that has gone is no error."""
    from rich.console import Console as RichConsole

    return RichConsole(file=cast("IO[str]", SafeStandardError()), highlight=False, markup=False, _environ=terminal_variables())


def rounds_left(rounds: int, half_width: float | None, target: float, least: int) -> float | None:
    """How many rounds are missing: the interval shrinks with the root of their number. None if that is not known yet.

    >>> rounds_left(4, 0.02, 0.01, least=4), rounds_left(1, 0.01, 0.01, least=4), rounds_left(2, None, 0.01, least=4)
    (12.0, 3.0, None)
    """
    if half_width is None or not math.isfinite(half_width):
        return None
    return max(rounds * ((half_width / target) ** 2 - 1), float(least - rounds), 0.0)


class ProgressLine:
    """The text of the live line."""

    def __init__(self, campaign: Campaign[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._campaign, self._clock = campaign, clock
        self._since, self._rounds_then = math.nan, 0  # when rounds began, and how many were there: resumed, or of a dead worker

    def text(self, message: Message, results: ResultStore[Any]) -> str:
        """The line after this message; empty if nothing changes."""
        rounds = results.complete_rounds
        if isinstance(message, Begin) and message.what == "measuring":
            if math.isnan(self._since):
                self._since, self._rounds_then = self._clock(), rounds
            return "" if rounds else "first round"
        if isinstance(message, Begin):
            return STAGES.get(message.what, "")
        if isinstance(message, (Hello, Ready, Failed)) and not rounds:
            done, every = results.prepared()
            return f"preparing {done} of {every}"
        return self._measuring(results) if isinstance(message, Round) else ""

    def _measuring(self, results: ResultStore[Any]) -> str:
        widest = self._campaign.widest()
        left = self.seconds_left(results.complete_rounds, widest)
        what = "speedups" if len(self._campaign.recipes) > 1 else "times"
        known = f", {what} known to ±{widest:.1%}" if widest is not None and math.isfinite(widest) else ""
        return f"round {results.complete_rounds}{known}" + (f", about {left:.0f} s left" if left is not None else "")

    def seconds_left(self, rounds: int, half_width: float | None) -> float | None:
        """The seconds left, from the rounds so far and how fast they came; None if they are not known."""
        rule, rounds_in_all = self._campaign.rule, self._campaign.rounds
        seen = rounds - self._rounds_then
        if math.isnan(self._since) or seen < 1:
            return None
        per_round = (self._clock() - self._since) / seen
        if rounds_in_all is not None:
            return max(rounds_in_all - seen, 0) * per_round
        missing = rounds_left(rounds, half_width, rule.target, rule.least_rounds)
        limit = max(rule.longest_s - (self._clock() - rule.started), (rule.least_rounds - rounds) * per_round, 0.0)
        if missing is None:
            return limit if math.isfinite(limit) else None
        return min(missing * per_round, limit)
