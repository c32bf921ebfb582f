"""Simulated fleets: the runs of many GPUs, with known spread, noise and slow chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemmscope.fleet.gather import Run, fleet_result
from gemmscope.fleet.summaries import RunSummary, SummaryFigure
from gemmscope.interval import Interval
from gemmscope.results.base import ModelSummary
from gemmscope.results.fleet import FleetResult, GpuCondition

TIMES = {"BF16": 690.8, "FP8Current": 417.2, "FP8Block": 494.7}
FLOPS = 4.6e14
MODEL = ModelSummary(name="llama-3.1-8b", hidden_size=4096, num_hidden_layers=32, layers="32 dense")
VERSIONS = {"driver": "570.86.15", "CUDA": "12.8", "torch": "2.11.0", "transformer_engine": "2.20.2", "python": "3.12.3"}
HEALTH: dict[str, int | str] = {"ecc": "on", "uncorrected_errors": 0, "remapped_rows_uncorrected": 0, "pcie_width": 16}


def run_of(
    place: int,
    slowdowns: Mapping[str, float],
    *,
    error: float = 0.003,
    gpus_per_node: int = 8,
    product: str = "NVIDIA H200",
    condition: GpuCondition | None = None,
    versions: Mapping[str, str] = VERSIONS,
    modes: Sequence[str] = ("autocast",),
    **changes: Any,
) -> Run:
    """The run of one GPU. `slowdowns`: by recipe, the factor of its time. `error`: relative standard error of times."""
    node, index = f"node{place // gpus_per_node:04}", place % gpus_per_node
    figures = []
    for mode in modes:
        suffix = " (pre-quantized)" * (mode == "pre-quantized")
        for recipe, usual in TIMES.items():
            time = usual * slowdowns.get(recipe, 1.0)
            if recipe == "BF16" and mode != modes[0]:
                continue
            about = {"recipe": recipe, "mode": mode}
            ends = Interval(time, time * (1 - 1.96 * error), time * (1 + 1.96 * error))
            figures.append(SummaryFigure(name=f"{recipe} linears{suffix}", unit="ms", flops=FLOPS, value=ends, **about))
            if recipe != "BF16":
                speedup = TIMES["BF16"] * slowdowns.get("BF16", 1.0) / time
                ends = Interval(speedup, speedup * (1 - 2.77 * error), speedup * (1 + 2.77 * error))
                figures.append(SummaryFigure(name=f"{recipe} speedup{suffix}", unit="x", value=ends, **about))
    usual_condition = GpuCondition(
        sm_mhz=1755.0, power_w=690.0, power_limit_w=700.0, temperature_c=60.0, throttled={"SW power cap": 1.0}, health=HEALTH
    )
    summary = RunSummary(
        of="bench",
        origin="preset llama-3.1-8b",
        model=MODEL,
        measured={"command": "bench", "linears": "QKV Proj 8192x4096x6144 and 3 more", "setting backend": "transformer_engine"},
        figures=tuple(figures),
        condition=condition or usual_condition,
        device={"name": product, "node": node, "index": str(index), "uuid": f"GPU-{place:08}"},
        versions=dict(versions),
    )
    return Run(summary.model_copy(update=changes))


def simulated_runs(
    count: int,
    *,
    spread: float = 0.01,
    noise: float = 0.003,
    slow: Mapping[int, float] | None = None,
    seed: int = 0,
    repeats: int = 1,
    chips: Sequence[float] | None = None,
    **how: Any,
) -> list[Run]:
    """Runs of normally distributed chips. `slow`: the slowdown of single GPUs, 0.05 is 5%. `chips`: the chips' own logarithms of
    time, instead of `spread`."""
    rng = np.random.default_rng(seed)
    own = np.asarray(chips) if chips is not None else spread * rng.standard_normal(count)
    runs = []
    for _ in range(repeats):
        for place in range(count):
            factors = np.exp(own[place] + noise * rng.standard_normal(len(TIMES))) * (1 + (slow or {}).get(place, 0.0))
            runs.append(run_of(place, dict(zip(TIMES, map(float, factors), strict=True)), error=max(noise, 1e-4), **how))
    return runs


def simulated_fleet(count: int, *, tolerance: float = 0.02, **how: Any) -> FleetResult:
    """The result of such a fleet."""
    return fleet_result(simulated_runs(count, **how), tolerance=tolerance, command="gemmscope fleet --preset llama-3.1-8b")
