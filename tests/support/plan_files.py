"""Plans of small searches, computed once."""

from __future__ import annotations

from functools import cache
from typing import Any

from gemmscope.job.load import load_model
from gemmscope.results.plan import PlanResult
from support.commands import plan


def planned(preset: str, gpu: str, gpus: int, batch: int, sequence: int, **options: Any) -> PlanResult:
    flags = f"--preset {preset} --gpu {gpu} --gpus {gpus} --global-batch {batch} --sequence-length {sequence}"
    return plan(
        load_model(preset=preset),
        gpu,
        gpus,
        global_batch=batch,
        sequence_length=sequence,
        command=f"gemmscope plan {flags}",
        **options,
    )


@cache
def plan_result() -> PlanResult:
    """A dense model with everything in it: pipelines, a budget, layouts too close to call."""
    return planned("llama-3.1-8b", "h100", 16, 64, 8192, tokens=15e12, price=2.5)


@cache
def plan_of_experts() -> PlanResult:
    restrict = {"recompute": ("none",), "micro_batch_size": (1, 2)}
    return planned("qwen3-30b-a3b", "h100", 16, 256, 4096, restrict=restrict, recipes=["fp8current", "bf16"])


@cache
def varied_plan() -> PlanResult:
    vary = {"hidden": [2048, 4096, 8192], "layers": [16, 32]}
    return planned("llama-3.2-1b", "b200", 8, 32, 4096, vary=vary, restrict={"tp": (1, 2), "recompute": ("none", "full")})
