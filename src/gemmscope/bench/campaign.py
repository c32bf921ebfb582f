"""Measures linears: every op in every recipe, autocast and pre-quantized.

All tasks are in memory at once, so that rounds can interleave them; those that do not fit are tried again among fewer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemmscope.bench.measurements import Measurements
from gemmscope.choices import MODES, Mode
from gemmscope.engine.campaign import Attempt, Campaign
from gemmscope.engine.journal import fingerprint
from gemmscope.engine.messages import Group
from gemmscope.engine.rule import Uncertainty
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import BenchSettings
from gemmscope.workload.cases import Task

WORKER = "gemmscope.bench.worker"


@dataclass(kw_only=True)
class LinearCampaign(Campaign[Measurements]):
    """Tasks, and how to measure them."""

    worker = WORKER
    tasks: Sequence[Task]
    settings: BenchSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        self.results = Measurements(self.tasks)
        self.recipes = list(dict.fromkeys(task.recipe for task in self.tasks))
        self.rounds = self.settings.counts.rounds if self.settings.counts else None
        self.modes: list[Mode] = [mode for mode in MODES if any(task.mode == mode for task in self.tasks)]

    @property
    def part(self) -> str:
        return fingerprint_of(self.tasks, self.settings)

    @property
    def silence_s(self) -> float:
        return self.settings.silence_s

    def attempts(self) -> Iterator[Attempt]:
        """All tasks together; then what ran out of memory: its op alone, then its recipe beside the baseline."""
        yield Attempt([task.key for task in self.tasks])
        for narrow in (_of_one_case, _of_one_recipe):
            for tasks in self._crowded_out(narrow):
                yield Attempt([task.key for task in tasks])

    def _crowded_out(self, narrow: Callable[[Task, Task], bool]) -> list[list[Task]]:
        """Smaller sets of tasks in which those that ran out of memory are tried again; never a set of all tasks."""
        failed = [result.task for result in self.results.tasks.values() if result.failure_kind == "out of memory"]
        sets = dict.fromkeys(tuple(other for other in self.tasks if narrow(task, other)) for task in failed)
        return [list(tasks) for tasks in sets if len(tasks) < len(self.tasks)]

    def request(self, tasks: Sequence[str]) -> dict[str, Any]:
        return {**asdict(self.settings), "tasks": [self.results.tasks[key].task.to_json() for key in tasks]}

    def uncertainties(self, tasks: Sequence[str]) -> Iterable[Uncertainty]:
        cases = list(dict.fromkeys(self.results.tasks[key].task.case for key in tasks))
        chosen = cases if len(tasks) < len(self.tasks) else None
        return self.results.uncertainties(self.recipes, self.modes, self.rule.target, chosen)

    def wanted(self, groups: Sequence[Group], tasks: Sequence[str]) -> list[Group]:
        """The groups that this worker can measure, the least precisely known first."""
        measurable = {self.results.tasks[key].task.group for key in self.results.left(tasks)}
        return [group for group in self.results.bursts_behind(groups) if group in measurable]


def fingerprint_of(tasks: Sequence[Task], settings: BenchSettings) -> str:
    """A key that is equal for campaigns that measure the same things; the order of bursts may differ."""
    return fingerprint("bench", {**asdict(settings), "seed": 0}, [task.to_json() for task in tasks])


def _of_one_case(task: Task, other: Task) -> bool:
    return other.case == task.case


def _of_one_recipe(task: Task, other: Task) -> bool:
    """Whether the other task has the same op and mode, in this recipe or the baseline."""
    return other.case == task.case and other.mode == task.mode and other.recipe in (task.recipe, BASELINE)
