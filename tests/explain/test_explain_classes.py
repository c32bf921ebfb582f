"""Classes of kernels, and what follows from them: unknown kernels, misaligned GEMMs, GPUs without FP8, other profilers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmscope.engine.kernels import classify
from gemmscope.errors import UserError
from gemmscope.explain.attention_speed import RATES
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.explain.scopes import find_scopes
from gemmscope.explain.step_evidence import gpu_rates
from gemmscope.explain.work_class import classify_work
from gemmscope.toml import load_data
from support.traces import ADAM, BF16, DATA, FP8, Builder, codes, fact, shared_trace, steady

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
SOFTMAX, SOFTMAX_BACKWARD = (
    f"void at::native::(anonymous namespace)::softmax_warp_{one}<c10::BFloat16>" for one in ("forward", "backward")
)
AMPERE = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
SGEMM = "volta_sgemm_64x64_nt"
ALIGN1 = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>(Params)"
TWO = ["c10::BFloat16", "c10::BFloat16"]


def step_of(*kernels: tuple[str, float, str, list[Any]], gpu: Any = "NVIDIA H100 80GB HBM3") -> Builder:
    """Two steps of kernels: name, microseconds, the operator that launches each, and the shapes of its inputs."""
    builder, moment, at = Builder(), 20_000.0, 500.0
    for step in range(2):
        began = at
        for number, (name, time, operator, shapes) in enumerate((*kernels, (ADAM, 5.0, "", []))):
            key = 1000 + 100 * step + number
            if operator:
                builder.mark(operator, at - 1, 8, "cpu_op", args={"External id": key, "Input Dims": shapes, "Input type": TWO})
            builder.kernel(name, moment, time, launched=at, args={"External id": key} if operator else {})
            moment, at = moment + time, at + 20
        builder.mark(f"ProfilerStep#{step}", began - 10, at - began - 2)
    return builder


def named(diagnosis: TraceDiagnosis) -> list[str]:
    return [cause.code for cause in diagnosis.causes]


def test_gemms_of_convolutions_are_convolutions(tmp_path: Path) -> None:
    """cuDNN runs plain GEMM kernels: the operator tells what they are for."""
    diagnosis = step_of(
        (SGEMM, 300.0, "aten::cudnn_convolution", [[8, 64, 56, 56], [64, 64, 3, 3]]),
        (SGEMM, 300.0, "aten::convolution_backward", []),
        (SGEMM, 100.0, "aten::mm", [[512, 512], [512, 512]]),
        ("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(cudnn::bn_fw_tr_1C11_args<float>)", 80.0, "", []),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(params)", 20.0, "", []),
    ).diagnose(tmp_path / "t.json")
    assert diagnosis.account.parts_ms["convolutions"] == pytest.approx(0.6)
    classes = diagnosis.account.classes_ms
    assert (classes["convolution"], classes["GEMM FP32"], classes["norms"], classes["layout"]) == pytest.approx(
        (0.6, 0.1, 0.08, 0.02)
    )
    assert sum(row.count for row in diagnosis.account.gemms) == 1


def test_ids_that_repeat_the_launch_are_not_those_of_operators(tmp_path: Path) -> None:
    """Old profilers: the id of each kernel's operator is the number of its launch, and belongs to another operator."""
    builder = steady()
    for event in builder.events:
        if event["cat"] == "kernel":
            event["args"]["External id"] = event["args"]["correlation"]
    for number in range(1, 40):
        builder.mark("NllLossBackward0", 900.0, 1.0, "cpu_op", args={"External id": number})
    for event in builder.events:
        if "cast_transpose" in event["name"]:
            event["name"] = "a_kernel_that_nobody_knows"
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert "loss" not in diagnosis.account.classes_ms


def test_second_kernels_belong_to_their_gemm(tmp_path: Path) -> None:
    epilogue = "void epilogue::impl::globalKernel<float, float, float, true, true>(int, int, long, float*)"
    diagnosis = step_of(
        (BF16, 200.0, "aten::mm", [[4096, 4096], [4096, 4096]]), (epilogue, 50.0, "aten::mm", [[4096, 4096], [4096, 4096]])
    ).diagnose(tmp_path / "t.json")
    (row,) = diagnosis.account.gemms
    assert (row.precision, row.count) == ("BF16", 1)
    assert row.sized_ms == pytest.approx(0.25)


def test_rates_are_of_the_gemms_whose_sizes_are_known(tmp_path: Path) -> None:
    sized = (BF16, 200.0, "aten::mm", [[4096, 4096], [4096, 4096]])
    diagnosis = step_of(sized, (BF16, 800.0, "CompiledFunction", [])).diagnose(tmp_path / "t.json")
    (row,) = diagnosis.account.gemms
    assert row.tflops == pytest.approx(2 * 4096**3 / 200e-6 / 1e12)
    assert row.time_ms == pytest.approx(1.0)
    assert fact(diagnosis.findings, "gemm-sizes-partial", "known") == 1


