"""The bridge and its driver with a pretended Ray, for what a real cluster does only by chance: actors die while they start."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gemmscope.pool import ray as ray_module
from gemmscope.pool import ray_bridge
from gemmscope.pool.pool import PlaceFound, PlaceLost, PlaceRefused
from gemmscope.pool.ray import RayPool
from gemmscope.pool.ray_bridge import Bridge
from gemmscope.signals import defer_signals

HELLO = json.dumps({"type": "hello"})
Answer = Callable[[], Awaitable[tuple[list[str], str | None]]]


class ActorError(Exception):
    """As Ray raises it when an actor or its node is gone."""


async def dies() -> tuple[list[str], str | None]:
    raise ActorError("The actor died because of an error raised in its creation task\nOSError: no space left on device")


async def greets() -> tuple[list[str], str | None]:
    return [HELLO], None


async def killed() -> tuple[list[str], str | None]:
    return [], "signal 9"


async def waits() -> tuple[list[str], str | None]:
    await asyncio.sleep(3600)
    return [], None


def pretended_ray(answers: list[Answer]) -> Any:
    """A cluster of one node. Each poll of its actors takes the next answer; the last one stays."""

    def poll(_: float) -> Awaitable[tuple[list[str], str | None]]:
        return (answers.pop(0) if len(answers) > 1 else answers[0])()

    async def nothing() -> None: ...

    actor = SimpleNamespace(poll=SimpleNamespace(remote=poll), stop=SimpleNamespace(remote=nothing))
    node = {"NodeID": "a", "Alive": True, "NodeManagerHostname": "host", "Resources": {"CPU": 1.0}}
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
    return SimpleNamespace(
        nodes=lambda: [node],
        exceptions=SimpleNamespace(RayError=ActorError),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "head"),
        cloudpickle=SimpleNamespace(register_pickle_by_value=lambda _: None),
        remote=lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor)),
        put=lambda _: None,
        kill=lambda _: None,
        util=SimpleNamespace(scheduling_strategies=strategies),
    )


REQUEST = {"cpu": True, "silence_s": 300.0, "held_s": 1.0, "module": "site", "begin": "{}"}


def outgoing_to(told: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(put=lambda **content: told.append(content))


def messages(answers: list[Answer], enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """What the bridge tells its driver, until that is enough."""
    told: list[dict[str, Any]] = []

    async def serve() -> None:
        bridge = Bridge(pretended_ray(answers), REQUEST, outgoing_to(told), b"")
        watching = asyncio.create_task(bridge._watch())
        for _ in range(12_000):
            await asyncio.sleep(0.01)
            if enough(told):
                break
        watching.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(serve())
    assert enough(told), told
    return [message for message in told if message["type"] != "census"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_bridge, "RESTART_S", 0.001)


def said(type_: str) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda told: any(message["type"] == type_ for message in told)


def test_actors_that_die_while_they_start_are_started_again() -> None:
    """Their places are not known yet, and the driver must expect them."""
    told = messages([dies, killed, dies, greets, waits], said("line"))
    kinds = [message["type"] for message in told]
    assert kinds == ["slot", "lost", "slot", "lost", "slot", "lost", "slot", "line"]
    assert [message["known"] for message in told if message["type"] == "slot"] == [False] * 4
    assert all(message["again"] for message in told if message["type"] == "lost")


def test_an_actor_that_never_starts_is_refused() -> None:
    told = messages([dies], said("refused"))
    assert [message["type"] for message in told].count("lost") == ray_bridge.MOST_RESTARTS
    assert told[-1]["why"] == "its process did not start there (OSError: no space left on device)"


def test_the_successor_of_a_known_place() -> None:
    """The driver waits for the place itself, which it knows."""
    told = messages([greets, dies, dies, greets, waits], lambda told: sum(message["type"] == "line" for message in told) == 2)
    assert [message["known"] for message in told if message["type"] == "slot"] == [False, True, True]


def test_a_slot_that_is_over_before_it_begins_starts_no_actor() -> None:
    """Nobody would end the actor, which would keep its GPU."""
    begun: list[str] = []

    async def serve() -> None:
        bridge = Bridge(pretended_ray([waits]), REQUEST, outgoing_to([]), b"")
        bridge.nodes["a"] = ray_bridge.Node("host", 0.0)
        bridge._actor = begun.append  # type: ignore[method-assign, assignment]
        bridge._start("a", delay_s=0.01)
        [slot] = bridge.slots.values()
        bridge._lose(slot, "its node left the Ray cluster", again=False)
        assert slot.task is not None
        await slot.task

    asyncio.run(serve())
    assert not begun


def test_a_ray_that_does_not_tell_which_gpus_are_free() -> None:
    """The node that was asked is leaving: the connection stays, and actors are started on all GPUs."""

    def fail() -> None:
        raise ActorError("the node died")

    told: list[dict[str, Any]] = []
    ray = pretended_ray([waits])
    ray.nodes = lambda: [{"NodeID": "a", "Alive": True, "NodeManagerHostname": "host", "Resources": {"GPU": 2.0}}]
    actors, ray.remote = ray.remote, lambda what: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=fail))
    bridge = Bridge(ray, REQUEST | {"cpu": False}, outgoing_to(told), b"")
    bridge._actor_class = actors(None)

    async def look() -> None:
        watching = asyncio.create_task(bridge._watch())
        while not watching.done() and not said("census")(told):
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(look())
    assert [message["type"] for message in told] == ["slot", "slot", "census"]


def hello(node: str, uuid: str) -> str:
    return json.dumps({"type": "hello", "node": node, "gpu": 0, "uuid": uuid, "facts": {}})


def test_a_site_that_says_something_invalid_is_replaced() -> None:
    """Before its hello it has no place yet: the bridge must end it all the same, and the driver expects another one."""
    pool, sent = RayPool("local"), list[dict[str, Any]]()
    pool._bridge = SimpleNamespace(order=lambda **order: sent.append(order))  # type: ignore[assignment]
    pool._take({"type": "slot", "slot": 1, "host": "host", "known": False})
    pool._take({"type": "line", "slot": 1, "line": "Traceback"})
    assert sent == [{"type": "abandon", "slot": 1}]
    assert (pool.expected(), list(pool._waiting)) == (1, [])
    pool._take({"type": "lost", "slot": 1, "why": "gemmscope stopped it", "again": True, "left": False})
    pool._take({"type": "slot", "slot": 2, "host": "host", "known": False})
    pool._take({"type": "line", "slot": 2, "line": hello("host", "GPU-a")})
    pool._take({"type": "line", "slot": 2, "line": "Traceback"})
    assert sent[1:] == [{"type": "abandon", "slot": 2}]
    [start, lost] = pool._waiting
    assert isinstance(start, PlaceFound)
    assert lost == PlaceLost("host/GPU-a", "its process sent an invalid message: 'Traceback'", again=True)


def test_a_place_that_was_lost_and_then_refused() -> None:
    """A GPU that fell off the bus: the place itself is refused, not one more; unless it could be another one of its node."""
    pool = RayPool("local")
    for number, uuid in enumerate(("GPU-a", "GPU-b", "GPU-c"), start=1):
        pool._take({"type": "slot", "slot": number, "host": "host", "known": False})
        pool._take({"type": "line", "slot": number, "line": hello("host", uuid)})
    pool._waiting.clear()

    def replaced(number: int) -> None:
        pool._take({"type": "lost", "slot": number, "why": "signal 9", "again": True, "left": False})
        pool._take({"type": "slot", "slot": number + 10, "host": "host", "known": True})

    replaced(1)
    refused = json.dumps({"type": "refused", "node": "host", "why": "no GPU", "hint": ""})
    pool._take({"type": "line", "slot": 11, "line": refused})
    assert list(pool._waiting) == [
        PlaceLost("host/GPU-a", "signal 9", again=True),
        PlaceRefused("host", "no GPU", "", "host/GPU-a"),
    ]
    pool._away.clear()
    replaced(2)
    pool._take({"type": "refused", "slot": 12, "host": "host", "why": "did not start"})
    assert pool._waiting[-1] == PlaceRefused("host", "did not start", "", "host/GPU-b")
    replaced(3)
    pool._away["host"].add("host/GPU-b")
    pool._take({"type": "refused", "slot": 13, "host": "host", "why": "did not start"})
    assert pool._waiting[-1] == PlaceRefused("host", "did not start", "", "")


def test_a_node_that_left_may_come_back() -> None:
    """Whether the bridge hears of its actors or of the node first is chance: the place is waited for either way."""
    pool = RayPool("local", cpu=True)
    pool._take({"type": "slot", "slot": 1, "host": "host", "known": False})
    pool._take({"type": "line", "slot": 1, "line": hello("host", "")})
    pool._take({"type": "lost", "slot": 1, "why": "its node left the Ray cluster", "again": False, "left": True})
    assert pool._waiting[-1] == PlaceLost("host/cpu", "its node left the Ray cluster", again=True)


def test_whose_token_a_bridge_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray of its own gets a new one each time; a cluster is joined with the user's."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(ray_module.WorkerProcess, "__init__", lambda *_, environment: given.append(environment))
    theirs = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "theirs", "RAY_AUTH_TOKEN_PATH": "/secret"}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    for starts_ray in (False, True, True):
        ray_module._BridgeProcess(starts_ray=starts_ray)
    joined, *started = given
    assert {name: joined[name] for name in theirs} == theirs
    assert {one["RAY_AUTH_MODE"] for one in started} == {"token"}
    assert len({one["RAY_AUTH_TOKEN"] for one in given}) == 3
    assert all(len(one["RAY_AUTH_TOKEN"]) == 64 for one in started)


def test_a_ray_that_lets_everyone_in_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before version 2.52 it has no tokens."""
    pretended = SimpleNamespace(__version__="2.44.1", init=lambda **_: pytest.fail("it was started"))
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, pretended)
    monkeypatch.setattr(ray_bridge.importlib.util, "find_spec", lambda _: None)
    told: list[dict[str, Any]] = []
    assert ray_bridge.connect({"address": "local", "folder": "/nowhere"}, outgoing_to(told)) is None
    assert told[-1]["type"] == "unusable"
    assert "Ray 2.44.1 cannot ask for a token" in told[-1]["why"]
    assert "2.52" in told[-1]["hint"]


