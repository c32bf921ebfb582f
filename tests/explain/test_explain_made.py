"""Traces made by hand: what recorded ones on one GPU cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.engine.kernels import classify
from gemmscope.errors import UserError
from gemmscope.explain.trace_view import EXPOSED
from support.traces import ADAM, BF16, CAST, FP8, Builder, as_expected, codes, fact, steady

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_nothing_is_wrong(tmp_path: Path) -> None:
    diagnosis = steady().diagnose(tmp_path / "t.json")
    assert as_expected(diagnosis)
    assert diagnosis.account.step_ms == pytest.approx(2.25)
    assert len(diagnosis.view.steps.chosen) == 3


def test_hidden_and_exposed_communication(tmp_path: Path) -> None:
    builder = steady(1)
    builder.kernel(NCCL, 1000.0, 500.0, stream=20, launched=100.0)  # hidden behind GEMMs
    hidden = builder.diagnose(tmp_path / "hidden.json").account
    assert hidden.hidden_ms == pytest.approx(0.5)
    assert EXPOSED not in hidden.classes_ms
    builder = steady(1)
    builder.events = [event for event in builder.events if not (event["cat"] == "kernel" and 1500 < event["ts"] < 2500)]
    builder.kernel(NCCL, 1500.0, 990.0, stream=20, launched=100.0)
    diagnosis = builder.diagnose(tmp_path / "exposed.json")
    assert diagnosis.account.classes_ms[EXPOSED] > 0.8
    assert diagnosis.causes[0].code == "communication"
    assert sum(diagnosis.account.classes_ms.values()) == pytest.approx(diagnosis.account.step_ms)


def test_streams_that_compute_at_once_share_the_time(tmp_path: Path) -> None:
    builder = Builder()
    for step in range(2):
        base = 1000.0 + 1000 * step
        builder.mark(f"ProfilerStep#{step}", base - 500, 990)
        for stream in range(4):
            builder.kernel(FP8, base, 800.0, stream=stream, launched=base - 400)
        builder.kernel(ADAM, base + 800, 200.0, launched=base - 400)
    account = builder.diagnose(tmp_path / "t.json").account
    assert account.classes_ms["GEMM FP8"] == pytest.approx(0.8)
    assert account.overlapped_ms == pytest.approx(0.8)
    assert account.step_ms == pytest.approx(1.0)


def test_late_launches_are_the_hosts(tmp_path: Path) -> None:
    builder = Builder()
    for step in range(2):
        base = 1000.0 + 3000 * step
        builder.mark(f"ProfilerStep#{step}", base, 2990)
        for number in range(20):
            begin = base + 150 * number
            builder.kernel(FP8, begin + 5, 20.0, launched=begin)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code == "host"
    assert diagnosis.account.idle_ms["late launch"] > 2.0


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "loader"),
        ("_compile.compile_inner (dynamo_timed)", "compilation"),
        ("Trainer._save_checkpoint", "checkpoint"),
        ("my own annotation", "elsewhere"),
    ],
)
def test_a_break_before_the_first_launch_is_told_by_its_annotation(name: str, cause: str, tmp_path: Path) -> None:
    builder = Builder()
    for step in range(2):
        base = 1000.0 + 10000 * step
        builder.mark(f"ProfilerStep#{step}", base, 9990)
        for number in range(20):
            builder.kernel(FP8, base + 7000 + 100 * number, 100.0, launched=base + 6900 + number)
        builder.mark(name, base + 10, 6500)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code == cause
    assert diagnosis.causes[0].cost_ms == pytest.approx(7 if cause == "elsewhere" else 6.5, rel=0.15)
    code, told = ("cause-cpu-activity", "frame") if cause == "elsewhere" else ("cause-host-calls", "name")
    assert name in fact(diagnosis.causes[0].evidence, code, told)


def test_a_compilation_in_the_first_step_is_left_out(tmp_path: Path) -> None:
    builder = steady(4)
    for event in builder.events:
        if event["name"].startswith("ProfilerStep#5"):
            event["ts"] -= 50_000
            event["dur"] += 50_000
    first = min(event["ts"] for event in builder.events if event["cat"] == "kernel")
    builder.kernel(BF16, first - 40_000, 10.0, launched=first - 40_100)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert len(diagnosis.view.steps.chosen) == 3
    assert fact(diagnosis.findings, "first-step-left-out", "times") > 10
    assert [step.averaged for step in diagnosis.each_step] == [False, True, True, True]


def test_unknown_kernels_are_listed(tmp_path: Path) -> None:
    builder = steady()
    builder.kernel("my_secret_kernel<float>(int)", 1110.0, 0.5, stream=9, launched=90.0)
    account = builder.diagnose(tmp_path / "t.json").account
    assert [kernel.name for kernel in account.unknown] == ["my_secret_kernel<float>(int)"]
    assert account.named_share < 1


def test_no_step_boundary_is_refused(tmp_path: Path) -> None:
    builder = Builder()
    for number in range(10):
        builder.kernel(FP8, 100.0 * number, 90.0)
    with pytest.raises(UserError, match="does not show where a training step begins") as caught:
        builder.diagnose(tmp_path / "t.json")
    assert "trace-me" in caught.value.hint


def test_events_without_a_phase_or_ids_are_read(tmp_path: Path) -> None:
    """As other tools write them: a category, a name, a time."""
    builder = steady()
    builder.events = [
        {key: event[key] for key in ("cat", "name", "ts", "dur")} for event in builder.events if event["cat"] == "kernel"
    ]
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert as_expected(diagnosis)
    assert diagnosis.account.step_ms == pytest.approx(2.25)


def test_events_of_other_tools_do_not_disturb(tmp_path: Path) -> None:
    builder = steady()
    builder.events += [
        {"ph": "X", "cat": "kernel", "name": "no time"},
        {"ph": "X", "cat": "kernel", "name": "bad", "ts": "soon", "dur": None},
        {"ph": "X", "cat": ["list"], "name": "odd", "ts": 1, "dur": 1},
        {"ph": "i", "name": "instant", "ts": 3, "s": "g"},
        {"ph": "C", "name": "counter", "ts": 3, "args": {"bytes": 3}},
        {"ph": "X", "cat": "cpu_op", "name": 7, "ts": 2, "dur": 1, "args": {"Input Dims": "none", "External id": [1]}},
        {"ph": "X", "cat": "kernel", "name": "elsewhere", "ts": 1, "dur": 1, "args": {"device": 3, "stream": {}}},
        {},
    ]
    diagnosis = builder.diagnose(tmp_path / "t.json", distributedInfo=None, gemmscope=[1])
    assert as_expected(diagnosis)
    assert fact(diagnosis.findings, "several-gpus", "gpus") == 2


@pytest.mark.parametrize(
    ("name", "kernel_class", "operands"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_32x3_tn", "gemm", ("bf16", "bf16")),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "gemm", ("bf16", "bf16")),
        ("cutlass3x_sm90_tensorop_s64x128x32gemm_e4m3_e4m3_f32_bf16_bf16_128x128x128_0_tnn_align16", "gemm", ("e4m3", "e4m3")),
        ("cutlass3x_sm100_tensorop_s256x256x16gemm_bf16_bf16_f32_bf16_bf16_256x256x64_0_tnn_align8", "gemm", ("bf16", "bf16")),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNN", "gemm", ("fp16", "fp16")),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "gemm", ("e4m3", "e4m3")),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn", "gemm", ("fp16", "fp16")),
        ("ampere_sgemm_128x64_tn", "gemm", ("fp32", "fp32")),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1", "gemm", ("bf16", "bf16")),
        ("Cijk_Alik_Bljk_F8BS_BH_Bias_HA_S_SAB_SCD_SAV_UserArgs_MT256x256x128", "gemm", ("e4m3", "e4m3")),
        ("Cijk_Alik_Bljk_F8B8BS_BH_Bias_HA_S", "gemm", ("e4m3", "e5m2")),
        ("nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_Avec32UE8M0_Bvec32UE8M0_bz_TNT", "gemm", ("e4m3", "e4m3")),
        ("nvjet_sm100_ootst_128x256_256x6_2x1_2cta_v_Avec16UE4M3_Bvec16UE4M3_bz_TNT", "gemm", ("e2m1", "e2m1")),
        ("void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u>(__nv_bfloat16*, float*)", "gemm", ("e4m3", "e4m3")),
        (NCCL, "communication", None),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "communication", None),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)", "attention", None),
        ("_attn_bwd_dkdv.kd", "attention", None),
        ("void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16> >", "linear attention", None),
        ("triton_tem_fused_flex_attention_0", "attention", None),
        ("void (anonymous namespace)::cuApplyRMSNorm<float>", "norm", None),
        ("_rms_norm_forward_kernel", "norm", None),
        ("liger_cross_entropy_kernel", "loss", None),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster<c10::BFloat16>>", "optimizer", None),
        ("Memcpy HtoD (Pinned -> Device)", "memory", None),
    ],
)
def test_kernels_of_other_gpus_and_frameworks(name: str, kernel_class: str, operands: tuple[str, str] | None) -> None:
    facts = classify(name)
    assert facts.kernel_class == kernel_class
    assert facts.operands == operands


def test_slow_gemms_without_a_clock_are_a_slow_gpu(tmp_path: Path) -> None:
    """Large GEMMs of every precision far below the GPU's peak rate, judged by FLOPs only."""
    builder = Builder()
    for step in range(2):
        base = 10_000.0 + 60_000 * step
        builder.mark(f"ProfilerStep#{step}", base - 9000, 59_000)
        for number in range(10):
            shape = {"args": {"External id": 100 * step + number + 1}}
            builder.kernel(FP8 if number % 2 else BF16, base + 5000 * number, 5000.0, launched=base - 8000 + number, **shape)
            told = {**shape["args"], "Input Dims": [[8192, 8192], [8192, 8192]], "Input type": ["c10::BFloat16"] * 2}
            builder.mark("aten::mm", base - 8000 + number - 0.1, 0.5, "cpu_op", args=told)
        builder.mark("Optimizer.zero_grad#SGD", base - 8500, 1)
        builder.kernel(CAST, base + 50_000, 100, launched=base - 7000)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code in ("throttled", "left-out")
    assert "throttled" in [cause.code for cause in diagnosis.causes]


