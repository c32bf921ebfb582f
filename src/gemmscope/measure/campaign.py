"""Runs a campaign from the parent's side: starts the worker, journals its messages, restarts it when it dies.

The parent never imports torch. It knows the worker's current task (`begin`), so a crash, a CUDA fault or a hang costs that task
and nothing else: it is recorded as failed, and a new worker takes the remaining ones. All tasks are in memory at once, so that
rounds can interleave them; those that do not fit are tried again among fewer.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gemmscope.errors import UserError, option
from gemmscope.findings import finding
from gemmscope.measure.journal import Journal
from gemmscope.measure.link import Link
from gemmscope.measure.measurements import Measurements
from gemmscope.measure.sampler import Group, StoppingRule
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import BenchSettings, Counts
from gemmscope.workload.cases import MODES, Case, Mode, Task


@dataclass
class Campaign:
    """Tasks, how to measure them, and where to write it down."""

    tasks: Sequence[Task]
    settings: BenchSettings
    rule: StoppingRule
    journal: Journal
    command: Sequence[str] = ()
    on_message: Callable[[dict[str, Any], Measurements], None] = lambda *_: None
    started: Link | None = None  # a worker that was started early: it imports torch while others read the model
    results: Measurements = field(init=False)

    def __post_init__(self) -> None:
        self.results = Measurements(self.tasks)
        self._decide_again = 0.0
        self._cases: list[Case] | None = None  # the only ones that are being measured, in another try
        self.recipes = list(dict.fromkeys(task.recipe for task in self.tasks))
        self.modes: list[Mode] = [mode for mode in MODES if any(task.mode == mode for task in self.tasks)]

    @property
    def counts(self) -> Counts | None:
        """Fixed numbers of runs, if they were asked for."""
        return self.settings.counts

    def widest(self) -> float | None:
        """The widest relative interval of all speedups."""
        return self.rule.widest(self.results, self.recipes, self.modes)

    @property
    def fingerprint(self) -> str:
        """The same for campaigns that measure the same."""
        settings = {key: value for key, value in asdict(self.settings).items() if key != "seed"}
        content = json.dumps([settings, [task.to_json() for task in self.tasks]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def run(self, *, resume: bool = False) -> Measurements:
        """Measure until the rule says stop. Ctrl-C ends it early; `results` has what was measured."""
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
        """One worker after another, until one ends normally: each that dies costs the task it died at."""
        while True:
            left = [task for task in tasks if not self.results.tasks[task.key].failure]
            failure = self._one_worker(number, left) if left else None
            if failure is None:
                return
            self._note(number, failure)

    def _crowded_out(self, narrow: Callable[[Task, Task], bool]) -> list[list[Task]]:
        """Smaller sets in which tasks that ran out of memory get another try; none that is as large as all together."""
        failed = [result.task for result in self.results.tasks.values() if result.failure_kind == "out of memory"]
        sets = dict.fromkeys(tuple(other for other in self.tasks if narrow(task, other)) for task in failed)
        return [list(tasks) for tasks in sets if len(tasks) < len(self.tasks)]

    def _enough(self) -> bool:
        """Asked after every burst; but deciding takes a moment with many ops, and must not hold up the messages."""
        began = time.monotonic()
        if self.settings.counts is not None or began < self._decide_again:
            return False
        enough = self.rule.done(self.results, self.recipes, self.modes, self._cases)
        self._decide_again = began + 4 * (time.monotonic() - began)
        return enough

    def _note(self, number: int, message: dict[str, Any]) -> None:
        if message["type"] == "hello" and self.results.hello:
            _must_be_alike(self.results.hello, message)
        reason = self.journal.write(number, message)
        self.results.take(message)
        self.on_message(message, self.results)
        if reason:
            self.results.findings.append(finding("journal-incomplete", reason=reason))

    def _one_worker(self, number: int, tasks: Sequence[Task]) -> dict[str, Any] | None:
        """Run one worker. None if it ended normally, else the failure of the task it died at."""
        early, self.started = self.started, None
        had = {task.key: len(self.results.tasks[task.key].rounds_ms) for task in tasks}  # bursts of processes before this one
        request = {
            **asdict(self.settings),
            "least_rounds": self.rule.least_rounds,
            "had": had if self.settings.counts else {},
            "tasks": [task.to_json() for task in tasks],
        }
        with early or Link() as link:
            death = link.converse(
                request,
                silence_s=self.settings.silence_s,
                note=lambda message: self._note(number, message),
                enough=self._enough,
                wanted=lambda: self._wanted(tasks),
            )
        if death is None:
            return None
        result = self.results.tasks[death.task or tasks[0].key]
        reported = bool(result.failure)  # by the worker itself, before it died
        why, kind = (result.failure, result.failure_kind) if reported else (death.why, death.kind)
        return {"type": "failed", "task": result.task.key, "why": why, "kind": kind}

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
    """Measurements that are combined must come from one GPU and one set of versions."""
    before, after = _identity(earlier), _identity(now)
    changed = [f"{key} was {before.get(key)} and is {value}" for key, value in after.items() if before.get(key) != value]
    if changed:
        raise UserError(
            f"the earlier measurement was made elsewhere: {', '.join(changed)}", f"start again without {option('resume')}"
        )


def _identity(hello: dict[str, Any]) -> dict[str, Any]:
    device = hello.get("device", {})
    return {**hello.get("versions", {}), "GPU": device.get("name"), "power limit": device.get("power_limit_w")}
