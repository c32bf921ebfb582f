"""Places of a Ray cluster. The driver never imports Ray: a bridge process does, and everything that Ray prints stays there."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from gemmscope import units
from gemmscope.errors import UserError, option, shown
from gemmscope.folders import temporary_folder
from gemmscope.pool.place_messages import ALIVE_S, PLACE_WORKER, PlaceSetup, event_of, unit_line
from gemmscope.pool.pool import Event, PlaceFound, PlaceLost, PlaceRefused, PoolEnded, Unit, UnitDone
from gemmscope.pool.ray_messages import check_installed, last_useful_line, nobody_answers, ray_address
from gemmscope.process import ProcessEndedError, WorkerProcess
from gemmscope.signals import Interrupted, defer_signals

ANSWER_S = 15.0  # time limit for an answer from an address
CONNECT_S = 90.0  # time limit to connect to a Ray that answers: the machine may be busy
LOCAL_S = 120.0  # the same for a Ray that is started here
CENSUS_S = 60.0  # time limit until the nodes are known
HELD_S = 10.0  # how long to wait for GPUs that are in use when a node is first seen: an earlier command may be ending
BRIDGE_SILENCE_S = 90.0  # a bridge that is silent for this long hangs
ACTOR_SILENCE_S = 15.0  # a node that is silent for this long is lost: Ray itself takes about 30 s to notice
STOP_S = 15.0
MOST_CONNECTIONS = 3  # without an outcome in between
REPLACED_S = 30.0  # how long to wait for a replacement of a node that left before anything was measured there


@dataclass
class _RaySlot:
    """An actor as the driver knows it. `key`: of its place, once its worker has said hello. `known`: it replaces one that had, on
    the same node."""

    host: str
    key: str = ""
    known: bool = False


class RayPool:
    """The GPUs of a Ray cluster, or the CPUs of its nodes. Nodes that appear later are used too."""

    def __init__(
        self,
        address: str,
        *,
        cpu: bool = False,
        share_gpu: bool = False,
        module: str = PLACE_WORKER,
        silence_s: float = ACTOR_SILENCE_S,
    ) -> None:
        self.address = ray_address(address)
        self._setup = PlaceSetup(cpu=cpu, share_gpu=share_gpu, near=not cpu)
        self._module, self._silence_s = module, silence_s
        self._stack = ExitStack()
        self._bridge: _BridgeProcess | None = None
        self._slots: dict[int, _RaySlot] = {}
        self._by_key: dict[str, int] = {}
        self._away: dict[str, set[str]] = {}  # the keys of places that were lost and are not back, by their host
        self._waiting: deque[Event] = deque()
        self._connections, self._connected = 0, False
        self._hope_until = 0.0
        self._ended = False

    def __enter__(self) -> RayPool:
        """Connect, and find the first places. A `UserError` if there is no cluster, or nothing in it that can measure."""
        check_installed()
        self._folder = str(self._stack.enter_context(temporary_folder()))
        self._stack.callback(self._end_bridge)
        try:
            self._check(self._connect())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_bridge(self) -> None:
        if self._bridge is not None:
            self._bridge.end(STOP_S if self._connected else 0.5)
            self._bridge, self._connected = None, False

    def expected(self) -> int:
        """Place workers that are being started, except at places that are known; and one if a node may be replaced."""
        starting = sum(not slot.key and not slot.known for slot in self._slots.values())
        return max(starting, int(time.monotonic() < self._hope_until))

    def events(self, wait_s: float) -> Iterable[Event]:
        """What has happened; also a connection that ended, and is made again."""
        if not self._waiting and self._bridge is not None:
            try:
                for message in self._bridge.messages(wait_s):
                    self._take(message)
            except _BridgeEndedError as end:
                self._reconnect(end)
        elif not self._waiting and self._ended:
            time.sleep(wait_s)
        happened, self._waiting = list(self._waiting), deque()
        return happened

    def assign(self, place: str, unit: Unit) -> None:
        """Send a unit to the place worker of a place. If it is gone, a `PlaceLost` reports that."""
        pack = getattr(unit.content, "for_other_machines", None)  # what it needs besides: files of a model
        travelling = unit if pack is None else replace(unit, content=pack())
        self._order(place, type="send", line=unit_line(travelling).decode())

    def abandon(self, place: str) -> None:
        """End what a place does; another place worker is started there."""
        self._order(place, type="abandon")

    def _order(self, place: str, **content: Any) -> None:
        number = self._by_key.get(place)
        if number is not None and self._bridge is not None:
            self._bridge.order(**content, slot=number)

    # -- the connection ------------------------------------------------------------------------------------------------------

    def _connect(self) -> dict[str, Any]:
        """Start a bridge and wait until it knows the nodes."""
        self._connections += 1
        self._bridge = bridge = _BridgeProcess(starts_ray=self.address == "local")
        bridge.order(
            address=self.address,
            cpu=self._setup.cpu,
            module=self._module,
            begin=self._setup.line().decode(),
            folder=self._folder,
            answer_s=ANSWER_S - 2,
            silence_s=self._silence_s,
            held_s=HELD_S,
            alive_s=ALIVE_S,
        )
        until = time.monotonic() + (LOCAL_S if self.address == "local" else ANSWER_S)
        answered = False
        while (left := until - time.monotonic()) > 0:
            with defer_signals() as signals:
                if signals.first is not None:
                    raise signals.interruption()
            try:
                messages = bridge.messages(min(left, 1.0))
            except _BridgeEndedError as end:
                raise UserError(*nobody_answers(self.address, str(end).strip("()"))) from end
            for message in messages:
                match message["type"]:
                    case "unusable":
                        raise UserError(message["why"], message["hint"])
                    case "answered":
                        answered = True
                        until = time.monotonic() + (LOCAL_S if self.address == "local" else CONNECT_S)
                    case "connected":
                        self._connected = True
                        until = time.monotonic() + CENSUS_S
                    case _:
                        self._take(message)
                if message["type"] == "census":
                    return dict(message)
        reason = "something answers there, but Ray does not connect to it" if answered else "no answer in time"
        raise UserError(*nobody_answers(self.address, reason))

    def _check(self, census: dict[str, Any]) -> None:
        """A `UserError` if the cluster has nothing to measure on."""
        nodes, slots, occupied = census["nodes"], census["slots"], census["held"]
        asked = option("ray", self.address)
        if slots:
            return
        if occupied:
            problem = (
                f"{asked}: other Ray jobs hold all {occupied} GPUs of the cluster"
                if occupied > 1
                else f"{asked}: another Ray job holds the only GPU"
            )
            raise UserError(problem, "wait until they end: `ray status` shows what is in use")
        count = f"none of the {nodes} nodes has" if nodes != 1 else "its only node does not have"
        if self._setup.cpu:
            raise UserError(f"{asked}: {count} a CPU for Ray's actors", "start a node with --num-cpus")
        raise UserError(f"{asked}: {count} a GPU that Ray knows of", f"{option('device', 'cpu')} tries it out on their CPUs")

    def _reconnect(self, end: _BridgeEndedError) -> None:
        """Every place is lost with the bridge. Another bridge finds them again, unless the cluster is gone."""
        self._end_bridge()
        lost = sorted(self._by_key)
        self._slots, self._by_key, self._away = {}, {}, {}
        again = self._connections < MOST_CONNECTIONS
        why = f"the connection to the Ray cluster was lost {end}".strip()
        self._waiting.extend(PlaceLost(key, why, again=again) for key in lost)
        hint = "finished measurements are kept: the same command with " + option("resume") + " continues from here"
        if again:
            try:
                self._connect()
                self._hope_until = time.monotonic() + REPLACED_S
            except UserError:
                self._end_bridge()
                why = f"{why} and could not be restored"
                again = False
            except (Interrupted, KeyboardInterrupt):  # the schedule has noticed it too, and returns what was measured
                self._end_bridge()
                self._ended = True
                return
        if not again:
            self._ended = True
            self._waiting.append(PoolEnded(why, hint))

    # -- messages of the bridge ----------------------------------------------------------------------------------------------

    def _take(self, message: dict[str, Any]) -> None:
        number = message.get("slot", 0)
        match message["type"]:
            case "slot":
                self._slots[number] = _RaySlot(message["host"], known=message["known"])
            case "line":
                self._take_line(number, message["line"])
            case "lost":
                slot = self._forget(number)
                if slot is not None and slot.key:
                    self._away.setdefault(slot.host, set()).add(slot.key)
                    may_return = message["again"] or message["left"]  # a node that left may come back, or another for it
                    self._waiting.append(PlaceLost(slot.key, message["why"], again=may_return))
                elif slot is not None and not slot.known:
                    self._hope_until = time.monotonic() + REPLACED_S
                    if not message["again"]:
                        self._waiting.append(PlaceRefused(slot.host, message["why"]))
            case "refused":
                slot = self._forget(number)
                if slot is not None:
                    name, key = message["host"], self._place_of(slot)
                    self._waiting.append(PlaceRefused(name, message["why"], _how_to_start(message["why"]), key))
            case "held":
                count, s = message["gpus"], "s" if message["gpus"] > 1 else ""
                why = f"{count} GPU{s} held by other Ray jobs"
                self._waiting.append(PlaceRefused(message["host"], why, "`ray status` shows what is in use", gpus=count))
            case "census":
                if not self._setup.cpu and message["without"]:
                    self._waiting.append(PlaceRefused(units.names(message["without"]), "no GPU that Ray knows of", gpus=0))

    def _take_line(self, number: int, line: str) -> None:
        slot = self._slots.get(number)
        if slot is None:
            return
        try:
            event = event_of(slot.key, line, name=slot.host)
        except ValueError:
            if self._bridge is not None:
                self._bridge.order(type="abandon", slot=number)
            if slot.key:  # else the bridge tells when it was ended, and starts another one
                self._waiting.append(PlaceLost(slot.key, f"its process sent an invalid message: {shown(line)}", again=True))
                self._forget(number)
            return
        match event:
            case PlaceFound():
                event = self._greet(number, slot, event)
            case PlaceRefused():
                event = replace(event, place=self._place_of(slot))
                self._forget(number)
            case _ if not slot.key:
                return
            case UnitDone():
                self._connections = 0
        self._waiting.append(event)

    def _greet(self, number: int, slot: _RaySlot, greeting: PlaceFound) -> PlaceFound:
        """Name the place: by its node and GPU. Nodes that share a machine are numbered."""
        place, count = greeting.place, 1
        node = place.node
        while (key := f"{node}/{place.uuid or 'cpu'}") in self._by_key:
            count += 1
            node = f"{place.node}#{count}"
        slot.key = key
        self._by_key[key] = number
        self._away.get(slot.host, set()).discard(key)
        return PlaceFound(replace(place, key=key, node=node))

    def _place_of(self, slot: _RaySlot) -> str:
        """The key of its place. The successor of a lost actor has that of the only place of its host that is away; empty if there
        are several, since Ray may have given it any of their GPUs."""
        away = self._away.get(slot.host, set()) if slot.known and not slot.key else ()
        return slot.key or (next(iter(away)) if len(away) == 1 else "")

    def _forget(self, number: int) -> _RaySlot | None:
        slot = self._slots.pop(number, None)
        if slot is not None and self._by_key.get(slot.key) == number:
            del self._by_key[slot.key]
        return slot


def _how_to_start(why: str) -> str:
    """What to do about a place worker that does not start."""
    if "ModuleNotFoundError" in why or "ImportError" in why:
        return "install gemmscope on that node, with the Python that Ray runs there"
    return ""


def _alone() -> dict[str, str]:
    """Variables with which Ray accepts nobody without a new token, and listens on the loopback address, as on a Mac. They are
    read by this user's processes alone; a command line could be read by all."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class _BridgeEndedError(Exception):
    """The bridge died, or was ended after silence. The message says how it ended."""


