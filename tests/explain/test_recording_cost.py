"""What the profiler itself costs: named where it is not known, corrected where steps were timed without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.compare.traces import with_twin
from gemmscope.explain.diagnose import TraceDiagnosis, diagnose
from gemmscope.explain.recorded_trace import read_trace
from support.traces import BF16, FP8, Builder, codes, fact, shared_trace


def recorded(
    path: Path, kernel: str, late_us: float, *, shapes: bool = True, kernel_us: float = 100.0, **head: object
) -> TraceDiagnosis:
    """Three steps of ten GEMMs of `kernel_us`, each of which begins `late_us` after the one before has ended."""
    trace, moment = Builder(), 10_000.0
    for step in range(3):
        first = moment
        for number in range(10):
            key = {"External id": 100 * step + number + 1}
            sizes = {"Input Dims": [[8192, 4096], [4096, 4096]]} if shapes else {}
            trace.mark("aten::mm", moment - 7, 6, "cpu_op", args={**key, **sizes})
            trace.kernel(kernel, moment, kernel_us, launched=moment - 5, args=key)
            moment += kernel_us + late_us
        trace.mark(f"ProfilerStep#{step}", first - 9, moment - first)
        trace.mark("Optimizer.zero_grad#SGD", first - 9, 1)
    return trace.diagnose(path, **head)


def test_recorded_shapes_may_be_why_launches_are_late(tmp_path: Path) -> None:
    slowed, plain = (recorded(tmp_path / f"{shapes}.json", FP8, 60.0, shapes=shapes) for shapes in (True, False))
    assert fact(slowed.findings, "recording-may-slow", "options") == ["operator shapes"]
    assert "recording-may-slow" not in codes(plain.findings)
    assert "recording-may-slow" not in codes(recorded(tmp_path / "busy.json", FP8, 0.5).findings)


def test_no_speedup_of_a_step_that_recording_slowed(tmp_path: Path) -> None:
    comparison = with_twin(recorded(tmp_path / "slow.json", BF16, 1.0), recorded(tmp_path / "fast.json", FP8, 60.0))
    assert "twin-speedup" not in codes(comparison.findings)
    assert fact(comparison.findings, "twin-recording", "files") == ["fast.json"]
    assert comparison.parts[-1].speedup is None


def test_kernels_without_durations_have_no_speedup(tmp_path: Path) -> None:
    """As damaged traces have them: the GPU is never busy."""
    slow = recorded(tmp_path / "slow.json", BF16, 60.0)
    comparison = with_twin(slow, recorded(tmp_path / "fast.json", FP8, 60.0, kernel_us=0.0))
    assert not {"twin-speedup", "twin-recording"} & set(codes(comparison.findings))


def test_steps_timed_without_the_profiler_correct_idle_time_and_comparisons(tmp_path: Path) -> None:
    """The recorded step takes 1.6 ms, and 1.2 ms without the profiler: 0.4 of its 0.6 ms of waiting are due to recording."""
    fast = recorded(tmp_path / "fast.json", FP8, 60.0, gemmscope={"plain_steps_ms": [1.2, 1.19, 1.3]})
    slow = recorded(tmp_path / "slow.json", BF16, 1.0, gemmscope={"plain_steps_ms": [1.8, 1.8]})
    assert fact(fast.findings, "recording-slows", "excess_ms") == pytest.approx(0.4, abs=0.02)
    late = next(cause for cause in fast.causes if cause.code == "host")
    assert late.cost_ms == pytest.approx(0.2, abs=0.02)
    comparison = with_twin(slow, fast)
    assert fact(comparison.findings, "twin-speedup", "after_ms") == pytest.approx(1.2, abs=0.02)


def test_a_compiled_loop_of_transformers() -> None:
    """Recorded, its step in FP8 takes 255 ms; the loop takes 181 ms without the profiler, in BF16 and in FP8."""
    slow, fast = (diagnose(read_trace(shared_trace(f"hf_qwen3_{name}_h200.json.gz"))) for name in ("bf16", "fp8"))
    assert "recording-may-slow" in codes(fast.findings)
    assert "recording-may-slow" not in codes(slow.findings)
    assert fact(with_twin(slow, fast).findings, "twin-recording", "speedup") == pytest.approx(1.13, abs=0.01)
