"""From runs to the fleet's result: outliers with what else differs, nodes, groups, repeats, differences."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.findings import finding
from gemmscope.fleet.gather import Run, fleet_result
from gemmscope.fleet.summaries import RunSummary, summary
from gemmscope.results.fleet import FleetGpu, FleetResult, GpuCondition
from support.fleets import HEALTH, TIMES, VERSIONS, run_of, simulated_fleet, simulated_runs
from support.run_files import recorded_bench, squares
from support.step_files import recorded_step

HOT = GpuCondition(
    sm_mhz=1410.0, power_w=520.0, power_limit_w=700.0, temperature_c=88.0, throttled={"HW thermal slowdown": 0.9}, health=HEALTH
)


def fleet_of(runs: list[Run], **how: Any) -> FleetResult:
    return fleet_result(runs, command="gemmscope fleet", **how)


def codes(fleet: FleetResult) -> set[str]:
    return {finding.code for finding in fleet.findings}


def test_a_slow_gpu_is_called_once_with_what_else_differs() -> None:
    runs = simulated_runs(64, spread=0.005)
    worse = dict.fromkeys(TIMES, 1.08)
    runs[13] = run_of(13, worse, condition=HOT, versions=VERSIONS | {"driver": "565.57.01"})
    fleet = fleet_of(runs)
    [outlier] = fleet.outliers
    assert (outlier.where, outlier.node, outlier.side, outlier.whole_node) == ("node0001 GPU 5", "node0001", "slow", False)
    assert outlier.ratio.value == pytest.approx(1 / 1.08, rel=0.01)
    assert outlier.ratio.low is not None
    assert outlier.ratio.low < outlier.ratio.value
    assert set(outlier.also) | {outlier.figure} == {"BF16 linears", "FP8Current linears", "FP8Block linears"}
    said = {finding.code: finding for finding in outlier.evidence}
    assert set(said) == {"fleet-clock", "fleet-temperature", "fleet-power", "fleet-throttled", "fleet-version"}
    assert said["fleet-clock"].facts == {"value": 1410.0, "others": 1755.0}
    assert said["fleet-version"].facts == {"what": "driver", "value": "565.57.01", "others": "570.86.15"}
    throttled = [finding for finding in outlier.evidence if finding.code == "fleet-throttled"]
    assert {finding.facts["reason"] for finding in throttled} == {"HW thermal slowdown", "SW power cap"}
    [difference] = fleet.differences
    assert (difference.name, difference.values) == ("driver", ("570.86.15 on 63 GPUs", "565.57.01 on node0001 GPU 5"))
    assert fleet.versions_of(fleet.gpus[13])["driver"] == "565.57.01"
    assert fleet.gpus[13].versions == {"driver": "565.57.01"}
    assert fleet.gpus[12].versions == {}
    assert fleet.speed(fleet.gpus[13], "BF16 linears") == pytest.approx(outlier.ratio.value)


def test_what_does_not_differ_is_no_evidence() -> None:
    fleet = simulated_fleet(64, spread=0.005, slow={13: 0.08})
    assert [outlier.evidence for outlier in fleet.outliers] == [()]


def test_memory_errors_and_links_are_evidence() -> None:
    runs = simulated_runs(32, spread=0.005)
    broken = HEALTH | {"uncorrected_errors": 3, "pcie_width": 8, "numa_node": 7}
    condition = GpuCondition(sm_mhz=1755.0, power_limit_w=700.0, throttled={"SW power cap": 1.0}, health=broken)
    runs[3] = run_of(3, dict.fromkeys(TIMES, 1.1), condition=condition)
    fleet = fleet_of(runs)
    [outlier] = fleet.outliers
    parts = {finding.facts["what"]: (finding.facts["value"], finding.facts["others"]) for finding in outlier.evidence}
    assert parts == {"uncorrected errors": (3, 0), "pcie width": (8, 16)}
    assert fleet.gpus[3].condition.health == {"uncorrected_errors": 3, "pcie_width": 8, "numa_node": 7}
    assert fleet.health_of(fleet.gpus[3])["ecc"] == "on"


def test_one_precision_that_is_slow() -> None:
    """Its time and its speedup are off; the baseline is not."""
    runs = simulated_runs(64, spread=0.004)
    runs[5] = run_of(5, {"FP8Block": 1.06})
    [outlier] = fleet_of(runs).outliers
    assert {outlier.figure, *outlier.also} == {"FP8Block speedup", "FP8Block linears"}


def test_a_slow_node_is_called_as_a_whole() -> None:
    slow = dict.fromkeys(range(16, 24), 0.06)
    fleet = simulated_fleet(128, spread=0.004, slow=slow, seed=2)
    [outlier] = fleet.outliers
    assert (outlier.where, outlier.whole_node, outlier.side) == ("node0002", True, "slow")
    assert len(outlier.gpus) == 8
    node = next(node for node in fleet.nodes if node.node == "node0002")
    assert node.speed["BF16 linears"] == pytest.approx(1 / 1.06, rel=0.01)
    assert (node.gpus, node.measured) == (8, 8)


def test_a_gpu_that_is_worse_than_its_slow_node_is_called_too() -> None:
    slow = dict.fromkeys(range(16, 24), 0.06) | {18: 0.30}
    fleet = simulated_fleet(128, spread=0.004, slow=slow, seed=2)
    assert [outlier.where for outlier in fleet.outliers] == ["node0002 GPU 2", "node0002"]


def test_a_node_with_some_slow_gpus_is_not_slow_as_a_whole() -> None:
    """Its median is off, but half of its GPUs are healthy: the others are called one by one."""
    fleet = simulated_fleet(128, spread=0.004, slow=dict.fromkeys(range(16, 20), 0.08), seed=2)
    assert [outlier.where for outlier in fleet.outliers if outlier.whole_node] == []
    assert {outlier.where for outlier in fleet.outliers} == {f"node0002 GPU {gpu}" for gpu in range(4)}


def test_groups_are_compared_within() -> None:
    """Another product, and another power limit, are not slow: they are different."""
    condition = GpuCondition(power_limit_w=500.0)
    runs = [
        *simulated_runs(32, spread=0.004),
        *(run_of(gpu, dict.fromkeys(TIMES, 1.2), condition=condition) for gpu in range(32, 34)),
        *(run_of(gpu, dict.fromkeys(TIMES, 1.5), product="NVIDIA H100 PCIe") for gpu in range(34, 42)),
    ]
    fleet = fleet_of(runs)
    assert fleet.outliers == ()
    groups = {figure.group: figure.gpus for figure in fleet.figures if figure.name == "BF16 linears"}
    assert groups == {"NVIDIA H200, 700 W": 32, "NVIDIA H200, 500 W": 2, "NVIDIA H100 PCIe": 8}
    rows = {row.name: row.values for row in fleet.differences}
    assert next(iter(rows)) == "GPU"
    assert rows["power limit"] == ("700 W on 40 GPUs", "500 W on node0004 GPU 0, node0004 GPU 1")
    few = [finding for finding in fleet.findings if finding.code == "fleet-too-few"]
    assert [finding.facts["group"] for finding in few] == ["NVIDIA H200, 500 W"]


def test_repeats_are_combined_and_give_the_noise() -> None:
    """Runs vary by 1% from process to process, more than their own intervals say."""
    runs = simulated_runs(24, spread=0.01, noise=0.01, repeats=4)
    runs = [Run(_narrow(run.summary)) for run in runs]  # type: ignore[arg-type]
    fleet = fleet_of(runs)
    assert len(fleet.gpus) == 24
    assert {gpu.repeats for gpu in fleet.gpus} == {4}
    figure = fleet.figure("BF16 linears", "NVIDIA H200")
    assert figure is not None
    assert figure.noise_from == "repeats"
    assert figure.noise == pytest.approx(0.01 * 0.2982**0.5, rel=0.3)  # of the median of four
    assert figure.spread is not None
    assert figure.spread.low is not None
    assert figure.spread.low < 0.01 < (figure.spread.high or 0)
    assert fleet.gpus[0].figures["BF16 linears"].half_width > 0.005


def _narrow(run: RunSummary) -> RunSummary:
    figures = [
        figure.model_copy(
            update={"value": figure.value.__class__(figure.value.value, figure.value.value * 0.999, figure.value.value * 1.001)}
        )
        for figure in run.figures
    ]
    return run.model_copy(update={"figures": tuple(figures)})


def test_an_unstable_gpu_has_its_own_noise() -> None:
    runs = simulated_runs(16, spread=0.004, noise=0.002, repeats=3)
    runs = [run for run in runs if run.summary.device["uuid"] != "GPU-00000004"]  # type: ignore[union-attr]
    runs += [run_of(4, dict.fromkeys(TIMES, factor)) for factor in (1.0, 1.06, 1.2)]
    fleet = fleet_of(runs)
    assert fleet.gpus[4].figures["BF16 linears"].half_width > 10 * fleet.gpus[5].figures["BF16 linears"].half_width
    assert fleet.outliers == ()


def test_the_order_of_the_runs_does_not_matter() -> None:
    runs = simulated_runs(40, slow={3: 0.2, 17: 0.1})
    forward, backward = fleet_of(runs), fleet_of(runs[::-1])
    assert forward.outliers == backward.outliers
    assert forward.gpus == backward.gpus
    assert [gpu.place for gpu in forward.gpus][:2] == ["node0000 GPU 0", "node0000 GPU 1"]


@given(st.integers(6, 24), st.integers(0, 10_000), st.floats(0.02, 0.6))
@settings(max_examples=15, deadline=None)
def test_a_planted_slow_gpu_is_found_or_within_the_limit(count: int, seed: int, slowdown: float) -> None:
    fleet = simulated_fleet(count, spread=0.005, noise=0.001, slow={2: slowdown}, seed=seed)
    figure = fleet.figure("BF16 linears", "NVIDIA H200")
    assert figure is not None
    assert figure.limit is not None
    speed = fleet.speed(fleet.gpus[2], "BF16 linears")
    assert speed is not None
    outliers = [outlier for outlier in fleet.outliers if outlier.where == fleet.gpus[2].place]
    if 1 - speed > figure.limit + 1e-4:
        assert outliers
    assert all(abs(outlier.ratio.value - 1) >= fleet.rule.tolerance - 1e-5 for outlier in fleet.outliers)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_gpus(count: int) -> None:
    """Nobody is called; one GPU keeps its own interval; two have no spread."""
    fleet = simulated_fleet(count, slow={0: 0.5})
    assert fleet.outliers == ()
    assert "fleet-too-few" in codes(fleet)
    figure = fleet.figures[0]
    assert figure.limit is None
    assert (figure.spread is None) == (count < 3)
    if count == 1:
        assert figure.center == fleet.gpus[0].figures[figure.name]


def test_a_gpu_that_was_not_measured() -> None:
    failed = FleetGpu(place="node0000 GPU 9", node="node0000", index=9, failure="the GPU is in use")
    fleet = fleet_of(simulated_runs(8), failed=[failed])
    assert len(fleet.gpus) == 9
    assert len(fleet.measured) == fleet.sample_count == 8
    assert next(node for node in fleet.nodes if node.node == "node0000").gpus == 9
    alone = fleet_result([], failed=[failed], of="step", origin="preset llama-3.1-8b")
    assert (alone.of, alone.origin, alone.measured) == ("step", "preset llama-3.1-8b", [])


def test_a_result_without_figures_is_a_failure() -> None:
    runs = simulated_runs(8)
    runs[2] = run_of(2, {}, figures=(), failure="nothing was measured")
    fleet = fleet_of(runs)
    assert [gpu.failure for gpu in fleet.gpus if gpu.failure] == ["nothing was measured"]


def test_a_recipe_that_some_gpus_lack() -> None:
    runs = simulated_runs(8)
    summary = runs[2].summary
    assert isinstance(summary, RunSummary)
    kept = tuple(figure for figure in summary.figures if figure.recipe != "FP8Block")
    runs[2] = Run(summary.model_copy(update={"figures": kept}))
    missing = [finding for finding in fleet_of(runs).findings if finding.code == "fleet-figure-missing"]
    assert [(finding.facts["figure"], finding.facts["gpus"]) for finding in missing] == [
        ("FP8Block linears", 1),
        ("FP8Block speedup", 1),
    ]


def test_data_that_is_no_summary_costs_one_gpu() -> None:
    fleet = fleet_of([*simulated_runs(8), Run({"of": "bench"}, FleetGpu(place="node9 GPU 0", node="node9"))])
    assert [(gpu.place, bool(gpu.failure)) for gpu in fleet.gpus if gpu.node == "node9"] == [("node9 GPU 0", True)]


def test_processes_that_all_call_their_gpu_number_0() -> None:
    runs = [Run(run.summary, FleetGpu(place="node1 GPU 0", node="node1")) for run in simulated_runs(3)]
    places = [gpu.place for gpu in fleet_of(runs).gpus]
    assert len(set(places)) == 3
    assert places[0] == "node1 GPU 0 (GPU-00000000)"


def test_other_models_and_settings_are_refused() -> None:
    other = run_of(1, {}, measured={"command": "bench", "linears": "QKV Proj 8192x4096x6144", "setting backend": "torchao"})
    with pytest.raises(
        UserError, match=r"node0000 GPU 0 and node0000 GPU 1 did not measure the same: linears: .* and .*; setting"
    ):
        fleet_of([*simulated_runs(1), other])


def test_runs_of_other_commands_are_refused_by_that_alone() -> None:
    other = run_of(1, {}, measured={"command": "step", "ran": "stack", "layers": "2"})
    with pytest.raises(UserError, match=r"did not measure the same: command: bench and step\n"):
        fleet_of([*simulated_runs(1), other])


@pytest.mark.parametrize("count", [6, 8])
def test_a_slow_gpu_of_a_small_fleet_widens_no_spread(count: int) -> None:
    """Only the baseline may reach its limit there, but the chip is slow in every time."""
    fleet = fleet_result(simulated_runs(count, spread=0.005, noise=0.002, slow={2: 0.1}, seed=3))
    [outlier] = fleet.outliers
    assert outlier.where == "node0000 GPU 2"
    spreads = {figure.name: figure.spread.value for figure in fleet.figures if figure.unit == "ms" and figure.spread is not None}
    assert len(spreads) == 3
    assert max(spreads.values()) < 0.015


def test_repeats_that_vary_a_lot_give_intervals_of_positive_times() -> None:
    """As of a busy machine: an interval of a time never begins below zero."""
    rng = np.random.default_rng(1)
    for scale in (2, 200):
        fleet = fleet_of([run_of(0, dict.fromkeys(TIMES, float(np.exp(scale * rng.standard_normal())))) for _ in range(7)])
        [gpu] = fleet.gpus
        for value in gpu.figures.values():
            assert 0 < (value.low or 0) <= value.value <= (value.high or 0)


def test_many_fast_gpus_may_be_the_healthy_ones() -> None:
    most_slow = fleet_result(simulated_runs(64, seed=5, slow=dict.fromkeys(range(40), 0.1)))
    [warned] = [finding for finding in most_slow.findings if finding.code == "fleet-many-fast"]
    assert warned.facts["gpus"] == 64
    assert not fleet_result(simulated_runs(64, seed=5, slow={3: -0.1})).has("fleet-many-fast")


def test_warnings_that_every_gpu_has_are_said_once() -> None:
    warned = finding("nothing-measured")
    runs = [Run(run.summary.model_copy(update={"findings": (warned,)})) for run in simulated_runs(8)]  # type: ignore[union-attr]
    fleet = fleet_of(runs)
    assert [finding.code for finding in fleet.findings] == ["fleet-everywhere"]
    assert all(gpu.findings == () for gpu in fleet.gpus)
    runs[1:] = simulated_runs(8)[1:]
    fleet = fleet_of(runs)
    assert [gpu.findings for gpu in fleet.gpus[:2]] == [(warned,), ()]


@pytest.mark.parametrize(
    ("result", "figures"),
    [
        (lambda: recorded_bench("first"), {"BF16 linears": 690.812, "FP8Block speedup": 1.39652}),
        (lambda: recorded_step("llama8b"), {"BF16 step": None, "FP8Block speedup": None}),
        (squares, {"BF16 GEMMs": None, "FP8Block speedup (pre-quantized)": None}),
    ],
)
def test_summaries_of_real_results(result: Any, figures: dict[str, float | None]) -> None:
    data = summary(result())
    assert len(json.dumps(data)) < 10_000
    fleet = fleet_of([Run(json.loads(json.dumps(data)))])
    own = fleet.gpus[0].figures
    for name, value in figures.items():
        assert value is None or own[name].value == value, name
    flops = {figure.name: figure.flops for figure in fleet.figures}
    times = [figure for figure in fleet.figures if figure.unit == "ms"]
    assert all(10 < (flops[figure.name] or 0) / figure.center.value / 1e9 < 3000 for figure in times)  # TFLOP/s
    assert fleet.model_validate_json(fleet.to_json()) == fleet
