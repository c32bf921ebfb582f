"""A result of every kind, by name: recorded on an H200, or computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from gemmscope.job.load import load_model, model_run
from gemmscope.results.base import Result
from support import commands
from support.explain_files import explanation
from support.fleet_files import shown_fleet
from support.forecast_files import forecast_result, plane, several_gpus, sweep
from support.numerics_files import numerics_result
from support.plan_files import plan_of_experts, plan_result, varied_plan
from support.run_files import recorded_bench, squares
from support.step_files import recorded_step
from support.sweep_files import measured_line, measured_plane

TRACES = sorted(
    path.name.removesuffix(".json.gz") for path in (Path(__file__).parent.parent / "data" / "traces").glob("*.json.gz")
)


def shapes(preset: str, **run: int) -> Result:
    return commands.shapes(model_run(load_model(preset=preset), **run), command=f"gemmscope shapes --preset {preset}")


def compared() -> Result:
    return commands.compare([recorded_bench("first"), recorded_bench("again")], fail_if_slower=0.03)


_MAKERS: dict[str, Callable[[], Result]] = {
    "shapes": lambda: shapes("llama-3.1-8b", micro_batch_size=1, sequence_length=8192, tp=2),
    "shapes of experts": lambda: shapes("qwen3-30b-a3b", micro_batch_size=4, sequence_length=4096, ep=8),
    "bench": lambda: recorded_bench("first"),
    "bench again": lambda: recorded_bench("again"),
    "bench with a fallback": lambda: recorded_bench("fallback"),
    "bench of bare GEMMs": squares,
    "step": lambda: recorded_step("llama8b"),
    "verified step": lambda: recorded_step("gpt1b", verified=True, batches=True),
    "forecast": forecast_result,
    "forecast of several GPUs": several_gpus,
    "sweep": sweep,
    "sweep of a plane": plane,
    "measured sweep": measured_line,
    "measured sweep of a plane": measured_plane,
    "plan": plan_result,
    "plan of experts": plan_of_experts,
    "plan of several models": varied_plan,
    "numerics": lambda: numerics_result(12, bound=0.12),
    "numerics of synthetic tensors": lambda: numerics_result(4, source="synthetic", gpu="", bound=None, detailed=False),
    "fleet": lambda: shown_fleet(48),
    "explain": lambda: explanation("recompute"),
    "compare": compared,
    **{f"bench, {name} run": partial(recorded_bench, name) for name in ("third", "fourth")},
    "step of a small model": lambda: recorded_step("gpt1b"),
    **{f"explain {name}": partial(explanation, name) for name in TRACES if name != "recompute"},
}
RESULTS = {name: cache(make) for name, make in _MAKERS.items()}
