"""Runs a campaign from the parent's side: starts the worker, journals what it says, restarts it when it dies.

The parent never imports torch. It knows which task the worker is at (`begin`), so a crash, a CUDA fault or a hang costs that task
and nothing else: it is recorded as failed, and a new worker takes the remaining ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from gemmscope.errors import UserError
from gemmscope.measure.results import Results
from gemmscope.measure.sampler import StoppingRule
from gemmscope.measure.task import MODES, Mode, Task
from gemmscope.process import worker_command


class Keeper(Protocol):
    """What a campaign asks of a journal (`store/journal.py`)."""

    def begin(self, fingerprint: str, command: list[str]) -> int:
        """A new campaign's number."""

    def write(self, campaign: int, message: dict[str, Any]) -> None:
        """Keep one message."""

    def finish(self, campaign: int) -> None:
        """Nothing is left to resume."""

    def unfinished(self, fingerprint: str) -> int | None:
        """An earlier campaign that measured the same and was cut short."""

    def messages(self, campaign: int) -> Iterator[dict[str, Any]]:
        """What it said."""


@dataclass(frozen=True)
class Counts:
    """Fixed numbers of runs, where they were asked for: `num_iters` of each task in all, spread over a few rounds, `num_warmup`
    before those of each round, and `gpu_warmup` seconds of heating before the first."""

    num_warmup: int = 10
    num_iters: int = 100
    gpu_warmup: float = 5.0

    @property
    def rounds(self) -> int:
        return min(5, self.num_iters)


@dataclass(frozen=True)
class Settings:
    """How to measure. A burst runs `drop_ms` to reach its steady state, then `keep_ms` that count."""

    backend: str
    drop_ms: float = 70.0
    keep_ms: float = 130.0
    max_rounds: int = 1000
    counts: Counts | None = None  # instead of times and a stopping rule
    timing: Literal["cuda-events", "profiler"] = "cuda-events"
    cache_weights: bool = False  # quantized once per step: the timed micro-batch is not the first
    for_nsight: bool = False  # run everything once between cudaProfilerStart and Stop, in NVTX ranges, and time nothing
    silence_s: float = 120.0  # a worker that says nothing for so long hangs
    seed: int = 0


@dataclass
class Campaign:
    """Tasks, how to measure them, and where to write it down."""

    tasks: Sequence[Task]
    settings: Settings
    rule: StoppingRule
    journal: Keeper
    command: Sequence[str] = ()
    on_message: Callable[[dict[str, Any], Results], None] = lambda *_: None
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = Results(self.tasks)
        self.recipes = list(dict.fromkeys(task.recipe for task in self.tasks))
        self.modes: list[Mode] = [mode for mode in MODES if any(task.mode == mode for task in self.tasks)]

    @property
    def fingerprint(self) -> str:
        """The same for campaigns that measure the same."""
        content = json.dumps([asdict(self.settings), [task.to_json() for task in self.tasks]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def run(self, *, resume: bool = False) -> Results:
        """Measure until the rule is content. Ctrl-C ends it early, with what was measured in `results`."""
        earlier = self.journal.unfinished(self.fingerprint) if resume else None
        number = earlier if earlier is not None else self.journal.begin(self.fingerprint, list(self.command))
        if earlier is not None:
            for message in self.journal.messages(earlier):
                self.results.take(message)
        while True:
            left = [result.task for result in self.results.tasks.values() if not result.failure]
            blamed = self._one_worker(number, left) if left else None
            if blamed is None:
                break
            self._note(number, blamed)
        self.journal.finish(number)
        return self.results

    def _note(self, number: int, message: dict[str, Any]) -> None:
        self.journal.write(number, message)
        self.results.take(message)
        self.on_message(message, self.results)

    def _one_worker(self, number: int, tasks: Sequence[Task]) -> dict[str, Any] | None:
        """One worker's life. None if it came to a good end, else the failure of the task it died at."""
        at = tasks[0].key
        with _worker(tasks, self.settings) as (process, lines, errors):
            for line in lines:
                if line is None:
                    process.kill()
                    return _failure(at, f"nothing was heard from it for {self.settings.silence_s:g} s", "hang")
                message = json.loads(line)
                if message["type"] == "fatal":
                    raise UserError(message["why"], "gemmscope doctor tells what this machine can measure")
                at = message["task"] if message["type"] == "begin" else at
                self._note(number, message)
                if message["type"] == "round" and self.rule.done(self.results, self.recipes, self.modes):
                    _tell_to_stop(process)
                if message["type"] == "done":
                    return None
            if not self.results.hello:
                raise UserError(f"the measuring process did not start {_last_words(process, errors)}")
            already = self.results.tasks[at].failure
            if already:  # it said so itself before it went
                return _failure(at, already, self.results.tasks[at].failure_kind)
            return _failure(at, f"the measuring process died {_last_words(process, errors)}", "crash")


def _failure(task: str, why: str, kind: str) -> dict[str, Any]:
    return {"type": "failed", "task": task, "why": why, "kind": kind}


def _last_words(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """How it ended: the signal or exit code, and the last line of its error output."""
    code = process.wait()
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"({ended})" + (f": {lines[-1][:200]}" if lines else "")


def _tell_to_stop(process: subprocess.Popen[bytes]) -> None:
    """The end of its standard input is the sign."""
    assert process.stdin is not None
    process.stdin.close()


Running = tuple[subprocess.Popen[bytes], Iterator[str | None], IO[bytes]]


@contextmanager
def _worker(tasks: Sequence[Task], settings: Settings) -> Iterator[Running]:
    """A running worker, its messages (a line each; None for too long a silence) and its error output. Leaves none behind."""
    request = {**asdict(settings), "tasks": [task.to_json() for task in tasks]}
    with tempfile.TemporaryDirectory(prefix="gemmscope-") as folder, tempfile.TemporaryFile() as errors:
        path = Path(folder, "request.json")
        path.write_text(json.dumps(request), encoding="utf-8")
        reading, writing = os.pipe()
        process = subprocess.Popen(
            worker_command("gemmscope.measure.worker", str(path), str(writing)),
            pass_fds=(writing,),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the worker
        )
        os.close(writing)
        try:
            yield process, _lines(reading, settings.silence_s), errors
        finally:
            process.kill()
            process.communicate()
            os.close(reading)


def _lines(descriptor: int, silence_s: float) -> Iterator[str | None]:
    """Complete lines as they arrive; None once nothing came for too long; ends when the other side closes."""
    pending = b""
    while True:
        readable, _, _ = select.select([descriptor], [], [], silence_s)
        if not readable:
            yield None
            return
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return
        *whole, pending = (pending + piece).split(b"\n")
        for line in whole:
            yield line.decode()
