"""The cost of a cause comes from replaying the step without it, not from subtraction."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.explain.diagnose import TraceDiagnosis, diagnose
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.explain.step_replay import StepChange, replayed_speedup, replayed_us, step_graphs
from support.explain_files import FIRST_CAUSE, REAL_FIXES, found_in, with_the_fix
from support.traces import BF16, Builder, shared_trace

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OTHER = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>"

REMOVED = ("recast", "unfused", "recompute")  # work whose launches disappear too


def halved(diagnosis: TraceDiagnosis, text: str = "nvjet") -> float:
    """Milliseconds of a step with these kernels at half their time."""
    items = [item for item in diagnosis.evidence.items if item.mentions(text)]
    return replayed_us(step_graphs(diagnosis.view), StepChange.shorten(items, 0.5)) / 1000 / diagnosis.view.count


def early(step: int, number: int = 0) -> float:
    """The launch time of a kernel if the CPU runs far ahead."""
    return 5000.0 + 200 * step + 5 * number


def one_stream(late: float = 0.0, sync: bool = False) -> Builder:
    """Two steps of ten kernels of 100 us. `late`: microseconds between launches; 0 launches them far ahead."""
    builder = Builder()
    moment = 10_000.0
    for step in range(2):
        begin = moment if late or sync else early(step)
        for number in range(10):
            call = begin + (late or 5) * number
            moment = max(moment, call + 5)
            builder.kernel(BF16, moment, 100.0, launched=call)
            moment += 100.0
        if sync:
            builder.mark("cudaStreamSynchronize", begin + 60, moment + 2 - begin - 60, "cuda_runtime")
            for number in range(5):
                builder.kernel(OTHER, moment + 10 + 60 * number, 50.0, launched=moment + 4 + 60 * number)
            moment += 310
        builder.mark(f"ProfilerStep#{step}", begin - 1, (moment if late or sync else early(step + 1)) - begin)
    return builder


@pytest.mark.parametrize("name", FIRST_CAUSE)
def test_without_a_change_every_step_takes_what_it_took(name: str) -> None:
    diagnosis = found_in(name)
    graphs = step_graphs(diagnosis.view)
    recorded_us = sum(step.time for step in diagnosis.view.steps.chosen)
    assert replayed_us(graphs, StepChange()) == pytest.approx(recorded_us, rel=1e-3)
    for cause in diagnosis.causes:
        subtracted = diagnosis.account.step_ms / (diagnosis.account.step_ms - cause.cost_ms)
        assert cause.speedup_without >= 1
        assert cause.code in REMOVED or cause.speedup_without <= 1.01 * subtracted


@pytest.mark.parametrize("name", ["low_clock", "idle_loader", "recompute", "unaligned_mlp"])
def test_the_replayed_step_is_the_healthy_one(name: str) -> None:
    """The replayed step time agrees with the same training without the cause."""
    diagnosis, healthy = found_in(name), found_in("healthy_te_current").account.step_ms
    assert diagnosis.account.step_ms / diagnosis.causes[0].speedup_without == pytest.approx(healthy, rel=0.07)


# Slower GEMMs in blocks; another clock; another clock; the compiler also fuses norms and activations
KNOWN_ONLY_AS_A_RANGE = ("healthy_te_block", "long_sequence", "idle_loader", "eager_torchao")


@pytest.mark.parametrize(("before", "after", "codes"), REAL_FIXES)
def test_the_replay_predicts_the_step_with_the_fix(before: str, after: str, codes: list[str]) -> None:
    """Pairs that were recorded on an H200 with and without the cause."""
    (predicted_ms, most_ms, least_ms), real_ms = with_the_fix(before, after, codes)
    assert least_ms / 1.025 < real_ms < 1.025 * most_ms
    within = 0.10 if {before, after} & {*KNOWN_ONLY_AS_A_RANGE} else 0.05
    assert predicted_ms == pytest.approx(real_ms, rel=within)


def test_a_promise_of_low_precision_holds_where_the_cpu_cannot_launch_the_casts() -> None:
    """Hugging Face's Qwen3 on an H200: 181.6 ms per step in BF16 and 181.1 ms in FP8, because the casts double the launches."""
    (cause,) = diagnose(read_trace(shared_trace("hf_qwen3_bf16_h200.json.gz"))).causes
    assert cause.speedup_range is not None
    assert cause.speedup_range[0] == 1.0
    (host,) = diagnose(read_trace(shared_trace("hf_qwen3_fp8_h200.json.gz"))).causes
    assert host.speedup_range is not None
    assert host.speedup_range[0] == 1.0  # the recording made this step host-bound
    assert "cause-range-recording" in {finding.code for finding in host.evidence}


