"""Times, speedups, totals, winners and findings computed from recorded kernels."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.bench.findings import linear_findings, measurement_findings
from gemmscope.bench.linears import measured_linears, memory
from gemmscope.bench.measurements import Measurements
from gemmscope.choices import MODES
from gemmscope.engine.messages import Failed, Hello
from gemmscope.results.bench import BenchResult
from gemmscope.results.linears import Linears, Memory
from gemmscope.workload.cases import Case, Task
from support.bench_results import LAYER, MODEL, POWER_LIMITED, QKV, RECIPES, SQUARES, recorded_linears, recorded_measurements
from support.run_files import BENCHES, bench_result, recorded_bench, replayed


def codes(measurements: Measurements, linears: Linears | None = None) -> set[str]:
    linears = linears or measured_linears(measurements, RECIPES, MODES)
    return {finding.code for finding in (*linear_findings(linears), *measurement_findings(measurements, linears))}


def facts(linears: Linears, code: str) -> list[dict[str, Any]]:
    return [dict(finding.facts) for finding in linear_findings(linears) if finding.code == code]


def total(linears: Linears, name: str, mode: Any) -> Any:
    total_time = linears.total(name, mode)
    assert total_time is not None
    return total_time


def test_a_correct_run_has_no_errors() -> None:
    measurements = recorded_measurements()
    linears = measured_linears(measurements, RECIPES, MODES)
    findings = [*linear_findings(linears), *measurement_findings(measurements, linears)]
    assert {finding.code for finding in findings if finding.level != "note"} == {"host-bound-linears"}
    assert {"same-kernels", "dgrad-over-fprop", "quantization-share", "clock-limited-by"} <= {
        finding.code for finding in findings
    }
    [host] = facts(linears, "host-bound-linears")
    assert (host["recipe"], host["host_ms"]) == ("FP8Block", pytest.approx(216.0))
    cell = linears.op_time("QKV Proj", "FP8Current", "autocast")
    assert cell is not None
    assert sum(time.value for time in cell.pass_ms.values()) == pytest.approx(cell.total_ms.value)
    assert sum(cell.gemm_ms.values()) + cell.quantization_ms == pytest.approx(cell.total_ms.value)
    assert 0.05 < cell.quantization_ms / cell.total_ms.value < 0.2
    assert linears.columns("pre-quantized") == ["BF16", "FP8Current", "FP8Block"]


@pytest.mark.parametrize("mode", MODES)
def test_sums_add_up(mode: Any) -> None:
    """Ops make a layer, layers make the model, and passes make the layer."""
    linears = recorded_linears(MODEL, about=LAYER)
    total_time = total(linears, "FP8Current", mode)
    ops = [linears.op_time(case.op, "FP8Current", mode) for case in MODEL]
    assert total_time.layer_ms == pytest.approx(sum(cell.total_ms.value for cell in ops if cell is not None))
    assert total_time.layer_ms == pytest.approx(sum(total_time.pass_ms.values()))
    assert total_time.total_ms.value == pytest.approx(24 * total_time.layer_ms, rel=0.001)


def test_layers_that_differ_are_not_averaged() -> None:
    total_time = total(recorded_linears(MODEL), "BF16", "autocast")
    assert total_time.layer_ms is None
    assert sum(total_time.pass_ms.values()) == pytest.approx(total_time.total_ms.value, rel=0.001)


def test_every_pair_of_recipes_and_every_pass_has_a_speedup() -> None:
    linears = recorded_linears()
    assert linears.speedup("FP8Delayed", "autocast", over="FP8Current") is not None
    block = linears.speedup("FP8Block", "autocast", over="FP8Current")
    assert block is not None
    assert block.below_one
    assert linears.speedup("FP8Delayed", "pre-quantized", over="FP8Current") is None  # the same kernels
    for pass_name in QKV.passes:
        speedup = linears.speedup("FP8Block", "pre-quantized", "QKV Proj", pass_name=pass_name)
        assert speedup is not None
        assert speedup.above_one
        assert speedup.known
    cell = linears.op_time("QKV Proj", "FP8Block", "pre-quantized")
    assert cell is not None
    assert all(time.known for time in cell.pass_ms.values())


def test_winners_are_called_by_ratios() -> None:
    linears = recorded_linears(MODEL)
    assert (linears.winners["autocast"].best, linears.winners["autocast"].rivals) == ("FP8Delayed", ())
    close = recorded_linears(MODEL, slower={"FP8Delayed": 1.03}, spread=0.02)
    assert close.winners["autocast"].rivals
    assert facts(close, "too-close-to-call")


def test_memory_is_computed() -> None:
    weights = sum(case.weights * case.count for case in MODEL)
    kept = sum(case.tokens * case.inputs * case.count for case in MODEL)
    assert memory(MODEL, "BF16") == Memory(recipe="BF16", weights_bytes=2 * weights, copies_bytes=0, kept_bytes=2 * kept)
    assert memory(MODEL, "FP8Current").copies_bytes == 2 * weights
    assert memory(MODEL, "FP8Current", capability="10.0").copies_bytes == weights  # Blackwell multiplies from one copy
    assert memory(MODEL, "MXFP8", "torchao").copies_bytes == 0  # torchao keeps BF16 and casts again
    assert memory(MODEL, "NVFP4").kept_bytes == pytest.approx(0.5625 * kept)
    assert {memory.recipe for memory in recorded_linears(MODEL).memory} == set(RECIPES)


def test_bare_gemms_have_no_totals_no_memory_and_no_winner() -> None:
    linears = recorded_linears(SQUARES, spread=0.01)
    assert (linears.totals, linears.memory, linears.winners) == ((), (), {})
    assert {speedup.op for speedup in linears.speedups} == {case.op for case in SQUARES}


def test_a_fallback_has_times_and_no_speedup() -> None:
    """FP8 requested, BF16 kernels seen."""
    linears = recorded_linears(MODEL, kernels_of={"FP8Current": "BF16"})
    [autocast, _] = facts(linears, "fallback")
    assert (autocast["recipe"], autocast["ops"], autocast["ran"]) == ("FP8Current", [case.op for case in MODEL], "bf16 x bf16")
    assert linears.falls_back("FP8Current", "autocast")
    assert "FP8Current" not in {speedup.recipe for speedup in linears.speedups} | {speedup.over for speedup in linears.speedups}
    assert linears.speedup("FP8Block", "autocast") is not None
    assert total(linears, "FP8Current", "autocast").total_ms.value > 0


def test_what_failed_is_missing_and_never_zero() -> None:
    measurements = recorded_measurements(MODEL)
    key = Task(QKV, "FP8Block", "autocast").key
    measurements.take(Failed(key, "OutOfMemoryError: too large", "out of memory"))
    linears = measured_linears(measurements, RECIPES, MODES, **LAYER)
    assert linears.op_time("QKV Proj", "FP8Block", "autocast") is None
    assert linears.op_time("MLP Up", "FP8Block", "autocast") is not None
    assert linears.total("FP8Block", "autocast") is None
    assert linears.speedup("FP8Block", "autocast") is None
    assert "not-measured" in codes(measurements, linears)


def test_what_the_framework_left_in_bf16_has_a_time_and_no_speedup() -> None:
    """torchao's filter is not a fallback: the op is named, and the speedup of the model is still shown."""
    reason = "torchao's filter leaves this layer in BF16"
    linears = recorded_linears(MODEL, kernels_of={"FP8Current": "BF16"}, notes={case.op: reason for case in MODEL})
    assert {"recipe": "FP8Current", "ops": [case.op for case in MODEL], "reason": reason} in facts(linears, "left-in-baseline")
    assert not facts(linears, "fallback")
    assert linears.speedup("FP8Current", "autocast", "QKV Proj") is None
    assert linears.speedup("FP8Current", "autocast") is not None


