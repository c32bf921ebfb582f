"""Known facts about traces of other projects: steps, communication, inference, the CPU. Skipped without these traces."""

from __future__ import annotations

from functools import cache

import pytest

from gemmscope.explain.diagnose import TraceDiagnosis, diagnose
from gemmscope.explain.recorded_trace import read_trace
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
