"""The waterfall on steps whose times are known."""

from __future__ import annotations

import pytest

from gemmscope.findings import Finding
from gemmscope.recipe.recipes import recipe
from gemmscope.results.step import ProfiledPart
from gemmscope.step.waterfall import (
    PlacedKernel,
    ProfiledStep,
    attention_kernels,
    fallbacks,
    levels_of,
    place,
    unknown_kernels,
    verdict,
)

BF16 = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
FP8, FP8_GRAD = "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT", "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_TNT"
CAST, FLASH = "cast_transpose_optimized_kernel(…)", "void pytorch_flash::flash_fwd_kernel<…cutlass::bfloat16_t>"
ADAM, NORM = "multi_tensor_apply_kernel<…FusedAdam…>", "transformer_engine::normalization::rmsnorm_fwd_tuned_kernel"


def step(gemms: float, casts: float = 0.0, attention: float = 10.0, low: bool = False, grad: str = "") -> list[ProfiledPart]:
    """One layer: half of the GEMMs forward, half backward, in milliseconds."""
    forward, backward = (FP8, grad or FP8_GRAD) if low else (BF16, BF16)

    def linear(name: str) -> list[list[object]]:
        return [[NORM, 500.0, 7], [CAST, casts * 500, 7], [name, gemms * 500, 7]]

    return [
        ("embedding", "forward", [["embedding_kernel", 100.0, 7]]),
        ("qkv", "forward", linear(forward)),
        ("attention", "forward", [[FLASH, attention * 1000, 7]]),
        ("loss", "forward", [["cunn_SoftMaxForward", 1000.0, 7]]),
        ("loss", "backward", []),
        ("attention", "backward", linear(backward)),
        ("qkv", "backward", [["embedding_backward", 100.0, 7]]),
        ("optimizer", "step", [[ADAM, 2000.0, 7]]),
    ]


def total(parts: list[ProfiledPart]) -> float:
    return sum(kernel[1] for _, _, kernels in parts for kernel in kernels) / 1000


def why(slow: list[ProfiledPart], fast: list[ProfiledPart], wall: float | None = None, name: str = "FP8Current") -> Finding:
    """The verdict on a step that takes as long as its kernels, or `wall`."""
    placed = place(fast)
    sides = ProfiledStep(place(slow), total(slow), total(slow)), ProfiledStep(placed, wall or total(fast), total(fast))
    return verdict(levels_of(*(side.parts_ms() for side in sides)), recipe(name), placed)


def test_parts_add_up_to_the_step() -> None:
    slow, fast = step(100), step(50, casts=10, low=True)
    sides = ProfiledStep(place(slow), 120.0, total(slow)), ProfiledStep(place(fast), 80.0, total(fast))
    levels = levels_of(*(side.parts_ms() for side in sides))
    assert sum(level.baseline_ms for level in levels) == pytest.approx(120.0)
    assert sum(level.recipe_ms for level in levels) == pytest.approx(80.0)
    assert levels[0].speedup == pytest.approx(2.0)
    assert levels[-1].speedup == pytest.approx(120 / 80)
    assert [level.part for level in levels][:4] == ["GEMMs", "quantization", "norms and activations", "attention"]
    assert sides[0].parts_ms()["GEMMs"] == pytest.approx(100.0)  # waiting is a part of its own: nothing is stretched to fill it
    assert sides[0].idle_ms == pytest.approx(120.0 - total(slow))


@pytest.mark.parametrize(
    ("fast", "wall", "code", "parts"),
    [
        (step(50, casts=1, attention=1, low=True), None, "step-gemm-bound", None),
        (step(50, casts=40, attention=1, low=True), None, "step-quantization", {"quantization"}),
        (step(96, casts=10, attention=1, low=True), None, "step-quantization", {"quantization"}),  # almost as fast, but slower
        (step(50, casts=40, attention=1000, low=True), None, "step-quantization", {"quantization", "attention"}),
        (step(50, casts=1, attention=60, low=True), None, "step-diluted", {"attention"}),
        (step(110, casts=1, attention=1, low=True), None, "step-gemms-slower", None),
        (step(50, casts=1, attention=1, low=True), 95.0, "step-host-bound", None),
        (step(100, attention=1), None, "step-fallback", None),
        (step(70, attention=1, low=True, grad=BF16), None, "step-fallback", None),
    ],
)
def test_verdicts(fast: list[ProfiledPart], wall: float | None, code: str, parts: set[str] | None) -> None:
    attention = next(kernels[0][1] for part, _, kernels in fast if part == "attention") / 1000
    finding = why(step(100, attention=attention), fast, wall)
    assert finding.code == code
    times = finding.facts.get("parts_ms")
    assert (set(times) if isinstance(times, dict) else None) == parts
    assert finding.text.startswith(("FP8Current", "FALLBACK: FP8Current"))


