"""What a campaign has measured so far, gathered from the worker's messages, live or from the journal."""

from collections.abc import Iterable, Sequence
from typing import Any

from gemmscope.findings import Finding, finding
from gemmscope.interval import Interval
from gemmscope.measure.stats import Bursts, Noise, noise_of, pieces, ratio_interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import TaskResult
from gemmscope.workload.cases import Case, Mode, Task


class Measurements:
    """All tasks of a campaign by their key. `pieces` are what statistics are made of (`stats.py`): by task, burst by burst."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = {task.key: TaskResult(task) for task in tasks}
        self.pieces: dict[str, list[list[float]]] = {key: [] for key in self.tasks}
        self._keys: dict[tuple[str, Mode], dict[Case, list[str]]] = {}  # of a recipe and mode, by case: looked up often
        for key, result in self.tasks.items():
            self._keys.setdefault(result.task.group, {}).setdefault(result.task.case, []).append(key)
        self.hello: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.complete_rounds = 0
        self._noise: dict[tuple[Case, ...], Noise] = {}  # until there are more samples

    def prepared(self) -> tuple[int, int]:
        """How many tasks are ready to be measured or have failed; of how many."""
        return sum(bool(result.facts) or bool(result.failure) for result in self.tasks.values()), len(self.tasks)

    def take(self, message: dict[str, Any]) -> None:
        """Take in one message of the worker."""
        kind, self._noise = message["type"], {}
        if kind == "hello":
            self.hello = message
        elif kind == "ready":
            self.tasks[message["task"]].facts = {key: value for key, value in message.items() if key not in ("type", "task")}
        elif kind == "failed":
            result = self.tasks[message["task"]]
            result.failure, result.failure_kind = message["why"], message["kind"]
        elif kind == "samples":
            bursts = ((self.tasks[key].facts, burst) for key, burst in message["times_ms"].items())
            # a sample is the time of one set of buffers; the sum of other tasks takes no time of its own
            duration_ms = sum(sum(burst) * int(facts.get("copies", 1)) for facts, burst in bursts if "sum_of" not in facts)
            for key, burst in message["times_ms"].items():
                self.tasks[key].rounds_ms.append(burst)
                self.pieces[key].append(pieces(burst, duration_ms))
                self.tasks[key].states.append(message["state"])
        elif kind == "kernels":
            self.tasks[message["task"]].kernels = message["kernels"]
        elif kind == "again":
            for key in message["tasks"]:
                self.tasks[key], self.pieces[key] = TaskResult(self.tasks[key].task), []
        elif kind == "sum":
            self.tasks[message["task"]].facts["sum_of"] = message["of"]
        elif kind == "finding":
            self.findings.append(finding(message["code"], **message["facts"]))
        elif kind == "round":
            self.complete_rounds += 1

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(result.task.case for result in self.tasks.values()))

    def of(self, recipe: str, mode: Mode, case: Case | None = None) -> list[TaskResult]:
        """The tasks of a recipe and mode, of one case or of all."""
        by_case = self._keys.get((recipe, mode), {})
        groups = [by_case.get(case, [])] if case is not None else by_case.values()
        return [self.tasks[key] for keys in groups for key in keys]

    def among(self, recipe: str, mode: Mode, cases: Iterable[Case] | None) -> list[TaskResult]:
        """The tasks of a recipe and mode, of some cases (None: of all)."""
        chosen = list(cases) if cases is not None else self.cases()
        return [result for case in chosen for result in self.of(recipe, mode, case)]

    def totals(self, recipe: str, mode: Mode, cases: Iterable[Case] | None = None) -> list[list[float]] | None:
        """Milliseconds of one micro-batch's linears, burst by burst in pieces; None if any part is missing.

        Every case counts as often as the model runs it. A round in which a burst is missing (the worker died) is left out.
        """
        parts = [(result, result.task.case.count) for result in self.among(recipe, mode, cases)]
        if not parts or any(not result.measured for result, _ in parts):
            return None
        return added([(self.pieces[result.task.key], count) for result, count in parts])

    def speedup_leaving(self, recipe: str, mode: Mode, left: Iterable[Case]) -> Interval | None:
        """The speedup of all linears together, with some cases left in the baseline's precision."""
        outside = set(left)
        inside = [case for case in self.cases() if case not in outside]
        slow, low = self.totals(BASELINE, mode), self.totals(recipe, mode, inside)
        high = self.totals(BASELINE, mode, outside)
        if slow is None or low is None or high is None:
            return None
        return ratio_interval(slow, added([(low, 1), (high, 1)]), self.noise())

    def noise(self, cases: Sequence[Case] | None = None) -> Noise:
        """The noise of everything that was measured; or of some ops, which may be noisier than all together."""
        key = tuple(cases) if cases is not None else ()
        if key not in self._noise:
            groups = dict.fromkeys(result.task.group for result in self.tasks.values() if "sum_of" not in result.facts)
            series = (self.totals(*group, cases) for group in groups)
            self._noise[key] = noise_of(totals for totals in series if totals is not None)
        return self._noise[key]

    def bursts_behind(self, groups: Iterable[tuple[str, Mode]]) -> list[tuple[str, Mode]]:
        """The groups whose bursts measure these, in their order: a linear that is the sum of its GEMMs is measured by them."""
        results = (result for group in groups for result in self.of(*group))
        keys = (key for result in results for key in result.facts.get("sum_of", [result.task.key]))
        return list(dict.fromkeys(self.tasks[key].task.group for key in keys))

    def speedup(self, recipe: str, mode: Mode, cases: Iterable[Case] | None = None, over: str = BASELINE) -> Interval | None:
        """The speedup over `over`, with its interval; None if either side is missing."""
        chosen = list(cases) if cases is not None else None
        slow, fast = self.totals(over, mode, chosen), self.totals(recipe, mode, chosen)
        if slow is None or fast is None:
            return None
        return ratio_interval(slow, fast, self.noise(chosen))


def added(parts: Sequence[tuple[Bursts, int]]) -> list[list[float]]:
    """Bursts of several tasks added up piece by piece, each as often as its count says.

    >>> added([([[1.0, 2.0]], 1), ([[10.0, 20.0]], 2)])
    [[21.0, 42.0]]
    """
    total = []
    for number in range(min(len(bursts) for bursts, _ in parts)):
        round_of_parts = [(bursts[number], count) for bursts, count in parts]
        size = len(round_of_parts[0][0])
        if any(len(burst) != size for burst, _ in round_of_parts):  # measured apart, and cut into other numbers of pieces
            total.append([sum(count * sum(burst) / len(burst) for burst, count in round_of_parts)])
        else:
            total.append([sum(count * burst[index] for burst, count in round_of_parts) for index in range(size)])
    return total