def test_weights_in_fewer_bits_are_not_low_precision(tmp_path: Path) -> None:
    diagnosis = step_of(("_matmul_ogs_NNT_bf16xbf16xmxfp4_32x128x256x1", 500.0, "", [])).diagnose(tmp_path / "t.json")
    assert diagnosis.account.classes_ms["GEMM FP4 weights"] == pytest.approx(0.5)
    assert not diagnosis.evidence.is_low
    assert "not-low" not in named(diagnosis)
    assert diagnosis.verdict.code == "step-precision-unknown"


@pytest.mark.parametrize(("known_us", "said"), [(960.0, True), (900.0, False)])
def test_low_precision_is_not_judged_where_kernels_are_unknown(known_us: float, said: bool, tmp_path: Path) -> None:
    diagnosis = step_of((BF16, known_us, "", []), ("my_secret_expert", 995.0 - known_us, "", [])).diagnose(tmp_path / "t.json")
    assert ("not-low" in named(diagnosis)) == said
    assert ("kernels-may-be-gemms" in codes(diagnosis.findings)) != said
    if not said:
        assert diagnosis.verdict.code == "step-kernels-unknown"
        assert fact(diagnosis.findings, "kernels-may-be-gemms", "kernels") == ["my_secret_expert"]


def test_low_precision_is_not_judged_where_gemms_are_of_unknown_precision(tmp_path: Path) -> None:
    diagnosis = step_of((BF16, 900.0, "", []), ("fused_moe_kernel", 95.0, "", [])).diagnose(tmp_path / "t.json")
    assert "not-low" not in named(diagnosis)
    assert diagnosis.verdict.code == "step-precision-partly-unknown"


WITHOUT_FP8: list[dict[str, Any]] = [
    {"name": "Tesla V100-SXM2-16GB", "computeMajor": 7, "computeMinor": 0},
    {"name": "NVIDIA GeForce RTX 2080 Ti"},
    {"name": "Tesla T4"},
    {"name": "NVIDIA A10G"},
    {"name": "NVIDIA GeForce RTX 3090"},
    {"name": "AMD Instinct MI250X"},
    {"name": "NVIDIA Something", "computeMajor": 8, "computeMinor": 6, "warpSize": 32},
    {"computeMajor": 7, "computeMinor": 5, "warpSize": 32},
]


@pytest.mark.parametrize("gpu", WITHOUT_FP8)
def test_gpus_without_fp8(gpu: dict[str, Any], tmp_path: Path) -> None:
    diagnosis = steady(product=AMPERE).diagnose(tmp_path / "t.json", deviceProperties=[gpu])
    assert "not-low" not in named(diagnosis)
    assert diagnosis.verdict.code == "step-without-fp8"


@pytest.mark.parametrize(
    "gpu", [{"name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "warpSize": 64}, {"name": "NVIDIA H100"}]
)
def test_gpus_with_fp8(gpu: dict[str, Any], tmp_path: Path) -> None:
    diagnosis = steady(product=BF16).diagnose(tmp_path / "t.json", deviceProperties=[gpu])
    assert named(diagnosis) == ["not-low"]


def test_a_gpu_that_the_trace_does_not_name_is_promised_nothing(tmp_path: Path) -> None:
    diagnosis = steady(product=AMPERE).diagnose(tmp_path / "t.json", deviceProperties=[])
    assert not diagnosis.causes
    assert diagnosis.verdict.code == "step-fp8-not-known"


def test_advice_for_amd(tmp_path: Path) -> None:
    slow = (BF16, 3000.0, "aten::mm", [[8192, 4096], [4096, 4096]])
    builder = step_of(slow, slow)
    slowed = {"clock": {"max_sm_mhz": 2000, "readings": [{"sm_mhz": 600, "throttle": []}]}}
    for name, tool in (("AMD Instinct MI300X", "rocm-smi"), ("NVIDIA H100", "nvidia-smi")):
        diagnosis = builder.diagnose(tmp_path / "t.json", deviceProperties=[{"name": name}], gemmscope=slowed)
        cause = next(cause for cause in diagnosis.causes if cause.code == "throttled")
        assert tool in " ".join(cause.advice)


def test_misaligned_gemms_are_not_throttling(tmp_path: Path) -> None:
    linear = (BF16, 400.0, "aten::addmm", [[1024], [16384, 4096], [4096, 2048]])
    odd = (ALIGN1, 1800.0, "aten::bmm", [[96, 3137, 64], [96, 64, 3137]])
    diagnosis = step_of(linear, odd, odd).diagnose(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}])
    assert "throttled" not in named(diagnosis)
    cause = next(cause for cause in diagnosis.causes if cause.code == "misaligned")
    assert fact(cause.evidence, "cause-misaligned-sizes", "sizes") == ["3137"]
    assert fact(cause.evidence, "cause-gemm-sizes", "sizes") == ["3137x64x3137"]
    assert cause.kernels == ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1",)
    assert 2 * 1.0 < cause.cost_ms < 2 * 1.4  # the memory needs 0.57 ms for each


