"""A pool in simulated time: places that die, return, fall silent, take long, or answer twice, as told."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any, Literal

from gemmscope.pool.pool import (
    Event,
    Place,
    PlaceFound,
    PlaceLost,
    PlaceRefused,
    Unit,
    UnitDone,
    UnitFailed,
    UnitProgress,
)

ALIVE_S = 5.0
FOREVER = 10.0**7

Kind = Literal["done", "fails", "dies", "refuses", "silent", "slow", "twice", "late"]


@dataclass(frozen=True)
class Fate:
    """How one assignment ends, after how long, and how long the place is away if it is lost (None: forever)."""

    kind: Kind = "done"
    seconds: float = 1.0
    away_s: float | None = 1.0


@dataclass
class FakePool:
    """Assignments take the fates in turn. `deaf`: it never answers `abandon`. `always_expecting`: places are always expected."""

    places: Sequence[Place]
    fates: Sequence[Fate] = (Fate(),)
    deaf: bool = False
    always_expecting: bool = False
    found_after_s: Sequence[float] = (0.0,)
    now: float = field(default=0.0, init=False)
    active: dict[str, str] = field(default_factory=dict, init=False)
    """What each place measures, as the pool knows it."""
    problems: list[str] = field(default_factory=list, init=False)
    assigned: list[tuple[str, str]] = field(default_factory=list, init=False)
    most_busy: int = field(default=0, init=False)
    """On one node, at the same time."""

    def __post_init__(self) -> None:
        self._ordered, self._fates = count(), cycle(self.fates)
        self._planned: list[tuple[float, int, Event]] = []
        self._life: dict[str, int] = {}  # events of an earlier life of a place do not happen any more
        self._there: set[str] = set()
        self._away_s: dict[str, float] = {}
        self._by_key = {place.key: place for place in self.places}
        self._lives: dict[int, tuple[str, int]] = {}
        self._waiting = len(self.places)
        for place, seconds in zip(self.places, cycle(self.found_after_s), strict=False):
            self._plan(seconds, PlaceFound(place))

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def clock(self) -> float:
        return self.now

    def expected(self) -> int:
        return 1 if self.always_expecting else self._waiting

    def _plan(self, seconds: float, event: Event, place: str = "") -> None:
        number = next(self._ordered)
        if place:
            self._lives[number] = (place, self._life.get(place, 0))
        heapq.heappush(self._planned, (self.now + seconds, number, event))

    def events(self, wait_s: float) -> Iterable[Event]:
        if not self._planned or self._planned[0][0] > self.now + wait_s:
            self.now += wait_s
            return []
        at, number, event = heapq.heappop(self._planned)
        self.now = max(self.now, at)
        place, life = self._lives.pop(number, ("", 0))
        if place and self._life.get(place, 0) != life:
            return []
        return self._happens(event)

    def _happens(self, event: Event) -> list[Event]:
        match event:
            case PlaceFound(place):
                self._waiting -= place.key not in self._life and self._waiting > 0
                self._life.setdefault(place.key, 0)
                self._there.add(place.key)
            case PlaceLost(key, _, again):
                self._gone(key)
                if again:
                    self._plan(self._away_s.pop(key, 0.5), PlaceFound(self._by_key[key]))
            case PlaceRefused(place=key):
                self._gone(key)
            case UnitDone(key, unit, _) | UnitFailed(key, unit):
                if self.active.get(key) == unit:
                    del self.active[key]
            case UnitProgress(key, _):
                if key not in self.active:
                    return []
                self._plan(ALIVE_S, event, key)
        return [event]

    def _gone(self, key: str) -> None:
        self.active.pop(key, None)
        self._there.discard(key)
        self._life[key] = self._life.get(key, 0) + 1

    def assign(self, place: str, unit: Unit) -> None:
        uuid, node = self._by_key[place].uuid, self._by_key[place].node
        if place not in self._there:
            self.problems.append(f"{place} is not there")
        if place in self.active:
            self.problems.append(f"{place} is busy")
        if uuid and not self.deaf and any(self._by_key[other].uuid == uuid for other in self.active):
            self.problems.append(f"two at once on {uuid}")
        if unit.place not in ("", place):
            self.problems.append(f"{unit.key} at the wrong place {place}")
        self.assigned.append((place, unit.key))
        self.active[place] = unit.key
        self.most_busy = max(self.busy_on(node), self.most_busy)
        self._fate(place, unit.key, next(self._fates))

    def busy_on(self, node: str) -> int:
        return sum(self._by_key[place].node == node for place in self.active)

    def _fate(self, place: str, unit: str, fate: Fate) -> None:
        outcome: Any = {"by": place}
        if fate.kind != "silent":
            self._plan(ALIVE_S, UnitProgress(place, "measuring"), place)
        if fate.kind in ("done", "twice"):
            self._plan(fate.seconds, UnitDone(place, unit, outcome), place)
        if fate.kind == "twice":
            self._plan(fate.seconds + 1.0, UnitDone(place, unit, outcome))
        elif fate.kind == "fails":
            self._plan(fate.seconds, UnitFailed(place, unit, "out of memory"), place)
        elif fate.kind == "refuses":
            self._plan(fate.seconds, PlaceRefused(place, "in use", "", place), place)
        elif fate.kind in ("dies", "late"):
            self._plan(fate.seconds, PlaceLost(place, "signal 9", again=fate.away_s is not None), place)
            if fate.away_s is not None:
                self._away_s[place] = fate.away_s
            if fate.kind == "late":  # the outcome was on its way
                self._plan(fate.seconds + 0.25, UnitDone(place, unit, outcome))

    def abandon(self, place: str) -> None:
        if self.deaf:
            self._life[place] = self._life.get(place, 0) + 1
            self._there.discard(place)
            self.active.pop(place, None)
            return
        self._plan(0.5, PlaceLost(place, "ended", again=True), place)
