"""Kills and interrupts bench, step and sweeps at random times, on the CPU, and counts what is lost.

`python benchmarks/kills.py --kills 1000 --seed 1`. A chain of runs measures one thing. Each run gets one fault at a random time,
and the next one continues with --resume; the last one is not disturbed. Every sample in the journal must be in the final result
exactly once, no process, temporary folder or silent exit may remain, and no file may be replaced by less. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.processes import MARKER, left_running

GEMMSCOPE = [sys.executable, "-m", "gemmscope"]
SIZES = "--hidden-size 64 --intermediate-size 128 --num-attention-heads 2 --num-hidden-layers 2 --micro-batch-size 1"
COMMANDS = {
    "bench": "bench --device cpu --shapes 16,24 --autocast-only --precision 0.0001 --time-limit 1.5",
    "step": f"step --device cpu {SIZES} --sequence-length 32 --precision 0.0001 --time-limit 1.5",
    "sweep": f"forecast --gpu h200 {SIZES} --sweep sequence_length=32:3200:32 --sweep gradient_accumulation=1:32:1",
}
OFTEN = {"bench": 9, "step": 7, "sweep": 4}
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
FAULTS = [
    *(f"{name} to {whom}" for name in SIGNALS for whom in ("the parent", "the group")),
    "SIGKILL to the parent",
    "SIGKILL to a worker",
    "stdout closed",
]
MOST_FAULTS = 6  # of one chain
PATIENCE_S, HANGS_AFTER_S = 5.0, 180.0
PROBLEMS = (
    "lost samples", "repeated samples", "results not delivered", "orphans", "silent exits", "folders left",
    "files replaced by less", "tracebacks", "unexpected exit codes", "hangs",
)  # fmt: skip


# --- results of a run -------------------------------------------------------------------------------------------------------

Bursts = Counter[tuple[float, ...]]


@dataclass
class JournaledRun:
    """One run of the journal: whether it was marked as finished, and its bursts."""

    finished: bool
    bursts: Bursts


def journaled_runs(state: Path) -> dict[int, JournaledRun]:
    """Every run in the journal, by its number. The only place that knows the journal's tables."""
    path = next((state / "gemmscope").glob("journal*.sqlite3"), state / "none")
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path, timeout=30)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "message" not in tables:  # killed before it was made
            return {}
        run = "run" if "run" in tables else "campaign"
        runs = {
            number: JournaledRun(at is not None, Counter()) for number, at in database.execute(f"SELECT id, finished FROM {run}")
        }
        for number, content in database.execute(f"SELECT {run}, content FROM message ORDER BY rowid"):
            message = json.loads(content)
            if message["type"] == "samples":
                runs[number].bursts.update(tuple(times) for times in message["times_ms"].values())
    return runs


def bursts_in(result: Any) -> Iterator[tuple[float, ...]]:
    """Every burst of a result, wherever it keeps them."""
    if isinstance(result, dict):
        yield from (tuple(burst) for burst in result.get("rounds_ms", ()))
        result = list(result.values())
    if isinstance(result, list):
        for value in result:
            if isinstance(value, (dict, list)):
                yield from bursts_in(value)


def size_of(result: Any) -> int:
    """How much there is in a result: bursts, or points of a sweep."""
    if result is None:
        return 0
    return sum(1 for _ in bursts_in(result)) + sum(len(sweep["points"]) for sweep in result.get("sweeps") or ())


# --- one run with one fault --------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a run ended. `hit` is False if it ended before its fault; `reaction_s` is the time from the fault to the end."""

    code: int
    stdout: str
    stderr: str
    hit: bool
    seconds: float
    reaction_s: float = 0.0