def test_marks_for_every_micro_batch_are_joined(tmp_path: Path) -> None:
    """prof.step() is called in the accumulation loop, but a step still ends with its optimizer."""
    builder = steady(8)
    optimizers = sorted((event for event in builder.events if event["name"] == ADAM), key=lambda event: event["ts"])
    for number, event in enumerate(optimizers):
        if number % 4 != 3:
            event["name"] = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>"
    marks = sorted((event for event in builder.events if event["name"].startswith("Prof")), key=lambda event: event["ts"])
    for number in (3, 7):
        builder.mark("Optimizer.step#AdamW.step", marks[number]["ts"] + marks[number]["dur"] - 5, 4.0)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert len(diagnosis.view.steps.chosen) == 2
    assert diagnosis.account.step_ms == pytest.approx(9.0, rel=0.02)


def test_a_gpu_without_low_precision_is_said(tmp_path: Path) -> None:
    diagnosis = steady(product=BF16).diagnose(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}])
    assert not diagnosis.causes
    assert diagnosis.verdict.code == "step-without-fp8"


def test_repeated_products_of_a_compiled_backward(tmp_path: Path) -> None:
    """Without function names: backward has three GEMMs of each size for one in forward, and attention runs forward twice."""
    builder = Builder()
    flash = ("flash_fwd_kernel", "flash_bwd_kernel")
    for step in range(2):
        base, launch = 10_000.0 + 10_000 * step, 500.0 + 10_000 * step
        builder.mark(f"ProfilerStep#{step}", launch - 100, 9990)
        for number, (name, backward) in enumerate(
            [(FP8, False), (flash[0], False), (FP8, True), (flash[0], True), (FP8, True), (flash[1], True), (FP8, True)] * 8
        ):
            key = 1000 * step + number + 1
            moment = launch + 50 * number
            if backward:
                builder.mark("autograd::engine::evaluate_function: CompiledFunctionBackward", moment - 5, 40, "cpu_op")
            if name == FP8:
                told = {"External id": key, "Input Dims": [[4096, 4096], [4096, 8192]]}
                builder.mark("aten::_scaled_mm", moment - 1, 20, "cpu_op", args=told)
            builder.kernel(name, base + 150.0 * number, 150.0, launched=moment, args={"External id": key})
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code == "recompute"
    assert diagnosis.causes[0].cost_ms == pytest.approx(8 * 0.15 * 2, rel=0.01)


@pytest.mark.parametrize("skew", [-3_000_000.0, -200.0, 90_000_000.0])
def test_clocks_that_disagree_are_set_right(skew: float, tmp_path: Path) -> None:
    builder = Builder()
    for step in range(3):
        base = 1000.0 + 3000 * step
        builder.mark(f"ProfilerStep#{step}", base, 2990)
        for number in range(20):
            begin = base + 150 * number
            builder.kernel(FP8, begin + 5 + skew, 20.0, launched=begin)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code == "host"
    assert diagnosis.account.step_ms == pytest.approx(3.0, rel=0.01)
    assert "clock-offset" in codes(diagnosis.findings)
