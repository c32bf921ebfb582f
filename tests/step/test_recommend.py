"""Which plan wins, how it is written down, what a run costs, and what the findings say of it."""

from __future__ import annotations

import sys
from shlex import split
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemmscope.engine.messages import Profile, Ready, Sampled
from gemmscope.errors import UserError
from gemmscope.interval import Interval
from gemmscope.model.spec import RunSpec
from gemmscope.paste.emit import ready_to_paste
from gemmscope.results.step import StepTime, StepTimes, Variant, Verified
from gemmscope.step.answer import PartialRecipe, candidate, losing_blocks, recommend, step_times
from gemmscope.step.cost import Budget, cost
from gemmscope.step.step_measurements import StepMeasurements
from gemmscope.step.waterfall import observed_findings, step_findings
from gemmscope.toml import parse_toml
from gemmscope.workload.ops import Work
from gemmscope.workload.summary import Totals

BF16, FP8, CAST = "nvjet_sm90_tst_NTN", "nvjet_sm90_qqtst_TNT", "cast_transpose_optimized_kernel"
PLAIN, LOW = Variant("BF16", 8), Variant("FP8Current", 8)
TOTALS = Totals((), 1e12, 1e11, Work(), 1, 1000, 1000, 1000, 1.1e12)


def profile(measurements: StepMeasurements, variant: Variant, **part_ms: float) -> None:
    name = BF16 if variant.recipe == "BF16" else FP8
    parts = [[part.replace("_", " "), "forward", [[name, time * 1000, 7]]] for part, time in part_ms.items()]
    measurements.take(Profile(variant.name, parts, sum(part_ms.values())))


def bursts(measurements: StepMeasurements, variant: Variant, center: float, spread: float = 0.002) -> None:
    for number in range(-2, 3):
        burst = [center * (1 + spread * number)] * 4
        measurements.take(Sampled({variant.name: burst}, {}))


def run(mixed_ms: float) -> tuple[StepMeasurements, list[PartialRecipe]]:
    """FP8 gains in the MLP and loses in the projections."""
    mixed = Variant("FP8Current", 8, ("qkv", "attn out"))
    measurements = StepMeasurements([PLAIN, LOW, mixed], layers=8)
    profile(measurements, PLAIN, qkv=20, attn_out=10, mlp=70)
    profile(measurements, LOW, qkv=22, attn_out=12, mlp=40)
    for variant, center in ((PLAIN, 110.0), (LOW, 84.0), (mixed, mixed_ms)):
        bursts(measurements, variant, center)
    return measurements, [PartialRecipe("BF16"), PartialRecipe("FP8Current"), PartialRecipe("FP8Current", ("qkv", "attn out"))]


def test_blocks_that_lose_are_left_out() -> None:
    measurements, _ = run(80.0)
    assert losing_blocks(measurements, "FP8Current") == ("qkv", "attn out")
    times = step_times(measurements, ["BF16", "FP8Current"], TOTALS, 1000)
    assert candidate(measurements, times) == PartialRecipe("FP8Current", ("qkv", "attn out"))


def test_the_plan_that_was_measured_fastest_wins() -> None:
    best = recommend(*run(80.0))
    assert best is not None
    assert (best.recipe, best.left_out, best.rivals) == ("FP8Current", ("qkv", "attn out"), ())
    assert best.speedup is not None
    assert best.speedup.value == pytest.approx(110 / 80)
    assert "Transformer Engine" in best.ready_to_paste
    slower = recommend(*run(90.0))
    assert slower is not None
    assert (slower.recipe, slower.left_out) == ("FP8Current", ())


def test_too_close_to_call() -> None:
    """Decided by the interval of the ratio of the two plans."""
    best = recommend(*run(83.95))
    assert best is not None
    assert best.rivals == ("FP8Current",)


def test_without_a_baseline_nothing_is_recommended() -> None:
    assert recommend(StepMeasurements([], 1), []) is None


