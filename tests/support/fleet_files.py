"""The fleets of documents and docs: simulated GPUs, two of them slow and hot, a node with another driver, a GPU in use."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gemmscope.fleet.gather import Run, fleet_result
from gemmscope.model.spec import RunSpec
from gemmscope.results.fleet import FleetGpu, FleetResult, GpuCondition
from support.fleets import HEALTH, TIMES, VERSIONS, run_of

SLOW = {13: 0.1, 37: 0.05}
RUN = RunSpec(micro_batch_size=1, sequence_length=8192)
OTHER_DRIVER = 3  # the number of the node
COMMAND = "gemmscope fleet --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8k --ray auto"


def runs(count: int, slow: Mapping[int, float] = SLOW, *, seed: int = 1, chip: float = 0.007, noise: float = 0.002) -> list[Run]:
    """The runs of so many GPUs. `slow`: numbers of GPUs with their slowdown; `chip`: the spread of chips."""
    rng = np.random.default_rng(seed)
    simulated = []
    for place in range(count):
        own = chip * rng.standard_normal()
        factors = np.exp(own + noise * rng.standard_normal(len(TIMES))) * (1 + slow.get(place, 0.0))
        hot = place in slow
        condition = GpuCondition(
            sm_mhz=round(1755.0 / (1 + slow.get(place, 0.0) * 1.05) + rng.normal(0, 6)),
            power_w=round(690 - 35 * hot + rng.normal(0, 2), 1),
            power_limit_w=700.0,
            temperature_c=round(61 + 22 * hot + rng.normal(0, 2)),
            throttled={"HW thermal slowdown": 0.62, "SW power cap": 0.4} if hot else {"SW power cap": 1.0},
            health=HEALTH,
        )
        versions = VERSIONS | ({"driver": "550.90.07"} if place // 8 == OTHER_DRIVER else {})
        slowdowns = dict(zip(TIMES, map(float, factors), strict=True))
        simulated.append(run_of(place, slowdowns, error=noise, condition=condition, versions=versions, run=RUN))
    return simulated


def shown_fleet(count: int = 64, slow: Mapping[int, float] = SLOW, *, failed: int = 1) -> FleetResult:
    """The result of such a fleet; `failed`: how many GPUs were in use."""
    unmeasured = [
        FleetGpu(place=f"node{number:04} GPU 7", node=f"node{number:04}", index=7, failure="the GPU is in use by process 40217")
        for number in range(9000, 9000 + failed)
    ]
    return fleet_result(runs(count, slow), failed=unmeasured, tolerance=0.02, command=COMMAND)
