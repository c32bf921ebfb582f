"""Steps one by one: slow ones, two groups, work outside of them, and what the CPU did while the GPU waited."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.explain.diagnose import diagnose
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.explain.trace_view import EXPOSED, UNRECORDED
from support.traces import ADAM, BF16, FP8, Builder, codes, fact, steady

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy DtoD (Device -> Device)"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def steps_of(lengths_ms: list[float], call: str = "", mark: str = "", product: str = FP8) -> Builder:
    """Steps with 2 ms of GEMMs. The rest of each step's length is CPU time, in an annotation or in runtime calls."""
    builder, moment = Builder(), 1000.0
    for number, length in enumerate(lengths_ms):
        lost = 1000 * length - 2000
        if mark and lost > 0:
            builder.mark(mark, moment, lost)
        for part in range(10 if call and lost > 0 else 0):
            builder.mark(
                call, moment + part * lost / 10, lost / 10, "cuda_runtime", args={"correlation": 10_000 + 100 * number + part}
            )
        for place in range(20):
            builder.kernel(product, moment + lost + 5 + 99.5 * place, 99.5, launched=moment + lost + place / 10)
        builder.mark(f"ProfilerStep#{number}", moment, 1000 * length - 1)
        moment += 1000 * length
    return builder


def test_copies_do_not_hide_communication(tmp_path: Path) -> None:
    """As Holistic Trace Analysis counts: 100 µs behind GEMMs, 300 µs beside a copy, 100 µs alone."""
    builder = Builder()
    for step in range(2):
        base = 10_000.0 * (step + 1)
        builder.mark(f"ProfilerStep#{step}", base - 2000, 9990)
        builder.kernel(BF16, base, 1000.0, launched=base - 1500)
        builder.kernel(NCCL, base + 900, 500.0, stream=20, launched=base - 1500)
        builder.kernel(COPY, base + 1000, 300.0, stream=21, launched=base - 1500, cat="gpu_memcpy")
        builder.kernel(ADAM, base + 1400, 50.0, launched=base - 1500)
    account = builder.diagnose(tmp_path / "t.json").account
    assert account.hidden_ms == pytest.approx(0.1)
    assert account.classes_ms[EXPOSED] == pytest.approx(0.4)
    assert account.communication_ms == pytest.approx(0.5)
    assert account.hidden_share == pytest.approx(0.2)
    assert "copies" not in account.classes_ms
    assert sum(account.classes_ms.values()) == pytest.approx(account.step_ms)


def test_a_slow_step_is_a_finding_and_counts(tmp_path: Path) -> None:
    diagnosis = steps_of([2, 2, 2, 2, 2, 2, 12, 2, 2, 2], mark=LOADER).diagnose(tmp_path / "t.json")
    assert diagnosis.account.step_ms == pytest.approx(3.0, rel=0.01)
    assert diagnosis.view.count == 10
    assert fact(diagnosis.findings, "steps-slow", "count") == 1
    assert fact(diagnosis.findings, "steps-slow", "extra") == "data loading"
    assert diagnosis.causes[0].code == "loader"
    assert [step.name for step in diagnosis.each_step if step.slow] == ["ProfilerStep#6"]
    slow = diagnosis.each_step[6]
    assert (slow.extra, slow.extra_ms) == ("data loading", pytest.approx(10.0, rel=0.02))
    assert all(step.time_ms == pytest.approx(step.busy_ms + step.idle_ms) for step in diagnosis.each_step)


def test_a_slow_first_step_that_is_like_others_counts(tmp_path: Path) -> None:
    assert steps_of([20, 2, 20, 2, 20], mark=LOADER).diagnose(tmp_path / "t.json").view.count == 5
    assert steps_of([40, 2, 20, 2, 20], mark=LOADER).diagnose(tmp_path / "t.json").view.count == 4


