"""Bursts: how long they are, and of what the next one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from gemmscope.engine.rule import StoppingRule
from gemmscope.workload.cases import MODES, Case, Task
from support.bench_results import MODEL, recorded_measurements

pytest.importorskip("torch", reason="the measuring process needs torch")


@dataclass(frozen=True)
class Event:
    """A CUDA event that was passed at that time."""

    at_ms: float

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_a_burst_tells_how_long_a_cycle_takes() -> None:
    """From its first mark to its last, what lies between tasks included: the next bursts are planned by that."""
    from gemmscope.engine.timer import Prepared
    from gemmscope.engine.timer import Runnable, _CudaBurst

    tasks = [Runnable(lambda: None, Prepared(lambda: None, copies, 0.0), 0.0) for copies in (1, 2)]
    learnt: list[float] = []
    burst = _CudaBurst(tasks, [[Event(0), Event(1), Event(5)], [Event(6), Event(8), Event(12)]], learnt.append)
    assert burst.times_ms() == [[1, 2], [2, 2]]
    assert learnt == [6]


def test_the_least_rounds_are_of_everything() -> None:
    from gemmscope.bench.worker import _plan

    groups = [[Task(Case("MLP Up", 1, 1, 1), name, "autocast")] for name in ("BF16", "FP8Current", "FP8Delayed", "FP8Block")]
    wanted = ("FP8Block", "BF16")

    def first_wanted(left: Sequence[list[Task]]) -> list[Task] | None:
        return min((tasks for tasks in left if tasks[0].recipe in wanted), key=lambda t: wanted.index(t[0].recipe), default=None)

    planned = [(number, tasks[0].recipe) for number, tasks in _plan(groups, 4, 0, 2, first_wanted)]
    assert sorted(number for number, _ in planned) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]
    assert planned[8:] == [(2, "FP8Block"), (2, "BF16"), (3, "FP8Block"), (3, "BF16")]


def test_more_of_what_the_worst_speedup_depends_on_comes_first() -> None:
    """It is known in the last of the least rounds already."""
    results = recorded_measurements([MODEL[0]], spread=0.001)
    names = ["BF16", "FP8Current"]
    noisy = results.of("FP8Current", "autocast")[0]
    bursts = results.pieces[noisy.task.key]
    bursts[:] = [[piece * factor for piece in burst] for burst, factor in zip(bursts, (0.9, 1.1, 1.0) * 9, strict=False)]
    rule = StoppingRule(target=0.0001, least_rounds=results.complete_rounds + 1)
    assert not rule.done(results, names, MODES)
    assert rule.open[0] == ("FP8Current", "autocast")
    assert set(rule.open[1:]) == {("BF16", "pre-quantized"), ("FP8Current", "pre-quantized")}  # the quiet side is not to blame
    early = StoppingRule(target=0.0001, least_rounds=results.complete_rounds + 2)
    assert not early.done(results, names, MODES)
    assert not early.open
