"""Comparisons of traces: a different precision, GPU or batch is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.compare.traces import with_twin
from gemmscope.errors import UserError
from gemmscope.explain.diagnose import TraceDiagnosis
from support.explain_files import found_in
from support.traces import BF16, FP8, Builder, codes, fact

FP16 = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNN"


def diagnosed(path: Path, kernel: str, rows: int = 8192, gpu: str = "NVIDIA H200", shapes: bool = True) -> TraceDiagnosis:
    trace = Builder()
    for step in range(2):
        base = 10_000.0 * (step + 1)
        trace.mark(f"ProfilerStep#{step}", base - 2000, 9990)
        trace.mark("Optimizer.step#AdamW.step", base - 100, 10)
        for number in range(9):
            key = {"External id": 100 * step + number + 1}
            sizes = {"Input Dims": [[rows, 4096], [4096, 4096]]} if shapes or number else {}
            trace.mark("aten::mm", base - 1500 + 10 * number, 5, "cpu_op", args={**key, **sizes})
            trace.kernel(kernel, base + 1000 * number, 1000.0, launched=base - 1499 + 10 * number, args=key)
    return trace.diagnose(path, deviceProperties=[{"name": gpu}])


def test_the_precision_of_the_baseline_is_named(tmp_path: Path) -> None:
    low, half = diagnosed(tmp_path / "low.json", FP8), diagnosed(tmp_path / "half.json", FP16)
    usual = with_twin(diagnosed(tmp_path / "high.json", BF16), low)
    assert usual.title == "Comparison with the BF16 trace"
    assert not {"twin-same-precision", "twin-baseline-precision", "twin-gpus-differ"} & set(codes(usual.findings))
    other = with_twin(half, low)
    assert other.title == "Comparison with the FP16 trace"
    assert fact(other.findings, "twin-baseline-precision", "precision") == "FP16"
    same = with_twin(low, diagnosed(tmp_path / "again.json", FP8))
    assert same.title == "Comparison with the FP8 trace"
    assert fact(same.findings, "twin-same-precision", "precision") == "FP8"


def test_another_gpu_is_said(tmp_path: Path) -> None:
    pair = with_twin(diagnosed(tmp_path / "a.json", BF16, gpu="NVIDIA A100-SXM4-80GB"), diagnosed(tmp_path / "b.json", FP8))
    assert fact(pair.findings, "twin-gpus-differ", "before") == "NVIDIA A100-SXM4-80GB"


def test_another_batch_is_said(tmp_path: Path) -> None:
    large, small = diagnosed(tmp_path / "a.json", BF16), diagnosed(tmp_path / "b.json", FP8, rows=4096)
    with pytest.raises(UserError, match="with 8,192 and 4,096 rows: a different batch or sequence length"):
        with_twin(large, small)
    unchecked = with_twin(diagnosed(tmp_path / "c.json", BF16, shapes=False), small)
    assert fact(unchecked.findings, "twin-batches-differ", "before") == 8192


def test_recorded_twins_are_comparable() -> None:
    pair = with_twin(found_in("healthy_te_bf16"), found_in("healthy_te_current"))
    assert all(finding.level == "note" for finding in pair.findings)