def test_slower_ops_and_ties() -> None:
    loses = recorded_linears([QKV], slower={"FP8Block": 2.0})
    assert [list(entry["speedups"]) for entry in facts(loses, "ops-slower")] == [["QKV Proj in FP8Block"]] * 2
    close = recorded_linears([QKV], slower={"FP8Block": 1.3446}, spread=0.02)
    assert {"recipe": "FP8Block", "mode": "autocast", "ops": ["QKV Proj"]} in facts(close, "ops-too-close")
    assert not [entry for entry in facts(close, "ops-slower") if entry["mode"] == "autocast"]


def test_unproven_precisions_are_in_the_result() -> None:
    measurements = recorded_measurements(MODEL)
    for result in measurements.tasks.values():
        if result.task.recipe == "FP8Block":
            result.kernels = [["cutlass::device_kernel<mystery>", *rest] for _, *rest in result.kernels[-1:]]
        if result.task.recipe == "FP8Current" and result.task.mode == "autocast":
            result.kernels = []
    linears = measured_linears(measurements, RECIPES, MODES)
    assert facts(linears, "unproven-no-kernels")[0]["recipe"] == "FP8Current"
    assert facts(linears, "unproven")[0]["recipe"] == "FP8Block"
    assert facts(linears, "not-split")[0]["recipe"] == "FP8Block"


