"""Which plan wins, how it is written down, what a run costs."""

from __future__ import annotations

import sys
from shlex import split
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.interval import Interval
from gemmscope.model.spec import RunSpec
from gemmscope.report.step import observed, sentences, tables
from gemmscope.step.answer import RecipeAnswer, StepAnswer, Verified, answer
from gemmscope.step.cost import Budget, cost
from gemmscope.step.emit import ready_to_paste
from gemmscope.step.recommend import Plan, Recommendation, as_asked, candidate, part_gains, recommend
from gemmscope.step.results import StepResults, Variant
from gemmscope.toml import parse_toml
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
    assert split(texts["Megatron-LM"], comments=True)[-1] == "blockwise"  # what it cannot do is a comment to a shell
    compile(texts["Transformer Engine"], "plan", "exec")
    titan = ready_to_paste(Plan("FP8Rowwise", ("attn out",)))["torchtitan"]
    assert parse_toml(titan)["quantize"]["linear"]["float8"]["filter_fqns"] == [
        "output",
        "lm_head",
        "router.gate",
        "attention.wo",
    ]
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


@pytest.mark.parametrize(
    ("left_out", "spared"),
    [
        ((), set()),
        (("attn out",), {"attention.wo", "self_attn.o_proj"}),
        (("qkv", "mlp"), {"self_attn.q_proj", "attention.wq", "feed_forward.w1", "mlp.gate_proj"}),
    ],
)
def test_torchao_code_does_what_it_says(left_out: tuple[str, ...], spared: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it stands, under torchtitan's and Hugging Face's names; heads, routers and odd sizes are never converted."""
    converted: dict[str, Any] = {}
    torchao, torch = ModuleType("torchao.float8"), ModuleType("torch")
    vars(torchao)["Float8LinearConfig"] = SimpleNamespace(from_recipe_name=lambda name: name)
    vars(torchao)["convert_to_float8_training"] = lambda model, **how: converted.update(how)
    vars(torch)["compile"] = lambda layer: f"compiled {layer}"
    for name, module in (("torchao", ModuleType("torchao")), ("torchao.float8", torchao), ("torch", torch)):
        monkeypatch.setitem(sys.modules, name, module)
    model = SimpleNamespace(layers=["a", "b"])
    exec(ready_to_paste(Plan("FP8Tensorwise", left_out))["torchao"], {"model": model})
    assert (converted["config"], model.layers) == ("tensorwise", ["compiled a", "compiled b"])
    linear, odd = SimpleNamespace(in_features=64, out_features=32), SimpleNamespace(in_features=64, out_features=1)
    fits = converted["module_filter_fn"]
    layers = {"attention.wo", "self_attn.o_proj", "self_attn.q_proj", "attention.wq", "feed_forward.w1", "mlp.gate_proj"}
    assert {name for name in layers if not fits(linear, f"layers.0.{name}")} == spared
    assert not any(fits(linear, name) for name in ("output", "lm_head", "layers.0.moe.router.gate", "model.layers.0.mlp.gate"))
    assert not fits(odd, "layers.0.attention.wo")


def test_a_fallback_is_never_recommended() -> None:
    """Its products ran in BF16: whatever its step took, it is not this precision's."""
    plain, low = Variant("BF16", 8), Variant("FP8Current", 8)
    results = StepResults([plain, low], layers=8)
    for variant in (plain, low):
        parts = [["mlp", "forward", [[BF16, 9e4, 7]]], ["optimizer", "step", [["multi_tensor_apply_kernel", 1e4, 7]]]]
        results.take({"type": "profile", "task": variant.name, "parts": parts, "busy_ms": 100.0})
    times(results, plain, 110.0)
    times(results, low, 100.0)
    found = answer(results, ["BF16", "FP8Current"], TOTALS, 1000)
    assert found.recipes[1].fell_back
    assert [each.recipe for each in as_asked(found)] == ["BF16"]
    assert candidate(results, found) is None
    assert [row[5] for row in tables(found)[0].rows] == ["1", "FALLBACK"]
    assert not any("too close" in line for line in sentences(found))


def test_no_interval_is_a_question_mark() -> None:
    unknown = Interval(1.2, 0.0, float("inf"))
    verified = Verified(8, unknown, Interval(0.2, -0.1, 0.5))
    step = RecipeAnswer("FP8Current", unknown, unknown, 1.0, 1.0, None, None, None, None, None, "", verified)
    assert tables(StepAnswer((step,), {}, 8, 8))[-1].rows[0][1:] == ("1.200x [?]", "0.200x [0.000, 0.500]", "+500.00%", "?")
    assert Recommendation(Plan("FP8Current"), unknown, None, certain=False).words == "use FP8Current (1.20x [?])"


@pytest.mark.parametrize(
    ("predicted", "gain", "words"),
    [
        (Interval(1.3, 1.29, 1.31), 1.3, "as expected"),
        (Interval(1.3, 1.29, 1.31), 1.02, "next to nothing of it"),
        (Interval(1.3, 1.29, 1.31), 0.7, "less than this step gains"),  # low precision that does not run would not be slower
        (Interval(0.9, 0.89, 0.91), 0.8, "less than this step gains"),
        (Interval(1.3, 0.0, float("inf")), 0.5, "too little was measured to say"),
    ],
)
def test_an_observed_speedup_in_words(predicted: Interval, gain: float, words: str) -> None:
    step = RecipeAnswer("FP8Current", Interval(1.0, 0.9, 1.1), predicted, 1.0, 1.0, None, None, None, None, None, "")
    (line,) = observed(StepAnswer((step,), {}, 8, 8), gain)
    assert words in line


def test_weights_that_stay_quantized_count_in_peak_memory() -> None:
    """10 GB beyond what both hold; FP8 also keeps 3 GB of quantized weights from one micro-batch to the next."""
    variants = [Variant("BF16", 8), Variant("FP8Current", 8)]
    results = StepResults(variants, layers=8)
    for variant, held in zip(variants, (1e9, 4e9), strict=True):
        results.take({"type": "ready", "task": variant.name, "held_bytes": held, "peak_bytes": held + 10e9})
        times(results, variant, 100.0)
    found = answer(results, ["BF16", "FP8Current"], TOTALS, 1000)
    assert [each.peak_bytes for each in found.recipes] == [10e9 + 8000, 13e9 + 8000]
