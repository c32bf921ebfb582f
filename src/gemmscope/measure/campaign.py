"""Runs a campaign from the parent's side: starts the worker, journals what it says, restarts it when it dies.

The parent never imports torch. It knows which task the worker is at (`begin`), so a crash, a CUDA fault or a hang costs that task
and nothing else: it is recorded as failed, and a new worker takes the remaining ones. All tasks are held in memory at once, so
that rounds can interleave them; those for which there was no room get another try among fewer.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from gemmscope.errors import UserError
from gemmscope.measure.link import Link
from gemmscope.measure.results import Results
from gemmscope.measure.sampler import Group, StoppingRule
from gemmscope.recipe.recipes import BASELINE
from gemmscope.workload.cases import MODES, Case, Mode, Task


class Keeper(Protocol):
    """What a campaign asks of a journal (`store/journal.py`)."""

    def begin(self, fingerprint: str, command: list[str]) -> int:
        """A new campaign's number."""

    def write(self, campaign: int, message: dict[str, Any]) -> str:
        """Keep one message; once, why it cannot be kept."""

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
    drop_ms: float = 80.0
    keep_ms: float = 750.0  # the power control swings with a period of some 0.8 s: shorter bursts see a part of a swing
    rest_ms: float = 0.0  # without work before each burst, which is then one op's alone: the chip runs at its highest clock
    max_rounds: int = 1_000_000  # as good as none: doubt and time decide
    counts: Counts | None = None  # instead of times and a stopping rule
    timing: Literal["cuda-events", "profiler"] = "cuda-events"
    cache_weights: bool = False  # quantized once per step: the timed micro-batch is not the first
    filter_layers: bool = True  # leave layers in BF16 that the framework's own filter would leave
    for_nsight: bool = False  # run everything once between cudaProfilerStart and Stop, in NVTX ranges, and time nothing
    silence_s: float = 120.0  # a worker that says nothing for so long hangs
    seed: int = field(default_factory=lambda: random.randrange(1 << 30))  # of the order of bursts