def test_misaligned_gemms_alone_tell_nothing_about_the_gpu(tmp_path: Path) -> None:
    odd = (ALIGN1, 1800.0, "aten::bmm", [[96, 3137, 64], [96, 64, 3137]])
    diagnosis = step_of(odd).diagnose(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}])
    assert "throttled" not in named(diagnosis)


@pytest.mark.parametrize(
    "name", ["Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080 Ti", "Tesla T4", "NVIDIA A10G", "NVIDIA GeForce RTX 3090"]
)
def test_published_rates_of_older_gpus(name: str) -> None:
    rates = gpu_rates(name)
    assert rates is not None
    assert rates.peak("FP8") is None
    assert (rates.peak("FP16") or 0) > (rates.peak("FP32") or 0) > 5


OTHER_PROFILERS: dict[str, tuple[dict[str, Any], str]] = {
    "JAX": (
        {
            "traceEvents": [
                {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
                {"ph": "M", "pid": 1, "tid": 13, "name": "thread_name", "args": {"name": "Stream #13(Compute)"}},
                {"ph": "X", "pid": 1, "tid": 13, "name": "fusion.3", "ts": 1.0, "dur": 5.0},
            ]
        },
        "JAX",
    ),
    "MTIA": (
        {"traceEvents": [{"ph": "X", "cat": "mtia_ccp_events", "name": "fc", "ts": 1.0, "dur": 5.0, "pid": 0, "tid": 1}]},
        "MTIA",
    ),
    "rocprof": (
        {
            "traceEvents": [
                {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "CPU HIP API"}},
                {"ph": "X", "pid": 6, "tid": 0, "name": "Cijk_Ailk", "ts": "1", "dur": "5", "args": {"BeginNs": "1000"}},
            ]
        },
        "rocprof",
    ),
    "rocprofv3": ({"rocprofiler-sdk-tool": [{"metadata": {}}]}, "rocprofv3"),
}


@pytest.mark.parametrize("kind", OTHER_PROFILERS)
def test_files_of_other_profilers(kind: str, tmp_path: Path) -> None:
    written, text = OTHER_PROFILERS[kind]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(written))
    with pytest.raises(UserError, match=text) as caught:
        read_trace(path)
    assert "trace-me" in str(caught.value)


def test_a_mark_of_another_device_does_not_reject_a_trace(tmp_path: Path) -> None:
    builder = steady(product=FP8)
    builder.events.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:CPU"}})
    assert builder.diagnose(tmp_path / "t.json").account.gemms


CLASSES = {"GEMM": "gemm", "quantization": "quantize", "embedding and indexing": "embedding"}


def test_rates_of_attention_are_of_implementations_with_kernels() -> None:
    known = {entry["name"] for entry in load_data("gemmscope.engine", "kernel_names.toml")["attention"]}
    assert {rate["name"] for rate in RATES} <= known


def test_names_seen_in_other_traces() -> None:
    wrong = []
    for line in shared_trace("../kernel_names_seen.tsv").read_text().splitlines()[1:]:
        told, name = line.split("\t")
        kind, precision = told.split(" (")[0], ""
        if kind.startswith("GEMM "):
            kind, precision = "GEMM", {"FP4": "e2m1", "FP8": "e4m3"}[kind.split()[1]]
        facts = classify(name)
        right = facts.known and facts.kernel_class == CLASSES.get(kind, kind)
        if not right or (precision and precision not in (facts.operands or ())):
            wrong.append((told, name, facts))
    assert not wrong


def test_nearly_all_time_of_shared_traces_is_named() -> None:
    for path in sorted(shared_trace("README.md").parent.rglob("*.json.gz")):
        trace = read_trace(path)
        work_classes = classify_work(trace, find_scopes(trace))
        pairs = list(zip(trace.work, work_classes, strict=True))
        unknown = sum(work.time for work, kernel in pairs if kernel.name == "other")
        share = 1 - unknown / sum(work.time for work, _ in pairs)
        assert share >= (0.95 if "mi300x" in path.name else 0.98), path.name


