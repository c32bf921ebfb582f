"""Which plan wins, how it is written down, what a run costs."""

from __future__ import annotations

import pytest

from gemmscope.errors import UserError
from gemmscope.measure.stats import Interval
from gemmscope.model.spec import RunSpec
from gemmscope.step.answer import answer
from gemmscope.step.cost import Budget, cost
from gemmscope.step.emit import ready_to_paste
from gemmscope.step.recommend import Plan, candidate, part_gains, recommend
from gemmscope.step.results import StepResults, Variant
from gemmscope.workload.ops import Work
from gemmscope.workload.summary import Totals

BF16, FP8, CAST = "nvjet_sm90_tst_NTN", "nvjet_sm90_qqtst_TNT", "cast_transpose_optimized_kernel"
TOTALS = Totals((), 1e12, 1e11, Work(), 1, 1000, 1000, 1000, 1.1e12)


def profile(results: StepResults, variant: Variant, **part_ms: float) -> None:
    name = BF16 if variant.recipe == "BF16" else FP8
    parts = [[part.replace("_", " "), "forward", [[name, time * 1000, 7]]] for part, time in part_ms.items()]
    results.take({"type": "profile", "task": variant.name, "parts": parts, "busy_ms": sum(part_ms.values())})


def times(results: StepResults, variant: Variant, centre: float, spread: float = 0.002) -> None:
    for number in range(-2, 3):
        burst = [centre * (1 + spread * number)] * 4
        results.take({"type": "samples", "times_ms": {variant.name: burst}, "state": {}})


def run(mixed_ms: float) -> tuple[StepResults, list[Plan]]:
    """FP8 gains in the MLP and loses in the projections."""
    plain, low = Variant("BF16", 8), Variant("FP8Current", 8)
    mixed = Variant("FP8Current", 8, ("qkv", "attn out"))
    results = StepResults([plain, low, mixed], layers=8)
    profile(results, plain, qkv=20, attn_out=10, mlp=70)
    profile(results, low, qkv=22, attn_out=12, mlp=40)
    for variant, centre in ((plain, 110.0), (low, 84.0), (mixed, mixed_ms)):
        times(results, variant, centre)
    return results, [Plan("BF16"), Plan("FP8Current"), Plan("FP8Current", ("qkv", "attn out"))]


def test_parts_that_lose_are_left_out() -> None:
    results, _ = run(80.0)
    assert [gain.part for gain in part_gains(results, "FP8Current") if gain.loses] == ["qkv", "attn out"]
    found = answer(results, ["BF16", "FP8Current"], TOTALS, 1000)
    assert candidate(results, found) == Plan("FP8Current", ("qkv", "attn out"))


def test_the_plan_that_was_measured_fastest_wins() -> None:
    results, plans = run(80.0)
    best = recommend(results, plans)
    assert best.plan == plans[2]
    assert best.certain
    assert best.words.startswith("use FP8Current, with qkv and attn out in BF16 (1.38x [")
    slower, plans = run(90.0)
    assert recommend(slower, plans).plan == Plan("FP8Current")


def test_too_close_to_call() -> None:
    results, plans = run(83.9)
    assert "too close to call against FP8Current" in recommend(results, plans).words
    assert recommend(StepResults([], 1), []) is None


def test_ready_to_paste() -> None:
    texts = ready_to_paste(Plan("FP8Block", ("attn out",)))
    assert "from transformer_engine.common.recipe import Float8BlockScaling" in texts["Transformer Engine"]
    assert "te.autocast(enabled=False)" in texts["Transformer Engine"]
    assert texts["Megatron-LM"].startswith("--transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe blockwise")
    compile(texts["Transformer Engine"], "plan", "exec")
    titan = ready_to_paste(Plan("FP8Rowwise", ("attn out",)))["torchtitan"]
    assert 'filter_fqns = ["output", "lm_head", "attention.wo"]' in titan
    assert ready_to_paste(Plan("BF16")) == {}


def test_cost_carries_the_interval() -> None:
    found = cost(Interval(100.0, 98.0, 102.0), RunSpec(1, 1000, tp=2), Budget(8.64e9, gpus=20, price=2.0))
    assert found.days.value == pytest.approx(1.0)
    assert found.money is not None
    assert (found.money.low, found.money.high) == (pytest.approx(0.98 * 960), pytest.approx(1.02 * 960))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ((0, 8), "no number of tokens"),
        ((1e9, 0), "nothing to train on"),
        ((1e9, 8, -1.0), "no price"),
        ((1e9, 3), "do not divide"),
    ],
)
def test_bad_budgets(budget: tuple[float, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cost(Interval(1.0, 1.0, 1.0), RunSpec(1, 16, tp=2), Budget(budget[0], int(budget[1]), *budget[2:]))


def test_torchao_code_is_code() -> None:
    text = ready_to_paste(Plan("FP8Tensorwise", ("mlp",)))["torchao"]
    compile(text, "plan", "exec")
    assert '"feed_forward"' in text
    assert "torch.compile(layer)" in text