@dataclass
class Campaign:
    """Tasks, how to measure them, and where to write it down."""

    tasks: Sequence[Task]
    settings: Settings
    rule: StoppingRule
    journal: Keeper
    command: Sequence[str] = ()
    on_message: Callable[[dict[str, Any], Results], None] = lambda *_: None
    started: Link | None = None  # a worker that was started early: it imports torch while others read the model
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = Results(self.tasks)
        self._look_again = 0.0
        self._cases: list[Case] | None = None  # the only ones that are being measured, in another try
        self.recipes = list(dict.fromkeys(task.recipe for task in self.tasks))
        self.modes: list[Mode] = [mode for mode in MODES if any(task.mode == mode for task in self.tasks)]

    @property
    def counts(self) -> Counts | None:
        """Fixed numbers of runs, if they were asked for."""
        return self.settings.counts

    def widest(self) -> float | None:
        """The largest doubt among the speedups."""
        return self.rule.widest(self.results, self.recipes, self.modes)

    @property
    def fingerprint(self) -> str:
        """The same for campaigns that measure the same."""
        settings = {key: value for key, value in asdict(self.settings).items() if key != "seed"}
        content = json.dumps([settings, [task.to_json() for task in self.tasks]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def run(self, *, resume: bool = False) -> Results:
        """Measure until the rule is content. Ctrl-C ends it early, with what was measured in `results`."""
        earlier = self.journal.unfinished(self.fingerprint) if resume else None
        number = earlier if earlier is not None else self.journal.begin(self.fingerprint, list(self.command))
        if earlier is not None:
            for message in self.journal.messages(earlier):
                self.results.take(message)
        self._measure(number, self.tasks)
        for narrow in (_of_one_case, _of_one_recipe):
            for tasks in self._crowded_out(narrow):
                self._note(number, {"type": "again", "tasks": [task.key for task in tasks]})
                self.rule.restart(self.results.complete_rounds)
                self._cases = list(dict.fromkeys(task.case for task in tasks))
                self._measure(number, tasks)
        self.journal.finish(number)
        return self.results

    def _measure(self, number: int, tasks: Sequence[Task]) -> None:
        """One worker after another, until one comes to a good end: each that dies costs the task it died at."""
        while True:
            left = [task for task in tasks if not self.results.tasks[task.key].failure]
            blamed = self._one_worker(number, left) if left else None
            if blamed is None:
                return
            self._note(number, blamed)

    def _crowded_out(self, narrow: Callable[[Task, Task], bool]) -> list[list[Task]]:
        """Smaller sets in which tasks that ran out of memory get another try; none that is as large as all together."""
        failed = [result.task for result in self.results.tasks.values() if result.failure_kind == "out of memory"]
        sets = dict.fromkeys(tuple(each for each in self.tasks if narrow(task, each)) for task in failed)
        return [list(tasks) for tasks in sets if len(tasks) < len(self.tasks)]

    def _enough(self) -> bool:
        """Asked after every burst; but looking takes a moment where there are many ops, and must not hold up the messages."""
        began = time.monotonic()
        if self.settings.counts is not None or began < self._look_again:
            return False
        enough = self.rule.done(self.results, self.recipes, self.modes, self._cases)
        self._look_again = began + 4 * (time.monotonic() - began)
        return enough

    def _note(self, number: int, message: dict[str, Any]) -> None:
        if message["type"] == "hello" and self.results.hello:
            _must_be_alike(self.results.hello, message)
        trouble = self.journal.write(number, message)
        for each in (message, *([{"type": "warning", "words": trouble}] if trouble else [])):
            self.results.take(each)
            self.on_message(each, self.results)

    def _one_worker(self, number: int, tasks: Sequence[Task]) -> dict[str, Any] | None:
        """One worker's life. None if it came to a good end, else the failure of the task it died at."""
        early, self.started = self.started, None
        with early or Link() as link:
            death = link.converse(
                {
                    **asdict(self.settings),
                    "least_rounds": self.rule.least_rounds,
                    "had": self._bursts_had(tasks),
                    "tasks": [task.to_json() for task in tasks],
                },
                silence_s=self.settings.silence_s,
                note=lambda message: self._note(number, message),
                enough=self._enough,
                wanted=lambda: self._wanted(tasks),
            )
        if death is None:
            return None
        at = death.task or tasks[0].key
        known = self.results.tasks[at]
        if known.failure:  # it said so itself before it went
            return _failure(at, known.failure, known.failure_kind)
        return _failure(at, death.why, death.kind)

    def _bursts_had(self, tasks: Sequence[Task]) -> dict[str, int]:
        """Where runs are counted, those of earlier processes (one that died, or was interrupted) count too: bursts by task."""
        return {task.key: len(self.results.tasks[task.key].rounds) for task in tasks} if self.settings.counts else {}

    def _wanted(self, tasks: Sequence[Task]) -> list[Group]:
        """What to measure more of, of what this worker can measure; what is known worst comes first."""
        measurable = {task.group for task in tasks if not self.results.tasks[task.key].failure}
        return [group for group in self.results.bursts_behind(self.rule.open) if group in measurable]


def _of_one_case(task: Task, other: Task) -> bool:
    return other.case == task.case


def _of_one_recipe(task: Task, other: Task) -> bool:
    """The same op and mode, in this recipe or the baseline."""
    return other.case == task.case and other.mode == task.mode and other.recipe in (task.recipe, BASELINE)


def _must_be_alike(earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """What is measured together must come from one GPU and one set of versions: refuse to go on with another's measurement."""
    before, after = _identity(earlier), _identity(now)
    changed = [f"{key} was {before.get(key)} and is {value}" for key, value in after.items() if before.get(key) != value]
    if changed:
        raise UserError(f"what was measured before was measured elsewhere: {', '.join(changed)}", "begin anew, without --resume")


def _identity(hello: dict[str, Any]) -> dict[str, Any]:
    device = hello.get("device", {})
    return {**hello.get("versions", {}), "GPU": device.get("name"), "power limit": device.get("power_limit_w")}


def _failure(task: str, why: str, kind: str) -> dict[str, Any]:
    return {"type": "failed", "task": task, "why": why, "kind": kind}
