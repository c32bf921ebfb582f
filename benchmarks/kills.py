"""Kills, stops and interrupts every command that measures or computes for long, at random times, on the CPU: what is lost?

`python benchmarks/kills.py --kills 1000 --seed 1`. A chain of runs measures one thing. Each run gets one fault at a random time,
and the next one continues with --resume; the last one is not disturbed. What the journal has must be in the final result exactly
once, no process, temporary folder or silent exit may remain, and no file may be replaced by less. Exit code 1 otherwise.
SIGTERM ends it early, with the table so far. `--nodes 20` kills the nodes of a Ray cluster instead, at 20 random
moments of a sweep.
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
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from gemmscope.errors import UserError
from gemmscope.process import descendants
from gemmscope.results.base import Result
from gemmscope.results.read import read_result
from support.processes import MARKER, left_running

TESTS = Path(__file__).resolve().parent.parent / "tests"
SIZES = "--hidden-size 64 --intermediate-size 128 --num-attention-heads 2 --num-hidden-layers 2"
BATCH = f"{SIZES} --micro-batch-size 1"
LARGE = "--hidden-size 4096 --intermediate-size 14336 --num-attention-heads 32 --num-hidden-layers 32"
UNTIL = "--device cpu --recipes bf16 --precision 0.0001"
COUNTED = "--device cpu --recipes bf16 --num-iters 20 --num-warmup 0"
SHORT = f"{UNTIL} --time-limit 0.5"


@dataclass(frozen=True)
class Case:
    """A command, and how it is checked: by the bursts in its journal; by the outcomes of its units there; by the files of its
    ranks; or by what it computed alone, where there is no journal. `places`: of the CPU; `often`: its share of the faults."""

    command: str
    checked: Literal["bursts", "units", "ranks", "computed"]
    often: int
    units: int = 0
    places: int = 0
    ranks: int = 0

    @property
    def way(self) -> frozenset[str]:
        """The command's name, and the options that decide where it measures."""
        name, *options = self.command.split()
        ways = {option.removeprefix("--") for option in options if option in ("--sweep", "--ray", "--folder")}
        return frozenset({name, *ways, *(["gpus"] if self.places else []), *(["launched"] if self.ranks else [])})


CASES = {
    "bench": Case("bench --shapes 16,24 --autocast-only --device cpu --precision 0.0001 --time-limit 1.5", "bursts", 8),
    "step": Case(f"step {BATCH} --sequence-length 32 --device cpu --precision 0.0001 --time-limit 1.5", "bursts", 6),
    "forecast sweep": Case(
        f"forecast --gpu h200 {BATCH} --sweep sequence_length=32:3200:32 --sweep gradient_accumulation=1:32:1", "computed", 4
    ),
    "plan": Case(f"plan --gpu h200 --gpus 1024 {LARGE} --sequence-length 4k --global-batch 1024", "computed", 4),
    "numerics": Case(
        f"numerics {BATCH} --sequence-length 32 --synthetic outliers --recipes mxfp8,nvfp4 --device cpu", "computed", 3
    ),
    "bench sweep, places": Case(
        f"bench --shapes 16x16x16 --autocast-only {COUNTED} --sweep m=16,24,32,40,48", "units", 5, units=5, places=2
    ),
    "step sweep, places": Case(f"step {BATCH} {SHORT} --sweep sequence_length=16,32,48", "units", 3, units=3, places=2),
    "fleet, places": Case(f"fleet --shapes 16 --autocast-only {COUNTED} --repeat 2 --folder runs", "units", 5, units=4, places=2),
    "fleet, launched": Case(f"fleet --shapes 16,24 --autocast-only {UNTIL} --time-limit 1.5 --folder runs", "ranks", 6, ranks=2),
    "fleet, Ray": Case(f"fleet --shapes 16 --autocast-only {COUNTED} --repeat 3 --ray local", "units", 2, units=3),
    "bench sweep, Ray": Case(
        f"bench --shapes 16x16x16 --autocast-only {COUNTED} --sweep m=16,24,32 --ray local", "units", 2, units=3
    ),
    "step sweep, Ray": Case(f"step {BATCH} {SHORT} --sweep sequence_length=16,32 --ray local", "units", 1, units=2),
}
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
FAULTS = [
    *(f"{name} to {whom}" for name in SIGNALS for whom in ("the parent", "the group")),
    "SIGKILL to the parent",
    "SIGKILL to a worker",
    "stdout closed",
]
STOPS = "SIGSTOP to a worker"
MOST_FAULTS = 6  # of one chain
HANGS_AFTER_S = 600.0
PROBLEMS = (
    "lost samples", "repeated samples", "results not delivered", "orphans", "silent exits", "folders left",
    "files replaced by less", "tracebacks", "unexpected exit codes", "hangs", "untrue messages",
)  # fmt: skip


