"""The throughput of N places over that of one, for the pool of this machine and for a Ray cluster on it.

`python benchmarks/pool_throughput.py --places 2`. Two kinds of units. *Waiting* units take 0.5 s and no CPU, as a site waits for
its GPU: the ratio shows what the pool itself costs. *CPU* units are real measurements of a small GEMM on the CPU, for at most as
many places as there are cores, each with cores of its own in the pool of this machine. Places are started before the clock. One
and N places alternate in one run; the ratio is that of the medians. Exit code 1 if a ratio is below 0.8 N; with fewer cores than
places and on a machine that does other things (see its load in the output), CPU units cannot reach that.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from gemmscope.pool.gpus import allowed_cores, divide_cores
from gemmscope.pool.local import LocalPlace, LocalPool
from gemmscope.pool.pool import Event, PlaceFound, Pool, Unit
from gemmscope.pool.ray import RayPool
from gemmscope.pool.schedule import Schedule
from support.pools import tiny_bench
from support.ray_cluster import RayCluster
from support.waiting import Waiting

TESTS = Path(__file__).resolve().parent.parent / "tests"
WANTED = 0.8
WAIT_S = 0.5
UNITS = {"waiting": lambda key: Unit(key, Waiting(WAIT_S)), "CPU": lambda key: tiny_bench(key, side=256, iterations=50)}


class Ready:
    """A pool whose places have all been found: their events come first."""

    def __init__(self, pool: Pool, places: int) -> None:
        self._pool, self._first = pool, list[Event]()
        until = time.monotonic() + 120
        while sum(isinstance(event, PlaceFound) for event in self._first) < places:
            if time.monotonic() > until:
                raise SystemExit(f"the places did not start: {self._first}")
            self._first += pool.events(0.5)
        self.expected, self.assign, self.abandon = pool.expected, pool.assign, pool.abandon

    def __enter__(self) -> Ready:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: the caller ends the pool."""

    def events(self, wait_s: float) -> Iterable[Event]:
        """Yield the events of the places first."""
        if self._first:
            events, self._first = self._first, []
            return events
        return self._pool.events(wait_s)


def units_per_s(pool: Pool, places: int, kind: str, count: int) -> float:
    """How many units are finished in a second."""
    with pool:
        ready = Ready(pool, places)
        begin = time.monotonic()
        outcomes = Schedule(ready, [UNITS[kind](f"{kind} {number}") for number in range(count)]).run()
        seconds = time.monotonic() - begin
    if len(outcomes.done) != count:
        raise SystemExit(f"{len(outcomes.done)} of {count} units: {outcomes.failed} {outcomes.refused} {outcomes.lost}")
    return count / seconds


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--places", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--units", type=int, default=6, help="for each place")
    parser.add_argument("--only", choices=["local", "Ray"])
    chosen = parser.parse_args()
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    ratios = []
    if chosen.only != "Ray":
        ratios += compare("local", chosen, lambda places: LocalPool(cpu_places(places)))
    if chosen.only != "local":
        with RayCluster(chosen.places) as many, RayCluster(1) as one:
            ratios += compare("Ray", chosen, lambda places: RayPool((one if places == 1 else many).address, cpu=True))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(ratio >= WANTED * chosen.places for ratio in ratios) else 1


def cpu_places(count: int) -> list[LocalPlace]:
    """Places on this machine's CPU that share its cores."""
    cores = divide_cores([()] * count, allowed_cores()) if count > 1 else [()]
    return [LocalPlace(cores=core) for core in cores]


def compare(name: str, chosen: argparse.Namespace, make: Callable[[int], Pool]) -> list[float]:
    """The ratios of both kinds of units."""
    ratios = []
    for kind in UNITS:
        rates: dict[int, list[float]] = {1: [], chosen.places: []}
        for _ in range(chosen.rounds):
            for places, seen in rates.items():
                seen.append(units_per_s(make(places), places, kind, chosen.units * places))
        one, many = (median(seen) for seen in rates.values())
        ratios.append(many / one)
        print(
            f"{name:5} pool, {kind:7} units: {one:.2f} units/s with 1 place, {many:.2f} with {chosen.places}: "
            f"{many / one:.2f} x ({many / one / chosen.places:.0%} of {chosen.places})",
            flush=True,
        )
    return ratios


if __name__ == "__main__":
    sys.exit(main())
