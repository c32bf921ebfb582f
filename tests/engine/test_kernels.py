"""Kernel names and attribution, on kernels recorded on an H200 (Transformer Engine 2.20.2, torchao 0.18, PyTorch 2.11)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gemmscope.bench.attribution import AttributionError, attribute
from gemmscope.bench.linears import evidence, op_time
from gemmscope.bench.measurements import Measurements
from gemmscope.engine.kernels import KernelRun, classify
from gemmscope.engine.messages import Hello, Kernels, Sampled
from gemmscope.recipe.recipes import recipe
from gemmscope.results.linears import OpTime
from gemmscope.workload.cases import Case, Task
from gemmscope.workload.ops import PASSES

RECORDED = json.loads(gzip.decompress((Path(__file__).parent.parent / "data" / "h200_linear_kernels.json.gz").read_bytes()))[
    "runs"
]
RECIPES = ("BF16", "FP8Current", "FP8Delayed", "FP8Block")
TORCHAO = {"FP8Tensorwise": "tensorwise", "FP8Rowwise": "rowwise", "FP8RowwiseGWHP": "rowwise_with_gw_hp"}
WGRAD_FIRST = ("fprop", "wgrad", "dgrad")


def recorded(name: str) -> list[KernelRun]:
    return [KernelRun(*kernel) for kernel in RECORDED[name]]


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_kernel_has_a_class(name: str) -> None:
    """At least 98% of the time is in a named class; what is not is delayed scaling's bookkeeping."""
    runs = recorded(name)
    assert not [run.name for run in runs if classify(run.name).kernel_class == "other"]


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("label", ["QKV {}", "QKV {} graph", "small {}", "small {} graph"])
def test_parts_sum_to_the_whole(label: str, recipe_name: str) -> None:
    runs = recorded(label.format(recipe_name))
    parts = attribute(runs)
    whole = sum(run.duration_us for run in runs)
    assert parts.total_us == pytest.approx(whole)
    assert sum(parts.charged_us().values()) == pytest.approx(whole)
    quantizes = recipe(recipe_name).quantizes
    assert all((time > 0) == quantizes for time in parts.quantize_us.values())
    for pass_name in PASSES:
        assert evidence(recipe(recipe_name), pass_name, parts.kernels[pass_name]).verdict == "as requested"


def test_the_larger_tensor_costs_more_to_quantize() -> None:
    """QKV: X is 15872x4096, W 4096x12288, dY 15872x12288."""
    quantize_us = attribute(recorded("QKV FP8Current")).quantize_us
    assert quantize_us["dY"] > quantize_us["X"] > quantize_us["W"]


def test_bf16_where_fp8_was_asked_for_is_a_fallback() -> None:
    parts = attribute(recorded("QKV BF16"))
    proof = evidence(recipe("FP8Current"), "dgrad", parts.kernels["dgrad"])
    assert proof.verdict == "fallback"
    assert (proof.ran, proof.requested) == ("bf16 x bf16", "e4m3 x e5m2, scales: tensor")


def test_another_scaling_is_told_apart() -> None:
    parts = attribute(recorded("QKV FP8Block"))
    assert evidence(recipe("MXFP8"), "fprop", parts.kernels["fprop"]).verdict == "emulated"
    assert evidence(recipe("FP8Block"), "fprop", ["cutlass::device_kernel<a template that says nothing>"]).verdict == "unproven"
    assert evidence(recipe("FP8Block"), "fprop", []).verdict == "unproven"


@pytest.mark.parametrize("recipe_name", TORCHAO)
def test_torchao(recipe_name: str) -> None:
    """Casts are charged to the product that they precede, and every product is what the recipe asks for."""
    runs = recorded(f"torchao {TORCHAO[recipe_name]}")
    asked = recipe(recipe_name)
    habits = asked.settings["torchao"]
    parts = attribute(runs, passes=habits.get("order", PASSES), casts=habits["casts"])
    whole = sum(run.duration_us for run in runs)
    assert parts.total_us == pytest.approx(whole)
    assert sum(parts.charged_us().values()) == pytest.approx(whole)
    assert parts.quantize_us["for fprop"] > 0
    assert parts.other_us == 0
    for pass_name in PASSES:
        assert evidence(asked, pass_name, parts.kernels[pass_name]).verdict == "as requested"