def test_what_is_not_launched_is_gained_where_launches_are_late() -> None:
    """Casts of weights in a host-bound step: without them the CPU launches fewer kernels, as a recorded trace shows."""
    diagnosis, cached = found_in("accumulation_host_bound"), found_in("accumulation_host_bound_cached").account.step_ms
    again = next(cause for cause in diagnosis.causes if cause.code == "recast")
    assert diagnosis.account.step_ms / again.speedup_without == pytest.approx(cached, rel=0.03)
    assert diagnosis.account.step_ms - again.cost_ms > 1.04 * cached  # subtracting promises less


def test_where_launches_are_early_shorter_work_is_gained(tmp_path: Path) -> None:
    diagnosis = one_stream().diagnose(tmp_path / "t.json")
    assert diagnosis.account.step_ms == pytest.approx(1.0, rel=0.01)
    assert halved(diagnosis) == pytest.approx(0.5, rel=0.01)


def test_where_launches_are_late_shorter_work_gains_nothing(tmp_path: Path) -> None:
    """Kernels of 100 us launched every 120 us: at 50 us they would wait for the same launches."""
    diagnosis = one_stream(120).diagnose(tmp_path / "t.json")
    assert diagnosis.account.step_ms - halved(diagnosis) < 0.06
    items = [item for item in diagnosis.evidence.items if item.mentions("nvjet")]
    assert diagnosis.evidence.ms(items) == pytest.approx(1.0)


def test_a_wait_of_the_cpu_ends_with_the_work_it_waits_for(tmp_path: Path) -> None:
    """Launches after the wait move forward by the time saved before it."""
    diagnosis = one_stream(sync=True).diagnose(tmp_path / "t.json")
    assert diagnosis.account.step_ms - halved(diagnosis) == pytest.approx(0.5, abs=0.08)


def _two_streams() -> Builder:
    """Computation, then a collective on another stream, which computation waits for."""
    builder = Builder()
    for step in range(2):
        base = 10_000.0 + 3000 * step
        builder.mark(f"ProfilerStep#{step}", early(step) - 1, 199)
        builder.kernel(BF16, base, 1000.0, launched=early(step, 0))
        builder.kernel(NCCL, base + 1003, 600.0, stream=20, launched=early(step, 1))
        builder.kernel(BF16, base + 1002, 200.0, launched=early(step, 3))
        builder.kernel(OTHER, base + 1606, 1394.0, launched=early(step, 4))
    return builder


def test_work_still_waits_for_another_stream(tmp_path: Path) -> None:
    """The second GEMM runs beside the collective, so shortening it gains nothing."""
    diagnosis = _two_streams().diagnose(tmp_path / "t.json")
    assert diagnosis.account.step_ms == pytest.approx(3.0, rel=0.02)
    assert diagnosis.account.step_ms - halved(diagnosis) == pytest.approx(0.5, abs=0.01)


def test_a_recorded_wait_for_an_event_is_kept(tmp_path: Path) -> None:
    """The collective ended long before the work that waits for it began; once that is earlier, it has to wait."""
    builder = Builder()
    for step in range(2):
        base = 10_000.0 + 3000 * step
        builder.mark(f"ProfilerStep#{step}", early(step) - 1, 199)
        builder.kernel(NCCL, base, 1800.0, stream=20, launched=early(step, 0))
        builder.kernel(BF16, base, 2000.0, launched=early(step, 1))
        builder.mark("cudaStreamWaitEvent", early(step, 2), 1, "cuda_runtime")
        builder.kernel(OTHER, base + 2001, 999.0, launched=early(step, 3))
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.account.step_ms - halved(diagnosis) == pytest.approx(0.2, abs=0.01)


def test_waiting_for_data_without_recorded_launches(tmp_path: Path) -> None:
    """A copy without a recorded launch ends the gap: what the loader took of it is gained."""
    builder = Builder()
    for step in range(3):
        base = 10_000.0 + 3000 * step
        builder.mark(f"ProfilerStep#{step}", base - 10, 2990.0)
        builder.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", base + 20, 900.0)
        builder.events.append({"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7,
                               "ts": base + 1000, "dur": 100, "args": {"stream": 7, "device": 0}})  # fmt: skip
        for number in range(18):
            builder.kernel(BF16, base + 1100 + 100 * number, 99.0, launched=base + 950 + number)
        builder.kernel(OTHER, base + 2900, 90.0, launched=base + 970)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    loader = next(cause for cause in diagnosis.causes if cause.code == "loader")
    assert loader.cost_ms == pytest.approx(0.6)  # of three steps, the first begins with its copy
    assert diagnosis.account.step_ms / loader.speedup_without == pytest.approx((1.89 + 2 * 2.1) / 3, rel=0.01)


