"""Known facts about traces of other projects: steps, communication, inference, the CPU. Skipped without these traces."""

from __future__ import annotations

from functools import cache

import pytest

from gemmscope.explain.attention_speed import attention_rows
from gemmscope.explain.diagnose import TraceDiagnosis, diagnose
from gemmscope.explain.gemm_speed import gemm_shapes
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.explain.trace_tables import idle_frames
from gemmscope.explain.trace_view import UNRECORDED
from support.traces import fact, shared_trace


@cache
def diagnosis(name: str) -> TraceDiagnosis:
    return diagnose(read_trace(shared_trace(f"{name}.json.gz")))


OVERLAP = {"dlrm_v100": 69.82, "resnet_ddp_a100": 15.61, "dlrm_sampled_rank0": 14.95, "dlrm_sampled_rank1": 19.93}


@pytest.mark.parametrize("name", OVERLAP)
def test_overlap_of_communication_and_computation(name: str) -> None:
    assert 100 * (diagnosis(name).account.hidden_share or 0) == pytest.approx(OVERLAP[name], abs=0.1)


STEP_MS = {
    "qwen_h100": 34.9,  # span of the kernels launched in the marked step
    "resnet_2080ti": 333,  # mean, optimizer to optimizer, without the first
    "resnet_ddp_a100": 222.4,  # mark to mark
    "resnet_checkpoint_ddp_mi300x": 18.84,  # span on the GPU
}


@pytest.mark.parametrize("name", STEP_MS)
def test_step_time(name: str) -> None:
    assert diagnosis(name).account.step_ms == pytest.approx(STEP_MS[name], rel=0.005)


def test_work_before_the_recording() -> None:
    qwen = diagnosis("qwen_h100")
    assert qwen.account.busy_ms == pytest.approx(31.91, rel=0.005)
    assert sum(row.count for row in qwen.account.gemms) == 169
    assert fact(qwen.findings, "work-before-recording", "count") > 500


def test_stalls_of_the_data_loader() -> None:
    resnet = diagnosis("resnet_2080ti")
    assert resnet.causes[0].code == "loader"
    assert len(resnet.each_step) == 30
    assert [step.averaged for step in resnet.each_step] == [False] + [True] * 29
    assert sum(step.slow and step.extra == "data loading" for step in resnet.each_step[1:]) == 14
    assert fact(resnet.causes[0].evidence, "cause-host-calls", "long") == 14
    assert fact(resnet.findings, "steps-in-two-groups", "slow") == 14


def test_allocation_storms() -> None:
    storm = diagnosis("resnet18_mi300x_hipfree")
    assert [cause.code for cause in storm.causes] == ["allocator"]
    assert fact(storm.causes[0].evidence, "cause-host-calls", "name") == "hipFree"
    assert fact(storm.causes[0].evidence, "cause-host-calls", "total_ms") == pytest.approx(3346, rel=0.01)
    assert fact(storm.findings, "steps-in-two-groups", "fast_ms") == pytest.approx(117, rel=0.005)
    assert fact(storm.findings, "steps-in-two-groups", "slow_ms") == pytest.approx(1053, rel=0.005)


def test_recomputed_convolutions() -> None:
    cause = next(cause for cause in diagnosis("resnet_checkpoint_ddp_mi300x").causes if cause.code == "recompute")
    assert cause.cost_ms == pytest.approx(1.37, rel=0.01)


@pytest.mark.parametrize(
    "name", ["qwen_h100", "timesformer_h100", "bert_small_h100", "sglang_decode_mi300x", "vllm_moe_mxfp4_b200"]
)
def test_inference(name: str) -> None:
    assert not diagnosis(name).trace.phase.judged
    assert not diagnosis(name).causes
    assert diagnosis(name).verdict.code in ("step-not-judged", "step-not-recorded")
    assert "optimizer" not in diagnosis(name).account.classes_ms


@pytest.mark.parametrize(
    "name", ["resnet_2080ti", "dlrm_v100", "resnet_ddp_a100", "resnet18_mi300x_hipfree", "dlrm_sampled_rank0"]
)
def test_training(name: str) -> None:
    assert diagnosis(name).trace.phase.trains


def test_a_decode_step_whose_begin_was_not_recorded() -> None:
    decode = diagnosis("sglang_decode_mi300x")
    assert decode.account.busy_ms == pytest.approx(9.77, rel=0.005)
    assert decode.account.classes_ms[UNRECORDED] == pytest.approx(463.3, rel=0.005)
    assert decode.account.idle_share < 0.01