def test_scaling_the_output_belongs_to_the_product_before() -> None:
    """With rowwise scales, torchao runs the second and the last GEMM with unit scales and scales their outputs afterwards."""
    parts = attribute(recorded("torchao rowwise"), passes=WGRAD_FIRST, casts="per GEMM")
    for_wgrad, for_dgrad = parts.kernels["for wgrad"], parts.kernels["for dgrad"]
    assert for_wgrad[-1] == "triton_poi_fused__to_copy_clamp_exp2_floor_log2_mul_reciprocal_t_5"
    assert for_dgrad[-1] == "triton_poi_fused__to_copy_clamp_exp2_floor_log2_mul_reciprocal_t_7"
    assert all("_scaled_mm" in name for name in for_dgrad[:-1])
    proof = evidence(recipe("FP8Rowwise"), "wgrad", parts.kernels["wgrad"])
    assert proof.ran == "e4m3 x e4m3, scales: row, applied outside of the GEMM"


def test_scales_outside_of_the_product_are_accepted_only_where_they_are_applied() -> None:
    per_tensor, per_block = "nvjet_sm90_qqtst_128x160_TNT", "nvjet_sm90_qqtst_128x128_Avec128_Bvec128_TNT"
    assert evidence(recipe("FP8Rowwise"), "fprop", [per_tensor]).verdict == "emulated"
    assert evidence(recipe("FP8Rowwise"), "dgrad", [per_block]).verdict == "emulated"
    assert evidence(recipe("FP8Block"), "dgrad", [per_tensor]).verdict == "emulated"
    proof = evidence(recipe("FP8RowwiseGWHP"), "wgrad", [per_tensor])
    assert (proof.verdict, proof.requested) == ("fallback", "bf16 x bf16")


def test_bf16_where_rows_were_asked_for_is_a_fallback() -> None:
    for pass_name, name in zip(PASSES, recorded("QKV BF16")[1::2], strict=True):
        assert evidence(recipe("FP8Rowwise"), pass_name, [name.name]).verdict == "fallback"


def test_the_forward_pass_alone_is_charged_with_all_that_it_quantizes() -> None:
    runs = recorded("QKV FP8Current")
    forward = runs[: 1 + next(index for index, run in enumerate(runs) if "nvjet" in run.name)]
    parts = attribute(forward, passes=("fprop",))
    assert list(parts.quantize_us) == ["X", "W"]
    assert parts.charged_us() == {"fprop": pytest.approx(sum(run.duration_us for run in forward))}


def test_a_cached_weight_is_not_quantized() -> None:
    """Without the four kernels of W's quantization, which follow the four of X's."""
    runs = recorded("QKV FP8Current")
    parts = attribute(runs[:4] + runs[8:], weight_cached=True)
    assert parts.quantize_us["W"] == 0
    assert parts.quantize_us["X"] == pytest.approx(attribute(runs).quantize_us["X"])


@pytest.mark.parametrize("recipe_name", ["BF16", "FP8Current", "FP8Delayed", "FP8Block"])
def test_experts(recipe_name: str) -> None:
    """Eight experts run eight products a pass, on several streams; each has a weight, and tokens of X and dY."""
    runs = recorded(f"grouped {recipe_name}")
    parts = attribute(runs, rows=(512,) * 8)
    assert all(len(parts.kernels[pass_name]) == 8 for pass_name in PASSES)
    assert parts.total_us == pytest.approx(sum(run.duration_us for run in runs))
    if recipe(recipe_name).quantizes:
        casts = {tensor: sum(classify(name).ends_tensor for name in parts.kernels[tensor]) for tensor in ("X", "W", "dY")}
        assert casts["W"] == 8
        assert casts["X"] == casts["dY"]  # delayed scaling casts all experts' tokens in one kernel


def test_experts_without_tokens_run_no_product() -> None:
    assert attribute(recorded("grouped BF16"), rows=(512, 0, *(512,) * 7)).gemm_us["fprop"] > 0


def test_what_is_no_linear_is_refused() -> None:
    runs = recorded("QKV BF16")
    with pytest.raises(AttributionError, match="2 GEMMs instead of 3"):
        attribute(runs[:-1])
    with pytest.raises(AttributionError, match="6 GEMMs instead of 3"):
        attribute(runs + runs)


def measured(name: str, kernels: str, versions: dict[str, str], **facts: object) -> Measurements:
    """Measurements of one linear in one recipe, as the worker's messages would have made them."""
    task = Task(Case("QKV Proj", 15872, 4096, 12288), name, "autocast")
    results = Measurements([task])
    results.take(Hello(versions))
    results.take(Kernels(task.key, RECORDED[kernels]))
    results.tasks[task.key].facts = {"host_ms": 0.1, "copies": 1, **facts}
    results.take(Sampled({task.key: [5.0]}, {}))
    return results


