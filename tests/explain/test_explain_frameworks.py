"""Traces as other frameworks and GPUs make them, from a simulated training: the first cause is the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.compare.traces import with_twin
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.recorded_trace import GpuWork
from support.traces import as_expected, codes, fact
from support.training import B200_MXFP8, B200_NVFP4, H100, HIDDEN, Chip, Job, Low

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def first(diagnosis: TraceDiagnosis) -> str:
    assert sum(diagnosis.account.classes_ms.values()) == pytest.approx(diagnosis.account.step_ms)
    return diagnosis.causes[0].code if diagnosis.causes else ""


@pytest.mark.parametrize("chip", [H100, B200_MXFP8, B200_NVFP4])
def test_healthy_on_several_chips(chip: Chip, tmp_path: Path) -> None:
    diagnosis = Job(chip).steps().explained(tmp_path)
    assert as_expected(diagnosis)
    assert diagnosis.account.named_share == 1


@pytest.mark.parametrize(
    ("low", "cause"),
    [
        (lambda layer, part: False, "not-low"),
        (lambda layer, part: part != "wgrad", "backward-high"),
        (lambda layer, part: part == "fprop", "backward-high"),
        (lambda layer, part: layer in (1, 2), "left-out"),  # of the same sizes as those that run low
    ],
)
def test_what_runs_high(low: Low, cause: str, tmp_path: Path) -> None:
    diagnosis = Job(B200_NVFP4, low).steps().explained(tmp_path)
    assert [named.code for named in diagnosis.causes] == [cause]


def test_layers_left_out_and_wgrad_high_at_once(tmp_path: Path) -> None:
    diagnosis = Job(B200_NVFP4, lambda layer, part: layer > 0 and part != "wgrad").steps().explained(tmp_path)
    assert {cause.code for cause in diagnosis.causes} == {"backward-high", "left-out"}
    kept = next(cause for cause in diagnosis.causes if cause.code == "backward-high")
    assert fact(kept.evidence, "cause-high-backward", "passes") == ["wgrad"]
    assert fact(kept.evidence, "cause-high-backward", "share") == pytest.approx(0.25)


@pytest.mark.parametrize("marked", [True, False])
def test_lightning_trains_inside_of_the_optimizer(marked: bool, tmp_path: Path) -> None:
    """Lightning passes forward and backward to `optimizer.step` as a closure: they do not count as optimizer."""
    job = Job()
    for number in range(3):
        name = f"ProfilerStep#{number}" if marked else "batch"
        with job.inside(name, "user_annotation"), job.inside("Optimizer.step#AdamW.step", "user_annotation"):
            job.backward(job.forward())
            job.optimize()
    diagnosis = job.explained(tmp_path)
    assert as_expected(diagnosis)
    assert len(diagnosis.view.steps.chosen) == 3
    assert diagnosis.account.classes_ms["optimizer"] == pytest.approx(0.8)


def test_an_optimizer_for_every_parameter(tmp_path: Path) -> None:
    """Optimizers that step inside backward do not end a step. The profiler's marks do."""
    job = Job()
    for number in range(3):
        with job.inside(f"ProfilerStep#{number}", "user_annotation"):
            for launched in job.forward():
                job.backward([launched])
                with job.node("AccumulateGrad"), job.inside("Optimizer.step#AdamW.step", "user_annotation"):
                    job.optimize()
    diagnosis = job.explained(tmp_path)
    assert len(diagnosis.view.steps.chosen) == 3
    assert diagnosis.account.classes_ms["optimizer"] == pytest.approx(0.8 * 16)


@pytest.mark.parametrize("ahead", [0, 3])
def test_micro_batches_of_a_pipeline(ahead: int, tmp_path: Path) -> None:
    """Several forward passes before the first backward, as in 1F1B's warm-up. Each is a micro-batch that casts the weights."""
    job = Job(layers=2, cast=150.0)
    for number in range(2):
        with job.inside(f"ProfilerStep#{number}", "user_annotation"):
            waiting = [job.forward() for _ in range(ahead)]
            for _ in range(8 - ahead):
                waiting.append(job.forward())
                job.backward(waiting.pop(0))
            for micro_batch in waiting:
                job.backward(micro_batch)
            job.optimize()
    diagnosis = job.explained(tmp_path)
    assert diagnosis.account.micro_batches == 8
    assert first(diagnosis) == "recast"
    repeated_ms = 7 * 2 * 2 * 0.3  # half of the forward casts, except in the first micro-batch
    assert diagnosis.causes[0].cost_ms == pytest.approx(repeated_ms, rel=0.2)


def test_one_graph_for_the_whole_step(tmp_path: Path) -> None:
    """Kernels of a CUDA graph share one launch, and no operator is known."""
    job, captured = Job(), Job().steps(1).events
    kernels = sorted((event for event in captured if event["cat"] == "kernel"), key=lambda event: event["ts"])
    for number in range(3):
        with job.inside(f"ProfilerStep#{number}", "user_annotation"):
            first_of_graph = len(job.events)
            for event in kernels:
                job.launch(event["name"], event["dur"])
            replayed = job.events[first_of_graph:]
            one = replayed[1]
            job.events[first_of_graph:] = [event for event in replayed if event["cat"] == "kernel"] + [
                {**one, "name": "cudaGraphLaunch"}
            ]
            for event in replayed:
                event["args"]["correlation"] = one["args"]["correlation"]
    diagnosis = job.explained(tmp_path)
    assert as_expected(diagnosis)
    assert diagnosis.account.launches == 1