# --- results of a run -------------------------------------------------------------------------------------------------------

Bursts = Counter[tuple[float, ...]]


@dataclass
class JournaledRun:
    """One run of the journal: whether it was marked as finished, its bursts, and the outcomes of its units."""

    finished: bool
    bursts: Bursts = field(default_factory=Counter)
    units: dict[str, str] = field(default_factory=dict)


def journaled_runs(state: Path) -> dict[int, JournaledRun]:
    """Every run in the journal, by its number. The only place that knows the journal's tables."""
    path = next((state / "gemmscope").glob("journal*.sqlite3"), state / "none")
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path, timeout=30)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"run", "message", "outcome"} <= tables:  # killed before they were made
            return {}
        runs = {number: JournaledRun(at is not None) for number, at in database.execute("SELECT id, finished FROM run")}
        for number, content in database.execute("SELECT run, content FROM message ORDER BY rowid"):
            message = json.loads(content)
            if message["type"] == "samples":
                runs[number].bursts.update(tuple(times) for times in message["times_ms"].values())
        for number, unit, content in database.execute("SELECT run, unit, content FROM outcome ORDER BY rowid"):
            runs[number].units[unit] = content
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


# --- one run with one fault --------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a run ended. `hit` is False if it ended before its fault; `reaction_s` is the time from the fault to the end.
    `code`: of several ranks, of that one."""

    code: int
    stdout: str
    stderr: str
    hit: bool
    seconds: float
    reaction_s: float = 0.0
    ranks: list[int] = field(default_factory=list)


def rank_variables(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun sets."""
    if not ranks:
        return {}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def run_with_fault(
    case: Case, arguments: list[str], folder: Path, fault: str | None, at_s: float, choice: random.Random
) -> Ended:
    """Run the command, or one for each rank, in its own process group. The fault comes `at_s` seconds after it
    handles signals."""
    environment = {
        **os.environ,
        **{f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CONFIG")},
        "TMPDIR": str(folder / "t"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch's own, which is meant to stay
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS)]),
        MARKER: folder.name,
    }
    module = ["support.cpu_places", str(case.places or 1)] if case.checked == "units" else ["gemmscope"]
    begin, processes = time.monotonic(), list[subprocess.Popen[bytes]]()
    files = [(folder / f"stdout{rank}", folder / f"stderr{rank}") for rank in range(max(case.ranks, 1))]
    for rank, (out, err) in enumerate(files):
        with out.open("wb") as stdout, err.open("wb") as stderr:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if fault == "stdout closed" else stdout,
                    stderr=stderr,
                    env=environment | rank_variables(rank, case.ranks),
                    cwd=folder,
                    process_group=processes[0].pid if processes else 0,
                )
            )
    chosen = choice.randrange(len(processes))
    process, hit, at = processes[chosen], False, 0.0
    if fault is not None and wait_for_handlers(process):
        with suppress(subprocess.TimeoutExpired):
            process.wait(at_s)
        hit, at = inflict(fault, process, processes, choice), time.monotonic()
    try:
        for each_one in processes:
            each_one.wait(HANGS_AFTER_S)
    except subprocess.TimeoutExpired:
        return Ended(-999, "", files[chosen][1].read_text(errors="replace"), hit, time.monotonic() - begin)
    finally:
        for each_one in processes:
            if each_one.poll() is None:
                each_one.kill()
                each_one.wait()
            if each_one.stdout is not None and not each_one.stdout.closed:
                each_one.stdout.close()
    end = time.monotonic()
    stdout_text, stderr_text = (file.read_text(errors="replace") for file in files[chosen])
    codes = [each_one.returncode for each_one in processes]
    return Ended(process.returncode, stdout_text, stderr_text, hit, end - begin, end - at if hit else 0.0, codes)


