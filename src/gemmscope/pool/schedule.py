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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from gemmscope.engine.journal import RecordedRun
from gemmscope.errors import UserError, option
from gemmscope.findings import finding
from gemmscope.pool.pool import (
    Event,
    Outcomes,
    Place,
    PlaceFound,
    PlaceLost,
    PlaceRefused,
    Pool,
    PoolEnded,
    Unit,
    UnitDone,
    UnitFailed,
    UnitFailure,
    UnitOutcome,
    UnitProgress,
    place_findings,
)
from gemmscope.progress import QUIET, PoolProgress, Reporter
from gemmscope.signals import defer_signals

CORES_PER_GPU = 2  # a measuring process launches kernels from one thread, and its parent needs some time beside it

State = Literal["free", "busy", "ending", "lost", "refused"]


@dataclass
class PlaceState:
    """A place and what it is doing. `ending`: it was told to end what it is doing, and has not confirmed this yet."""

    place: Place
    state: State = "free"
    unit: str = ""
    """What it measures; empty if it measures nothing."""
    since: float = 0.0
    """When it began."""
    paused_s: float = 0.0
    """How long the schedule itself did not run since then."""
    text: str = ""
    """What it says that it is doing."""
    heard: float = 0.0
    """When it gave the last sign of life."""
    until: float = math.inf
    """How long its return is waited for, while it is ending or lost."""

    @property
    def usable(self) -> bool:
        return self.state in ("free", "busy")

    def seconds(self, now: float) -> float:
        """How long it has been measuring, as far as the schedule could have noticed its end."""
        return now - self.since - self.paused_s