@pytest.mark.parametrize("call", ["cudaFree", "hipFree", "cudaMalloc", "hipMalloc"])
def test_allocation_storms_in_two_groups_of_steps(call: str, tmp_path: Path) -> None:
    diagnosis = steps_of([2, 2, 20, 20, 20], call=call).diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code == "allocator"
    assert diagnosis.causes[0].cost_ms == pytest.approx(18 * 3 / 5, rel=0.02)
    assert fact(diagnosis.causes[0].evidence, "cause-host-calls", "name") == call
    assert fact(diagnosis.causes[0].evidence, "cause-host-calls", "count") == 30
    assert fact(diagnosis.findings, "steps-in-two-groups", "fast") == 2
    assert fact(diagnosis.findings, "steps-in-two-groups", "slow_ms") == pytest.approx(20, rel=0.01)
    assert fact(diagnosis.findings, "steps-in-two-groups", "extra") == "memory allocation"


def test_even_steps_are_not_remarkable(tmp_path: Path) -> None:
    diagnosis = steady(6).diagnose(tmp_path / "t.json")
    assert not {"steps-slow", "steps-in-two-groups", "first-step-left-out"} & set(codes(diagnosis.findings))
    assert not any(step.slow or step.extra for step in diagnosis.each_step)


def test_activities_of_other_threads_are_not_the_reason(tmp_path: Path) -> None:
    """An asynchronous checkpoint in a thread of its own does not keep the GPU waiting."""
    builder = steps_of([4, 4, 4, 4])
    builder.mark("save_checkpoint", 1000, 16_000, tid=99)
    assert found_codes(builder, tmp_path) == ["elsewhere"]


@pytest.mark.parametrize(("launches", "expected"), [(True, "allocator"), (False, "elsewhere")])
def test_allocation_counts_on_a_thread_that_launches_kernels(launches: bool, expected: str, tmp_path: Path) -> None:
    """At the end of backward, the main thread waits for backward's thread; a thread that only allocates keeps nobody waiting."""
    builder = steps_of([20, 20, 20], call="hipFree")
    for number, event in enumerate(event for event in builder.events if event["name"] == "cudaLaunchKernel"):
        event["tid"] = 99 if launches and number % 20 >= 10 else 1
    for event in builder.events:
        if event["name"] == "hipFree":
            event["tid"] = 99
    assert found_codes(builder, tmp_path) == [expected]


def found_codes(builder: Builder, tmp_path: Path) -> list[str]:
    return [cause.code for cause in builder.diagnose(tmp_path / "t.json").causes]


def test_work_launched_before_the_recording_belongs_to_no_step(tmp_path: Path) -> None:
    """14 ms of GEMMs of the step before still run when the recording begins."""
    builder = Builder()
    builder.mark("ProfilerStep#6", 100.0, 30_000.0)
    for number in range(14):
        builder.kernel(BF16, 1000.0 * number, 990.0)
    for number in range(20):
        builder.kernel(FP8, 14_200.0 + 1000 * number, 1000.0, launched=14_150.0 + 10 * number)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.account.step_ms == pytest.approx(20.0)
    assert diagnosis.account.busy_ms == pytest.approx(20.0)
    assert {row.precision: row.count for row in diagnosis.account.gemms} == {"FP8": 20}
    assert fact(diagnosis.findings, "work-before-recording", "count") == 14


@pytest.mark.parametrize("steps", [None, 2])
def test_without_marks_such_work_belongs_to_no_step_either(steps: int | None, tmp_path: Path) -> None:
    builder = steady(2)
    builder.events = [event for event in builder.events if "ProfilerStep" not in event["name"]]
    before = Builder()
    before.number = 1000
    for number in range(20):
        before.kernel(FP8, 10.0 * number, 10.0)
    before.kernel(ADAM, 200.0, 50.0)
    builder.events += before.events
    diagnosis = diagnose(read_trace(builder.write(tmp_path / "t.json")), steps)
    assert diagnosis.view.count == 2
    assert diagnosis.account.step_ms == pytest.approx(2.25)
    assert fact(diagnosis.findings, "work-before-recording", "count") == 21


def graphs(kernels: list[int]) -> Builder:
    """Steps of one CUDA graph each, with the given number of recorded kernels."""
    builder = Builder()
    for step, count in enumerate(kernels):
        base = 1000.0 + 10_000 * step
        builder.mark(f"ProfilerStep#{step}", base, 9990)
        builder.kernel(BF16, base + 20, 80.0, launched=base + 10)
        key = 5000 + step
        builder.mark("cudaGraphLaunch", base + 50, 30, "cuda_runtime", args={"correlation": key})
        for number in range(count):
            builder.kernel(FP8, base + 100 + 900 * number, 900.0, args={"correlation": key})
        builder.kernel(ADAM, base + 9200, 500.0, launched=base + 90)
    return builder


