"""Runs fuzz targets where nothing they do can harm this process: a hang, a memory explosion, a crash.

`fuzz` draws inputs and runs them in a forked child, which has a limit on its memory and reports after each input. If it dies or
goes silent, the next input in line is the one to blame; another child continues after it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.targets import ALLOWED_EXITS, Target, collect, command_line
from gemmscope.errors import UserError, in_shell
from gemmscope.reading import ANY
from support.same_cases import draw_the_same_cases

PREFIX = "gemmscope-fuzz-"
TIME_LIMIT_S, MEMORY_LIMIT = ANY["seconds"], ANY["memory"]
BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
LONGEST_SHOWN = 3000
SILENT_S, SUITE_LIMIT_S = 60.0, 600  # for one input, and for one target: the machine may be busy
STARTING_S = 120.0
FOLDERS = ("api", "cli", "commands", "document", "results", "writers", "fleet", "explain")
USUAL = ("shapes", "forecast --gpu h200", "forecast --gpu h200,b300 --csv -", "shapes --json -", "shapes --markdown -")


@dataclass(frozen=True)
class Defect:
    """One input that broke a promise."""

    target: str
    problem: str
    """In one line: the exception and its place, the limit that was passed, the character that was shown."""
    detail: str
    """The traceback, or what the dying process wrote."""
    value: Any

    def __str__(self) -> str:
        shown = repr(self.value)
        cut = f"… ({len(shown)} characters)" if len(shown) > LONGEST_SHOWN else ""
        return f"{self.target}: {self.problem}\ninput: {shown[:LONGEST_SHOWN]}{cut}\n{self.detail}"


@dataclass
class Summary:
    """How the inputs of one target ended."""

    inputs: int = 0
    values: int = 0
    user_errors: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    """CPU time: the machine may be busy."""
    peak_bytes: int = 0
    """The most memory that one child used beyond what it began with."""
    defects: list[Defect] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        """Count another batch of the same target."""
        self.inputs += other.inputs
        self.values += other.values
        self.user_errors += other.user_errors
        self.seconds += other.seconds
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.defects += other.defects


def fuzz(target: Target, inputs: int, seed_number: int, time_limit_s: float = SILENT_S) -> Summary:
    """Try that many inputs, fewer if the strategy has no more. The same seed gives the same inputs."""
    begin = time.perf_counter()
    summary = Summary()
    values = draw(target, inputs, seed_number)
    while summary.inputs < len(values):
        summary.add(_run_in_child(target, values[summary.inputs :], time_limit_s))
    summary.seconds = time.perf_counter() - begin
    return summary


def draw(target: Target, count: int, seed_number: int) -> list[Any]:
    """Inputs of a target, as the seed decides."""
    values: list[Any] = []

    @seed(seed_number)
    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(target.inputs)
    def keep(value: Any) -> None:
        values.append(value)

    keep()
    return values[:count]


def why_not_shown(text: str) -> str:
    """What is wrong with a text that reaches a terminal; empty if nothing is.

    >>> why_not_shown("1.65x\\n"), why_not_shown("a\\x1b[2J")
    ('', "control character '\\\\x1b' in the output: 'a\\\\x1b[2J'")
    """
    for place, character in enumerate(text):
        if " " <= character <= "~" or character in "\n\t":
            continue
        kind = "lone surrogate" if "\ud800" <= character <= "\udfff" else "bidirectional override" if character in BIDI else ""
        if kind or unicodedata.category(character) == "Cc":
            around = text[max(0, place - 40) : place + 40]
            return f"{kind or 'control character'} {character!a} in the output: {around!a}"
    return ""


def run_one(target: Target, value: Any, folder: Path) -> tuple[str, str, str]:
    """One input in this process: ("value" or "user error" or "defect", the problem, the traceback)."""
    outcome = "value"
    try:
        try:
            text = target.run(value, folder)
        except UserError as error:
            outcome, text = "user error", f"{error}\n{in_shell(error.message)}\n{in_shell(error.hint)}"
        except SystemExit as ending:
            if ending.code not in ALLOWED_EXITS:
                return "defect", f"exit code {ending.code!r}", traceback.format_exc()
            outcome, text = "user error" if ending.code == 2 else "value", ""
        problem = why_not_shown(text)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "gemmscope" in frame.filename] or frames
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        message = str(error).strip().splitlines()
        return (
            "defect",
            f"{type(error).__name__} at {place}: {message[0][:200] if message else ''}",
            traceback.format_exc()[-6000:],
        )
    return ("defect", problem, "") if problem else (outcome, "", "")


@cache
def warm_up() -> None:
    """Import what commands load when they are used, and read the tables of facts."""
    for name in (f"gemmscope.{folder}" for folder in FOLDERS):
        import_module(name)
        for module in iter_modules(getattr(import_module(name), "__path__", ())):
            if not module.name.startswith("_"):
                import_module(f"{name}.{module.name}")
    for command in USUAL:
        command_line([*command.split(), "--preset", "gpt2", "--micro-batch-size", "1", "--sequence-length", "64"])


def _run_in_child(target: Target, values: Sequence[Any], time_limit_s: float) -> Summary:
    """Run inputs until one of them ends the child, or all are done."""
    warm_up()  # once here, not in each child
    for name in target.needs:
        import_module(name)
    summary = Summary()
    with _child(target, values) as (child, reports, folder):
        reports.next(STARTING_S)
        while summary.inputs < len(values):
            report = reports.next(time_limit_s)
            if report is None:
                summary.defects.append(_blame(target, values[summary.inputs], child, folder, time_limit_s, dead=reports.closed))
                summary.inputs += 1
                break
            outcome, problem, detail, seconds, peak = report
            if seconds > TIME_LIMIT_S:
                outcome, problem = "defect", f"it took {seconds:.0f} s of CPU time"
            summary.values += outcome == "value"
            summary.user_errors += outcome == "user error"
            if outcome == "defect":
                summary.defects.append(Defect(target.name, problem, detail, values[summary.inputs]))
            summary.inputs += 1
            summary.slowest_s, summary.peak_bytes = max(summary.slowest_s, seconds), max(summary.peak_bytes, peak)
    return summary


@contextmanager
def _child(target: Target, values: Sequence[Any]) -> Iterator[tuple[int, Reports, Path]]:
    """A child that runs the inputs. At the end it is gone, with its own children and its folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    reading, writing = os.pipe()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn where this process has threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            _be_child(target, values, folder, writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with suppress(OSError):
        os.setpgid(child, child)  # the child does the same; either may come first
    try:
        yield child, Reports(reading), folder
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _be_child(target: Target, values: Sequence[Any], folder: Path, writing: int) -> None:
    os.setpgid(0, 0)
    end_with_parent()
    null, errors = os.open(os.devnull, os.O_RDWR), os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT)
    for number, target_number in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(number, target_number)
    faulthandler.enable(file=errors)
    faulthandler.register(signal.SIGUSR1, file=errors)  # the parent asks where it hangs
    private = {"TMPDIR": "tmp", "HOME": "home", **{f"XDG_{kind}_HOME": kind.lower() for kind in ("STATE", "CACHE", "CONFIG")}}
    for name, inside in private.items():
        (folder / inside).mkdir()
        os.environ[name] = str(folder / inside)
    tempfile.tempdir = None
    mapped, resident = (int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2])
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_LIMIT, mapped + MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(writing, b"[]\n")  # it begins
    for number, value in enumerate(values):
        inside = folder / str(number)
        inside.mkdir()
        begin = time.process_time()
        outcome, problem, detail = run_one(target, value, inside)
        seconds = time.process_time() - begin
        shutil.rmtree(inside, ignore_errors=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
        line = json.dumps([outcome, problem, detail, seconds, max(peak, 0)]).encode() + b"\n"
        while line:
            line = line[os.write(writing, line) :]


class Reports:
    """What the child says about its inputs, line by line."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._received = pipe, b""
        self.closed = False
        """The child is dying or dead."""

    def next(self, time_limit_s: float) -> list[Any] | None:
        """The child's report on the next input; None if it dies or is silent for too long."""
        until = time.monotonic() + time_limit_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))
            received = os.read(self._pipe, 65536) if ready else b""
            if not received:
                self.closed = bool(ready)
                return None
            self._received += received
        line, self._received = self._received.split(b"\n", 1)
        report: list[Any] = json.loads(line)
        return report