FIRST_CAUSES = {
    "resnet_2080ti": "loader",
    "resnet18_mi300x_hipfree": "allocator",
    "resnet_fp32_v100": "full-precision",
    "dlrm_v100": "full-precision",
    "resnet_ddp_a100": "host",
    "resnet_checkpoint_ddp_mi300x": "communication",
    "hf_qwen3_bf16_h200": "not-low",
    "hf_qwen3_fp8_h200": "host",
}


@pytest.mark.parametrize("name", FIRST_CAUSES)
def test_first_cause_of_training(name: str) -> None:
    assert diagnosis(name).causes[0].code == FIRST_CAUSES[name]
    assert diagnosis(name).account.named_share > 0.98
    assert all(cause.speedup_without > 1 for cause in diagnosis(name).causes)


PHASES = {
    "vllm_moe_mxfp4_b200": "inference server",
    "sglang_decode_mi300x": "inference server",
    "sglang_prefill_mi300x": "inference server",
    "sglang_qwen3_moe_decode_b300": "inference server",
    "vllm_graph_capture_mi300x": "capture of GPU graphs",
    "flux_mi300x": "image or video generation",
    "qwen_mi300x": "forward pass without gradients",
    "timesformer_mi300x": "forward pass without gradients",
    "gemm_misaligned_mi300x": "forward pass without gradients",
    "bert_small_h100": "forward pass without gradients",
}


@pytest.mark.parametrize("name", PHASES)
def test_what_is_not_training_gets_facts_only(name: str) -> None:
    assert diagnosis(name).trace.phase.name == PHASES[name]
    assert not diagnosis(name).causes


def test_low_precision_of_a_mixture_of_experts() -> None:
    account = diagnosis("vllm_moe_mxfp4_b200").account
    assert account.classes_ms["GEMM FP4"] / account.busy_ms == pytest.approx(0.45, abs=0.01)


def test_the_gpu_finishes_work_from_before_the_recording() -> None:
    prefill = diagnosis("sglang_prefill_mi300x").account
    assert prefill.classes_ms[UNRECORDED] == pytest.approx(493, rel=0.005)
    assert prefill.idle_ms["late launch"] < 1.5


def test_attention_replayed_from_a_graph_has_no_shape_of_another_module() -> None:
    rows = {row.kernel: row for row, _ in attention_rows(diagnosis("flux_mi300x").evidence)}
    assert rows["aiter::fmha_fwd_hd128_bf16_rtz"].queries is None
    assert rows["aiter::fmha_fwd_hd128_bf16_rtz"].tflops is None


def test_no_attention_above_the_peak_and_norms_of_single_operators() -> None:
    qwen = diagnosis("qwen_mi300x")
    assert all((row.tflops or 0) < 1307 for row, _ in attention_rows(qwen.evidence))
    unfused = qwen.account.classes_ms["norms"] + qwen.account.classes_ms["elementwise"]
    assert qwen.account.classes_ms["norms"] > 4
    assert unfused / qwen.account.step_ms == pytest.approx(0.40, abs=0.01)
    assert unfused > qwen.account.classes_ms["GEMM BF16"]


@pytest.mark.parametrize("name", ["timesformer_h100", "timesformer_mi300x"])
def test_attention_has_one_time(name: str) -> None:
    account, rows = diagnosis(name).account, attention_rows(diagnosis(name).evidence)
    assert sum(row.time_ms for row, _ in rows) == pytest.approx(account.parts_ms["attention"], rel=0.001)
    assert {row.backend for row, _ in rows} == {"math (bmm and softmax)"}


def test_what_the_cpu_did_is_named() -> None:
    frames = idle_frames(diagnosis("timesformer_mi300x").evidence)
    assert "preprocess" in frames[0].frame
    assert frames[0].time_ms == pytest.approx(269, rel=0.01)


def test_kernels_of_one_graph_launch() -> None:
    findings = diagnosis("sglang_qwen3_moe_decode_b300").findings
    assert fact(findings, "graph-launches", "share") == pytest.approx(0.94, abs=0.05)
    assert "shapes-inside-graphs" in {finding.code for finding in findings}


def test_a_misaligned_gemm_without_correlations() -> None:
    gemm = diagnosis("gemm_misaligned_mi300x")
    assert all(work.call is not None for work in gemm.trace.work)
    (row,) = gemm_shapes(gemm.evidence)
    assert (row.m, row.n, row.k, row.count, row.alignment_bytes) == (4097, 4097, 4097, 10, 2)


def test_the_tensor_cores_of_a_v100_stand_idle() -> None:
    cause = diagnosis("resnet_fp32_v100").causes[0]
    assert fact(cause.evidence, "cause-full-precision", "formats") == ["FP16"]
    assert fact(cause.evidence, "cause-full-precision", "kinds") == "GEMMs and convolutions"