def test_kernels_missing_from_a_replayed_graph_are_not_idle_time(tmp_path: Path) -> None:
    whole = graphs([10, 10, 10]).diagnose(tmp_path / "whole.json")
    assert whole.account.unrecorded_ms == 0
    diagnosis = graphs([10, 10, 0, 10]).diagnose(tmp_path / "missing.json")
    assert diagnosis.account.classes_ms[UNRECORDED] == pytest.approx(9.0 / 4, rel=0.02)
    assert sum(diagnosis.account.idle_ms.values()) < 0.7
    assert "launched-kernels-missing" in codes(diagnosis.findings)
    assert not {"host", "idle", "elsewhere"} & {cause.code for cause in diagnosis.causes}
    assert sum(diagnosis.account.classes_ms.values()) == pytest.approx(diagnosis.account.step_ms)


def test_while_the_cpu_waits_for_the_gpu_the_gpu_is_not_idle(tmp_path: Path) -> None:
    """A synchronization returns when the GPU has finished. If no kernels ran before, they were not recorded."""
    builder = steps_of([8, 8, 8])
    for step in range(3):
        builder.mark("cudaStreamSynchronize", 1000 + 8000 * step, 5990, "cuda_runtime", args={"correlation": 900 + step})
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.account.unrecorded_ms == pytest.approx(6.0, rel=0.01)
    assert diagnosis.verdict.code == "step-not-recorded"
    assert "kernels-missing" in codes(diagnosis.findings)
    assert not diagnosis.causes or diagnosis.causes[0].code not in ("host", "elsewhere", "idle")


def test_recomputed_convolutions_count(tmp_path: Path) -> None:
    """With the batch norm and activation after the last of them, until backward does its own work."""
    builder = Builder()
    for step in range(2):
        base = 10_000.0 + 1000 * step
        builder.mark(f"ProfilerStep#{step}", base - 1000, 990)
        at = 0

        def run(name: str, operator: str, time: float, base: float = base, step: int = step) -> None:
            nonlocal at
            key = 1000 * step + at + 1
            builder.mark(operator, base - 900 + 20 * at, 10, "cpu_op", args={"External id": key})
            builder.kernel(name, base + 100 * at, time, launched=base - 899 + 20 * at, args={"External id": key})
            at += 1

        run("implicit_convolve_sgemm", "aten::conv2d", 100)
        run("bn_fw_tr_1C11_kernel_NCHW", "aten::batch_norm", 100)
        builder.mark("autograd::engine::evaluate_function: ReluBackward0", base - 900 + 20 * at - 5, 100, "cpu_op")
        run("implicit_convolve_sgemm", "aten::conv2d", 100)
        run("bn_fw_tr_1C11_kernel_NCHW", "aten::batch_norm", 100)
        run("vectorized_elementwise_kernel", "aten::relu_", 100)
        run("vectorized_elementwise_kernel", "aten::threshold_backward", 100)
        builder.mark("autograd::engine::evaluate_function: ConvolutionBackward0", base - 900 + 20 * at - 5, 100, "cpu_op")
        run("wgrad_alg0_engine", "aten::convolution_backward", 400)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    cause = next(cause for cause in diagnosis.causes if cause.code == "recompute")
    assert cause.cost_ms == pytest.approx(0.3)
    assert fact(cause.evidence, "cause-recomputed-kernels", "kernels") == 3


def test_kernels_that_the_profiler_dropped_are_no_idle_time(tmp_path: Path) -> None:
    """Every launch is early; of the third kernel of each step, only the launch was recorded."""
    builder = Builder()
    for step in range(3):
        base, called = 10_000.0 + 1000 * step, 1000.0 + 200 * step
        builder.mark(f"ProfilerStep#{step}", called - 1, 199)
        for number in range(10):
            builder.kernel(BF16, base + 100 * number, 99.0, launched=called + 10 * number)
            if number == 3:
                del builder.events[-2]
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.account.classes_ms[UNRECORDED] == pytest.approx(0.1, rel=0.02)
    assert "launched-kernels-missing" in codes(diagnosis.findings)
    assert "streams" not in [cause.code for cause in diagnosis.causes]