class PlaceStates(dict[str, PlaceState]):
    """All places of a schedule by their keys, the one whose state changed the longest ago first; with what limits them: a GPU
    measures one unit at a time, and a node `at_once` at most."""

    def __init__(self, at_once: int | None = None) -> None:
        super().__init__()
        self._at_once = at_once
        self._cores: dict[str, dict[str, int]] = {}  # of each node, as its GPUs report them
        self.most_at_once: dict[str, int] = {}
        self.few_cores: dict[str, tuple[int, int, int]] = {}
        """Nodes that are limited because of their CPU cores: cores, GPUs, at once."""

    def add(self, place: Place) -> PlaceState:
        """Add a new place, or update a known one."""
        place_state = self.setdefault(place.key, PlaceState(place))
        place_state.place = place
        self._see(place)
        self.move(place_state, "free")
        return place_state

    def move(self, place_state: PlaceState, state: State) -> None:
        """Give a place another state."""
        place_state.state = state
        if state != "busy":
            place_state.unit = ""
        self[place_state.place.key] = self.pop(place_state.place.key)  # as the last

    def having(self, *states: State) -> list[PlaceState]:
        """The places in one of these states."""
        return [place_state for place_state in self.values() if place_state.state in states]

    def ready(self) -> Iterator[PlaceState]:
        """Free places that may begin something now. Each is judged when it is asked for: those before it may have begun."""
        occupied = [place_state.place for place_state in self.having("busy", "ending")]
        on_node, on_gpu = Counter(place.node for place in occupied), Counter(place.uuid for place in occupied)
        for place_state in self.having("free"):
            place = place_state.place
            if on_node[place.node] < self.limit(place.node) and not (place.uuid and on_gpu[place.uuid]):
                yield place_state
                if place_state.state == "busy":
                    on_node[place.node] += 1
                    on_gpu[place.uuid] += 1
                    self.most_at_once[place.node] = max(self.most_at_once.get(place.node, 0), on_node[place.node])

    def limit(self, node: str) -> float:
        """How many places of a node may measure at the same time: as requested, else one for every two CPU cores."""
        if self._at_once is not None:
            return self._at_once
        return self.few_cores[node][2] if node in self.few_cores else math.inf

    def _see(self, place: Place) -> None:
        """Record what a place reports about its node."""
        if not place.uuid or self._at_once is not None:
            return
        reported = self._cores.setdefault(place.node, {})
        reported[place.uuid] = int(place.facts.get("cores", 0))
        cores, gpus = min(filter(None, reported.values()), default=0), len(reported)
        if gpus > 1 and 0 < cores < CORES_PER_GPU * gpus:
            self.few_cores[place.node] = (cores, gpus, max(1, cores // CORES_PER_GPU))


@dataclass(frozen=True)
class Limits:
    """How long things may take."""

    silence_s: float = 60.0
    """A place that measures and gives no sign of life for this long is ended."""
    return_s: float = 120.0
    """How long the return of a lost place is waited for."""
    start_s: float = 600.0
    """How long the first place is waited for."""
    copy_after: tuple[float, float] = (3.0, 60.0)
    """A copy of a unit is started after this many times the median time, and at least this many seconds."""
    leave_after: tuple[float, float] = (4.0, 120.0)
    """A unit that only one place may run fails after this many times the median time, and at least this many seconds."""
    longest: tuple[float, float] = (20.0, 6 * 3600.0)
    """No unit takes longer than this: its place is ended, and it counts as lost."""


def too_slow(seconds: float, typical: float | None, limit: tuple[float, float]) -> bool:
    """Whether `seconds` exceeds both a multiple of the typical time and a minimum.

    >>> too_slow(70, 20, (3.0, 60.0)), too_slow(50, 1, (3.0, 60.0)), too_slow(70, None, (3.0, 60.0))
    (True, False, False)
    """
    return typical is not None and seconds > max(limit[0] * typical, limit[1])


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
        reporter: Reporter = QUIET,
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
        self._places = PlaceStates(at_once)
        self._outcomes = Outcomes()
        self._tasks: dict[str, _Task] = {}
        self._queues: defaultdict[str, deque[str]] = defaultdict(deque)  # by the place that must measure the units; "": any
        self._took_s: list[float] = []
        self._slow: list[PlaceState] = []  # the slowest first
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
            with self._reporter.spreading(self._what) as show:
                self._loop(lambda: signals.first is not None, show)
            if signals.first is not None:
                outcomes.interrupted = signals.answered = True
                signals.outcome = f"the same command with {option('resume')} continues from here"
        outcomes.findings += place_findings(outcomes, self._places.most_at_once, self._places.few_cores)
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
        self._queues[unit.place].append(unit.key)

    @property
    def _open(self) -> int:
        """How many units have neither an outcome nor a failure."""
        return len(self._tasks) + self._outcomes.resumed - len(self._outcomes.done) - len(self._outcomes.failed)

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
                if (place_state := self._places.get(key)) is not None:
                    place_state.heard, place_state.text = self._clock(), text or place_state.text
            case UnitDone(key, unit, outcome):
                self._done(key, unit, outcome)
            case UnitFailed():
                self._failed(event)
            case PoolEnded(why, hint):
                self._last, self._ended = why, True
                for place_state in list(self._places.values()):
                    self._leave(place_state, "lost", 0.0)
                self._queues.clear()
                for task in [task for key, task in self._tasks.items() if not self._finished(key)]:
                    self._fail(task, "", why, hint)

    def _found(self, place: Place) -> None:
        known = self._places.get(place.key)
        if known is not None and known.state == "refused":
            return
        if known is not None and known.unit:  # it was lost and is back, all in one
            self._lose(known.unit, place.key, f"{place.name} was started again")
        place_state = self._places.add(place)
        place_state.heard = self._clock()
        first = place.key not in self._outcomes.places
        self._outcomes.places[place.key] = place
        if first:
            self._news = self._clock()
            for unit in self._units_of(place) if self._units_of is not None else ():
                self._add(unit)

    def _lost(self, event: PlaceLost) -> None:
        place_state = self._places.get(event.place)
        if place_state is None or place_state.state != "ending":  # else it was ended by this schedule, which has reported it
            self._report(event)
        if place_state is None:
            return
        unit = place_state.unit
        self._leave(place_state, "lost", self._limits.return_s if event.again else 0.0)
        if unit:
            self._lose(unit, event.place, event.why)

    def _report(self, event: PlaceLost) -> None:
        self._outcomes.lost.append(event)
        self._last = f"{self._outcomes.place_name(event.place)} lost: {event.why}"

    def _refused(self, event: PlaceRefused) -> None:
        self._news = self._clock()
        self._outcomes.refused.append(event)
        self._last = f"{event.name} not used: {event.why}"
        if event.place and (place_state := self._places.get(event.place)) is not None:
            unit = place_state.unit
            self._leave(place_state, "refused", 0.0)
            if unit:
                self._lose(unit, event.place, event.why, counts=False)
            self._fail_all(self._queues[event.place], event.name, event.why, event.hint)

    def _done(self, key: str, unit: str, outcome: Any) -> None:
        place_state, task = self._places.get(key), self._tasks.get(unit)
        if place_state is None or task is None:
            return
        if self._finished(unit):
            self._release(place_state, unit)
            return
        if place_state.unit == unit:
            self._took_s.append(self._clock() - place_state.since)
        elif unit in self._queues[task.unit.place]:  # it counted as lost
            self._queues[task.unit.place].remove(unit)
        place = place_state.place
        self._outcomes.done[unit] = UnitOutcome(place, outcome)
        if self._recording is not None and (
            problem := self._recording.write_outcome(unit, {"place": asdict(place), "outcome": outcome})
        ):
            self._outcomes.findings.append(finding("journal-incomplete", reason=problem))
        self._release(place_state, unit)
        for other in list(task.running):  # copies of it: too late
            self._end(other)
        self._on_outcome(task.unit, place, outcome)

    def _failed(self, event: UnitFailed) -> None:
        place_state, task = self._places.get(event.place), self._tasks.get(event.unit)
        if place_state is None or task is None or event.place not in task.running:
            return  # it counted as lost already
        self._release(place_state, event.unit)
        if not task.running and not self._finished(event.unit):
            self._fail(task, place_state.place.name, event.why, event.hint, lost=False, unfit=event.unfit)

    # --- what becomes of units and places

    def _finished(self, unit: str) -> bool:
        return unit in self._outcomes.done or unit in self._outcomes.failed

    def _release(self, place_state: PlaceState, unit: str) -> None:
        """The place has finished this unit."""
        self._tasks[unit].running.discard(place_state.place.key)
        place_state.heard = self._clock()
        if place_state.unit == unit:
            self._places.move(place_state, "free")

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
            self._queues[task.unit.place].appendleft(unit)
        else:
            self._fail(task, self._outcomes.place_name(key), f"lost {task.losses} times; the last reason: {why}")

    def _fail(self, task: _Task, place: str, why: str, hint: str = "", *, lost: bool = True, unfit: bool = False) -> None:
        self._outcomes.failed[task.unit.key] = UnitFailure(place, why, hint, lost, unfit)
        self._last = f"{place if place and task.unit.place else task.unit.key} failed: {why}"

    def _fail_all(self, queue: deque[str], place: str, why: str, hint: str = "") -> None:
        while queue:
            self._fail(self._tasks[queue.popleft()], place, why, hint)

    def _leave(self, place_state: PlaceState, state: State, wait_s: float) -> None:
        """The place is not usable from now on."""
        place_state.until = self._clock() + wait_s
        self._places.move(place_state, state)

    def _end(self, key: str, why: str = "") -> None:
        """End what a place is doing; with a reason, it is reported as lost."""
        place_state = self._places.get(key)
        if place_state is None or place_state.state != "busy":
            return
        unit = place_state.unit
        self._leave(place_state, "ending", self._limits.return_s)
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
        for place_state in self._places.having("busy"):
            task, key, seconds = self._tasks[place_state.unit], place_state.place.key, place_state.seconds(now)
            if now - max(place_state.heard, place_state.since) > self._limits.silence_s:
                why = f"no sign of life for {self._limits.silence_s:g} s"
                self._end(key, why)
                self._lose(task.unit.key, key, why)
            elif task.unit.place and half and too_slow(seconds, typical, self._limits.leave_after):
                why = f"not finished after {seconds:.0f} s; the others took {typical:.0f} s"
                self._end(key, why)
                self._fail(task, place_state.place.name, why)
            elif too_slow(seconds, typical or 0.0, self._limits.longest):
                why = f"not finished after {seconds:.0f} s"
                self._end(key, why)
                self._lose(task.unit.key, key, why)
        busy = self._places.having("busy")
        self._slow = [place_state for place_state in busy if too_slow(place_state.seconds(now), typical, self._limits.copy_after)]
        for place_state in self._places.having("ending"):
            if place_state.until <= now:
                self._leave(place_state, "lost", 0.0)
        if self._open and not busy and not self._coming():
            self._give_up(now)
        return True

    def _excuse(self, paused_s: float, now: float) -> None:
        """Do not count time in which this process itself did not run (stopped, or waiting for a disk): messages may still be in
        its pipes."""
        self._news += paused_s
        for place_state in self._places.values():
            place_state.heard = min(place_state.heard + paused_s, now)
            place_state.paused_s += paused_s
            place_state.until += paused_s

    def _give_up(self, now: float) -> None:
        """Nothing is being measured: units that no place can measure any more have failed."""
        hoped = {key for key, place_state in self._places.items() if place_state.usable or place_state.until > now}
        for place, queue in self._queues.items():
            name, known = self._outcomes.place_name(place), place in self._outcomes.places
            if not place and not hoped:
                self._fail_all(queue, "", "no GPU is left that can measure it")
            elif place and place not in hoped:
                why = f"{name} was lost and did not come back" if known else f"{name} was not found"
                self._fail_all(queue, name if known else "", why)

    # --- handing out

    def _hand_out(self) -> None:
        for place_state in self._places.ready():
            unit, now = self._next(place_state.place.key), self._clock()
            if unit is not None:
                place_state.since, place_state.heard, place_state.text, place_state.paused_s = now, now, "", 0.0
                self._places.move(place_state, "busy")
                place_state.unit = unit
                self._tasks[unit].running.add(place_state.place.key)
                self._pool.assign(place_state.place.key, self._tasks[unit].unit)

    def _next(self, key: str) -> str | None:
        """What this place should measure now."""
        if self._queues[key]:
            return self._queues[key].popleft()
        queue = self._queues[""]
        for index, unit in enumerate(queue):
            if not self._better_elsewhere(unit, key):
                del queue[index]
                return unit
        return self._to_copy(key) if not queue else None

    def _better_elsewhere(self, unit: str, key: str) -> bool:
        """Whether this place lost the unit before, and others have not."""
        lost_at = self._tasks[unit].lost_at
        return key in lost_at and any(other.usable and place not in lost_at for place, other in self._places.items())

    def _to_copy(self, key: str) -> str | None:
        """The unit that takes the longest, if that is much longer than the others took."""
        for place_state in self._slow:
            if place_state.unit and self._may_copy(self._tasks[place_state.unit], key):
                self._tasks[place_state.unit].copies += 1
                self._last = f"{place_state.place.name} is slow: its measurement also runs on another GPU"
                return place_state.unit
        return None

    def _may_copy(self, task: _Task, key: str) -> bool:
        once = not task.unit.place and len(task.running) == 1 and task.copies < MOST_COPIES
        return once and key not in task.lost_at

    def _progress(self) -> PoolProgress:
        done, failed = len(self._outcomes.done), len(self._outcomes.failed)
        working, usable = self._places.having("busy"), [state.place for state in self._places.having("free", "busy")]
        left = None
        if self._took_s and usable:
            running_s = sum(self._clock() - place_state.since for place_state in working)
            left = max(0.0, self._open * sum(self._took_s) / len(self._took_s) - running_s) / max(len(working), 1)
        doing = working[0].text if len(working) == 1 else ""
        kind = "GPU" if any(place.gpu is not None for place in self._outcomes.places.values()) else "machine"
        total, nodes = done + failed + self._open, len({place.node for place in usable})
        gpus = len({place.uuid or place.key for place in usable})  # several places may share one
        return PoolProgress(done, failed, total, gpus, len(working), nodes, left, self._last, doing, kind)
