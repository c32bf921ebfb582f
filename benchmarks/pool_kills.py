"""Kills, stops and ends sites and measuring processes of this machine at random times, on the CPU, and counts what is lost.

`python benchmarks/pool_kills.py --units 40 --kills 20 --places 3 --seed 1`. Every unit is a real measurement. In the end each
must have exactly one outcome, in the result and in the journal, or a failure after three losses; no process, temporary folder or
open file may remain. Exit code 1 otherwise. `benchmarks/ray_kills.py` does the same to the nodes of a Ray cluster.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)

from gemmscope.engine.journal import Journal
from gemmscope.pool.local import LocalPlace, LocalPool
from gemmscope.pool.pool import Event
from gemmscope.pool.schedule import MOST_TRIES, Limits, Outcomes, Schedule
from gemmscope.process import descendants
from support.pools import tiny_bench
from support.processes import MARKER, left_running

FAULTS = ("kill the site", "stop the site", "kill the measuring process")


class Killed(LocalPool):
    """A pool whose processes are killed, stopped or ended at random times."""

    def __init__(self, places: int, kills: int, seed: int, pause_s: float) -> None:
        super().__init__([LocalPlace()] * places, alive_s=0.5)
        self._random, self._kills, self._pause_s = random.Random(seed), kills, pause_s
        self._next = time.monotonic() + pause_s
        self.faults: Counter[str] = Counter()

    def events(self, wait_s: float) -> list[Event]:
        events = list(super().events(wait_s))
        if time.monotonic() > self._next and self.faults.total() < self._kills and (pids := self.pids()):
            self._next = time.monotonic() + self._random.uniform(0, 2 * self._pause_s)
            self._fault(self._random.choice(list(pids.values())), self._random.choice(FAULTS))
        return events

    def _fault(self, site: int, fault: str) -> None:
        workers = descendants(site)
        if fault == "kill the measuring process" and not workers:
            return
        victim = self._random.choice(workers) if fault == "kill the measuring process" else site
        try:
            os.kill(victim, signal.SIGSTOP if fault == "stop the site" else signal.SIGKILL)
        except ProcessLookupError:
            return
        self.faults[fault] += 1


def problems(outcomes: Outcomes, seen: Counter[str], stored: set[str], units: set[str]) -> list[str]:
    """Errors in the outcomes."""
    wrong = []
    if set(outcomes.done) | set(outcomes.failed) != units or set(outcomes.done) & set(outcomes.failed):
        wrong.append("units without exactly one end")
    if set(seen) != set(outcomes.done) or set(seen.values()) - {1}:
        wrong.append("outcomes that were not handed over exactly once")
    if stored != set(outcomes.done):
        wrong.append("outcomes that the journal does not have")
    if any(f"lost {MOST_TRIES} times" not in failure.why for failure in outcomes.failed.values()):
        wrong.append("failures for another reason than three losses")
    return wrong


def main() -> int:
    """Run the pool and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("units", 40), ("kills", 20), ("places", 3), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between two faults")
    options = parser.parse_args()
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[MARKER], os.environ["TMPDIR"] = folder, folder
        tempfile.tempdir = None
        files = len(list(Path("/proc/self/fd").iterdir()))
        units = [tiny_bench(f"unit {number}", side=32 + number) for number in range(options.units)]
        began = time.monotonic()
        with closing(Journal(Path(folder) / "journal")) as journal, journal.recording("kills", "") as recording:
            with Killed(options.places, options.kills, options.seed, options.pause) as pool:
                outcomes = Schedule(
                    pool,
                    units,
                    recording,
                    lambda unit, *_: seen.update([unit.key]),
                    limits=Limits(silence_s=10.0),
                ).run()
            wrong = problems(outcomes, seen, set(recording.outcomes()), {unit.key for unit in units})
        left, folders = left_running(folder), [path.name for path in Path(folder).iterdir() if path.is_dir()]
        wrong += [f"{len(left)} processes left"] * bool(left) + [f"folders left: {folders}"] * bool(folders)
        wrong += ["open files left"] * (len(list(Path("/proc/self/fd").iterdir())) != files)
    faults = ", ".join(f"{count} x {fault}" for fault, count in pool.faults.items())
    print(f"{options.units} units at {options.places} places in {time.monotonic() - began:.0f} s; {faults}")
    print(f"{len(outcomes.done)} done, {len(outcomes.failed)} failed, {len(outcomes.lost)} losses, {outcomes.repeated} repeated")
    print("\n".join(wrong) if wrong else "each unit has exactly one end; nothing is left")
    return 1 if wrong or pool.faults.total() < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
