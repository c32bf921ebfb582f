"""The GPUs of this machine as a pool: one place worker per GPU, pinned to it and to the CPU cores near it.

A place worker that dies is started again, unless it dies again and again without finishing anything.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from gemmscope.folders import temporary_folder
from gemmscope.gpu.environment import node_name
from gemmscope.pool.place_messages import ALIVE_S, PLACE_WORKER, RESTART_S, START_S, PlaceSetup, event_of, unit_line
from gemmscope.pool.pool import Event, Place, PlaceFound, PlaceLost, PlaceRefused, Unit, UnitDone, UnitFailed
from gemmscope.process import Ending, ProcessEndedError, WorkerProcess, worker_environment

MOST_DEATHS = 3  # in a row, without a unit finished between them


@dataclass(frozen=True)
class LocalPlace:
    """A GPU of this machine, by its number and UUID; or its CPU. `cores`: the CPU cores for its processes; none: all."""

    gpu: int | None = None
    uuid: str = ""
    cores: tuple[int, ...] = ()


@dataclass
class _Slot:
    """A place, and the process that serves it now."""

    place: Place
    local: LocalPlace
    process: WorkerProcess | None = None
    begun: float = 0.0
    greeted: bool = False
    """Whether it was ever found or refused."""
    ready: bool = False
    """Whether its process now has said so."""
    deaths: int = 0
    restart_at: float | None = None
    starts: int = 0


class LocalPool:
    """A pool of the places given. Two places may name the same GPU; the schedule lets them take turns."""

    def __init__(
        self,
        places: Sequence[LocalPlace],
        *,
        share_gpu: bool = False,
        alive_s: float = ALIVE_S,
        restart_s: float = RESTART_S,
        start_s: float = START_S,
    ) -> None:
        self._share_gpu, self._alive_s, self._restart_s, self._start_s = share_gpu, alive_s, restart_s, start_s
        self._node = node_name()
        self._slots: dict[str, _Slot] = {}
        for place in places:
            key = f"{self._node}/{place.uuid or ('cpu' if place.gpu is None else place.gpu)}"
            turn = sum(slot.local.uuid == place.uuid and slot.local.gpu == place.gpu for slot in self._slots.values()) + 1
            key += f" #{turn}" if turn > 1 else ""
            self._slots[key] = _Slot(Place(key, self._node, place.gpu, place.uuid, turn=turn), place)
        self._waiting: deque[Event] = deque()
        self._resources = ExitStack()

    def __enter__(self) -> LocalPool:
        self._folder = self._resources.enter_context(temporary_folder())
        self._resources.callback(self._end_all)
        try:
            for slot in self._slots.values():
                self._start(slot)
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def expected(self) -> int:
        return sum(
            not slot.greeted and (slot.process is not None or slot.restart_at is not None) for slot in self._slots.values()
        )

    def events(self, wait_s: float) -> Iterable[Event]:
        for slot in self._slots.values():
            if slot.restart_at is not None and slot.restart_at <= time.monotonic():
                self._start(slot)
        if self._waiting:
            wait_s = 0.0
        due = [slot.restart_at - time.monotonic() for slot in self._slots.values() if slot.restart_at is not None]
        running = [slot.process for slot in self._slots.values() if slot.process is not None]
        reading, sending = [one.reading for one in running], [one.writing for one in running if one.sending]
        select.select(reading, sending, [], 0.0 if any(one.over for one in running) else max(0.0, min([wait_s, *due])))
        for slot in self._slots.values():
            self._receive(slot)
        events, self._waiting = list(self._waiting), deque()
        return events

    def assign(self, place: str, unit: Unit) -> None:
        slot = self._slots[place]
        if slot.process is not None:  # else its loss is about to be reported
            slot.process.send(unit_line(unit))

    def abandon(self, place: str) -> None:
        slot = self._slots[place]
        if slot.process is not None:
            self._close(slot)
            slot.restart_at = time.monotonic()
            self._waiting.append(PlaceLost(place, "ended", again=True))

    def _start(self, slot: _Slot) -> None:
        slot.starts += 1
        folder = self._folder / f"{list(self._slots).index(slot.place.key)}-{slot.starts}"
        cpu = slot.local.gpu is None
        setup = PlaceSetup(cpu, self._share_gpu, slot.local.cores, folder=str(folder), alive_s=self._alive_s)
        visible = {"CUDA_VISIBLE_DEVICES": slot.local.uuid or str(slot.local.gpu)} if not cpu else {}
        slot.begun, slot.restart_at, slot.ready = time.monotonic(), None, False
        try:
            slot.process = WorkerProcess(PLACE_WORKER, environment={**worker_environment(), **visible})
        except OSError as error:  # no memory, no more processes or files
            self._died(slot, f"its process cannot be started: {error.strerror or error}")
            return
        slot.process.send(setup.line())

    def _receive(self, slot: _Slot) -> None:
        """Process what a place worker has sent, and send what it has not received yet."""
        if slot.process is None:
            return
        try:
            slot.process.flush()
            for line in slot.process.lines():
                self._tell(slot, event_of(slot.place.key, line, name=slot.place.name))
                if slot.process is None:
                    return
        except ValueError as error:
            self._died(slot, str(error))
        except ProcessEndedError as end:
            self._died(slot, _how(end.ending))
        if slot.process is not None and not slot.ready and time.monotonic() - slot.begun > self._start_s:
            self._died(slot, f"its process did not respond for {self._start_s:g} s: the GPU driver may hang", again=False)

    def _tell(self, slot: _Slot, event: Event) -> None:
        match event:
            case PlaceFound(found):
                slot.greeted = slot.ready = True
                event = PlaceFound(replace(slot.place, node=found.node, uuid=slot.place.uuid or found.uuid, facts=found.facts))
            case UnitDone() | UnitFailed():
                slot.deaths = 0
            case PlaceRefused():
                slot.greeted, event = True, replace(event, node=slot.place.node)
                self._close(slot)
        self._waiting.append(event)

    def _died(self, slot: _Slot, why: str, *, again: bool = True) -> None:
        self._close(slot)
        slot.deaths += 1
        again = again and slot.deaths < MOST_DEATHS
        slot.restart_at = time.monotonic() + self._restart_s if again else None
        if slot.greeted:
            self._waiting.append(PlaceLost(slot.place.key, why, again=again))
        elif not again:
            self._waiting.append(
                PlaceRefused(
                    slot.place.name,
                    why,
                    "gemmscope doctor shows what this machine can measure",
                    slot.place.key,
                    node=slot.place.node,
                )
            )

    def _close(self, slot: _Slot) -> None:
        process, slot.process = slot.process, None
        if process is not None:
            process.close()

    def _end_all(self) -> None:
        for slot in self._slots.values():
            if slot.process is not None:
                slot.process.kill()
        for slot in self._slots.values():
            self._close(slot)


def _how(ending: Ending) -> str:
    """How the process of a place worker ended."""
    if ending.code is None:
        return "its process closed its output"
    return "its process was killed (signal 9)" if ending.killed else f"its process died ({ending.how}){ending.detail}"
