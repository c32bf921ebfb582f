"""Gives every unit to a place, takes its outcome, and ensures that whatever dies costs no more than the unit in flight.

One thread, driven by the events of the pool. Every unit ends with one outcome or one failure, in limited time:

- A unit that was lost with its place is measured again, before the others and elsewhere if possible. After three losses,
  it has failed.
- A place that gives no sign of life for a while is ended and reported.
- When nothing is left to hand out, a unit that takes much longer than the others is begun a second time on a free place; the
  first outcome counts.
- A unit that only one place may measure waits for that place if it was lost, for a limited time; if it takes much longer than
  the others, it has failed: the schedule does not wait for a slow GPU.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from gemmscope.engine.journal import RecordedRun
from gemmscope.errors import UserError, option
from gemmscope.findings import finding
from gemmscope.pool.board import Board, Station
from gemmscope.pool.limits import Limits, too_slow
from gemmscope.pool.outcomes import Outcomes, UnitFailure, UnitOutcome, place_findings
from gemmscope.pool.units import (
    Event,
    Place,
    PlaceFound,
    PlaceLost,
    PlaceRefused,
    Pool,
    PoolEnded,
    Unit,
    UnitDone,
    UnitFailed,
    UnitProgress,
)
from gemmscope.progress import PoolProgress, Reporter
from gemmscope.signals import defer_signals

__all__ = ["Limits", "Outcomes", "Schedule", "UnitFailure", "UnitOutcome"]

POLL_S = 0.5  # the longest wait for events, so that Ctrl-C is noticed soon
SHOW_S = 0.2  # between two reports of progress
PAUSE_S = 5.0  # after a longer time between two checks, this process was not running
MOST_TRIES = 3
MOST_COPIES = 2

OnOutcome = Callable[[Unit, Place, Any], None]


@dataclass
class _Task:
    """A unit and its state."""

    unit: Unit
    losses: int = 0
    copies: int = 0
    running: set[str] = field(default_factory=set)
    lost_at: set[str] = field(default_factory=set)


class Schedule:
    """One run of many units. `units` may run anywhere, or where they say; `units_of` makes those of a place when it is found."""

    def __init__(
        self,
        pool: Pool,
        units: Iterable[Unit] = (),
        recording: RecordedRun | None = None,
        on_outcome: OnOutcome = lambda *_: None,
        reporter: Reporter | None = None,
        *,
        units_of: Callable[[Place], Sequence[Unit]] | None = None,
        at_once: int | None = None,
        limits: Limits | None = None,
        what: str = "measurement",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if at_once is not None and at_once < 1:
            raise UserError(f"{option('at_once')} must be at least 1, got {at_once}", f"for example {option('at_once', 1)}")
        self._pool, self._recording, self._on_outcome, self._reporter = pool, recording, on_outcome, reporter
        self._units_of, self._limits, self._what, self._clock = units_of, limits or Limits(), what, clock
        self._board = Board(at_once)
        self._outcomes = Outcomes()
        self._tasks: dict[str, _Task] = {}
        self._open = 0  # units without an outcome or a failure
        self._queue: deque[str] = deque()
        self._bound: dict[str, deque[str]] = {}
        self._out: set[str] = set()  # places that refused
        self._took_s: list[float] = []
        self._slow: list[Station] = []  # the slowest first
        self._last, self._ended = "", False
        self._news = self._checked = clock()  # when a place was found or refused last, and when limits were checked last
        if recording is not None:
            known: dict[str, Place] = {}
            for key, data in recording.outcomes().items():
                place = known.setdefault(data["place"]["key"], Place(**data["place"]))
                self._outcomes.done[key] = UnitOutcome(place, data["outcome"])
            self._outcomes.resumed = len(self._outcomes.done)
        for unit in units:
            self._add(unit)

    @property
    def outcomes(self) -> Outcomes:
        """The outcomes so far, including those of an earlier run."""
        return self._outcomes

    def run(self) -> Outcomes:
        """Until every unit is finished, or a signal arrives. The pool must have been entered."""
        outcomes = self._outcomes
        with defer_signals() as signals:
            if self._reporter is None:
                self._loop(lambda: signals.first is not None, lambda _: None)
            else:
                with self._reporter.spreading(self._what) as show:
                    self._loop(lambda: signals.first is not None, show)
            if signals.first is not None:
                outcomes.interrupted = signals.answered = True
                signals.outcome = f"the same command with {option('resume')} continues from here"
        outcomes.findings += place_findings(outcomes, self._board.most_at_once, self._board.few_cores)
        return outcomes

    def _loop(self, interrupted: Callable[[], bool], show: Callable[[PoolProgress], None]) -> None:
        shown = -math.inf
        while not interrupted() and not self._over():
            news = False
            for event in self._pool.events(POLL_S):
                self._take(event)
                news = news or not isinstance(event, UnitProgress)
            checked = self._check()
            if news or checked:
                self._hand_out()
            if self._clock() - shown > SHOW_S:
                shown = self._clock()
                show(self._progress())
        show(self._progress())
        for event in self._pool.events(0.0) if interrupted() else ():  # what has arrived meanwhile counts, too
            if isinstance(event, UnitDone):
                self._take(event)

    def _add(self, unit: Unit) -> None:
        if unit.key in self._tasks or unit.key in self._outcomes.done:
            return
        self._tasks[unit.key] = _Task(unit)
        self._open += 1
        self._line(unit).append(unit.key)

    def _line(self, unit: Unit) -> deque[str]:
        """The queue that this unit waits in."""
        return self._bound.setdefault(unit.place, deque()) if unit.place else self._queue

    def _over(self) -> bool:
        if self._open:
            return False
        return self._units_of is None or not self._coming()

    def _coming(self) -> bool:
        """Whether a place is being started for the first time."""
        return not self._ended and self._pool.expected() > 0 and self._clock() - self._news < self._limits.start_s

    # --- events

    def _take(self, event: Event) -> None:
        match event:
            case PlaceFound(place):
                self._found(place)
            case PlaceLost():
                self._lost(event)
            case PlaceRefused():
                self._refused(event)
            case UnitProgress(key, text):
                if (station := self._board.get(key)) is not None:
                    station.heard, station.text = self._clock(), text or station.text
            case UnitDone(key, unit, outcome):
                self._done(key, unit, outcome)
            case UnitFailed():
                self._failed(event)
            case PoolEnded(why, hint):
                self._last, self._ended = why, True
                for station in list(self._board.stations()):
                    self._leave(station, "lost", 0.0)
                for task in self._unfinished():
                    self._fail(task, "", why, hint)

    def _found(self, place: Place) -> None:
        if place.key in self._out:
            return
        known = self._board.get(place.key)
        if known is not None and known.unit:  # it was lost and is back, all in one
            self._lose(known.unit, place.key, f"{place.name} was started again")
        station = self._board.add(place)
        station.heard = self._clock()
        first = place.key not in self._outcomes.places
        self._outcomes.places[place.key] = place
        if first:
            self._news = self._clock()
            for unit in self._units_of(place) if self._units_of is not None else ():
                self._add(unit)

    def _lost(self, event: PlaceLost) -> None:
        station = self._board.get(event.place)
        if station is None or station.state != "ending":  # else it was ended by this schedule, which has reported it
            self._report(event)
        if station is None:
            return
        unit = station.unit
        self._leave(station, "lost", self._limits.return_s if event.again else 0.0)
        if unit:
            self._lose(unit, event.place, event.why)

    def _report(self, event: PlaceLost) -> None:
        self._outcomes.lost.append(event)
        self._last = f"{self._outcomes.place_name(event.place)} lost: {event.why}"

    def _refused(self, event: PlaceRefused) -> None:
        self._news = self._clock()
        self._outcomes.refused.append(event)
        self._last = f"{event.name} not used: {event.why}"
        if event.place and (station := self._board.get(event.place)) is not None:
            unit = station.unit
            self._leave(station, "lost", 0.0)
            self._out.add(event.place)
            if unit:
                self._lose(unit, event.place, event.why, counts=False)
            for key in self._bound.get(event.place, ()):
                if not self._finished(key):
                    self._fail(self._tasks[key], event.name, event.why, event.hint)

    def _done(self, key: str, unit: str, outcome: Any) -> None:
        station, task = self._board.get(key), self._tasks.get(unit)
        if station is None or task is None:
            return
        if self._finished(unit):
            self._release(station, unit)
            return
        if station.unit == unit:
            self._took_s.append(self._clock() - station.since)
        place = station.place
        self._outcomes.done[unit] = UnitOutcome(place, outcome)
        self._open -= 1
        if self._recording is not None and (
            problem := self._recording.write_outcome(unit, {"place": asdict(place), "outcome": outcome})
        ):
            self._outcomes.findings.append(finding("journal-incomplete", reason=problem))
        self._release(station, unit)
        for other in list(task.running):  # copies of it: too late
            self._end(other)
        self._on_outcome(task.unit, place, outcome)

    def _failed(self, event: UnitFailed) -> None:
        station, task = self._board.get(event.place), self._tasks.get(event.unit)
        if station is None or task is None or event.place not in task.running:
            return  # it counted as lost already
        self._release(station, event.unit)
        if not task.running and not self._finished(event.unit):
            self._fail(task, station.place.name, event.why, event.hint, lost=False, unfit=event.unfit)

    # --- what becomes of units and places

    def _finished(self, unit: str) -> bool:
        return unit in self._outcomes.done or unit in self._outcomes.failed

    def _unfinished(self) -> list[_Task]:
        return [task for key, task in self._tasks.items() if not self._finished(key)]

    def _release(self, station: Station, unit: str) -> None:
        """The place has finished this unit."""
        self._tasks[unit].running.discard(station.place.key)
        station.heard = self._clock()
        if station.unit == unit:
            self._board.move(station, "free")

    def _lose(self, unit: str, key: str, why: str, *, counts: bool = True) -> None:
        """A unit was lost with its place; `counts`: that may be the fault of the unit."""
        task = self._tasks[unit]
        task.running.discard(key)
        task.lost_at.add(key)
        if self._finished(unit) or task.running:
            return
        task.losses += counts
        if task.losses < MOST_TRIES:
            self._outcomes.repeated += counts
            self._line(task.unit).appendleft(unit)
        else:
            self._fail(task, self._outcomes.place_name(key), f"lost {task.losses} times; the last reason: {why}")

    def _fail(self, task: _Task, place: str, why: str, hint: str = "", *, lost: bool = True, unfit: bool = False) -> None:
        self._outcomes.failed[task.unit.key] = UnitFailure(place, why, hint, lost, unfit)
        self._open -= 1
        self._last = f"{place if place and task.unit.place else task.unit.key} failed: {why}"

    def _leave(self, station: Station, state: Any, wait_s: float) -> None:
        """The place is not usable from now on."""
        station.until = self._clock() + wait_s
        self._board.move(station, state)

    def _end(self, key: str, why: str = "") -> None:
        """End what a place is doing; with a reason, it is reported as lost."""
        station = self._board.get(key)
        if station is None or station.state != "busy":
            return
        unit = station.unit
        self._leave(station, "ending", self._limits.return_s)
        self._tasks[unit].running.discard(key)
        self._pool.abandon(key)
        if why:
            self._report(PlaceLost(key, why, again=True))

    # --- limits

    def _check(self) -> bool:
        """Look for what took too long; not too often, and True if it was done."""
        now = self._clock()
        if (passed := now - self._checked) < POLL_S:
            return False
        if passed > PAUSE_S:
            self._excuse(passed, now)
        self._checked = now
        typical = median(self._took_s) if self._took_s else None
        half = 2 * len(self._outcomes.done) >= len(self._outcomes.done) + self._open
        for station in self._board.busy():
            task, key, seconds = self._tasks[station.unit], station.place.key, station.seconds(now)
            if now - max(station.heard, station.since) > self._limits.silence_s:
                why = f"no sign of life for {self._limits.silence_s:g} s"
                self._end(key, why)
                self._lose(task.unit.key, key, why)
            elif task.unit.place and half and too_slow(seconds, typical, self._limits.leave_after):
                why = f"not finished after {seconds:.0f} s; the others took {typical:.0f} s"
                self._end(key, why)
                self._fail(task, station.place.name, why)
            elif too_slow(seconds, typical or 0.0, self._limits.longest):
                why = f"not finished after {seconds:.0f} s"
                self._end(key, why)
                self._lose(task.unit.key, key, why)
        self._slow = [
            station for station in self._board.busy() if too_slow(station.seconds(now), typical, self._limits.copy_after)
        ]
        self._slow.sort(key=lambda station: station.since)
        for station in self._board.stations():
            if station.state == "ending" and station.until <= now:
                self._leave(station, "lost", 0.0)
        if self._open and not self._board.busy() and not self._coming():
            self._give_up(now)
        return True

    def _excuse(self, paused_s: float, now: float) -> None:
        """Do not count time in which this process itself did not run (stopped, or waiting for a disk): messages may still be in
        its pipes."""
        self._news += paused_s
        for station in self._board.stations():
            station.heard = min(station.heard + paused_s, now)
            station.paused_s += paused_s
            station.until += paused_s

    def _give_up(self, now: float) -> None:
        """Nothing is being measured: units that no place can measure any more have failed."""
        returning = {station.place.key for station in self._board.stations() if station.until > now and station.state != "free"}
        if not self._board.usable() and not returning:
            for key in self._queue:
                if not self._finished(key):
                    self._fail(self._tasks[key], "", "no GPU is left that can measure it")
        for place, line in self._bound.items():
            if not self._board.is_usable(place) and place not in returning:
                for key in line:
                    if not self._finished(key):
                        name, known = self._outcomes.place_name(place), place in self._outcomes.places
                        why = f"{name} was lost and did not come back" if known else f"{name} was not found"
                        self._fail(self._tasks[key], name if known else "", why)

    # --- handing out

    def _hand_out(self) -> None:
        for station in self._board.ready():
            unit = self._next(station.place.key)
            if unit is not None:
                self._assign(station, unit)

    def _next(self, key: str) -> str | None:
        """What this place should measure now."""
        line = self._bound.get(key, deque())
        while line:
            if not self._finished(unit := line.popleft()):
                return unit
        while self._queue and self._finished(self._queue[0]):
            self._queue.popleft()
        for index, unit in enumerate(self._queue):
            if not self._finished(unit) and not self._better_elsewhere(unit, key):
                del self._queue[index]
                return unit
        return self._to_copy(key) if not self._queue else None

    def _better_elsewhere(self, unit: str, key: str) -> bool:
        """Whether this place lost the unit before, and others have not."""
        lost_at = self._tasks[unit].lost_at
        return key in lost_at and any(
            self._board.is_usable(other.place.key) and other.place.key not in lost_at for other in self._board.stations()
        )

    def _to_copy(self, key: str) -> str | None:
        """The unit that takes the longest, if that is much longer than the others took."""
        for station in self._slow:
            if station.unit and self._may_copy(self._tasks[station.unit], key):
                self._tasks[station.unit].copies += 1
                self._last = f"{station.place.name} is slow: its measurement also runs on another GPU"
                return station.unit
        return None

    def _may_copy(self, task: _Task, key: str) -> bool:
        once = not task.unit.place and len(task.running) == 1 and task.copies < MOST_COPIES
        return once and key not in task.lost_at

    def _assign(self, station: Station, unit: str) -> None:
        station.since = station.heard = self._clock()
        station.text, station.paused_s = "", 0.0
        self._board.move(station, "busy")
        station.unit = unit
        self._tasks[unit].running.add(station.place.key)
        self._pool.assign(station.place.key, self._tasks[unit].unit)

    def _progress(self) -> PoolProgress:
        done, failed = len(self._outcomes.done), len(self._outcomes.failed)
        working, usable = self._board.busy(), self._board.usable()
        left = None
        if self._took_s and usable:
            running_s = sum(self._clock() - station.since for station in working)
            left = max(0.0, self._open * sum(self._took_s) / len(self._took_s) - running_s) / max(len(working), 1)
        doing = working[0].text if len(working) == 1 else ""
        kind = "GPU" if any(place.gpu is not None for place in self._outcomes.places.values()) else "machine"
        total, nodes = done + failed + self._open, self._board.nodes()
        return PoolProgress(done, failed, total, self._board.gpus(), len(working), nodes, left, self._last, doing, kind)
