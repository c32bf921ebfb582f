"""Real Ray: a cluster of several nodes on this machine, whose nodes, actors and bridge die while a command measures on it."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.pool import ray as ray_module
from gemmscope.pool.pool import Event, Place, PlaceFound, PlaceLost, PlaceRefused, Unit, UnitDone
from gemmscope.pool.ray import RayPool
from gemmscope.process import descendants
from support.pools import Script
from support.processes import MARKER, left_running
from support.ray_cluster import RayCluster
from support.ray_kills import sweep_with_kills

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "gemmscope[ray]"'
)
TESTS = Path(__file__).resolve().parents[1]

# Another job, which holds as many GPUs as it is told to until its input ends.
HOLD = """
import ray, sys
ray.init(sys.argv[1], log_to_driver=False)
@ray.remote(num_gpus=int(sys.argv[2]), num_cpus=0)
class Holder:
    def ready(self): return True
holder = Holder.remote()
ray.get(holder.ready.remote())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes. Nothing of them is left at the end."""
    marker = str(tmp_path_factory.mktemp("cluster"))
    with RayCluster(
        2, {MARKER: marker, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    ) as started:
        yield started
    assert left_running(marker) == []


def events_until(pool: RayPool, enough: Callable[[list[Event]], bool], seconds: float = 240.0) -> list[Event]:
    events: list[Event] = []
    until = time.monotonic() + seconds
    while not enough(events) and time.monotonic() < until:
        events += pool.events(0.5)
    assert enough(events), events
    return events


def of(kind: type[Event], events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def present(events: list[Event]) -> dict[str, Place]:
    """The places that were found and not lost since; on a busy machine, an actor may seem silent and be found again."""
    places: dict[str, Place] = {}
    for event in events:
        if isinstance(event, PlaceFound):
            places[event.place.key] = event.place
        elif isinstance(event, PlaceLost):
            places.pop(event.place, None)
    return places


def lost(count: int) -> Callable[[list[Event]], bool]:
    return lambda events: len(of(PlaceLost, events)) >= count


def test_nodes_killed_during_a_sweep(cluster: RayCluster, tmp_path: Path) -> None:
    """As `benchmarks/kills.py --nodes`: the command as people type it, real measurements, nodes killed and added."""
    report = sweep_with_kills(cluster, tmp_path, points=5, moments=[0, 2], choice=random.Random(1))
    assert report.problems == [], report.stderr
    assert (report.code, report.measured) == (0, 5)
    assert report.kills == 2  # a point that is lost three times is given up
    assert left_running(str(tmp_path)) == []


def test_actors_and_bridges_that_die(cluster: RayCluster) -> None:
    """A silent actor is noticed, although Ray calls its node alive. When the bridge has died, another one finds every place."""
    with RayPool(cluster.address, cpu=True, silence_s=2.0) as pool:
        events = events_until(pool, lambda seen: len(present(seen)) == 2 and pool.expected() == 0)
        names = sorted(place.name for place in present(events).values())
        assert names[1] == names[0].replace(" CPU", "#2 CPU"), "nodes on one machine are told apart"
        cluster.freeze(cluster.nodes[0])
        events = events_until(pool, lambda seen: lost(1)(seen) and len(of(PlaceFound, seen)) == len(of(PlaceLost, seen)))
        silent = [(event.why, event.again) for event in events if isinstance(event, PlaceLost)]
        assert set(silent) == {("it sent nothing for 2 s", True)}  # on a busy machine, also an actor that runs
        assert pool._bridge is not None
        pool._silence_s = 120.0
        os.kill(pool._bridge._process.pid, signal.SIGKILL)
        events = events_until(pool, lambda seen: len(present(seen)) == 2)
        losses = [event.why for event in events if isinstance(event, PlaceLost)]
        assert any(why.startswith("the connection to the Ray cluster was lost") for why in losses), losses
        for place in present(events).values():
            pool.assign(place.key, Unit(place.key, Script("answer", place.key)))
        events = events_until(pool, lambda seen: len(of(UnitDone, seen)) == 2)
        assert {(event.unit, event.outcome) for event in events if isinstance(event, UnitDone)} == {
            (event.place, event.place) for event in events if isinstance(event, UnitDone)
        }


def test_nodes_that_cannot_measure(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node has a GPU; then one has two, of which another job holds one: the other is tried, and its site finds no GPU."""
    monkeypatch.setattr(ray_module, "HELD_S", 2.0)
    with pytest.raises(UserError, match="none of the 3 nodes has a GPU that Ray knows of") as error, RayPool(cluster.address):
        pass
    assert "cpu" in error.value.hint
    with RayPool(cluster.address, cpu=True, module="gemmscope.commands.no_such_site") as pool:
        events = events_until(pool, lambda seen: len(of(PlaceRefused, seen)) == 2)
        assert pool.expected() == 0
    for event in of(PlaceRefused, events):
        assert isinstance(event, PlaceRefused)
        assert "its process did not start there (exit code 1: " in event.why
        assert "no_such_site" in event.why
    cluster.add(num_cpus=1, num_gpus=2)
    job = subprocess.Popen(
        [sys.executable, "-c", HOLD, cluster.address, "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with job:
        assert job.stdout is not None
        assert any(line == "held\n" for line in job.stdout)
        with RayPool(cluster.address) as pool:
            assert pool.expected() == 1
            events = events_until(pool, lambda seen: len(of(PlaceRefused, seen)) == 3)
        job.communicate("")
    reasons = {event.why: event.gpus for event in events if isinstance(event, PlaceRefused)}
    assert reasons == {
        "no GPU that Ray knows of": 0,
        "1 GPU held by other Ray jobs": 1,
        "there is no NVIDIA GPU here to measure on": 1,
    }


# A process of another user, or of another machine: it knows the address and nothing else.
STRANGER = """
import grpc, json, ray, sys, urllib.error, urllib.request
methods = {method: (service, method) for service, method in [
    ("NodeInfoGcsService", "GetClusterId"), ("InternalKVGcsService", "InternalKVPut"),
    ("NodeManagerService", "RequestWorkerLease"), ("ObjectManagerService", "Pull"), ("CoreWorkerService", "PushTask")]}
answers = {}
for port in json.loads(sys.argv[1]):
    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for service, method in methods.values():
            try:
                channel.unary_unary(f"/ray.rpc.{service}/{method}")(b"", timeout=60)
                codes.add("ACCEPTED")
            except grpc.RpcError as error:
                codes.add(error.code().name)
    if codes == {"UNAVAILABLE"}:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/get_or_create_runtime_env", data=b"", timeout=60)
            codes = {"ACCEPTED"}
        except urllib.error.HTTPError as error:
            codes = {error.code}
    answers[port] = sorted(codes - {"UNIMPLEMENTED"})
print("answers:", json.dumps(answers), flush=True)
try:
    ray.init(sys.argv[2], log_to_driver=False)
    print("joined", flush=True)
except Exception as error:
    print("refused:", type(error).__name__, flush=True)
"""


def listening(pids: list[int]) -> dict[int, str]:
    """The TCP sockets on which processes listen: port → address, as the kernel writes it."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [line[1].rpartition(":") for line in lines if line[3] == "0A" and line[9] in inodes]
    return {int(port, 16): address for address, _, port in ends}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_a_ray_of_its_own_lets_nobody_in() -> None:
    """It listens on the loopback address alone; without the token, every service refuses; nobody else can read its files, and no
    command line has the token."""
    with RayPool("local", cpu=True) as pool:
        assert pool._bridge is not None
        pids = [pool._bridge.pid, *descendants(pool._bridge.pid)]
        ports = listening(pids)
        assert len(ports) >= 5
        assert set(ports.values()) <= LOOPBACK
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        secrets = {
            entry.removeprefix(b"RAY_AUTH_TOKEN=")
            for pid in pids
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if entry.startswith(b"RAY_AUTH_TOKEN=")
        }
        assert [len(token) for token in secrets] == [64]
        assert not any(secrets.copy().pop() in command for command in commands.values())
        assert Path(pool._folder).stat().st_mode & 0o777 == 0o700
        [gcs] = (pid for pid, command in commands.items() if b"gcs_server" in command.split(b"\0")[0])
        [port] = listening([gcs])
        quick = {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER, json.dumps(list(ports)), f"127.0.0.1:{port}"],
            env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **quick}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        answers = json.loads(stranger.stdout.splitlines()[0].removeprefix("answers:"))
        assert set(map(tuple, answers.values())) <= {("UNAUTHENTICATED",), (401,)}, answers
        assert len(answers) == len(ports)
        assert "joined" not in stranger.stdout


def test_a_cluster_that_asks_for_a_token_is_joined_with_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5ecret" * 10}
    with RayCluster(1, {MARKER: str(tmp_path), **token}) as guarded:
        with pytest.raises(UserError, match="no Ray cluster answers there"), RayPool(guarded.address, cpu=True):
            pass
        for name, value in token.items():
            monkeypatch.setenv(name, value)
        with RayPool(guarded.address, cpu=True) as pool:
            events_until(pool, lambda seen: len(present(seen)) == 1)