def test_gathered_parameters_are_exposed(tmp_path: Path) -> None:
    job = Job()
    for number in range(3):
        with job.inside(f"ProfilerStep#{number}", "user_annotation"):
            done = job.forward()
            for at in range(0, len(done), 4):
                job.launch(GATHER, 9000.0, stream=30, after=7)
                job.free[7] = job.free[30]
                job.backward(done[at : at + 4])
            job.optimize()
    assert first(job.explained(tmp_path)) == "communication"


def test_copies_between_gpus_are_communication(tmp_path: Path) -> None:
    job = Job().steps(2)
    job.kernel("Memcpy PtoP (Device -> Device)", 20_000.0, 500.0, stream=40, cat="gpu_memcpy")
    diagnosis = job.explained(tmp_path)
    assert diagnosis.account.hidden_ms == pytest.approx(0.25, rel=0.05)
    assert "copies" not in diagnosis.account.classes_ms


def test_precision_that_nothing_tells_is_not_called_high(tmp_path: Path) -> None:
    job = Job(Chip("NVIDIA H100 80GB HBM3", "matmul_kernel", "matmul_kernel", "other", (600, 600))).steps()
    diagnosis = job.explained(tmp_path)
    assert "not-low" not in [cause.code for cause in diagnosis.causes]
    assert not as_expected(diagnosis)
    assert "gemm-precision-unknown" in codes(diagnosis.findings)


def test_without_launches_the_host_does_not_mark_steps(tmp_path: Path) -> None:
    """The host runs far ahead, so its marks are before the GPU's work. The optimizer's kernels end the steps."""
    job = Job().steps()
    job.events = [event for event in job.events if event["cat"] != "cuda_runtime"]
    diagnosis = job.explained(tmp_path)
    assert as_expected(diagnosis)
    assert diagnosis.view.steps.found_by == "optimizer kernels"
    assert diagnosis.account.idle_share < 0.02


def test_odd_ids_and_names_are_read(tmp_path: Path) -> None:
    job = Job().steps()
    for odd in ("--5", "²", "٣", {}, "9" * 40):
        job.kernel("odd \ud800 name", 1500.0, 0.1, stream=odd, args={"correlation": odd, "External id": odd})
    diagnosis = job.explained(tmp_path)
    assert first(diagnosis) == ""
    assert [kernel.name for kernel in diagnosis.account.unknown] == ["odd ? name"]
    assert all(isinstance(work, GpuWork) for work in diagnosis.trace.work)


def test_offloading_that_nothing_hides(tmp_path: Path) -> None:
    job = Job()
    for number in range(3):
        with job.inside(f"ProfilerStep#{number}", "user_annotation"):
            job.backward(job.forward())
            job.launch("Memcpy DtoH (Device -> Pinned)", 20_000.0, stream=50, after=7, cat="gpu_memcpy")
            job.free[7] = job.free[50]
            job.optimize()
    diagnosis = job.explained(tmp_path)
    assert [cause.code for cause in diagnosis.causes] == ["copies"]
    assert diagnosis.causes[0].cost_ms == pytest.approx(20, rel=0.01)


def test_times_that_are_not_microseconds_are_said(tmp_path: Path) -> None:
    """GEMMs a thousand times below the peak rate are not throttling."""
    job = Job().steps()
    for event in job.events:
        event["ts"], event["dur"] = 1000 * event["ts"], 1000 * event["dur"]
    diagnosis = job.explained(tmp_path)
    assert not diagnosis.causes
    assert "times-not-microseconds" in codes(diagnosis.findings)


def test_casts_of_a_function_that_is_named_after_its_format(tmp_path: Path) -> None:
    """In torchao's eager MXFP8, the autograd function of the GEMM casts in many small kernels."""
    job = Job(B200_MXFP8, cast=0.5)
    small = [
        f"void at::native::vectorized_elementwise_kernel<4, {name}>" for name in ("Abs", "Max", "Clamp", "Mul", "Shift", "Copy")
    ]
    for number in range(3):
        with job.inside(f"ProfilerStep#{number}", "user_annotation"):
            done = job.forward()
            for _ in range(12):
                with job.inside("mx_mm"):
                    for name in small:
                        job.launch(name, 150.0)
                    job.product(True, HIDDEN, HIDDEN)
            job.backward(done)
            job.optimize()
    diagnosis = job.explained(tmp_path)
    assert diagnosis.account.classes_ms["quantization"] > 12 * 6 * 0.15


def test_a_pair_without_shapes_cannot_be_checked(tmp_path: Path) -> None:
    sides = []
    for name, low in (("slow", False), ("fast", True)):
        job = Job(low=lambda layer, part, low=low: low).steps()  # type: ignore[misc]
        for event in job.events:
            event.get("args", {}).pop("Input Dims", None)
        (tmp_path / name).mkdir()
        sides.append(job.explained(tmp_path / name))
    findings = with_twin(*sides).findings
    assert fact(findings, "twin-not-checked", "gemms_before") == pytest.approx(48)