def replayed_ms(diagnosis: TraceDiagnosis, kernel: str, share: float) -> float:
    items = [item for item in diagnosis.evidence.items if item.mentions(kernel)]
    return replayed_us(step_graphs(diagnosis.view), StepChange.shorten(items, share)) / 1000 / diagnosis.view.count


@pytest.mark.parametrize("overlap", [0.2, 20.0])
def test_kernels_that_overlap_on_a_stream_keep_their_order(overlap: float, tmp_path: Path) -> None:
    """Ten kernels of one graph launch, each begins before the one before has ended: at half their time, half the step."""
    builder = Builder()
    for step in range(2):
        base = 10_000.0 + 1100 * step
        builder.mark(f"ProfilerStep#{step}", early(step) - 1, 199)
        builder.mark("cudaGraphLaunch", early(step), 100, "cuda_runtime", args={"correlation": 7000 + step})
        for number in range(10):
            begin = base + number * (100 - overlap)
            builder.kernel(BF16, begin, 100.0, args={"correlation": 7000 + step})
        builder.kernel(OTHER, begin + 100, base + 1100 - begin - 100, launched=early(step, 30))
    diagnosis = builder.diagnose(tmp_path / "t.json")
    recorded_ms, gain = 1.1, (1.0 - 0.009 * overlap) / 2  # of the time from the first to the last
    assert diagnosis.account.step_ms == pytest.approx(recorded_ms, rel=0.01)
    assert replayed_ms(diagnosis, "nvjet", 0.5) == pytest.approx(recorded_ms - gain, rel=0.01)


def test_a_blocking_copy_waits_and_is_no_time_of_the_cpu(tmp_path: Path) -> None:
    """The CPU launches 900 us of work, sits in a copy until it is done, and needs 300 us for the next launches."""
    builder = Builder()
    for step in range(4):
        base = 10_000.0 + 1300 * step
        builder.mark(f"ProfilerStep#{step}", base - 5, 1299)
        for number in range(9):
            builder.kernel(BF16, base + 5 + 100 * number, 100.0, launched=base + number)
        copy = {"correlation": 9000 + step}
        builder.mark("hipMemcpyWithStream", base + 20, 890 + 60, "cuda_runtime", args=copy)
        builder.events.append({"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "pid": 0, "tid": 7,
                               "ts": base + 905, "dur": 1, "args": {"stream": 7, "device": 0, **copy}})  # fmt: skip
    diagnosis = builder.diagnose(tmp_path / "t.json")
    first, *others = step_graphs(diagnosis.view)
    assert first.step.time == pytest.approx(1300, rel=0.01)
    assert first.host_us == pytest.approx(380, rel=0.1)  # of its own
    assert replayed_ms(diagnosis, "nvjet", 0.5) == pytest.approx((4 * 1.3 - 4 * 0.45) / 4, rel=0.01)
    assert len(others) == 3


@pytest.mark.parametrize(("name", "gain"), [("flux_mi300x", 1.37), ("sglang_qwen3_moe_decode_b300", 1.27)])
def test_gains_that_other_traces_state(name: str, gain: float) -> None:
    """Low-precision GEMMs: the time that is removed is gained, although kernels of a stream overlap."""
    diagnosis = diagnose(read_trace(shared_trace(f"{name}.json.gz")))
    graphs, evidence = step_graphs(diagnosis.view), diagnosis.evidence
    items = [item for item in evidence.items if item.work_class.is_gemm]
    removed_ms = evidence.step_ms * (1 - 1 / gain)
    change = StepChange.shorten(items, removed_ms / evidence.ms(items))
    assert replayed_speedup(graphs, change) == pytest.approx(gain, rel=0.02)


def test_communication_that_the_cpu_hides_gains_nothing() -> None:
    """A host-bound step of ResNet on two A100: without its collectives the launches take as long."""
    diagnosis = diagnose(read_trace(shared_trace("resnet_ddp_a100.json.gz")))
    exposed = [cause for cause in diagnosis.causes if cause.code == "communication"]
    assert all(cause.speedup_without < 1.03 for cause in exposed)