def test_a_signal_ends_the_attempt_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning it ends the command; later the schedule returns what there is."""
    silent = SimpleNamespace(order=lambda **_: None, messages=lambda _: [], end=lambda _: None)
    monkeypatch.setattr(ray_module, "_BridgeProcess", lambda **_: silent)
    monkeypatch.setattr(ray_module, "check_installed", lambda: None)
    pool = RayPool("auto")
    with defer_signals() as signals:
        signals.note(signal.SIGINT)
        signals.answered = True
        with pytest.raises(KeyboardInterrupt):
            pool.__enter__()
    again = RayPool("auto")
    again._folder, again._connections = "", 1
    with defer_signals() as signals:
        signals.note(signal.SIGINT)
        again._reconnect(ray_module._BridgeEndedError("(gone)"))
        signals.answered = True
    assert list(again.events(0.0)) == []


def test_what_a_driver_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors that start, also after others that died; and for a while one more, for a node that left and may be replaced."""
    now = [1000.0]
    monkeypatch.setattr(ray_module.time, "monotonic", lambda: now[0])
    pool = RayPool("local", cpu=True)
    assert pool.expected() == 0
    pool._take({"type": "slot", "slot": 1, "host": "host", "known": False})
    pool._take({"type": "lost", "slot": 1, "why": "", "again": True})
    pool._take({"type": "slot", "slot": 2, "host": "host", "known": False})
    assert pool.expected() == 1
    now[0] += 2 * ray_module.REPLACED_S
    assert pool.expected() == 1
    pool._take({"type": "lost", "slot": 2, "why": "its node left the Ray cluster", "again": False})
    assert pool.expected() == 1
    now[0] += ray_module.REPLACED_S
    assert pool.expected() == 0
    pool._take({"type": "slot", "slot": 3, "host": "host", "known": True})
    assert pool.expected() == 0
    assert list(pool._waiting) == [PlaceRefused("host", "its node left the Ray cluster")]
