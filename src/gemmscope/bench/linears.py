"""From the measurements of a campaign to `Linears`: the time of every op, and the speedups that may be formed.

What ran in a different precision than requested has a time but no speedup, and neither has an op that the framework left in high
precision. What was not measured is missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from gemmscope.bench.breakdown import op_time
from gemmscope.bench.measurements import Measurements
from gemmscope.bench.memory import memory
from gemmscope.engine.stats import ratio_interval, time_interval
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Linears, LinearsTotal, Speedup, Winner, linears_total
from gemmscope.results.winner import find_winner
from gemmscope.workload.cases import Case, Mode

GEMMS_ONLY = "torch"  # a backend that runs GEMMs and trains nothing


def measured_linears(
    measurements: Measurements,
    recipes: Sequence[str],
    modes: Sequence[Mode],
    *,
    layers: int | None = None,
    layer_counts: Mapping[str, int] | None = None,
    backend: str = "transformer_engine",
    cache_weights: bool = False,
    as_te_benchmark: bool = False,
) -> Linears:
    """Everything about the linears that follows from the measurements. `recipes`: those to show, measured or not."""
    cases = tuple(measurements.cases())
    linears = Linears(
        origin="measured",
        cases=cases,
        recipes=tuple(recipes),
        modes=tuple(modes),
        layers=layers,
        layer_counts=dict(layer_counts or {}),
        as_te_benchmark=as_te_benchmark,
        cache_weights=cache_weights,
        ops=tuple(
            time
            for case in cases
            for name in recipes
            for mode in modes
            if (time := op_time(measurements, case, name, mode)) is not None
        ),
    )
    sums = _Sums(measurements, linears)
    capability = str(measurements.hello.device.get("compute_capability", ""))
    counted = not linears.bare and not as_te_benchmark and backend != GEMMS_ONLY
    return linears.model_copy(
        update={
            "speedups": tuple(sums.speedups()),
            "totals": () if linears.bare else tuple(sums.totals()),
            "memory": tuple(memory(cases, name, backend, capability) for name in recipes) if counted else (),
            "winners": {} if linears.bare else sums.winners(),
        }
    )


class _Sums:
    """What is computed across ops and recipes."""

    def __init__(self, measurements: Measurements, linears: Linears) -> None:
        self._measured, self._linears = measurements, linears

    def speedup(self, name: str, mode: Mode, case: Case | None = None, over: str = BASELINE) -> Interval | None:
        """One op, or all together as often as the model runs them; None where no speedup may be formed."""
        if name == over or any(self._linears.falls_back(side, mode, case.op if case else "") for side in (name, over)):
            return None
        if case is not None:
            sides = [self._linears.op_time(case.op, side, mode) for side in (name, over)]
            if any(side is not None and side.left_in_baseline for side in sides):
                return None
        return self._measured.speedup(name, mode, [case] if case else None, over=over)

    def speedups(self) -> Iterator[Speedup]:
        """The speedups of ops, and of passes timed by themselves, over the baseline; of all linears over every earlier recipe."""
        for mode in self._linears.modes:
            names = self._linears.columns(mode)
            for index, name in enumerate(names):
                for case in self._linears.cases:
                    yield from self._of_case(name, mode, case)
                for over in names[:index]:
                    yield from self._over(name, over, mode)

    def _over(self, name: str, over: str, mode: Mode) -> Iterator[Speedup]:
        """The speedup of all linears of one recipe over another; for bare GEMMs, of each GEMM (over the baseline, `_of_case`
        yields it)."""
        if not self._linears.bare:
            if (speedup := self.speedup(name, mode, over=over)) is not None:
                yield Speedup(recipe=name, over=over, mode=mode, speedup=speedup)
            return
        for case in self._linears.cases if over != BASELINE else ():
            if (speedup := self.speedup(name, mode, case, over)) is not None:
                yield Speedup(recipe=name, over=over, mode=mode, op=case.op, speedup=speedup)

    def _of_case(self, name: str, mode: Mode, case: Case) -> Iterator[Speedup]:
        speedup = self.speedup(name, mode, case)
        if speedup is None:
            return
        yield Speedup(recipe=name, over=BASELINE, mode=mode, op=case.op, speedup=speedup)
        if len(case.passes) == 1:
            return
        pieces = {task.task.pass_name: self._measured.pieces[task.task.key] for task in self._measured.of(BASELINE, mode, case)}
        for task in self._measured.of(name, mode, case):
            pass_name = task.task.pass_name
            if pass_name:
                ratio = ratio_interval(pieces[pass_name], self._measured.pieces[task.task.key])
                yield Speedup(recipe=name, over=BASELINE, mode=mode, op=case.op, pass_name=pass_name, speedup=ratio)

    def totals(self) -> Iterator[LinearsTotal]:
        """The time of all linears, for every mode and recipe that has all its parts."""
        for mode in self._linears.modes:
            for name in self._linears.columns(mode):
                bursts = self._measured.totals(name, mode)
                if bursts is not None:
                    ops = {time.op: time for time in self._linears.ops if (time.recipe, time.mode) == (name, mode)}
                    total = time_interval(bursts, self._measured.noise())
                    yield linears_total(name, mode, total, self._linears.cases, ops, self._linears.layer_counts)

    def winners(self) -> dict[Mode, Winner]:
        """The fastest recipe of each mode that has speedups."""
        winners = {}
        for mode in self._linears.modes:
            speedups = {name: gain for name in self._linears.columns(mode) if (gain := self.speedup(name, mode)) is not None}
            if speedups:
                winners[mode] = find_winner(speedups, partial(self._ratio, mode))
        return winners

    def _ratio(self, mode: Mode, name: str, over: str) -> Interval | None:
        return self.speedup(name, mode, over=over)
