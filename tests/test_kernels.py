"""Kernel names and attribution, on kernels recorded on an H200 (Transformer Engine 2.20.2, torchao 0.18, PyTorch 2.11)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gemmscope.measure.attribution import AttributionError, attribute
from gemmscope.measure.kernels import KernelRun, classify, evidence
from gemmscope.recipe.recipes import recipe
from gemmscope.workload.ops import PASSES

RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "data" / "h200_linear_kernels.json.gz").read_bytes()))["runs"]
RECIPES = ("BF16", "FP8Current", "FP8Delayed", "FP8Block")


def recorded(name: str) -> list[KernelRun]:
    return [KernelRun(*kernel) for kernel in RECORDED[name]]


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_kernel_has_a_class(name: str) -> None:
    """At least 98% of the time is in a named class; what is not is delayed scaling's bookkeeping."""
    runs = recorded(name)
    unknown = [run for run in runs if classify(run.name).kernel_class == "other"]
    assert all("CatArrayBatchedCopy" in run.name for run in unknown)
    assert sum(run.duration_us for run in unknown) < 0.02 * sum(run.duration_us for run in runs)


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
        assert evidence(recipe(recipe_name), pass_name, parts.kernels[pass_name]).verdict == "as asked"


def test_the_larger_tensor_costs_more_to_quantize() -> None:
    """QKV: X is 15872x4096, W 4096x12288, dY 15872x12288."""
    found = attribute(recorded("QKV FP8Current")).quantize_us
    assert found["dY"] > found["X"] > found["W"]


def test_bf16_where_fp8_was_asked_for_is_a_fallback() -> None:
    parts = attribute(recorded("QKV BF16"))
    proof = evidence(recipe("FP8Current"), "dgrad", parts.kernels["dgrad"])
    assert proof.verdict == "fallback"
    assert proof.words == "ran bf16 x bf16, asked for e4m3 x e5m2"


def test_another_scaling_is_told_apart() -> None:
    parts = attribute(recorded("QKV FP8Block"))
    assert evidence(recipe("MXFP8"), "fprop", parts.kernels["fprop"]).verdict == "emulated"
    assert evidence(recipe("FP8Block"), "fprop", ["cutlass::device_kernel<a template that says nothing>"]).verdict == "unproven"
    assert evidence(recipe("FP8Block"), "fprop", []).verdict == "unproven"


@pytest.mark.parametrize("recipe_name", ["BF16", "FP8Current", "FP8Block"])
def test_experts(recipe_name: str) -> None:
    """Eight experts run eight products a pass, on several streams."""
    parts = attribute(recorded(f"grouped {recipe_name}"), products_per_pass=8)
    assert all(len(parts.kernels[pass_name]) == 8 for pass_name in PASSES)


def test_what_is_no_linear_is_refused() -> None:
    runs = recorded("QKV BF16")
    with pytest.raises(AttributionError, match="2 products"):
        attribute(runs[:-1])
    with pytest.raises(AttributionError, match="more than 3"):
        attribute(runs + runs)


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
        ("void at::native::vectorized_elementwise_kernel", "other", None, None),
    ],
)
def test_names_from_other_chips(name: str, kernel_class: str, operands: object, scales: object) -> None:
    facts = classify(name)
    assert (facts.kernel_class, facts.operands, facts.scales) == (kernel_class, operands, scales)
