"""Chip-to-chip spread, the range of another GPU and the median: their intervals contain the truth as often as they say."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.fleet.gather import Run, fleet_result
from gemmscope.fleet.quote import quoted_spread
from gemmscope.fleet.spread import Floats, another_gpu, chip_spread, median_interval
from gemmscope.fleet.summaries import summary
from gemmscope.results.fleet import FleetGpu
from support.fleets import simulated_fleet
from support.run_files import recorded_bench

values = st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=60).map(np.array)


@given(values, st.floats(-2.0, 2.0), st.floats(0.0, 0.05))
def test_spread_does_not_depend_on_the_unit(chips: Floats, shift: float, noise: float) -> None:
    plain, moved = chip_spread(chips, noise), chip_spread(chips + shift, noise)
    assert plain is not None
    assert moved is not None
    assert plain.low is not None
    assert plain.high is not None
    assert plain.low <= plain.value <= plain.high
    assert moved.value == pytest.approx(plain.value, abs=1e-6)


@given(values, st.floats(0.0, 0.05), st.floats(2.0, 100.0))
def test_noise_is_removed_and_its_uncertainty_added(chips: Floats, noise: float, freedom: float) -> None:
    without, known, estimated = chip_spread(chips), chip_spread(chips, noise), chip_spread(chips, noise, freedom)
    assert without is not None
    assert known is not None
    assert estimated is not None
    assert known.value <= without.value
    assert (estimated.low or 0) <= (known.low or 0) + 1e-12
    assert (estimated.high or inf) >= (known.high or inf) - 1e-12


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("count", [4, 12, 64])
def test_intervals_contain_the_truth(count: int, heavy: bool) -> None:
    """benchmarks/fleet_spread.py has more sizes and distributions."""
    rng = np.random.default_rng(count)
    spread = another = middle = 0
    fleets = 400
    for _ in range(fleets):
        draws = rng.standard_t(5, count + 1) / (5 / 3) ** 0.5 if heavy else rng.standard_normal(count + 1)
        seen = 0.01 * draws + 0.004 * rng.standard_normal(count + 1)
        estimate, ends = chip_spread(seen[:-1], 0.004), another_gpu(seen[:-1], np.zeros(count, dtype=bool))
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        assert ends is not None
        spread += estimate.low <= 0.01 <= estimate.high
        another += ends[0] <= seen[-1] <= ends[1]
        inside = median_interval(seen[:-1])
        middle += inside is None or inside[0] <= 0 <= inside[1]
    assert spread >= 0.88 * fleets
    assert 0.84 * fleets <= another <= 0.95 * fleets
    assert middle >= 0.92 * fleets


def test_outliers_are_not_spread() -> None:
    """Three slow GPUs among many leave the spread of the others; another GPU of the fleet may be one of them."""
    healthy, with_slow = (simulated_fleet(64, spread=0.005, slow=slow) for slow in ({}, {3: 0.2, 9: 0.2, 40: 0.3}))
    before, after = (fleet.figures[0].spread for fleet in (healthy, with_slow))
    assert before is not None
    assert after is not None
    assert after.value == pytest.approx(before.value, rel=0.25)


def test_what_one_gpu_can_quote() -> None:
    result = recorded_bench("first")
    fleet = simulated_fleet(64)
    [about] = quoted_spread(fleet, result)  # the simulated fleet ran something else
    assert about.code == "fleet-another-gpu-about"
    assert about.facts["ranges"][0].startswith("FP8Current 1.6")
    own = fleet_result(
        [Run(summary(result), FleetGpu(place="", node=f"node{gpu}", index=0, uuid=f"GPU-{gpu}")) for gpu in range(20)]
    )
    [exact] = quoted_spread(own, result)
    assert exact.code == "fleet-another-gpu"
    assert exact.facts["ranges"][:2] == ["FP8Current 1.66x to 1.66x", "FP8Delayed 1.71x to 1.71x"]


def test_a_fleet_that_says_nothing_about_this_gpu() -> None:
    result = recorded_bench("first")
    with pytest.raises(UserError, match="the fleet has NVIDIA B200, but this is NVIDIA H200"):
        quoted_spread(simulated_fleet(8, product="NVIDIA B200"), result)
    with pytest.raises(UserError, match="no spread of FP8Current speedup"):
        quoted_spread(simulated_fleet(2), result)
