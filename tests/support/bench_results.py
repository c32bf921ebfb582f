"""Measurements of kernels that were recorded on an H200, and the linears that follow from them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemmscope.bench.linears import measured_linears
from gemmscope.bench.measurements import Measurements
from gemmscope.choices import MODES, Mode
from gemmscope.engine.messages import Hello, Kernels, Ready, Round, Sampled
from gemmscope.results.linears import Linears
from gemmscope.workload.cases import Case, Task, bare_gemms, tasks_of

RECORDED = json.loads(gzip.decompress((Path(__file__).parent.parent / "data" / "h200_linear_kernels.json.gz").read_bytes()))[
    "runs"
]
QKV = Case("QKV Proj", 15872, 4096, 12288, 24)
MODEL = [
    QKV,
    Case("Attn Out", 15872, 4096, 4096, 24),
    Case("MLP Up", 15872, 4096, 16384, 24),
    Case("MLP Down", 15872, 16384, 4096, 24),
]
LAYER: dict[str, Any] = {"layers": 24, "layer_counts": {case.op: 1 for case in MODEL}}
SQUARES = bare_gemms([(side, side, side) for side in (1024, 2048, 4096, 8192)])
RECIPES = ["BF16", "FP8Current", "FP8Delayed", "FP8Block"]
POWER_LIMITED = {"sm_mhz": 1400, "power_w": 690.0, "temperature_c": 60, "throttle": ["SW power cap"]}


def recorded_kernels(task: Task, recipe: str) -> list[list[Any]]:
    """The kernels of the recorded linear in this recipe, as long as this task's size makes them."""
    label = f"QKV {recipe} graph" if task.mode == "autocast" else f"Up pre {recipe} {task.pass_name}"
    kernels = RECORDED[label]
    if task.case.passes != QKV.passes and task.mode == "autocast":  # a bare GEMM: the kernels up to the first
        gemms = [index for index, kernel in enumerate(kernels) if "nvjet" in kernel[0] or "gemm" in kernel[0]]
        kernels = kernels[: gemms[0] + 1]
    scale = task.case.flops / (QKV.flops if task.mode == "autocast" else 2 * 15872 * 4096 * 16384)
    return [[name, duration * scale, *rest] for name, duration, *rest in kernels]


def recorded_measurements(
    cases: Sequence[Case] = (QKV,), *, recipes: Sequence[str] = RECIPES, modes: Sequence[Mode] = MODES, **how: Any
) -> Measurements:
    """Measurements of the recorded kernels; `record` lists what else can be set."""
    measurements = Measurements(tasks_of(cases, recipes, modes, {"FP8Delayed": "FP8Current"}))
    record(measurements, **how)
    return measurements


def recorded_linears(
    cases: Sequence[Case] = (QKV,), modes: Sequence[Mode] = MODES, *, about: Mapping[str, Any] | None = None, **how: Any
) -> Linears:
    """The linears of such measurements; `about`: what `measured_linears` takes beside them."""
    return measured_linears(recorded_measurements(cases, modes=modes, **how), RECIPES, modes, **(about or {}))


def record(
    measurements: Measurements,
    *,
    kernels_of: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    slower: Mapping[str, float] | None = None,
    states: Sequence[Mapping[str, Any]] = (POWER_LIMITED,),
    rounds: int = 4,
    spread: float = 0.001,
) -> None:
    """Every task is timed as its kernels ran on the H200.

    `kernels_of` swaps a recipe's kernels for another's, `notes` are what a framework reports of an op, `slower` multiplies a
    recipe's times, `states` are used in turn.
    """
    device = {"name": "NVIDIA H200", "compute_capability": "9.0"}
    measurements.take(Hello({"transformer_engine": "2.20.2"}, device))
    for task in [result.task for result in measurements.tasks.values()]:
        kernels = recorded_kernels(task, (kernels_of or {}).get(task.recipe, task.recipe))
        time_ms = sum(kernel[1] for kernel in kernels) / 1000 * (slower or {}).get(task.recipe, 1.0)
        host_ms = 9.0 if task.recipe == "FP8Block" else 0.0001
        note = (notes or {}).get(task.case.op, "") if task.recipe != "BF16" else ""
        measurements.take(Ready(task.key, {"error": 0.04, "host_ms": host_ms, "copies": 1, "note": note}))
        measurements.take(Kernels(task.key, kernels))
        for number in range(rounds):
            lag = (number + len(task.key)) % 3  # no two tasks move alike
            state = dict(states[number % len(states)])
            measurements.take(Sampled({task.key: [time_ms * (1 + lag * spread)]}, state))
    for number in range(rounds):
        measurements.take(Round(number))