def run_with_fault(
    arguments: list[str], folder: Path, marker: str, fault: str | None, at_s: float, choice: random.Random
) -> Ended:
    """Run the command in its own process group. The fault comes `at_s` seconds after the command handles signals."""
    environment = {
        **os.environ,
        **{f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CONFIG")},
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch's own, which is meant to stay
        "OMP_NUM_THREADS": "1",
        MARKER: marker,
    }
    out, err = folder / "stdout", folder / "stderr"
    begin = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        to = subprocess.PIPE if fault == "stdout closed" else stdout
        process = subprocess.Popen(
            [*GEMMSCOPE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=stderr,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        hit, at = False, 0.0
        if fault is not None and wait_for_handlers(process):
            with suppress(subprocess.TimeoutExpired):
                process.wait(at_s)
            hit, at = inflict(fault, process, choice), time.monotonic()
        try:
            process.wait(HANGS_AFTER_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Ended(-999, "", err.read_text(errors="replace"), hit, time.monotonic() - begin)
        finally:
            if process.stdout is not None and not process.stdout.closed:
                process.stdout.close()
    end = time.monotonic()
    return Ended(process.returncode, out.read_text(), err.read_text(errors="replace"), hit, end - begin, end - at if hit else 0.0)


def wait_for_handlers(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the process handles SIGTERM: before that, Python itself is starting. False if it has ended."""
    while process.poll() is None:
        with suppress(OSError, IndexError, ValueError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            if int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
                return True
        time.sleep(0.005)
    return False


def inflict(fault: str, process: subprocess.Popen[bytes], choice: random.Random) -> bool:
    """Cause the fault. Returns whether it hit a living process."""
    if process.poll() is not None:
        return False
    if fault == "stdout closed":
        assert process.stdout is not None
        process.stdout.close()
        return True
    name, whom = fault.split(" to ")
    number = signal.Signals[name]
    with suppress(ProcessLookupError):
        if whom == "the group":
            os.killpg(process.pid, number)
        elif whom == "the parent":
            os.kill(process.pid, number)
        else:
            while process.poll() is None and not (workers := children(process.pid)):
                time.sleep(0.01)
            if process.poll() is not None:
                return False
            os.kill(choice.choice(workers), number)
        return True
    return False


def pythons_own(path: Path) -> bool:
    """Whether this is the test file of Python's tempfile, which a kill at that moment leaves behind."""
    return path.is_file() and path.read_bytes() in (b"blat", b"")


def children(parent: int) -> list[int]:
    """Its child processes."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                pids.append(int(path.parent.name))
    return pids


# --- a chain of runs ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Everything that was counted, by all chains."""

    wanted: int
    verbose: bool = False
    hits: int = 0
    runs: int = 0
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    slowest_s: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    usual_s: dict[str, float] = field(default_factory=dict)

    def problem(self, kind: str, count: int, where: str, detail: str = "") -> None:
        """Count and print it."""
        with self.lock:
            self.problems[kind] += count
            print(f"{kind}: {count}: {where}{': ' if detail else ''}{detail}", flush=True)


class Chain:
    """Runs of one command, one after the other, in a private folder."""

    def __init__(self, name: str, number: int, seed: int, tally: Tally, *, resumes: bool) -> None:
        self.name, self.tally, self.resumes = name, tally, resumes
        self.choice = random.Random(f"{seed} {number}")
        self.folder = Path(tempfile.mkdtemp(prefix="gemmscope-kills-"))
        self.marker = f"{self.folder.name}-{number}"
        self.where = f"chain {number} ({name})"
        self.result = self.folder / "result.json"
        self.before = 0  # the newest run of the journal that is settled
        self.kept = Bursts()  # of the runs after it
        self.size = 0  # of the result, as far as it is of the same measurement
        self.written_at = 0
        self.fresh = True  # the next run continues nothing
        for inside in ("state", "config", "tmp"):
            (self.folder / inside).mkdir()

    def run(self) -> None:
        """Some faults, then a run without one."""
        try:
            for _ in range(self.choice.randint(1, MOST_FAULTS)):
                if self.tally.hits >= self.tally.wanted:
                    break
                self._one(self.choice.choice(FAULTS))
            ended = self._one(None)
            if ended.code != 0:
                self._problem("unexpected exit codes", f"{ended.code} without a fault: {ended.stderr[-500:]}")
            if left := sorted(path.name for path in (self.folder / "tmp").iterdir() if not pythons_own(path)):
                self._problem("folders left", ", ".join(left), len(left))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _problem(self, kind: str, detail: str, count: int = 1) -> None:
        self.tally.problem(kind, count, self.where, detail)

    def _one(self, fault: str | None) -> Ended:
        arguments = [*COMMANDS[self.name].split(), "--json", str(self.result)]
        arguments += ["--resume"] if self.resumes and not self.fresh else []
        at_s = self.choice.uniform(0, 1.05) * self.tally.usual_s.get(self.name, 5.0)
        if self.name != "sweep" and not self.resumes:
            self.before, self.kept, self.size = max(journaled_runs(self.folder / "state"), default=0), Bursts(), min(self.size, 1)
        ended = run_with_fault(arguments, self.folder, self.marker, fault, at_s, self.choice)
        self.where = f"{self.where.split(':')[0]}: {fault or 'no fault'} after {at_s:.2f} s"
        if left := left_running(self.marker, PATIENCE_S):
            self._problem("orphans", str(left), len(left))
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        if self.tally.verbose:
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            print(f"{self.where}: {ended.code} in {ended.seconds:.1f} s: {last}", flush=True)
        outcome = self._check_ending(fault, ended)
        self._check_result(ended)
        with self.tally.lock:
            self.tally.runs += 1
            self.tally.hits += ended.hit
            self.tally.outcomes[self.name, fault or "none", outcome] += 1
            if fault is None or not ended.hit:
                usual = self.tally.usual_s.get(self.name, ended.seconds)
                self.tally.usual_s[self.name] = 0.7 * usual + 0.3 * ended.seconds
            elif fault.split()[0] in SIGNALS:
                self.tally.slowest_s[self.name] = max(self.tally.slowest_s.get(self.name, 0.0), ended.reaction_s)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{self.tally.hits} of {self.tally.wanted} faults \x1b[K")
        return ended

    def _check_ending(self, fault: str | None, ended: Ended) -> str:
        """The exit code and what was said; returns the outcome for the table."""
        expected = {0, 1, 2}
        if fault is not None and ended.hit:
            name = fault.split()[0]
            expected |= (
                {SIGNALS[name]}
                if name in SIGNALS
                else {-9}
                if fault.endswith("the parent")
                else {141}
                if name == "stdout"
                else set()
            )
        if ended.code == -999:
            self._problem("hangs", ended.stderr[-500:])
            return "hang"
        if ended.code not in expected:
            self._problem("unexpected exit codes", f"{ended.code}: {ended.stderr[-300:]}")
        if "Traceback (most recent call last)" in ended.stderr:
            self._problem("tracebacks", ended.stderr[-1500:])
        if ended.code not in (-9, 141) and not ended.stderr.strip() and not ended.stdout.strip():
            self._problem("silent exits", f"exit code {ended.code}")
        return "ended before" if fault is not None and not ended.hit else str(ended.code)

    def _check_result(self, ended: Ended) -> None:
        """The file beside the journal."""
        try:
            result = json.loads(self.result.read_text()) if self.result.exists() else None
        except ValueError:
            self._problem("files replaced by less", "the result is not JSON")
            return
        size = size_of(result)
        if self.name == "sweep":
            self._check_sweep(ended, result, size)
            return
        runs = {number: run for number, run in journaled_runs(self.folder / "state").items() if number > self.before}
        kept = sum((run.bursts for run in runs.values()), Bursts())
        self._check_size(size)
        settled = bool(runs) and runs[max(runs)].finished
        written = Bursts(bursts_in(result))
        for beside in self._interrupted():
            written |= Bursts(bursts_in(json.loads(beside.read_text())))
        if forgotten := self.kept - kept:
            self._problem("lost samples", f"{forgotten.total()} bursts are no longer in the journal", forgotten.total())
        if ended.code == 0 or settled:  # everything must be in the result
            self._compare(kept, written)
        elif ended.code in SIGNALS.values() and kept - self.kept and kept - written:  # what this run measured, at least
            self._problem("results not delivered", f"{(kept - written).total()} of {kept.total()} bursts")
        self.kept = Bursts() if settled else kept
        self.fresh = settled or not runs
        if settled:
            self.before, self.size = max(runs), 1
            for beside in self._interrupted():  # of the measurement that is settled now
                beside.unlink()

    def _interrupted(self) -> list[Path]:
        """Results of interrupted runs beside the file, which had more samples."""
        return sorted(self.result.parent.glob(f"{self.result.stem}.interrupted*"))

    def _check_size(self, size: int) -> None:
        """A written file has at least the samples measured before. For another measurement, it is not empty."""
        written_at = self.result.stat().st_mtime_ns if self.result.exists() else 0
        if size < self.size:
            self._problem("files replaced by less", f"{self.size}, then {size}")
        if written_at != self.written_at:
            self.size, self.written_at = size, written_at

    def _compare(self, kept: Bursts, written: Bursts) -> None:
        if lost := kept - written:
            self._problem("lost samples", f"{lost.total()} of {kept.total()} bursts", lost.total())
        if repeated := written - kept:
            self._problem("repeated samples", f"{repeated.total()} bursts that the journal does not have", repeated.total())
        with self.tally.lock:
            self.tally.samples += kept.total()

    def _check_sweep(self, ended: Ended, result: Any, size: int) -> None:
        complete = 100 * 32
        if ended.code == 0 and (size != complete or result["interrupted"]):
            self._problem("lost samples", f"{size} of {complete} points", complete - size)
        if ended.code in SIGNALS.values() and "wrote" in ended.stderr and not result["interrupted"] and size != complete:
            self._problem("lost samples", "an interrupted sweep does not say so")
        self._check_size(size)
        self.size = min(size, 1)  # nothing is continued


# --- all of them -------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run chains until there were enough faults; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="How many faults.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="Chains at a time.")
    parser.add_argument("--verbose", action="store_true", help="Print how every run ended.")
    parser.add_argument("--only", choices=list(COMMANDS), action="append", help="Only this command. Can be repeated.")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell starts this in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    names = options.only or list(COMMANDS)
    begin, tally = time.monotonic(), Tally(options.kills, options.verbose)
    resumes = {name: name != "sweep" and has_resume(name) for name in names}
    for name, able in resumes.items():
        if not able and name != "sweep":
            print(f"{name} has no --resume: each of its runs is checked by itself")
    numbers = iter(range(10**9))
    which = random.Random(options.seed)

    def work() -> None:
        while tally.hits < tally.wanted:
            with tally.lock:
                number, name = next(numbers), which.choices(names, [OFTEN[candidate] for candidate in names])[0]
            Chain(name, number, options.seed, tally, resumes=resumes[name]).run()

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(work) for _ in range(options.jobs)]:
            done.result()
    print_tally(tally, time.monotonic() - begin)
    sys.exit(bool(tally.problems))


def has_resume(name: str) -> bool:
    """Whether the command continues what was cut short."""
    helped = subprocess.run([*GEMMSCOPE, COMMANDS[name].split()[0], "--help"], capture_output=True, text=True, check=True)
    return "--resume" in helped.stdout


def print_tally(tally: Tally, seconds: float) -> None:
    """Faults by outcomes, then the totals."""
    heads = sorted({outcome for _, _, outcome in tally.outcomes})
    rows = [("command", "fault", *heads)]
    for name, fault in sorted({(name, fault) for name, fault, _ in tally.outcomes}):
        rows.append((name, fault, *(str(tally.outcomes[name, fault, head] or "-") for head in heads)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )
    print(f"\n{tally.hits} faults in {tally.runs} runs, {seconds:.0f} s; {tally.samples} bursts compared")
    for name, slowest in tally.slowest_s.items():
        print(f"{name}: at most {slowest:.1f} s from a signal to the end")
    print(", ".join(f"{tally.problems[kind]} {kind}" for kind in PROBLEMS))


if __name__ == "__main__":
    main()