def cell(results: Measurements, name: str) -> OpTime:
    time = op_time(results, results.cases()[0], name, "autocast")
    assert time is not None
    return time


def test_a_breakdown_knows_how_the_framework_casts() -> None:
    op = cell(measured("FP8Rowwise", "torchao rowwise", {"torch": "2.11", "torchao": "0.18"}), "FP8Rowwise")
    assert set(op.quantize_ms) == {"for fprop", "for dgrad", "for wgrad"}
    assert sum(time.value for time in op.pass_ms.values()) == pytest.approx(5.0)
    assert sum(op.gemm_ms.values()) == pytest.approx(5.0 - op.quantization_ms)
    assert op.counts
    current = cell(measured("FP8Current", "QKV FP8Current", {"torch": "2.11", "transformer_engine": "2.20"}), "FP8Current")
    assert set(current.quantize_ms) == {"X", "W", "dY"}


def test_the_order_that_a_run_found_comes_first() -> None:
    versions = {"torch": "2.11", "torchao": "0.18"}
    as_recorded = cell(measured("FP8Rowwise", "torchao rowwise", versions), "FP8Rowwise")
    as_found = cell(measured("FP8Rowwise", "torchao rowwise", versions, order=list(PASSES)), "FP8Rowwise")
    assert as_recorded.pass_ms["dgrad"].value == pytest.approx(as_found.pass_ms["wgrad"].value)


def test_a_layer_left_in_bf16_on_purpose_is_no_alarm_and_no_speedup() -> None:
    versions = {"torch": "2.11", "torchao": "0.18"}
    silent = cell(measured("FP8Rowwise", "QKV BF16", versions), "FP8Rowwise")
    assert silent.fallbacks
    assert not silent.counts
    said = cell(measured("FP8Rowwise", "QKV BF16", versions, note="torchao's filter leaves this layer in BF16"), "FP8Rowwise")
    assert not said.fallbacks
    assert not said.counts


def test_what_cannot_be_split_says_why() -> None:
    op = cell(measured("FP8Rowwise", "Up pre BF16 fprop", {"torchao": "0.18"}), "FP8Rowwise")
    assert op.not_split == "1 GEMMs instead of 3"
    assert not op.pass_ms


@pytest.mark.parametrize(
    ("name", "kernel_class", "operands", "scales"),
    [
        ("nvjet_sm100_ootst_256x128_Avec16UE4M3_Bvec16UE4M3_TNT", "gemm", ("e2m1", "e2m1"), "block16"),
        ("nvjet_sm100_qqtst_128x256_Avec32UE8M0_Bvec32UE8M0_NTN", "gemm", ("e4m3", "e4m3"), "block32"),
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", "gemm", ("e4m3", "e4m3"), "row"),
        ("void row_col_rht_gemm_device<…>", "quantize", None, None),
        ("kernel_cutlass_quantize_…", "quantize", None, None),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm", None, None),
        ("cutlass3x_sm100_bstensorop_s256x192_ue4m3xf4_…", "gemm", ("e2m1", "e2m1"), "block16"),
        ("void at::native::vectorized_elementwise_kernel", "elementwise", None, None),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<…cutlass::bfloat16_t…>", "attention", None, None),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<…FusedAdamMathFunctor…>", "optimizer", None, None),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<…>", "norm", None, None),
        ("void transformer_engine::unary_kernel<8, float, …gelu…>", "activation", None, None),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<…>", "loss", None, None),
        ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel<…>", "embedding", None, None),
        ("a kernel that nobody knows", "other", None, None),
        ("triton_tem_fused__scaled_mm_0", "gemm", None, None),
        ("to_mxfp8_dim0_kernel", "quantize", None, None),
        ("_hadamard_quantize_row_col_kernel", "quantize", None, None),
        ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, cutlass::bfloat16_t>", "memory", None, None),
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
            "cutlass::gemm::GroupProblemShape<cute::tuple<int>>, cutlass::bfloat16_t>>>",
            "gemm",
            ("bf16", "bf16"),
            "none",
        ),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t, cutlass::bfloat16_t>>",
            "gemm",
            ("e4m3", "e4m3"),
            None,
        ),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::float_e4m3_t, "
            "cutlass::epilogue::fusion::Sm90ColBroadcast<0, float>, cutlass::bfloat16_t>>",
            "gemm",
            ("e4m3", "e4m3"),
            "row",
        ),
    ],
)
def test_names_from_other_chips(name: str, kernel_class: str, operands: object, scales: object) -> None:
    facts = classify(name)
    assert (facts.kernel_class, facts.operands, facts.scales) == (kernel_class, operands, scales)