def test_classes_in_shared_traces() -> None:
    expected = {
        "vllm_moe_mxfp4_b200": {"GEMM FP4": 0.447, "routing": 0.06, "communication": 0.184},
        "dlrm_sampled_rank0": {"embedding": 0.172, "communication": 0.652, "GEMM TF32": 0.084},
        "resnet_2080ti": {"convolution": 0.58, "norms": 0.138},
        "resnet18_mi300x_hipfree": {"convolution": 0.265, "norms": 0.434, "layout": 0.183},
        "sglang_decode_mi300x": {"GEMM BF16": 0.591, "attention": 0.236, "norms": 0.07},
    }
    for name, shares in expected.items():
        trace = read_trace(shared_trace(f"{name}.json.gz"))
        times: dict[str, float] = {}
        for work, kernel in zip(trace.work, classify_work(trace, find_scopes(trace)), strict=True):
            times[kernel.name] = times.get(kernel.name, 0.0) + work.time
        assert not times.get("GEMM unknown precision")
        total = sum(times.values())
        assert {kind: times[kind] / total for kind in shares} == pytest.approx(shares, abs=0.01), name


def test_the_largest_kernels_of_training_traces_elsewhere(tmp_path: Path) -> None:
    """The 20 largest of each, by their names and operators, against a table that was checked by hand."""
    rows = [line.split("\t") for line in (DATA / "largest_kernels.tsv").read_text().splitlines() if line[0] != "#"]
    builder, stepping = Builder(), []
    for number, (_, _, _, phase, operators, name) in enumerate(sorted(rows, key=lambda row: row[3] == "optimizer")):
        at, opened = 1000.0 + 100 * number, operators.split(" > ") if operators else []
        opened = (
            ["autograd::engine::evaluate_function: MulBackward0", "aten::linear", *opened] if phase == "recomputed" else opened
        )
        stepping += [at] if phase == "optimizer" else []
        for depth, operator in enumerate(opened):
            sizes = {"External id": 1000 * number + depth, "Input type": ["c10::BFloat16"]}
            builder.mark(operator, at + depth, 90 - 2 * depth, "cpu_op", args=sizes)
        launched_by = {"External id": 1000 * number + len(opened) - 1} if opened else {}
        builder.kernel(name, 100_000.0 + 10 * number, 5.0, stream=number, launched=at + 20, args=launched_by)
    builder.mark("Optimizer.step#Adam.step", stepping[0], 100.0 * len(stepping))
    trace = read_trace(builder.write(tmp_path / "t.json"))
    classes = {work.stream: one.name for work, one in zip(trace.work, classify_work(trace, find_scopes(trace)), strict=True)}
    expected = [row[2] for row in sorted(rows, key=lambda row: row[3] == "optimizer")]
    assert [classes[number] for number in range(len(rows))] == expected


def test_attention_is_everything_between_its_products(tmp_path: Path) -> None:
    """Scale, mask and dropout of unfused attention, and all four products of its backward pass."""
    forward = [(BF16, "aten::bmm"), (ADD, "aten::mul"), (ADD, "aten::add"), (SOFTMAX, "aten::_softmax"), (ADD, "aten::mul"),
               (BF16, "aten::bmm"), (ADD, "aten::add"), (BF16, "aten::mm")]  # fmt: skip
    backward = [*[(BF16, "aten::bmm")] * 2, (SOFTMAX_BACKWARD, "aten::_softmax_backward_data"), *[(BF16, "aten::bmm")] * 2]
    builder = Builder()
    for number, (name, operator) in enumerate([*forward, *backward]):
        builder.mark(operator, 1000.0 + 20 * number, 15, "cpu_op", args={"External id": number + 1})
        builder.kernel(name, 5000.0 + 20 * number, 10.0, launched=1005.0 + 20 * number, args={"External id": number + 1})
    trace = read_trace(builder.write(tmp_path / "t.json"))
    classes = [one.name for one in classify_work(trace, find_scopes(trace))]
    assert classes == ["attention"] * 6 + ["elementwise", "GEMM BF16"] + ["attention"] * 5


def test_sums_of_gradients_belong_to_no_module(tmp_path: Path) -> None:
    """The engine of autograd adds them up before it calls a node."""
    builder = Builder()
    node = "autograd::engine::evaluate_function: NativeLayerNormBackward0"
    builder.mark(node, 1000.0, 90, "cpu_op")
    builder.kernel(ADD, 5000.0, 10.0, launched=1010.0)
    builder.mark(node.partition(": ")[2], 1020.0, 60, "cpu_op")
    builder.kernel(ADD, 5020.0, 10.0, launched=1030.0)
    trace = read_trace(builder.write(tmp_path / "t.json"))
    assert [one.name for one in classify_work(trace, find_scopes(trace))] == ["elementwise", "norms"]
