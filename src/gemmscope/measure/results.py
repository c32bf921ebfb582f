"""What a campaign has found so far, gathered from the worker's messages, live or out of the journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmscope.measure.stats import Floats, Interval, per_round, ratio_interval
from gemmscope.measure.task import Case, Mode, Task
from gemmscope.recipe.recipes import BASELINE


@dataclass
class TaskResult:
    """One task: its bursts, round by round, and what is known of it. `failure` says why there is nothing to show."""

    task: Task
    rounds: list[list[float]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[list[Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    failure_kind: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.rounds) and not self.failure


class Results:
    """All tasks of a campaign by their key."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = {task.key: TaskResult(task) for task in tasks}
        self.hello: dict[str, Any] = {}
        self.complete_rounds = 0

    def take(self, message: dict[str, Any]) -> None:
        """Note one message of the worker."""
        kind = message["type"]
        if kind == "hello":
            self.hello = message
        elif kind == "ready":
            self.tasks[message["task"]].facts = {key: message[key] for key in ("error", "host_ms", "copies")}
        elif kind == "failed":
            result = self.tasks[message["task"]]
            result.failure, result.failure_kind = message["why"], message["kind"]
        elif kind == "samples":
            for key, burst in message["times_ms"].items():
                self.tasks[key].rounds.append(burst)
                self.tasks[key].states.append(message["state"])
        elif kind == "kernels":
            self.tasks[message["task"]].kernels = message["kernels"]
        elif kind == "round":
            self.complete_rounds += 1

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(result.task.case for result in self.tasks.values()))

    def of(self, recipe: str, mode: Mode, case: Case | None = None) -> list[TaskResult]:
        """The tasks of a recipe and mode, of one case or of all."""
        return [
            result
            for result in self.tasks.values()
            if result.task.group == (recipe, mode) and (case is None or result.task.case == case)
        ]

    def totals(self, recipe: str, mode: Mode, cases: Iterable[Case] | None = None) -> Floats | None:
        """Milliseconds of one micro-batch's linears, round by round; None if any part is missing.

        Every case counts as often as the model runs it. A round in which a burst is missing (the worker died) is left out.
        """
        chosen = list(cases) if cases is not None else self.cases()
        parts = [(result, case.count) for case in chosen for result in self.of(recipe, mode, case)]
        if not parts or any(not result.measured for result, _ in parts):
            return None
        rounds = min(len(result.rounds) for result, _ in parts)
        summed: Floats = np.sum([per_round(result.rounds[:rounds]) * count for result, count in parts], axis=0)
        return summed

    def speedup(self, recipe: str, mode: Mode, cases: Iterable[Case] | None = None, over: str = BASELINE) -> Interval | None:
        """How many times faster than `over`, with its interval; None if either side is missing."""
        chosen = list(cases) if cases is not None else None
        slow, fast = self.totals(over, mode, chosen), self.totals(recipe, mode, chosen)
        if slow is None or fast is None:
            return None
        return ratio_interval([[time] for time in slow], [[time] for time in fast])