def test_a_slower_recipe_is_not_recommended() -> None:
    measurements = StepMeasurements([PLAIN, LOW], layers=8)
    bursts(measurements, PLAIN, 100.0)
    bursts(measurements, LOW, 110.0)
    best = recommend(measurements, [PartialRecipe("BF16"), PartialRecipe("FP8Current")])
    assert best is not None
    assert (best.recipe, best.speedup, best.rivals, best.ready_to_paste) == ("BF16", None, (), {})


def test_ready_to_paste() -> None:
    texts = ready_to_paste("FP8Block", ("attn out",))
    assert "from transformer_engine.common.recipe import Float8BlockScaling" in texts["Transformer Engine"]
    assert "te.autocast(enabled=False)" in texts["Transformer Engine"]
    assert texts["Megatron-LM"].startswith("--transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe blockwise")
    options, _, file = texts["Megatron-LM"].partition("# mix.yaml")
    assert split(options, comments=True)[-3:] == ["blockwise", "--te-precision-config-file", "mix.yaml"]
    assert 'pattern: "*.self_attention.linear_proj"' in file
    delayed = ready_to_paste("FP8Delayed", ("attn out",))["Megatron-LM"]
    assert split(delayed, comments=True)[-1] == "max"  # what it cannot do is a comment to a shell
    assert "cannot mix FP8Delayed" in delayed
    compile(texts["Transformer Engine"], "plan", "exec")
    titan = ready_to_paste("FP8Rowwise", ("attn out",))["torchtitan"]
    left = parse_toml(titan)["quantize"]["linear"]["float8"]["filter_fqns"]
    assert left == ["output", "lm_head", "router.gate", "attention.wo"]
    assert ready_to_paste("BF16") == {}


def test_cost_carries_the_interval() -> None:
    estimate = cost(Interval(100.0, 98.0, 102.0), RunSpec(1, 1000, tp=2), Budget(8.64e9, gpus=20, price=2.0))
    assert estimate.days.value == pytest.approx(1.0)
    assert estimate.money is not None
    assert (estimate.money.low, estimate.money.high) == (pytest.approx(0.98 * 960), pytest.approx(1.02 * 960))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ((0, 8), "tokens=0 is not a number of tokens"),
        ((1e9, 0), "gpus=0 is invalid"),
        ((1e9, 8, -1.0), "price=-1 is not a price"),
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
    exec(ready_to_paste("FP8Tensorwise", left_out)["torchao"], {"model": model})
    assert (converted["config"], model.layers) == ("tensorwise", ["compiled a", "compiled b"])
    linear, odd = SimpleNamespace(in_features=64, out_features=32), SimpleNamespace(in_features=64, out_features=1)
    fits = converted["module_filter_fn"]
    layers = {"attention.wo", "self_attn.o_proj", "self_attn.q_proj", "attention.wq", "feed_forward.w1", "mlp.gate_proj"}
    assert {name for name in layers if not fits(linear, f"layers.0.{name}")} == spared
    assert not any(fits(linear, name) for name in ("output", "lm_head", "layers.0.moe.router.gate", "model.layers.0.mlp.gate"))
    assert not fits(odd, "layers.0.attention.wo")


def test_a_fallback_is_never_recommended() -> None:
    """Its GEMMs ran in BF16, so its step time is not that of the recipe."""
    measurements = StepMeasurements([PLAIN, LOW], layers=8)
    for variant in (PLAIN, LOW):
        parts = [["mlp", "forward", [[BF16, 9e4, 7]]], ["optimizer", "step", [["multi_tensor_apply_kernel", 1e4, 7]]]]
        measurements.take(Profile(variant.name, parts, 100.0))
    bursts(measurements, PLAIN, 110.0)
    bursts(measurements, LOW, 100.0)
    times = step_times(measurements, ["BF16", "FP8Current"], TOTALS, 1000)
    assert times.recipes[1].fell_back
    assert times.recipes[1].speedup is None
    assert times.speedups == ()
    assert times.winner is not None
    assert times.winner.best == "BF16"
    assert candidate(measurements, times) is None
    assert [finding.code for finding in step_findings(times)] == ["step-fallback"]
    assert [finding.code for finding in observed_findings(times, 1.1)] == ["observed-fallback"]