def test_ops_that_frameworks_leave_in_high_precision() -> None:
    measurements = recorded_measurements([*MODEL, Case("LM Head", 15872, 4096, 32000, 1)])
    assert "speedup-leaving-ops" in codes(measurements)
    assert "speedup-leaving-ops" not in codes(recorded_measurements(MODEL))


@pytest.mark.parametrize(
    ("state", "code"),
    [({"throttle": ["HW thermal slowdown"]}, "throttled"), ({"sm_mhz": 1900}, "clock-moved"), ({"sm_mhz": 1450}, "")],
)
def test_states_that_training_would_not_have(state: dict[str, Any], code: str) -> None:
    found_codes = codes(recorded_measurements(states=[POWER_LIMITED, POWER_LIMITED | state]))
    assert found_codes & {"throttled", "clock-moved"} == ({code} if code else set())


def test_states_may_be_unknown() -> None:
    """On the CPU, or with a driver that does not report power and temperature."""
    for state in ({}, {"sm_mhz": 1400, "power_w": None, "temperature_c": None, "throttle": []}):
        assert "power-while-measuring" not in codes(recorded_measurements(states=[state]))


def test_one_round_has_no_interval() -> None:
    measurements = recorded_measurements(rounds=1)
    linears = measured_linears(measurements, RECIPES, MODES)
    assert not any(speedup.speedup.known for speedup in linears.speedups)
    assert "single-round" in codes(measurements, linears)
    assert not facts(linears, "ops-too-close")


def test_what_stays_in_the_cache_is_said() -> None:
    measurements = recorded_measurements()
    assert "warm-cache" not in codes(measurements)
    measurements.take(Hello(measurements.hello.versions, {**measurements.hello.device, "l2_bytes": 10**12}))
    assert "warm-cache" in codes(measurements)


@pytest.mark.parametrize("name", BENCHES)
def test_recorded_benches_give_the_same_numbers_again(name: str) -> None:
    """The speedups computed from the samples of a run file are those stored in it."""
    result = recorded_bench(name)
    linears = result.linears
    about = {"layers": linears.layers, "layer_counts": linears.layer_counts}
    again = measured_linears(replayed(result), linears.recipes, linears.modes, **about)
    assert again == linears


def test_a_result_survives_its_run_file() -> None:
    result = bench_result(recorded_measurements(MODEL), **LAYER)
    assert BenchResult.model_validate_json(result.to_json()) == result