class _BridgeProcess(WorkerProcess):
    """The bridge. Its output goes to a log that nobody sees. `starts_ray`: a Ray of its own, for this user alone; else the user's
    variables say how to join a cluster."""

    def __init__(self, *, starts_ray: bool) -> None:
        environment = {
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",  # actors travel by value: 3.11.4 and 3.11.7 understand each other
            "RAY_USAGE_STATS_ENABLED": "0",  # a Ray that is started here reports to nobody
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        super().__init__(
            "gemmscope.pool.ray_bridge", environment={**environment, **os.environ, **(_alone() if starts_ray else {})}
        )
        self._heard = time.monotonic()

    def order(self, **content: Any) -> None:
        self.send(json.dumps(content).encode() + b"\n")

    def messages(self, wait_s: float) -> list[dict[str, Any]]:
        """What has arrived; waits for the first message. A `_BridgeEndedError` if no more can arrive."""
        until = time.monotonic() + wait_s
        while True:
            self.wait(until - time.monotonic())
            try:
                lines = self.lines()
            except ProcessEndedError as end:
                last = last_useful_line(end.ending.errors)
                raise _BridgeEndedError(f"({last})" if last else f"(exit code {end.ending.code})") from end
            if lines:
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > BRIDGE_SILENCE_S:
                raise _BridgeEndedError(f"(no answer from Ray for {BRIDGE_SILENCE_S:.0f} s)")
            messages = [message for line in lines if (message := json.loads(line))["type"] != "alive"]
            if messages or time.monotonic() >= until:
                return messages
