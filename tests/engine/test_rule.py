"""When a measurement ends, and which tasks it has."""

from __future__ import annotations

import pytest

from gemmscope.bench.measurements import Measurements
from gemmscope.choices import MODES
from gemmscope.engine.rule import StoppingRule, Uncertainty
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.workload.cases import Case, Task, cases_of, tasks_of
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Linear
from support.bench_results import MODEL, recorded_measurements
from support.campaigns import CASES


def test_tasks_cross_the_process_boundary() -> None:
    for task in tasks_of([Case("Expert Up", 8, 4, 4, 3, rows=(5, 3))], ["BF16"], MODES, {}):
        assert Task.from_json(task.to_json()) == task


def test_same_kernels_are_not_measured_twice() -> None:
    tasks = tasks_of(CASES, ["BF16", "FP8Current", "FP8Delayed"], MODES, {"FP8Delayed": "FP8Current"})
    assert not [task for task in tasks if (task.recipe, task.mode) == ("FP8Delayed", "pre-quantized")]
    assert [task for task in tasks if (task.recipe, task.mode) == ("FP8Delayed", "autocast")]


def test_cases_of_a_model() -> None:
    model = presets.load("mixtral-8x7b").model
    assert model is not None
    cases = cases_of(op for op in derive(model, RunSpec(1, 128)).ops if isinstance(op, Linear))
    experts = next(case for case in cases if case.op == "Expert Gate+Up")
    assert (experts.count, len(experts.rows), sum(experts.rows)) == (32, 8, 256)


def widest(results: Measurements, recipes: list[str], cases: list[Case] | None = None) -> float | None:
    return max((uncertainty.half_width for uncertainty in results.uncertainties(recipes, MODES, 0.01, cases)), default=None)


@pytest.mark.parametrize(("target", "seconds", "code"), [(0.5, 1e9, "precision-reached"), (0.0, 0.0, "time-limit-reached")])
def test_stopping_rule(target: float, seconds: float, code: str) -> None:
    """The rule depends only on uncertainties, not on what they are uncertainties of."""
    rule = StoppingRule(target=target, least_rounds=3, longest_s=seconds, clock=lambda: 0.0)
    known = [Uncertainty(0.1, (("FP8", "autocast"),)), Uncertainty(0.2, (("BF16", "autocast"), ("FP8", "autocast")))]
    for number in range(3):
        assert not rule.done(number, lambda: known)
    assert rule.open == (() if target else (("BF16", "autocast"), ("FP8", "autocast")))
    assert rule.done(3, lambda: known)
    assert rule.ended is not None
    assert rule.ended.code == code


def test_another_try_has_rounds_of_its_own() -> None:
    """Minimum rounds and time limit start again, and no group is requested yet."""
    rule, known = StoppingRule(target=1e-6, least_rounds=2, longest_s=0.0), [Uncertainty(0.1, (("BF16",),))]
    assert rule.done(4, lambda: known)
    assert rule.open
    rule.restart(4)
    assert not rule.open
    assert not rule.done(4, lambda: known)
    assert not rule.done(5, lambda: known)
    assert rule.done(6, lambda: known)


def test_while_something_is_still_to_come_times_do_not_decide() -> None:
    results = recorded_measurements([MODEL[0]], spread=0.0001)
    for low in results.of("FP8Current", "autocast") + results.of("FP8Current", "pre-quantized"):
        low.rounds_ms, results.pieces[low.task.key] = [], []
    assert widest(results, ["BF16", "FP8Current"]) is None
    for low in results.of("FP8Current", "autocast") + results.of("FP8Current", "pre-quantized"):
        low.failure = "too large"
    width = widest(results, ["BF16", "FP8Current"])
    assert width is not None
    assert width < 0.01


def test_another_try_looks_at_its_own_ops_only() -> None:
    """Otherwise wide intervals of the first try would keep the second one running until its time limit."""
    wide, narrow = MODEL[0], MODEL[1]
    results = recorded_measurements([wide, narrow], spread=0.0001)
    for result in results.tasks.values():
        if result.task.case == wide:
            bursts = results.pieces[result.task.key]
            bursts[:] = [[piece * (1 + 0.2 * (index % 2)) for piece in burst] for index, burst in enumerate(bursts)]
    every, own = (widest(results, ["BF16", "FP8Current"], cases) for cases in (None, [narrow]))
    assert every is not None
    assert own is not None
    assert own < every / 2