def _blame(target: Target, value: Any, child: int, folder: Path, time_limit_s: float, *, dead: bool) -> Defect:
    """Why the child reports no more."""
    if dead:
        number = -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        problem = f"the process died of {signal.Signals(number).name}" if number > 0 else f"the process ended with {-number}"
    else:
        problem = f"it took longer than {time_limit_s:g} s"
        os.kill(child, signal.SIGUSR1)
        until, written = time.monotonic() + STARTING_S, 0
        while (size := (folder / "stderr").stat().st_size) != written or not size:  # where it hangs
            assert time.monotonic() < until, f"{target.name} does not answer signals"
            written = size
            time.sleep(0.2)
    return Defect(target.name, problem, (folder / "stderr").read_text(errors="replace")[-6000:], value)


def remove_stale_folders() -> None:
    """Remove the folders of fuzzing processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        if not Path("/proc", folder.name.removeprefix(PREFIX).split("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def end_with_parent() -> None:
    """The kernel kills this process when its parent ends, however that ends."""
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def save(defect: Defect, folder: Path) -> Path:
    """Write a defect's input as a file that `replay` reads, and its description beside it. Returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{defect.target}-*.pickle")))
    path = folder / f"{defect.target}-{number}.pickle"
    path.write_bytes(pickle.dumps((defect.target, defect.value)))
    path.with_suffix(".txt").write_text(str(defect), errors="backslashreplace")
    return path


def replay(path: Path, targets: dict[str, Target]) -> str:
    """Run a saved input again, in this process and without limits. Returns what it shows."""
    name, value = pickle.loads(path.read_bytes())
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        sys.stderr.write(f"{name}: {value!r}\n")
        return targets[name].run(value, Path(folder))


def serve() -> None:
    """For the test suite, in a process without threads: for each line NAME COUNT on standard input, a pickled `Summary`."""
    remove_stale_folders()
    draw_the_same_cases()
    targets = collect()
    for line in sys.stdin:
        name, count = line.rsplit(maxsplit=1)
        signal.alarm(SUITE_LIMIT_S)  # ends this process, should drawing never end; its child ends with it
        pickle.dump(fuzz(targets[name], int(count), 0), sys.stdout.buffer)
        sys.stdout.buffer.flush()
        signal.alarm(0)
