"""Bursts: how long they are, and which group comes next."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gemmscope.engine.rule import StoppingRule
from gemmscope.workload.cases import MODES
from support.bench_results import MODEL, recorded_measurements

pytest.importorskip("torch", reason="the measuring process needs torch")


@dataclass(frozen=True)
class Event:
    """A CUDA event recorded at that time."""

    at_ms: float

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_a_burst_tells_how_long_a_cycle_takes() -> None:
    """The length of a cycle includes the time between tasks, and is used to plan the next bursts."""
    from gemmscope.engine.timer import Prepared, Runnable, cuda_burst

    tasks = [Runnable(lambda: None, Prepared(lambda: None, copies, 0.0), 0.0) for copies in (1, 2)]
    learnt: list[float] = []
    burst = cuda_burst(tasks, [[Event(0), Event(1), Event(5)], [Event(6), Event(8), Event(12)]], learnt.append)
    assert burst.times_ms() == [[1, 2], [2, 2]]
    assert learnt == [6]


def test_the_least_rounds_are_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmscope.engine.worker import BurstGroup, Orders, plan_rounds

    groups = [BurstGroup((name, "autocast"), [name]) for name in ("BF16", "FP8Current", "FP8Delayed", "FP8Block")]
    orders = Orders()
    monkeypatch.setattr(orders, "stop", lambda: False)
    orders._wanted = [("FP8Block", "autocast"), ("BF16", "autocast")]
    planned = [(number, group.tasks[0]) for number, group in plan_rounds(groups, 4, 0, 2, orders.first_wanted)]
    assert sorted(number for number, _ in planned) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3]
    assert planned[8:] == [(2, "FP8Block"), (2, "BF16"), (3, "FP8Block"), (3, "BF16")]


def test_more_of_what_the_worst_speedup_depends_on_comes_first() -> None:
    """The order is decided in the last of the minimum rounds."""
    results = recorded_measurements([MODEL[0]], spread=0.001)
    names = ["BF16", "FP8Current"]
    noisy = results.of("FP8Current", "autocast")[0]
    bursts = results.pieces[noisy.task.key]
    bursts[:] = [[piece * factor for piece in burst] for burst, factor in zip(bursts, (0.9, 1.1, 1.0) * 9, strict=False)]
    rule = StoppingRule(target=0.0001, least_rounds=results.complete_rounds + 1)
    known = list(results.uncertainties(names, MODES, rule.target))
    assert not rule.done(results.complete_rounds, lambda: known)
    assert rule.open[0] == ("FP8Current", "autocast")
    assert set(rule.open[1:]) == {
        ("BF16", "pre-quantized"),
        ("FP8Current", "pre-quantized"),
    }  # the precise side is not
    early = StoppingRule(target=0.0001, least_rounds=results.complete_rounds + 2)
    assert not early.done(results.complete_rounds, lambda: known)
    assert not early.open
