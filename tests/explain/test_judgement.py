"""What `explain` recognizes, judges and advises, on small traces made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemmscope.engine.kernels import classify, work_in_step
from gemmscope.errors import UserError
from gemmscope.explain.collectives import collective_totals, collectives_of
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.trace_view import UNRECORDED
from support.traces import ADAM, BF16, Builder, codes, fact, steady

V100, A100, H100 = ([{"name": name}] for name in ("Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"))
SGEMM, SCUDNN = "volta_sgemm_128x64_nn", "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, at::native::MulFunctor>>"
SOFTMAX = "void at::native::(anonymous namespace)::softmax_warp_forward<c10::BFloat16>"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def training(*kernels: tuple[str, float, str, dict[str, Any]], steps: int = 2) -> Builder:
    """Steps of kernels (name, microseconds, operator, its arguments), launched far ahead, that end with an optimizer."""
    builder, moment, key = Builder(), 50_000.0, 100
    for step in range(steps):
        called = 1000.0 + 4000 * step
        builder.mark(f"ProfilerStep#{step}", called - 10, 3990)
        for number, (name, time, operator, arguments) in enumerate((*kernels, (ADAM, 20.0, "", {}))):
            at, key = called + 20 * number, key + 1
            if operator:
                builder.mark(operator, at - 1, 8, "cpu_op", args={"External id": key, **arguments})
            builder.kernel(name, moment, time, launched=at, args={"External id": key} if operator else {})
            moment += time
    return builder


def named(diagnosis: TraceDiagnosis) -> list[str]:
    return [cause.code for cause in diagnosis.causes]


def product(m: int, k: int, n: int, kind: str) -> dict[str, Any]:
    return {"Input Dims": [[m, k], [k, n]], "Input type": [kind] * 2}


def test_convolutions_in_fp32_on_a_volta(tmp_path: Path) -> None:
    diagnosis = training((SCUDNN, 900.0, "", {}), (ADD, 100.0, "", {})).diagnose(tmp_path / "t.json", deviceProperties=V100)
    assert named(diagnosis) == ["full-precision"]
    assert fact(diagnosis.causes[0].evidence, "cause-full-precision", "formats") == ["FP16"]
    assert diagnosis.causes[0].cost_ms == pytest.approx(0.45)
    least, largest = diagnosis.causes[0].speedup_range or (0, 0)  # 1.5x and 3x, and half the bytes of what is beside
    assert 1.1 < least < diagnosis.causes[0].speedup_without < largest < 1.5


def test_gemms_in_fp32_on_an_ampere_are_limited_by_their_size(tmp_path: Path) -> None:
    """8192^3 in FP32 at 15 TFLOP/s: in BF16, 312 TFLOP/s are the peak."""
    time = 2 * 8192**3 / 15e6
    diagnosis = training((SGEMM, time, "aten::mm", product(8192, 8192, 8192, "float"))).diagnose(
        tmp_path / "t.json", deviceProperties=A100
    )
    assert diagnosis.causes[0].code == "full-precision"
    assert fact(diagnosis.causes[0].evidence, "cause-full-precision-rate", "tflops") == pytest.approx(15, rel=0.01)
    assert diagnosis.causes[0].speedup_without > 10


@pytest.mark.parametrize("name", ["void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>", BF16])
def test_tensor_cores_in_use_are_no_cause(name: str, tmp_path: Path) -> None:
    assert "full-precision" not in named(training((name, 900.0, "", {})).diagnose(tmp_path / "t.json", deviceProperties=A100))


def test_the_cpu_in_a_blocking_copy_waits_for_the_gpu(tmp_path: Path) -> None:
    """The kernel after the gap was launched long before it began, behind work from before the recording."""
    builder = Builder()
    builder.mark("ProfilerStep#1", 0.0, 60_000.0)
    builder.kernel(ADD, 90.0, 5.0, stream=3, launched=80.0)
    builder.mark("hipMemcpyWithStream", 170.0, 49_900.0, "cuda_runtime", args={"correlation": 999})
    builder.kernel(BF16, 50_000.0, 9_000.0, launched=120.0)
    builder.kernel(ADAM, 59_000.0, 500.0, launched=130.0)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.account.classes_ms[UNRECORDED] == pytest.approx(49.9, rel=0.01)
    assert not {"host", "elsewhere", "streams"} & set(named(diagnosis))


def test_idle_time_has_one_owner(tmp_path: Path) -> None:
    """500 us until the launch belong to the CPU, 1000 us from then on to another stream."""
    builder = Builder()
    for step in range(3):
        base = 10_000.0 + 10_000 * step
        builder.mark(f"ProfilerStep#{step}", base - 60, 9_990.0)
        builder.kernel(BF16, base, 3000.0, launched=base - 50)
        builder.kernel(ADD, base + 3010, 20.0, launched=base - 45)
        builder.kernel(BF16, base + 4530, 5000.0, launched=base + 3530)
        builder.kernel(ADAM, base + 9530, 300.0, launched=base + 3540)
    idle = builder.diagnose(tmp_path / "t.json").account.idle_ms
    assert 0.45 < idle["no launch for over 1 ms"] < 0.7  # and the ends of the steps
    assert idle["other stream"] == pytest.approx(1.0, abs=0.06)


def test_nothing_is_promised_for_a_wait_that_the_trace_does_not_explain(tmp_path: Path) -> None:
    """All work is launched early; in the middle of each step something that was not recorded holds it up for 500 us."""
    builder = Builder()
    for step in range(3):
        base, called = 10_000.0 + 2500 * step, 1000.0 + 100 * step
        builder.mark(f"ProfilerStep#{step}", called - 1, 99)
        for number, begin in enumerate((0, 1500)):
            builder.kernel(BF16, base + begin, 999.0, launched=called + number)
    (cause,) = [cause for cause in builder.diagnose(tmp_path / "t.json").causes if cause.code == "streams"]
    assert cause.speedup_without == pytest.approx(1.25, rel=0.02)
    assert cause.speedup_range == pytest.approx((1.0, cause.speedup_without))


def test_waiting_in_collectives_of_unlike_kinds(tmp_path: Path) -> None:
    """Kernels of unknown sizes: dispatch and combine have a shortest one each, layout ran once."""
    builder = steady(1)
    kernels = [("dispatch", 100.0), ("dispatch", 150.0), ("combine", 400.0), ("combine", 420.0), ("layout", 5.0)]
    for number, (name, time) in enumerate(kernels):
        builder.kernel(f"deep_ep::{name}<8>", 1000.0 + 430 * number, time, stream=20, launched=100.0)
    view = builder.diagnose(tmp_path / "t.json").view
    totals = {total.kind: total for total in collective_totals(collectives_of(view), 1, 1, {})}
    assert totals["deep_ep::dispatch"].waiting_ms == pytest.approx(0.05)
    assert totals["deep_ep::combine"].waiting_ms == pytest.approx(0.02)
    assert totals["deep_ep::layout"].waiting_ms is None


@pytest.mark.parametrize(
    ("name", "category", "phase"),
    [
        ("vllm::unified_attention", "cpu_op", "inference server"),
        ("step[DECODE bs=32]", "user_annotation", "inference server"),
        ("/opt/diffusers/models/unet.py(12): forward", "python_function", "image or video generation"),
        ("hipStreamBeginCapture", "cuda_runtime", "capture of GPU graphs"),
        ("aten::mul", "cpu_op", "forward pass without gradients"),
    ],
)
def test_what_is_no_training_is_not_judged(name: str, category: str, phase: str, tmp_path: Path) -> None:
    builder = Builder()
    builder.mark("ProfilerStep#1", 0.0, 9_000.0)
    builder.mark("aten::mm", 5.0, 3.0, "cpu_op", args={"External id": 1})
    builder.mark(name, 10.0, 2.0, category)
    for number in range(5):
        builder.kernel(BF16, 1000.0 + 1500 * number, 100.0, launched=990.0 + 1500 * number)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.trace.phase.name == phase
    assert not diagnosis.causes
    assert fact([diagnosis.verdict], "step-not-judged", "phase") == phase


def test_a_forward_pass_with_gradients_is_judged(tmp_path: Path) -> None:
    builder = Builder()
    builder.mark("ProfilerStep#1", 0.0, 9_000.0)
    for number in range(5):
        builder.mark("aten::mm", 1480.0 * number + 5, 3.0, "cpu_op", args={"External id": number, "Sequence number": 40 + number})
        builder.kernel(BF16, 1000.0 + 1500 * number, 100.0, launched=990.0 + 1500 * number)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.trace.phase.name == "forward pass with gradients"
    assert diagnosis.causes


FRAMEWORKS = {
    "All2All_Pooled_Req": ("torchrec", ("FSDP", "Megatron")),
    "DistributedDataParallel.forward": ("bucket_cap_mb", ("FSDP", "Megatron")),
    "FullyShardedDataParallel.forward": ("forward_prefetch", ("Megatron", "torchrec")),
    "LinearWithGradAccumulationAndAsyncCommunicationBackward": ("--overlap-grad-reduce", ("FSDP", "torchrec")),
    "aten::mm_backward": ("overlap it", ("FSDP", "Megatron", "torchrec", "bucket_cap_mb")),
}


@pytest.mark.parametrize("operator", FRAMEWORKS)
def test_advice_is_that_of_the_framework(operator: str, tmp_path: Path) -> None:
    builder = training((BF16, 500.0, operator, {}), (NCCL, 900.0, "", {}))
    cause = next(cause for cause in builder.diagnose(tmp_path / "t.json").causes if cause.code == "communication")
    wanted, others = FRAMEWORKS[operator]
    assert wanted in " ".join(cause.advice)
    assert not any(other in " ".join(cause.advice) for other in others)


@pytest.mark.parametrize(("call", "advised"), [("cudaLaunchKernel", True), ("cudaGraphLaunch", False)])
def test_graphs_are_advised_where_none_are_used(call: str, advised: bool, tmp_path: Path) -> None:
    builder = Builder()
    for step in range(3):
        base = 10_000.0 + 10_000 * step
        builder.mark(f"ProfilerStep#{step}", base - 60, 9_990.0)
        for number in range(9):
            builder.kernel(BF16, base + 1000 * number, 300.0, launched=base + 1000 * number - 8)
        builder.kernel(ADAM, base + 9000, 300.0, launched=base + 8990)
    for event in builder.events:
        event["name"] = call if event["name"] == "cudaLaunchKernel" else event["name"]
    cause = builder.diagnose(tmp_path / "t.json").causes[0]
    assert cause.code == "host"
    assert ("CUDA graphs" in " ".join(cause.advice)) == advised


def test_the_start_of_the_gpu_is_no_steady_state(tmp_path: Path) -> None:
    builder = Builder()
    builder.mark("ProfilerStep#1", 0.0, 10_300_000.0)
    builder.mark("cudaFree", 100.0, 6_000_000.0, "cuda_runtime", args={"correlation": 998})
    builder.kernel(BF16, 6_000_200.0, 2_000_000.0, launched=6_000_190.0)
    builder.kernel(ADAM, 8_000_200.0, 2_000_000.0, launched=6_000_195.0)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert named(diagnosis)[0] == "warm-up"
    assert "allocator" not in named(diagnosis)


def test_launches_without_correlations_are_matched_by_order(tmp_path: Path) -> None:
    builder = steady()
    for event in builder.events:
        event.get("args", {}).pop("correlation", None)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert all(work.call is not None for work in diagnosis.trace.work)
    assert "launches-not-recorded" not in codes(diagnosis.findings)


def test_the_architecture_is_in_the_names_of_kernels(tmp_path: Path) -> None:
    name = "Cijk_Ailk_Bljk_BBS_BH_MT256x112x64_MI16x16x16x1_SN_ISA942_IU1"
    diagnosis = training((name, 900.0, "", {})).diagnose(tmp_path / "t.json", deviceProperties=[])
    assert diagnosis.trace.gpu_name.startswith("AMD Instinct MI300 series")
    assert diagnosis.evidence.has_fp8


@pytest.mark.parametrize(
    ("name", "kind", "operands"),
    [
        ("my_matmul_kernel_bf16", "gemm", ("bf16", "bf16")),
        ("custom_gemm(float*, float const*, int)", "gemm", ("fp32", "fp32")),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::WelfordOps<thrust::pair<int>>>>",
            "norm",
            None,
        ),
        ("triton__0d1d2d3de", "elementwise", None),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<x>>>", "attention", None),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc", "convolution", ("tf32", "tf32")),
    ],
)
def test_names_of_kernels(name: str, kind: str, operands: tuple[str, str] | None) -> None:
    assert work_in_step(name).kernel_class == kind
    assert classify(name).operands == operands


def test_classes_by_operators(tmp_path: Path) -> None:
    """A product of elements within attention is elementwise, ReLU an activation, and a softmax alone no attention."""
    kernels = (
        (MUL, 100.0, "aten::scaled_dot_product_attention"),
        (ADD, 200.0, "aten::clamp_min_"),
        (SOFTMAX, 50.0, "aten::_softmax"),
    )
    builder = training(*((name, time, operator, {}) for name, time, operator in kernels))
    classes = builder.diagnose(tmp_path / "t.json").account.classes_ms
    assert (classes["elementwise"], classes["activations"]) == pytest.approx((0.1, 0.25))
    assert not {"attention", "loss"} & set(classes)


def test_an_eager_rms_norm_is_a_norm_that_could_be_fused(tmp_path: Path) -> None:
    norm = [(ADD, 100.0, f"aten::{name}", {}) for name in ("pow", "mean", "add", "rsqrt", "mul", "mul")]
    diagnosis = training((BF16, 1000.0, "aten::mm", {}), *norm, (BF16, 1000.0, "aten::mm", {})).diagnose(tmp_path / "t.json")
    assert diagnosis.account.classes_ms["norms"] == pytest.approx(0.6)
    cause = next(cause for cause in diagnosis.causes if cause.code == "fusing")
    assert cause.cost_ms == pytest.approx(0.5)
    assert fact(cause.evidence, "cause-eager-norms", "kernels") == 6


def test_a_gemm_below_the_rate_of_its_neighbours(tmp_path: Path) -> None:
    sizes = [(8192, 4096, n) for n in (4096, 5120, 6144, 7168)]
    rates = [629.0, 629.0, 457.0, 629.0]
    kernels = [(BF16, 2 * m * k * n / rate / 1e6, "aten::mm", product(m, k, n, "c10::BFloat16"))
               for (m, k, n), rate in zip(sizes, rates, strict=True)]  # fmt: skip
    diagnosis = training(*kernels).diagnose(tmp_path / "t.json", deviceProperties=H100)
    cause = next(cause for cause in diagnosis.causes if cause.code == "poor-gemm")
    assert fact(cause.evidence, "cause-poor-gemm", "tflops") == pytest.approx(457)
    assert fact(cause.evidence, "cause-poor-gemm", "usual") == pytest.approx(629)


def test_layouts_of_convolutions(tmp_path: Path) -> None:
    conversion = ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(params)", 200.0, "", {})
    diagnosis = training((SCUDNN, 600.0, "", {}), conversion).diagnose(tmp_path / "t.json", deviceProperties=V100)
    cause = next(cause for cause in diagnosis.causes if cause.code == "layout")
    assert cause.cost_ms == pytest.approx(0.2)
    assert "channels_last" in " ".join(cause.advice)


def test_many_small_collectives(tmp_path: Path) -> None:
    message = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"}
    builder = training((BF16, 500.0, "", {}), *((NCCL, 30.0, "", {}) for _ in range(25)))
    for event in builder.events:
        event.get("args", {}).update(message if event["name"] == NCCL else {})
    cause = next(cause for cause in builder.diagnose(tmp_path / "t.json").causes if cause.code == "small-collectives")
    assert cause.cost_ms == pytest.approx(0.75, rel=0.01)
    assert fact(cause.evidence, "cause-small-collectives", "count") == 25


REFUSED = {
    "report.nsys-rep": ("binary", "Nsight"),
    "report.sqlite": ("SQLite format 3\0", "Nsight"),
    "chakra.json": ('{"schema": "1.1.1-chakra.0.0.4", "pid": 7, "nodes": [{"id": 1}]}', "execution trace"),
    "ranges.json": (
        '{"traceEvents": [{"ph": "X", "cat": "cuda_profiler_range", "name": "0", "ts": 1, "dur": 2}]}',
        "CUPTI range",
    ),
    "rocprof.json": ('{"rocprofiler-sdk-tool": []}', "rocprof"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_of_other_profilers_get_the_command_that_records(name: str, tmp_path: Path) -> None:
    from gemmscope.explain.recorded_trace import read_trace

    content, told = REFUSED[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=told) as error:
        read_trace(tmp_path / name)
    assert "gemmscope trace-me" in str(error.value)


def test_launches_without_kernels_are_refused_with_the_reason(tmp_path: Path) -> None:
    builder = steady(1)
    builder.events = [event for event in builder.events if event["cat"] != "kernel"]
    with pytest.raises(UserError, match="launches, but no GPU kernels"):
        builder.diagnose(tmp_path / "t.json")
