"""What was measured of linears so far: times, speedups, and how precisely they are known."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gemmscope.choices import Mode
from gemmscope.engine.messages import Group, Kernels, Message, Sum
from gemmscope.engine.rule import Uncertainty
from gemmscope.engine.stats import Bursts, Noise, noise_of, ratio_interval, time_interval
from gemmscope.engine.store import ResultStore
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import TaskResult
from gemmscope.workload.cases import Case, Task

ALIKE = 0.8  # both sides of a speedup need more samples if the ratio of their half-widths is above this


class Measurements(ResultStore[TaskResult]):
    """All tasks of linears by their key."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        super().__init__({task.key: TaskResult(task) for task in tasks})
        by_group = grouped((result.task.group, (result.task.case, key)) for key, result in self.tasks.items())
        self._keys = {group: grouped(keys) for group, keys in by_group.items()}  # by case: looked up often
        self._noise: dict[tuple[Case, ...], Noise] = {}  # until there are more samples

    def take(self, message: Message) -> None:
        """Record one message of the worker."""
        self._noise = {}
        match message:
            case Kernels(key, kernels):
                self.tasks[key].kernels = [list(kernel) for kernel in kernels]
            case Sum(key, parts):
                self.tasks[key].facts["sum_of"] = parts
            case _:
                super().take(message)

    def empty(self, key: str) -> TaskResult:
        return TaskResult(self.tasks[key].task)

    def duration_ms(self, times_ms: Mapping[str, list[float]]) -> float:
        """A sample is the time of one set of buffers; the sum of other tasks takes no time of its own."""
        bursts = ((self.tasks[key].facts, burst) for key, burst in times_ms.items())
        return sum(sum(burst) * int(facts.get("copies", 1)) for facts, burst in bursts if "sum_of" not in facts)

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(result.task.case for result in self.tasks.values()))

    def of(self, recipe: str, mode: Mode, cases: Iterable[Case] | None = None) -> list[TaskResult]:
        """The tasks of a recipe and mode, of some cases or of all."""
        by_case = self._keys.get((recipe, mode), {})
        return [self.tasks[key] for case in (by_case if cases is None else cases) for key in by_case.get(case, ())]

    def totals(self, recipe: str, mode: Mode, cases: Iterable[Case] | None = None) -> list[list[float]] | None:
        """Milliseconds of one micro-batch's linears, burst by burst in pieces; None if any part is missing.

        Every case counts as often as the model runs it. A round in which a burst is missing (the worker died) is left out.
        """
        parts = [(result, result.task.case.count) for result in self.of(recipe, mode, cases)]
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

    def bursts_behind(self, groups: Iterable[Group]) -> list[Group]:
        """The groups whose bursts measure these, in their order: a linear that is the sum of its GEMMs is measured by them."""
        results = (result for group in groups for result in self.tasks.values() if result.task.group == group)
        keys = (key for result in results for key in result.facts.get("sum_of", [result.task.key]))
        return list(dict.fromkeys(self.tasks[key].task.group for key in keys))

    def speedup(self, recipe: str, mode: Mode, cases: Iterable[Case] | None = None, over: str = BASELINE) -> Interval | None:
        """The speedup over `over`, with its interval; None if either side is missing."""
        chosen = list(cases) if cases is not None else None
        slow, fast = self.totals(over, mode, chosen), self.totals(recipe, mode, chosen)
        if slow is None or fast is None:
            return None
        return ratio_interval(slow, fast, self.noise(chosen))

    def uncertainties(
        self, recipes: Sequence[str], modes: Sequence[Mode], target: float, cases: Sequence[Case] | None = None
    ) -> Iterator[Uncertainty]:
        """How precisely every speedup is known, and the groups that it is formed of: of each op and of all together over the
        baseline, of all together also over each other. In a mode where no speedup can be formed any more (one recipe alone, or
        the others failed), every time; but nothing is decided while samples are still to come. `cases`: only of these."""
        wanted = [None, *([case] for case in self.cases())] if cases is None else [[case] for case in cases]
        for mode in modes:
            formed = False
            for index, recipe in enumerate(recipes):
                for over in recipes[:index]:
                    for some in wanted if over == BASELINE else wanted[:1]:
                        speedup = self.speedup(recipe, mode, some, over)
                        if speedup is not None:
                            formed = True
                            sides = ((recipe, mode), (over, mode))
                            behind = sides if speedup.half_width <= target else self._wider(sides, some)
                            yield Uncertainty(speedup.half_width, behind)
            pairs = [(recipe, some) for recipe in recipes for some in wanted]
            if formed or any(result.pending for recipe, some in pairs for result in self.of(recipe, mode, some)):
                continue
            for recipe, some in pairs:
                total = self.totals(recipe, mode, some)
                if total is not None:
                    yield Uncertainty(time_interval(total, self.noise(some)).half_width, ((recipe, mode),))

    def _wider(self, sides: Sequence[tuple[str, Mode]], cases: Sequence[Case] | None) -> tuple[Group, ...]:
        """The side of a speedup that needs more samples: the less precise one, or both if they are similar."""
        totals = {side: self.totals(*side, cases) for side in sides}
        noise = self.noise(cases)
        widths = {side: time_interval(total, noise).half_width for side, total in totals.items() if total is not None}
        return tuple(side for side, width in widths.items() if width >= ALIKE * max(widths.values()))


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
