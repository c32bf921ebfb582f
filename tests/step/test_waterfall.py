"""The waterfall on steps whose times are known."""

from __future__ import annotations

import pytest

from gemmscope.recipe.recipes import recipe
from gemmscope.report.page.from_step import step_bars
from gemmscope.step.results import Part
from gemmscope.step.waterfall import Side, fallbacks, place, verdict, waterfall
from gemmscope.store.benchfile import IntervalRecord
from gemmscope.store.stepfile import LevelRecord

BF16 = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
FP8, FP8_GRAD = "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT", "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_TNT"
CAST, FLASH = "cast_transpose_optimized_kernel(…)", "void pytorch_flash::flash_fwd_kernel<…cutlass::bfloat16_t>"
ADAM, NORM = "multi_tensor_apply_kernel<…FusedAdam…>", "transformer_engine::normalization::rmsnorm_fwd_tuned_kernel"


def step(products: float, casts: float = 0.0, attention: float = 10.0, low: bool = False, grad: str = "") -> list[Part]:
    """One layer: half of the products forward, half backward, in milliseconds."""
    forward, backward = (FP8, grad or FP8_GRAD) if low else (BF16, BF16)

    def linear(name: str) -> list[list[object]]:
        return [[NORM, 500.0, 7], [CAST, casts * 500, 7], [name, products * 500, 7]]

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


def total(parts: list[Part]) -> float:
    return sum(kernel[1] for _, _, kernels in parts for kernel in kernels) / 1000


def test_rows_add_up_to_the_step() -> None:
    slow, fast = place(step(100)), place(step(50, casts=10, low=True))
    found = waterfall(Side(slow, 120.0), Side(fast, 80.0))
    assert sum(level.slow_ms for level in found.levels) == pytest.approx(120.0)
    assert sum(level.fast_ms for level in found.levels) == pytest.approx(80.0)
    assert found.products == pytest.approx(2.0)
    assert found.step == pytest.approx(120 / 80)
    assert [level.row for level in found.levels][:4] == ["products", "quantization", "norms and activations", "attention"]
    assert found.named == 1.0


@pytest.mark.parametrize(
    ("fast", "wall", "words"),
    [
        (step(50, casts=1, attention=1, low=True), None, "GEMM-bound, as expected"),
        (step(50, casts=40, attention=1, low=True), None, "eaten by quantization"),
        (step(96, casts=10, attention=1, low=True), None, "eaten by quantization"),  # near what products gain, but a loss
        (step(50, casts=40, attention=1000, low=True), None, "of each step; attention takes 1000.0 ms in any precision"),
        (step(50, casts=1, attention=60, low=True), None, "diluted by attention"),
        (step(50, casts=1, attention=1, low=True), 95.0, "host-bound: the GPU waits"),
        (step(100, attention=1), None, "not running in low precision: qkv forward: ran bf16 x bf16"),
        (step(70, attention=1, low=True, grad=BF16), None, "not running in low precision: qkv backward"),
    ],
)
def test_verdicts(fast: list[Part], wall: float | None, words: str) -> None:
    attention = next(kernels[0][1] for part, _, kernels in fast if part == "attention") / 1000
    slow = step(100, attention=attention)
    placed = place(fast)
    found = waterfall(Side(place(slow), total(slow)), Side(placed, wall or total(fast)))
    assert words in verdict(found, recipe("FP8Current"), placed)


def test_a_cast_fused_with_an_activation_is_divided_between_the_two() -> None:
    """As compiled layers have them; in BF16 the same kernel casts nothing, and what is of another part stays there."""
    fused = "triton_red_fused_abs_gelu_max_6"
    parts: list[Part] = [("mlp", "forward", [[fused, 8000.0, 7], [FP8, 10_000.0, 7]]), ("head", "forward", [[fused, 100.0, 7]])]
    kernels = place(parts)
    assert [kernel.rows for kernel in kernels] == [
        {"quantization": 6000.0, "norms and activations": 2000.0},
        {"products": 10_000.0},
        {"head and loss": 100.0},
    ]
    assert [kernel.rides for kernel in kernels] == [True, False, False]
    assert place(parts, quantizes=False)[0].rows == {"norms and activations": 8000.0}


def test_words_tell_how_fused_casts_were_counted() -> None:
    slow, cast = step(100, attention=1), "triton_poi_fused__scaled_mm__to_copy_clamp_gelu_mul_7"
    fast: list[Part] = [*step(50, attention=1, low=True), ("mlp", "forward", [[cast, 40_000.0, 7]])]
    placed = place(fast)
    words = verdict(waterfall(Side(place(slow), total(slow)), Side(placed, total(fast))), recipe("FP8Tensorwise"), placed)
    assert words == (
        "eaten by quantization, which takes 30.0 ms of each step (casts fused with norms or activations are counted by 75%)"
    )


def test_shares_are_those_of_the_layers_that_were_run() -> None:
    """A quarter of the layers was: its rows are no quarter of themselves."""
    levels = [
        LevelRecord(row="products", baseline_ms=80.0, recipe_ms=50.0, speedup=1.6),
        LevelRecord(row="attention", baseline_ms=20.0, recipe_ms=50.0, speedup=1.0),
    ]
    (bars,) = step_bars([("FP8Current", levels, IntervalRecord(value=400.0, low=399.0, high=401.0), None)], {})
    assert [("share", "50.0%") in segment.facts for segment in bars.bars[0].segments] == [True, True]


def test_unknown_kernels_are_listed() -> None:
    parts = [*step(10), ("optimizer", "step", [["nobody knows", 10_000.0, 7]])]
    found = waterfall(Side(place(parts), 60.0), Side(place(parts), 60.0))
    assert found.unknown == ("nobody knows",)
    assert found.named < 0.9


def test_a_model_without_parts_falls_back_if_all_its_products_do() -> None:
    """A Hugging Face model whose linears are none that could be converted; the head's product is always in BF16."""
    low, plain = recipe("FP8Tensorwise"), recipe("BF16")
    names = [[BF16, 1000.0, 7], [FLASH, 1000.0, 7]]
    assert fallbacks(low, place([("model", "forward", names)])) == "every product: ran bf16 x bf16, asked for e4m3 x e4m3"
    assert fallbacks(low, place([("model", "forward", [*names, [FP8, 1000.0, 7]])])) == ""
    assert fallbacks(plain, place([("model", "forward", names)])) == ""


def test_a_baseline_has_no_fallbacks() -> None:
    assert fallbacks(recipe("BF16"), place(step(100))) == ""
