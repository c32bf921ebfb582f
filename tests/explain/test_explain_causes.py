"""Causes that no recorded trace suffers from, on traces made by hand."""

from __future__ import annotations

from pathlib import Path

from support.traces import ADAM, BF16, CAST, FP8, Builder, fact

UPDATE = "transformer_engine::delayed_scaling_recipe::amax_and_scale_update_impl::kernel_bulk(AmaxParams)"
REDUCE = "ncclDevKernel_AllReduce_Max_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def gemms(size: tuple[int, int, int], low_us: float, high_us: float, cast_us: float) -> Builder:
    """Two steps: each of ten low-precision GEMMs with a cast, and two of the same size in BF16 behind them."""
    builder = Builder()
    m, k, n = size
    moment, at = 10_000.0, 500.0
    for step in range(2):
        began = at
        for number in range(12):
            low = number < 10
            key = 100 * step + number + 1
            told = {"External id": key, "Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
            builder.mark("aten::_scaled_mm" if low else "aten::mm", at - 1, 8, "cpu_op", args=told)
            if low:
                builder.kernel(CAST, moment, cast_us, launched=at - 3)
                moment += cast_us
            time = low_us if low else high_us
            builder.kernel(FP8 if low else BF16, moment, time, launched=at, args={"External id": key})
            moment, at = moment + time, at + 20
        builder.kernel(ADAM, moment, 5.0, launched=at)
        moment, at = moment + 5.0, at + 20
        builder.mark(f"ProfilerStep#{step}", began - 10, at - began - 2)
    return builder


def test_small_gemms(tmp_path: Path) -> None:
    diagnosis = gemms((8192, 512, 512), 20.0, 30.0, 12.0).diagnose(tmp_path / "t.json")
    cause = next(cause for cause in diagnosis.causes if cause.code == "small")
    assert "8192x512x512" in fact(cause.evidence, "cause-small-gemms", "sizes")


def test_quantization_of_large_gemms(tmp_path: Path) -> None:
    diagnosis = gemms((8192, 4096, 4096), 200.0, 380.0, 150.0).diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code == "quantization"
    assert diagnosis.causes[0].cost_ms < 1.5  # all casts of a step


def test_all_reduce_of_maxima(tmp_path: Path) -> None:
    builder = Builder()
    for step in range(2):
        base = 10_000.0 + 10_000 * step
        builder.mark(f"ProfilerStep#{step}", base - 9000, 9_900)
        for number in range(20):
            builder.kernel(FP8, base + 450 * number, 300.0, launched=base - 8000 + number)
            builder.kernel(REDUCE, base + 450 * number + 300, 100.0, stream=20, launched=base - 8000 + number)
            builder.kernel(UPDATE, base + 450 * number + 400, 50.0, launched=base - 8000 + number)
    diagnosis = builder.diagnose(tmp_path / "t.json")
    assert diagnosis.causes[0].code == "amax"
    assert "current scaling" in " ".join(diagnosis.causes[0].advice)


def test_heat_is_named_by_its_reason(tmp_path: Path) -> None:
    reading = {"sm_mhz": 1200, "power_w": 400.0, "temperature_c": 90, "throttle": ["HW thermal slowdown"]}
    facts = {"clock": {"max_sm_mhz": 1980, "readings": [reading] * 5}}
    diagnosis = gemms((8192, 4096, 4096), 200.0, 380.0, 10.0).diagnose(tmp_path / "t.json", gemmscope=facts)
    cause = next(cause for cause in diagnosis.causes if cause.code == "throttled")
    assert fact(cause.evidence, "cause-throttle-reasons", "reasons") == ["HW thermal slowdown"]
    usual = {**reading, "throttle": ["SW power cap"], "sm_mhz": 1500}  # how training runs
    facts = {"clock": {"max_sm_mhz": 1980, "readings": [usual] * 5}}
    diagnosis = gemms((8192, 4096, 4096), 200.0, 380.0, 10.0).diagnose(tmp_path / "t.json", gemmscope=facts)
    assert "throttled" not in [cause.code for cause in diagnosis.causes]
