"""Bursts: how long they are, and of what the next one is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench_results import MODEL, recorded_results
from gemmscope.measure.sampler import StoppingRule
from gemmscope.measure.task import MODES, Case, Task

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
    from gemmscope.measure.backends.base import Prepared
    from gemmscope.measure.timer import Runnable, _CudaBurst

    tasks = [Runnable(lambda: None, Prepared(lambda: None, copies, 0.0), 0.0) for copies in (1, 2)]
    learnt: list[float] = []
    burst = _CudaBurst(tasks, [[Event(0), Event(1), Event(5)], [Event(6), Event(8), Event(12)]], learnt.append)
    assert burst.times_ms() == [[1, 2], [2, 2]]
    assert learnt == [6]


def test_the_least_rounds_are_of_everything() -> None:
    from gemmscope.measure.worker import _plan

    groups = [[Task(Case("MLP Up", 1, 1, 1), name, "autocast")] for name in ("BF16", "FP8Current", "FP8Delayed")]
    planned = list(_plan(groups, 4, 0, lambda tasks: tasks[0].recipe == "FP8Current", least=2))
    assert sorted(number for number, _ in planned) == [0, 0, 0, 1, 1, 1, 2, 3]
    assert {tasks[0].recipe for number, tasks in planned if number > 1} == {"FP8Current"}


def test_more_of_what_the_worst_speedup_depends_on() -> None:
    """It is known in the last of the least rounds already, and what is known better waits."""
    results = recorded_results([MODEL[0]], spread=0.001)
    names = ["BF16", "FP8Current"]
    noisy = results.of("FP8Current", "autocast")[0]
    noisy.pieces = [[piece * factor for piece in burst] for burst, factor in zip(noisy.pieces, (0.9, 1.1, 1.0) * 9, strict=False)]
    rule = StoppingRule(target=0.0001, least_rounds=results.complete_rounds + 1)
    assert not rule.done(results, names, MODES)
    assert rule.open == {("FP8Current", "autocast")}
    early = StoppingRule(target=0.0001, least_rounds=results.complete_rounds + 2)
    assert not early.done(results, names, MODES)
    assert not early.open