def step(speedup: Interval, **values: Any) -> StepTimes:
    """One recipe whose speedup is known."""
    low = StepTime(recipe="FP8Current", step_ms=Interval(1.0), speedup=speedup, tokens_per_s=1.0, model_tflops=1.0, **values)
    return StepTimes(origin="measured", recipes=(low,))


def test_without_an_interval_nothing_is_said_of_agreement() -> None:
    assert Verified(depth=8, predicted=Interval(1.2), actual=Interval(0.2, -0.1, 0.5)).agrees is None
    assert Verified(depth=8, predicted=Interval(1.2, 1.1, 1.3), actual=Interval(1.2, 1.1, 1.3)).agrees is True


@pytest.mark.parametrize(
    ("predicted", "observed", "code"),
    [
        (Interval(1.3, 1.29, 1.31), 1.3, "observed-as-expected"),
        (Interval(1.3, 1.29, 1.31), 1.5, "observed-more"),
        (Interval(1.3, 1.29, 1.31), 1.02, "observed-no-gain"),
        (Interval(1.3, 1.29, 1.31), 0.7, "observed-less"),  # low precision that falls back to BF16 would not be slower
        (Interval(0.9, 0.89, 0.91), 0.8, "observed-less"),
        (Interval(1.3), 0.5, "observed-unknown"),
    ],
)
def test_an_observed_speedup(predicted: Interval, observed: float, code: str) -> None:
    (finding,) = observed_findings(step(predicted), observed)
    assert (finding.code, finding.facts["predicted"]) == (code, predicted)
    assert finding.text.startswith(f"You observed {observed:g}x")


@pytest.mark.parametrize(
    ("speedup", "codes"),
    [(Interval(1.0, 0.98, 1.02), ["too-close-to-call"]), (Interval(1.0), []), (Interval(1.1, 1.08, 1.12), [])],
)
def test_too_close_to_call_needs_an_interval(speedup: Interval, codes: list[str]) -> None:
    assert [finding.code for finding in step_findings(step(speedup))] == codes


def test_what_is_host_bound_or_missing_is_said() -> None:
    times = step(
        Interval(1.1, 1.08, 1.12),
        launch_ms=Interval(5.0),
        gpu_ms=Interval(4.0),
        named_share=0.9,
        unknown_kernels=("void odd(int)",),
    )
    times = times.model_copy(update={"failures": {"FP8Block": "out of memory"}})
    findings = {finding.code: finding.facts for finding in step_findings(times)}
    assert set(findings) == {"step-launch-bound", "unknown-kernels", "step-not-measured"}
    assert findings["unknown-kernels"]["kernels"] == ["void odd(int)"]
    assert findings["step-not-measured"] == {"recipe": "FP8Block", "reason": "out of memory"}


def test_weights_that_stay_quantized_count_in_peak_memory() -> None:
    """10 GB beyond what both hold; FP8 also keeps 3 GB of quantized weights from one micro-batch to the next."""
    measurements = StepMeasurements([PLAIN, LOW], layers=8)
    for variant, weights in ((PLAIN, 1e9), (LOW, 4e9)):
        measurements.take(Ready(variant.name, {"held_bytes": weights, "peak_bytes": weights + 10e9}))
        bursts(measurements, variant, 100.0)
    times = step_times(measurements, ["BF16", "FP8Current"], TOTALS, 1000)
    assert [time.peak_bytes for time in times.recipes] == [10e9 + 8000, 13e9 + 8000]
