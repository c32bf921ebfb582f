"""Recorded training steps, each made to suffer from one cause: the first cause named is the right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmscope.compare.traces import with_twin
from gemmscope.explain.diagnose import diagnose
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.parts import STEP_PARTS
from support.explain_files import FIRST_CAUSE, found_in
from support.traces import RECORDED, as_expected, events_of, fact, recorded


def test_every_recorded_trace_is_expected() -> None:
    assert {path.name.removesuffix(".json.gz") for path in RECORDED.iterdir()} == set(FIRST_CAUSE)


@pytest.mark.parametrize("name", FIRST_CAUSE)
def test_first_cause(name: str) -> None:
    diagnosis = found_in(name)
    assert (diagnosis.causes[0].code if diagnosis.causes else "") == FIRST_CAUSE[name]
    assert all(cause.evidence and cause.cost_ms >= 0 and cause.advice for cause in diagnosis.causes)
    if not diagnosis.causes:
        assert as_expected(diagnosis)


@pytest.mark.parametrize("name", FIRST_CAUSE)
def test_classes_and_parts_sum_to_the_step(name: str) -> None:
    account = found_in(name).account
    assert sum(account.classes_ms.values()) == pytest.approx(account.step_ms, rel=1e-9)
    assert account.named_share >= 0.98
    assert account.step_ms - account.busy_ms == pytest.approx(sum(account.idle_ms.values()), abs=1e-9)
    assert all(time >= 0 for time in account.classes_ms.values())
    assert sum(account.parts_ms.values()) == pytest.approx(account.step_ms, rel=1e-9)
    assert list(account.parts_ms) == [part for part in STEP_PARTS if part in account.parts_ms]


def test_what_casting_weights_again_costs() -> None:
    """The cost agrees with the difference to the same training with `is_first_microbatch`."""
    again, once = found_in("recast_weights"), found_in("cached_weights")
    assert again.causes[0].cost_ms == pytest.approx(again.account.step_ms - once.account.step_ms, rel=0.15)


WALLS_MS = {  # of the same steps, timed without the profiler
    "healthy_te_current": 60.43, "healthy_te_bf16": 83.53, "eager_torchao": 159.56, "backward_in_bf16": 80.71,
    "unaligned_mlp": 82.10, "recompute": 78.06, "long_sequence": 124.63, "large_head": 39.14, "low_clock": 157.62,
    "healthy_torchao_compiled": 49.80, "rowwise_casts": 61.41, "compiled_bf16": 63.67, "idle_loader": 116.83,
    "recast_weights": 75.44, "cached_weights": 68.29, "recompute_torch": 43.38, "unaligned_torchao": 61.04,
}  # fmt: skip


@pytest.mark.parametrize("name", WALLS_MS)
def test_step_time_is_what_a_clock_says(name: str) -> None:
    assert found_in(name).account.step_ms == pytest.approx(WALLS_MS[name], rel=0.05)


def test_flops_are_those_of_the_model() -> None:
    """Four layers of hidden 4096, intermediate 14336, 8 of 32 heads for keys and values; 8192 tokens, vocabulary 16384."""
    per_token = 4 * (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336) + 4096 * 16384
    for name in ("healthy_te_current", "healthy_te_bf16", "eager_torchao", "healthy_te_block"):
        assert sum(row.flops for row in found_in(name).account.gemms) == pytest.approx(6 * 8192 * per_token)
    assert found_in("healthy_te_current").evidence.low_share == 1.0
    assert found_in("backward_in_bf16").evidence.low_share == pytest.approx(1 / 3)


def test_counts() -> None:
    current, delayed = found_in("healthy_te_current").account, found_in("healthy_te_delayed").account
    assert current.low_gemms == delayed.low_gemms == 48  # four linears, three passes, four layers
    assert current.quantization_kernels > 3 * delayed.quantization_kernels - 5  # maxima and scales of their own
    assert found_in("accumulation_host_bound").account.micro_batches == 4


@pytest.mark.parametrize("name", ["low_clock", "idle_loader", "recompute", "unaligned_mlp"])
def test_a_cost_is_what_the_healthy_run_saves(name: str) -> None:
    """The step time minus the cost is about the step time of the same training without the cause."""
    diagnosis, healthy = found_in(name), found_in("healthy_te_current").account.step_ms
    assert diagnosis.account.step_ms - diagnosis.causes[0].cost_ms == pytest.approx(healthy, rel=0.07)


def test_weights_cast_again_cost_what_caching_saves() -> None:
    """With `is_first_microbatch`, quantization of the same training is shorter by about the cost."""
    again = next(cause for cause in found_in("accumulation_host_bound").causes if cause.code == "recast")
    assert fact(again.evidence, "cause-casts-per-micro-batch", "micro_batches") == 4
    cached = found_in("accumulation_host_bound_cached")
    assert "recast" not in [cause.code for cause in cached.causes]
    saved = found_in("accumulation_host_bound").account.classes_ms["quantization"] - cached.account.classes_ms["quantization"]
    assert again.cost_ms == pytest.approx(saved, rel=0.1)


def test_evidence_is_concrete() -> None:
    unaligned = found_in("unaligned_mlp").causes[0]
    assert fact(unaligned.evidence, "cause-odd-sizes", "sizes") == ["14328"]
    assert any("nvjet" in kernel for kernel in unaligned.kernels)
    assert fact(found_in("low_clock").causes[0].evidence, "cause-clock", "clock_mhz") == pytest.approx(600)
    assert "NVTE_BACKWARD_OVERRIDE" in " ".join(found_in("backward_in_bf16").causes[0].advice)


def test_twins_account_for_the_difference() -> None:
    pair = with_twin(found_in("healthy_te_bf16"), found_in("healthy_te_current"))
    before, after = found_in("healthy_te_bf16").account.step_ms, found_in("healthy_te_current").account.step_ms
    assert sum(part.difference_ms or 0 for part in pair.parts) == pytest.approx(after - before)
    assert pair.parts[0].part == "GEMMs"
    assert 1.8 < (pair.parts[0].speedup or 0) < 2.0
    assert pair.parts[-1].speedup == pytest.approx(before / after)


@pytest.mark.parametrize("name", ["healthy_torchao_compiled", "rowwise_casts"])
def test_norms_do_not_vanish_into_casts(name: str) -> None:
    """A compiler fuses norms with casts. Compared with BF16, where they are separate, norms take about as long."""
    rows = {part.part: part for part in with_twin(found_in("compiled_bf16"), found_in(name)).parts}
    norms, casts = rows["norms and activations"], rows["quantization"]
    assert norms.expected_ms is not None
    assert 0.7 < norms.trace_ms / norms.expected_ms < 1.6
    assert casts.trace_ms < found_in(name).account.classes_ms["quantization"]
    assert sum(part.trace_ms for part in rows.values()) == pytest.approx(found_in(name).account.step_ms)


# What a trace may lack. The diagnosis must still be right, or say less.
def _without(raw: dict[str, Any], keep: Any) -> dict[str, Any]:
    return {**raw, "traceEvents": [event for event in raw["traceEvents"] if keep(event)]}


def _no_shapes(event: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in event.get("args", {}).items() if key not in ("Input Dims", "Input type")}
    return {**event, "args": kept}


def _no_correlation(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "args": {key: value for key, value in event.get("args", {}).items() if key != "correlation"}}


def _as_text(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, **{key: str(event[key]) for key in ("ts", "dur") if key in event}}


GPU_ONLY = ("kernel", "gpu_memcpy", "gpu_memset")
LACKS = {
    "operators": lambda raw: _without(raw, lambda event: event.get("cat") != "cpu_op"),
    "shapes": lambda raw: {**raw, "traceEvents": [_no_shapes(event) for event in raw["traceEvents"]]},
    "step marks": lambda raw: _without(raw, lambda event: not event["name"].startswith("ProfilerStep")),
    "correlations": lambda raw: {**raw, "traceEvents": [_no_correlation(event) for event in raw["traceEvents"]]},
    "all marks": lambda raw: _without(raw, lambda event: "annotation" not in event.get("cat", "")),
    "everything but kernels": lambda raw: _without(raw, lambda event: event.get("cat") in GPU_ONLY),
    "numbers, which are text": lambda raw: {**raw, "traceEvents": [_as_text(event) for event in raw["traceEvents"]]},
}
CAREFUL = {"host": "idle", "elsewhere": "idle", "backward-high": "left-out", "unfused": "rest"}  # what can be said with less


@pytest.mark.parametrize("lacking", LACKS)
@pytest.mark.parametrize(
    "name", ["eager_torchao", "host_bound", "backward_in_bf16", "recompute", "long_sequence", "large_head", "healthy_te_delayed"]
)
def test_with_less_in_the_trace(name: str, lacking: str, tmp_path: Path) -> None:
    path = tmp_path / "less.json"
    path.write_text(json.dumps(LACKS[lacking](events_of(recorded(name)))))
    diagnosis = diagnose(read_trace(path))
    first = diagnosis.causes[0].code if diagnosis.causes else ""
    assert first in (FIRST_CAUSE[name], CAREFUL.get(FIRST_CAUSE[name]))
    assert sum(diagnosis.account.classes_ms.values()) == pytest.approx(diagnosis.account.step_ms, rel=1e-9)