def test_a_fallback_names_what_ran() -> None:
    facts = why(step(100, attention=1), step(70, attention=1, low=True, grad=BF16)).facts
    assert facts["where"] == ["qkv backward"]
    assert (facts["ran"], facts["requested"]) == ("bf16 x bf16", ["e4m3 x e5m2"])


def test_a_forecast_needs_neither_recipe_nor_kernels() -> None:
    finding = verdict(levels_of({"GEMMs": 80.0, "attention": 20.0}, {"GEMMs": 40.0, "attention": 20.0}))
    assert (finding.code, finding.facts["parts_ms"]) == ("step-diluted", {"attention": 20.0})
    assert finding.text


def test_a_cast_fused_with_an_activation_is_divided_between_the_two() -> None:
    """As compiled layers have them; in BF16 the same kernel casts nothing, and what is of another block stays there."""
    fused = "triton_red_fused_abs_gelu_max_6"
    parts: list[ProfiledPart] = [
        ("mlp", "forward", [[fused, 8000.0, 7], [FP8, 10_000.0, 7]]),
        ("head", "forward", [[fused, 100.0, 7]]),
    ]
    assert [kernel.parts for kernel in place(parts)] == [
        {"quantization": 6000.0, "norms and activations": 2000.0},
        {"GEMMs": 10_000.0},
        {"head and loss": 100.0},
    ]
    assert place(parts, quantizes=False)[0].parts == {"norms and activations": 8000.0}


def test_the_verdict_tells_that_fused_casts_are_an_estimate() -> None:
    cast = "triton_poi_fused__scaled_mm__to_copy_clamp_gelu_mul_7"
    fast: list[ProfiledPart] = [*step(50, attention=1, low=True), ("mlp", "forward", [[cast, 40_000.0, 7]])]
    finding = why(step(100, attention=1), fast, name="FP8Tensorwise")
    assert (finding.code, finding.facts["fused_casts"]) == ("step-quantization", True)
    assert finding.facts["parts_ms"] == {"quantization": pytest.approx(30.0)}


def test_unknown_kernels_are_listed() -> None:
    parts = [*step(10), ("optimizer", "step", [["nobody knows", 10_000.0, 7]])]
    known, names = unknown_kernels(place(parts))
    assert names == ("nobody knows",)
    assert known < 0.9
    assert unknown_kernels(place(step(10))) == (1.0, ())


def test_a_model_without_marks_falls_back_if_all_its_gemms_do() -> None:
    """A Hugging Face model none of whose linears could be converted; the head's GEMM is always in BF16."""
    low, plain = recipe("FP8Tensorwise"), recipe("BF16")
    names = [[BF16, 1000.0, 7], [FLASH, 1000.0, 7]]
    finding = fallbacks(low, place([("model", "forward", names)]))
    assert finding is not None
    assert (finding.facts["where"], finding.facts["requested"]) == (["every GEMM"], ["e4m3 x e4m3"])
    assert fallbacks(low, place([("model", "forward", [*names, [FP8, 1000.0, 7]])])) is None
    assert fallbacks(plain, place([("model", "forward", names)])) is None


def test_a_baseline_has_no_fallbacks() -> None:
    assert fallbacks(recipe("BF16"), place(step(100))) is None


def test_which_attention_ran() -> None:
    """The fused kernels by their names; where there are none, a softmax in the model means the unfused one."""
    names = {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop": 3000.0, "fmha_cutlassF_bf16_aligned_64x128": 1000.0}
    names |= {"triton_red_fused__scaled_dot_product_cudnn_attention_backward_abs_amax": 500.0, "nvjet_tst_128x64": 9000.0}
    fused = [PlacedKernel("model", "forward", name, time) for name, time in names.items()]
    assert attention_kernels(fused) == {"cuDNN": 3.0, "memory-efficient": 1.0}
    softmax = [PlacedKernel("model", "forward", "softmax_warp_forward<BFloat16>", 2000.0)]
    assert attention_kernels(softmax) == {"math (bmm and softmax)": 2.0}
    assert attention_kernels([PlacedKernel("model", "forward", "cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>", 1.0)]) == {}
