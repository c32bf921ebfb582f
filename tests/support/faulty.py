"""Runs the real command line with a fault at one of its messages. `python -m support.faulty` reads one case per line of JSON.

Importing torch takes seconds, and there are hundreds of cases: so this process imports everything once, and the parent of each
case and its workers are forked from it. What runs in them is the engine itself: real pipes, real processes, real samples.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmscope import process, signals
from gemmscope.engine.campaign import Campaign
from gemmscope.engine.journal import RecordedRun
from gemmscope.engine.messages import Sampled

WORKERS = ("gemmscope.bench.worker", "gemmscope.step.worker")
WARM = ("gemmscope.bench.backends.cpu", "gemmscope.step.kits.plain", "gemmscope.document.bench", "gemmscope.document.step")
KILLED = ("worker", "parent")
SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
FAULTS = (*KILLED, *SIGNALS, "full disk", "full journal", "closed stdout", "damaged journal")
MOST_MESSAGES = 1000
ALMOST_NOTHING = 900  # bytes: a message on standard error


class Forked:
    """What `subprocess.Popen` does for a worker, by forking."""

    running: list[int] = []  # noqa: RUF012

    def __init__(self, command: list[str], *, pass_fds: tuple[int], stderr: Any, **_: Any) -> None:
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.stdin = os.fdopen(writing, "wb", buffering=0)
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(reading, 0)
            os.dup2(stderr.fileno(), 2)
            os.close(writing)
            sys.stdin = os.fdopen(0)
            process._messages = pass_fds[0]
            signals._deferred, signals._installed = None, False
            _ending_here(lambda: (process.end_with_parent(parent), signals.leave_to_parent(), _worker(command[-1]).serve()))
        os.close(reading)
        self.running.append(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _worker(module: str) -> Any:
    """The worker's class. It makes each of its bursts different: two bursts of equal times are not one that is counted twice."""
    worker = getattr(importlib.import_module(module), {"bench": "Worker", "step": "StepWorker"}[module.split(".")[1]])
    say = worker.say

    def saying(self: Any, message: Any) -> None:
        if isinstance(message, Sampled):
            mark_ms = int.from_bytes(os.urandom(6), "big") * 1e-20  # at most 3 ns
            message = replace(message, times_ms={task: [times[0] + mark_ms, *times[1:]] for task, times in message.times_ms.items()})
        say(self, message)

    worker.say = saying
    return worker


def _ending_here(work: Callable[[], object]) -> None:
    """Run `work` in this forked process, and never come back."""
    code = 70
    try:
        work()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


class _Full:
    """A database on a disk that is full."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        if statement.startswith(("INSERT", "UPDATE")):
            raise sqlite3.OperationalError("database or disk is full")
        return self._database.execute(statement, values)

    def close(self) -> None:
        self._database.close()


class Fault:
    """Happens once, at the message of this number, or when results are written: before (-2) or after that (-1)."""

    def __init__(self, kind: str, at: int, folder: Path) -> None:
        self.kind, self.at, self.count, self.folder = kind, at, 0, folder
        note, deliver = Campaign._note, RecordedRun.deliver

        def noting(campaign: Any, message: Any) -> None:
            before = kind.startswith("full")
            if self.count == at and before:
                self.happens(campaign.recording)
            note(campaign, message)
            if self.count == at and not before:
                self.happens(campaign.recording)
            self.count += 1
            if at > MOST_MESSAGES:
                (folder / "messages").write_text(str(self.count))

        def delivering(recording: RecordedRun, write: Callable[[], None], *, complete: bool) -> None:
            def writing() -> None:
                if at == -2:
                    self.happens(recording)
                write()
                if at == -1:
                    self.happens(recording)

            deliver(recording, writing, complete=complete)

        Campaign._note = noting  # type: ignore[method-assign]
        RecordedRun.deliver = delivering  # type: ignore[method-assign]

    def happens(self, recording: RecordedRun) -> None:
        (self.folder / "hit").touch()
        if self.kind == "worker":
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(Forked.running[-1], signal.SIGKILL)
        elif self.kind == "parent":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind in SIGNALS:
            os.kill(os.getpid(), getattr(signal, self.kind))
        elif self.kind == "full disk":  # nothing can be written any more, to any file
            resource.setrlimit(resource.RLIMIT_FSIZE, (ALMOST_NOTHING, ALMOST_NOTHING))
        elif self.kind == "full journal":
            recording.journal._database = _Full(recording.journal._database)  # type: ignore[assignment]
        elif self.kind == "damaged journal":
            path = recording.journal.path
            recording.journal.ask("PRAGMA wal_checkpoint(TRUNCATE)")
            with path.open("r+b") as file:
                file.seek(0)
                file.write(random.Random(0).randbytes(path.stat().st_size))


def _case(arguments: list[str], folder: str, kind: str, at: int) -> None:
    """One run of the command line with one fault. Never returns."""
    place = Path(folder)
    os.environ |= {"XDG_STATE_HOME": folder, "XDG_CACHE_HOME": f"{folder}/cache", "TMPDIR": f"{folder}/tmp"}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/torch"  # torch's own, which is meant to stay
    sys.argv = ["gemmscope", *arguments]
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if kind == "closed stdout":
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(reading)
        os.close(writing)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    for number in signals.ENDING:  # background jobs of a shell ignore some of them
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    process.subprocess.Popen = Forked  # type: ignore[misc, assignment]
    Fault(kind, at, place)
    _ending_here(importlib.import_module("gemmscope.__main__").run)


def main() -> None:
    for module in (
        *WORKERS,
        *WARM,
        "gemmscope.cli.commands",
        "gemmscope.commands.bench",
        "gemmscope.commands.step",
        "gemmscope.writers.terminal",
        "pydantic",
    ):
        importlib.import_module(module)
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            _case(case["arguments"], case["folder"], case["kind"], case["at"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201


def journaled(path: Path) -> list[tuple[float, ...]]:
    """Every burst in the runs of a journal that are not finished."""
    if not path.exists():
        return []
    database = sqlite3.connect(path)
    try:
        rows = database.execute("SELECT content FROM message, run WHERE run.id = message.run AND run.finished IS NULL").fetchall()
    finally:
        database.close()
    said = [json.loads(content) for (content,) in rows]
    return [tuple(burst) for message in said if message["type"] == "samples" for burst in message["times_ms"].values()]


if __name__ == "__main__":
    main()
