"""Real Ray: a cluster of several nodes on this machine, whose nodes, actors and bridge die while a command measures on it."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.pool import ray as ray_module
from gemmscope.pool.pool import Event, Place, PlaceFound, PlaceLost, PlaceRefused, Unit, UnitDone
from gemmscope.pool.ray import RayPool
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
    """The small version of benchmarks/ray_kills.py: the command as people type it, real measurements, nodes killed and added."""
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