def wait_for_handlers(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the process handles SIGTERM: before that, Python itself is starting. False if it has ended."""
    while process.poll() is None:
        with suppress(OSError, IndexError, ValueError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            if int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
                return True
        time.sleep(0.005)
    return False


def inflict(fault: str, process: subprocess.Popen[bytes], group: list[subprocess.Popen[bytes]], choice: random.Random) -> bool:
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
            os.killpg(group[0].pid, number)
        elif whom == "the parent":
            os.kill(process.pid, number)
        else:
            while process.poll() is None and not (
                workers := [pid for pid in descendants(process.pid) if began(pid, process.pid)]
            ):
                time.sleep(0.01)
            if process.poll() is not None:
                return False
            os.kill(choice.choice(workers), number)
        return True
    return False


def began(pid: int, parent: int) -> bool:
    """Whether it runs a program of its own: if it is stopped before that, the kernel stops its parent too, for ever."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != Path(f"/proc/{parent}/cmdline").read_bytes()
    return False


def pythons_own(path: Path) -> bool:
    """Whether this is the test file of Python's tempfile, which a kill at that moment leaves behind."""
    return path.is_file() and path.read_bytes() in (b"blat", b"")


# --- a chain of runs ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Everything that was counted, by all chains."""

    wanted: int
    until: float
    verbose: bool = False
    hits: int = 0
    runs: int = 0
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    usual_s: dict[str, float] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether there were enough faults, or the time is over."""
        return self.hits >= self.wanted or time.monotonic() > self.until

    def problem(self, kind: str, count: int, where: str, detail: str = "") -> None:
        """Count and print it."""
        with self.lock:
            self.problems[kind] += count
            print(f"{kind}: {count}: {where}{': ' if detail else ''}{detail}", flush=True)


class Chain:
    """Runs of one command, one after the other, in a private folder."""

    def __init__(self, name: str, number: int, seed: int, tally: Tally) -> None:
        self.name, self.case, self.tally = name, CASES[name], tally
        self.choice = random.Random(f"{seed} {number}")
        self.folder = Path(tempfile.mkdtemp(prefix="gk-"))  # short: Ray's sockets have paths of at most 107 bytes
        self.where = f"chain {number} ({name})"
        self.result = self.folder / "result.json"
        self.before = 0  # the newest run of the journal that is settled
        self.kept = JournaledRun(finished=False)  # of the runs after it
        self.size = 0  # of the result, as far as it is of the same measurement
        self.written_at = 0
        self.files: dict[str, tuple[int, bool]] = {}  # of ranks and GPUs: samples, whether complete
        self.fresh = True  # the next run continues nothing
        for inside in ("state", "config", "t"):
            (self.folder / inside).mkdir()

    def run(self) -> None:
        """Some faults, then a run without one."""
        faults = [*FAULTS, STOPS] if self.case.checked != "computed" and not self.case.ranks else FAULTS
        if self.case.checked == "bursts":
            faults = FAULTS * 4 + [STOPS]  # these wait for as long as in real use
        try:
            for _ in range(self.choice.randint(1, MOST_FAULTS)):
                if self.tally.over:
                    break
                self._one(self.choice.choice(faults))
            ended = self._one(None)
            if any(ended.ranks) or ended.code:
                self._problem("unexpected exit codes", f"{ended.code} {ended.ranks} without a fault: {ended.stderr[-500:]}")
            if left := sorted(path.name for path in (self.folder / "t").iterdir() if not pythons_own(path)):
                self._problem("folders left", ", ".join(left), len(left))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _problem(self, kind: str, detail: str, count: int = 1) -> None:
        self.tally.problem(kind, count, self.where, detail)

    def _one(self, fault: str | None) -> Ended:
        case, arguments = self.case, self.case.command.split()
        arguments += [] if case.ranks else ["--json", str(self.result)]
        of_ranks = bool(case.ranks) and (fault is None or self.choice.random() < 0.5)
        resumes = case.checked != "computed" and (of_ranks or not self.fresh)
        arguments += ["--resume"] if resumes else []
        at_s = self.choice.uniform(0, 1.05) * self.tally.usual_s.get(self.name, 5.0)
        ended = run_with_fault(case, arguments, self.folder, fault, at_s, self.choice)
        self.where = f"{self.where.split(':')[0]}: {fault or 'no fault'} after {at_s:.2f} s{' --resume' if resumes else ''}"
        if left := left_running(self.folder.name):
            self._problem("orphans", str(left), len(left))
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        if self.tally.verbose:
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            missed = "" if ended.hit or fault is None else ", ended before"
            print(f"{self.where}: {ended.code} in {ended.seconds:.1f} s{missed}: {last}", flush=True)
        outcome = self._check_ending(fault, ended)
        if case.ranks:
            self._check_files(ended)
        else:
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
        expected = {0, 1, 2, 4}
        if fault is not None and ended.hit:
            name = fault.split()[0]
            expected |= {SIGNALS[name]} if name in SIGNALS else {-9} if fault.endswith("the parent") else set()
            expected |= {141} if name == "stdout" else set()
        if ended.code == -999:
            self._problem("hangs", ended.stderr[-500:])
            return "hang"
        if ended.code not in expected:
            self._problem("unexpected exit codes", f"{ended.code}: {ended.stderr[-300:]}")
        if "Traceback (most recent call last)" in ended.stderr:
            self._problem("tracebacks", ended.stderr[-1500:])
        if ended.code not in (-9, 141) and not ended.stderr.strip() and not ended.stdout.strip():
            self._problem("silent exits", f"exit code {ended.code}")
        if self.case.ranks and "continues from here" in ended.stderr:
            self._problem("untrue messages", ended.stderr[-300:])
        return "ended before" if fault is not None and not ended.hit else str(ended.code)

    def _read(self, path: Path) -> Result | None:
        try:
            return read_result(path) if path.exists() else None
        except UserError as error:
            self._problem("files replaced by less", f"{path.name}: {error.message}")
            return None

    def _check_result(self, ended: Ended) -> None:
        """The file; what is beside the journal; and, with --folder, the files of GPUs."""
        result = self._read(self.result)
        size = (result.sample_count or 0) if result is not None else 0
        if size < self.size:
            self._problem("files replaced by less", f"{self.size}, then {size}")
        written_at = self.result.stat().st_mtime_ns if self.result.exists() else 0
        if written_at != self.written_at:  # else it is of an earlier measurement
            self.size, self.written_at = size, written_at
        if self.case.checked == "computed":
            self._check_computed(ended, result, size)
            return
        self._check_files(ended)
        runs = {number: run for number, run in journaled_runs(self.folder / "state").items() if number > self.before}
        kept = JournaledRun(finished=bool(runs) and runs[max(runs)].finished)
        for run in runs.values():
            kept.bursts.update(run.bursts)
            kept.units |= run.units
        changed = {unit for unit, content in self.kept.units.items() if kept.units.get(unit) != content}
        if forgotten := (self.kept.bursts - kept.bursts).total() + len(changed):
            self._problem("lost samples", f"{forgotten} are no longer in the journal", forgotten)
        besides = [self._read(path) for path in sorted(self.folder.glob("result.interrupted*"))]
        written = [one for one in (result, *besides) if one is not None]
        new = (kept.bursts - self.kept.bursts).total() + len(kept.units) - len(self.kept.units)
        if ended.code == 0 or kept.finished:  # everything must be in the result
            self._compare(kept, written)
        elif ended.code in SIGNALS.values() and new and (missing := self._missing(kept, written)):
            self._problem("results not delivered", f"{missing} of what the journal has")
        self.kept = JournaledRun(finished=False) if kept.finished else kept
        self.fresh = kept.finished or not runs
        if kept.finished:
            self.before, self.size = max(runs), min(self.size, 1)
            for path in self.folder.glob("result.interrupted*"):  # of the measurement that is settled now
                path.unlink()

    def _missing(self, kept: JournaledRun, written: list[Result]) -> int:
        """How much of the journal no file has."""
        if self.case.checked == "units":
            return max(0, len(kept.units) - max((one.sample_count or 0 for one in written), default=0))
        bursts = Bursts()
        for one in written:
            bursts |= Bursts(bursts_in(one.model_dump(mode="json")))
        return (kept.bursts - bursts).total()

    def _compare(self, kept: JournaledRun, written: list[Result]) -> None:
        if lost := self._missing(kept, written):
            self._problem("lost samples", f"{lost} of what the journal has", lost)
        bursts = Bursts(burst for one in written[:1] for burst in bursts_in(one.model_dump(mode="json")))
        count = sum(one.sample_count or 0 for one in written[:1])
        repeated = (bursts - kept.bursts).total() if self.case.checked == "bursts" else max(0, count - len(kept.units))
        if repeated:
            self._problem("repeated samples", f"{repeated} that the journal does not have", repeated)
        with self.tally.lock:
            self.tally.compared.update({"bursts": kept.bursts.total(), "outcomes of units": len(kept.units)})

    def _check_computed(self, ended: Ended, result: Result | None, size: int) -> None:
        complete = result is not None and not getattr(result, "interrupted", False)
        if ended.code == 0 and not complete:
            self._problem("lost samples", "an undisturbed run is not complete")
        if not complete and self.files.get("", (0, False))[1]:
            self._problem("files replaced by less", "a complete file by an incomplete one")
        self.files[""] = size, complete
        with self.tally.lock:
            self.tally.compared["computed files"] += 1

    def _check_files(self, ended: Ended) -> None:
        """The run files of ranks and GPUs: none that is complete is lost, or replaced by one that is not."""
        results = {path.name: self._read(path) for path in sorted((self.folder / "runs").glob("*.json"))}
        now = {
            name: (one.sample_count or 0, not getattr(one, "interrupted", False))
            for name, one in results.items()
            if one is not None and ".interrupted" not in name
        }
        for name, (size, complete) in self.files.items():
            after, still = now.get(name, (0, False))
            if (complete and not still) or (not still and after < size):
                self._problem("files replaced by less", f"{name}: {size} samples, then {after}")
        if self.case.ranks and not any(ended.ranks) and sum(complete for _, complete in now.values()) != self.case.ranks:
            self._problem("lost samples", f"the files of ranks: {now}")
        self.files = now
        with self.tally.lock:
            self.tally.compared["files of GPUs"] += len(now)


# --- all of them -------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run chains until there were enough faults; print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="How many faults.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="Chains at a time.")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="End after so long, with fewer faults.")
    parser.add_argument("--verbose", action="store_true", help="Print how every run ended.")
    parser.add_argument("--only", choices=list(CASES), action="append", help="Only this command. Can be repeated.")
    parser.add_argument("--nodes", type=int, default=0, help="Kill nodes of a Ray cluster instead, at so many moments.")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell starts this in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if options.nodes:
        sys.exit(kill_nodes(options.nodes, options.seed))
    names = options.only or list(CASES)
    begin = time.monotonic()
    tally = Tally(options.kills, begin + 60 * options.minutes, options.verbose)
    numbers, which = iter(range(10**9)), random.Random(options.seed)

    def end_early(*_: object) -> None:
        tally.until = 0.0

    signal.signal(signal.SIGTERM, end_early)

    def work() -> None:
        while not tally.over:
            with tally.lock:
                number, name = next(numbers), which.choices(names, [CASES[candidate].often for candidate in names])[0]
            Chain(name, number, options.seed, tally).run()

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(work) for _ in range(options.jobs)]:
            done.result()
    print_tally(tally, time.monotonic() - begin)
    sys.exit(bool(tally.problems))


def kill_nodes(count: int, seed: int, nodes: int = 4) -> int:
    """Kill nodes of a Ray cluster of several nodes during a sweep, and add others."""
    from support.ray_cluster import RayCluster
    from support.ray_kills import sweep_with_kills

    choice, points = random.Random(seed), 10 * count
    moments = [choice.randrange(points - nodes) for _ in range(count)]
    with tempfile.TemporaryDirectory(prefix="gk-") as name:
        with RayCluster(nodes, {MARKER: name}) as cluster:
            report = sweep_with_kills(cluster, Path(name), points, moments, choice)
        left = left_running(name)
    report.problems += [f"{len(left)} processes left"] * bool(left)
    print(f"{report.measured} of {points} points in the file, exit code {report.code}, {report.seconds:.0f} s")
    print(f"{report.kills} nodes killed, {report.added} added; {report.repeated} measurements lost with them and repeated")
    print(
        "\n".join([*(f"PROBLEM: {problem}" for problem in report.problems), report.stderr] if report.problems else ["no problem"])
    )
    return bool(report.problems)


def print_tally(tally: Tally, seconds: float) -> None:
    """Faults by outcomes, then the totals."""
    heads = sorted({outcome for _, _, outcome in tally.outcomes})
    rows = [("command", "fault", *heads)]
    for name, fault in sorted({(name, fault) for name, fault, _ in tally.outcomes}):
        rows.append((name, fault, *(str(tally.outcomes[name, fault, head] or "-") for head in heads)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(cells)))
    compared = ", ".join(f"{count} {what}" for what, count in tally.compared.items())
    print(f"\n{tally.hits} faults in {tally.runs} runs, {seconds:.0f} s; compared: {compared}")
    for name, slowest in tally.slowest_s.items():
        print(f"{name}: at most {slowest:.1f} s from a signal to the end")
    print(", ".join(f"{tally.problems[kind]} {kind}" for kind in PROBLEMS))


if __name__ == "__main__":
    main()
