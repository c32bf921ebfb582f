"""Which places there are, what each is doing, and which of them may begin something now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gemmscope.pool.units import Place

CORES_PER_GPU = 2  # a measuring process launches kernels from one thread, and its parent needs some time beside it

State = Literal["free", "busy", "ending", "lost"]


@dataclass
class Station:
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

    def seconds(self, now: float) -> float:
        """How long it has been measuring, as far as the schedule could have noticed its end."""
        return now - self.since - self.paused_s


class Board:
    """All places of a schedule, with what limits them: a GPU measures one unit at a time, and a node `at_once` at most."""

    def __init__(self, at_once: int | None = None) -> None:
        self._at_once = at_once
        self._stations: dict[str, Station] = {}
        self._free: dict[str, None] = {}  # the one that has been free the longest first
        self._busy: dict[str, None] = {}
        self._nodes: Counter[str] = Counter()  # busy or ending
        self._gpus: Counter[str] = Counter()
        self._gpus_of: dict[str, set[str]] = {}  # of each node
        self._cores: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self.most_at_once: dict[str, int] = {}
        self.few_cores: dict[str, tuple[int, int, int]] = {}
        """Nodes that are limited because of their CPU cores: cores, GPUs, at once."""

    def get(self, key: str) -> Station | None:
        return self._stations.get(key)

    def add(self, place: Place) -> Station:
        """Add a new place, or update a known one."""
        station = self._stations.get(place.key)
        if station is None:
            station = self._stations[place.key] = Station(place)
        self._see(place)
        station.place = place
        self.move(station, "free")
        return station

    def move(self, station: Station, state: State) -> None:
        """Give a place another state."""
        key, place = station.place.key, station.place
        if (occupied := state in ("busy", "ending")) != (station.state in ("busy", "ending")):
            change = 1 if occupied else -1
            self._nodes[place.node] += change
            self._gpus[place.uuid] += change
            self.most_at_once[place.node] = max(self.most_at_once.get(place.node, 0), self._nodes[place.node])
        station.state = state
        for states, keys in (("free", self._free), ("busy", self._busy)):
            keys.pop(key, None)
            if state == states:
                keys[key] = None
        if state != "busy":
            station.unit = ""

    def busy(self) -> list[Station]:
        return [self._stations[key] for key in self._busy]

    def usable(self) -> int:
        """Places that are free or busy."""
        return len(self._free) + len(self._busy)

    def gpus(self) -> int:
        """GPUs of the usable places: several places may share one."""
        return len({self._stations[key].place.uuid or key for keys in (self._free, self._busy) for key in keys})

    def is_usable(self, key: str) -> bool:
        return key in self._free or key in self._busy

    def nodes(self) -> int:
        """Nodes with usable places."""
        return len({self._stations[key].place.node for keys in (self._free, self._busy) for key in keys})

    def stations(self) -> Iterator[Station]:
        yield from self._stations.values()

    def ready(self) -> Iterator[Station]:
        """Free places that may begin something now. Each is judged when it is asked for: those before it may have begun."""
        for key in list(self._free):
            place = self._stations[key].place
            if self._nodes[place.node] < self.limit(place.node) and not (place.uuid and self._gpus[place.uuid]):
                yield self._stations[key]

    def limit(self, node: str) -> float:
        """How many places of a node may measure at the same time: as requested, else one for every two CPU cores."""
        return self._at_once if self._at_once is not None else self._limits.get(node, math.inf)

    def _see(self, place: Place) -> None:
        """Record what a place reports about its node."""
        cores, gpus = int(place.facts.get("cores", 0)), self._gpus_of.setdefault(place.node, set())
        if not place.uuid:
            return
        gpus.add(place.uuid)
        if cores:
            self._cores[place.node] = min(cores, self._cores.get(place.node, cores))
        cores = self._cores.get(place.node, 0)
        if self._at_once is None and len(gpus) > 1 and 0 < cores < CORES_PER_GPU * len(gpus):
            at_once = self._limits[place.node] = max(1, cores // CORES_PER_GPU)
            self.few_cores[place.node] = (cores, len(gpus), at_once)
