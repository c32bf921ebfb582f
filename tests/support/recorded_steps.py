"""Training steps recorded on an H200, replayed: kernels, times and CPU launch times of two models."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from gemmscope.engine.messages import Message, parse
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.results.step import StepTimes, Variant
from gemmscope.step.answer import step_times
from gemmscope.step.step_measurements import StepMeasurements
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import totals

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    gzip.decompress((Path(__file__).parent.parent / "data" / "h200_steps.json.gz").read_bytes())
)
RECIPES = ("BF16", "FP8Current", "FP8Delayed", "FP8Block")
LLAMA = from_hyperparameters(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=8, num_key_value_heads=8,
    vocab_size=128256, gated=True,
)  # fmt: skip
GPT = from_hyperparameters(
    hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_hidden_layers=16, vocab_size=50304
)
MODELS = {
    "llama8b": (LLAMA, RunSpec(micro_batch_size=4, sequence_length=4096)),
    "gpt1b": (GPT, RunSpec(micro_batch_size=8, sequence_length=1024)),
}


def _message(recorded: dict[str, Any]) -> Message:
    """The facts of a variant were beside its name when this was recorded."""
    if recorded["type"] == "ready":
        facts = {key: value for key, value in recorded.items() if key not in ("type", "task")}
        recorded = {"type": "ready", "task": recorded["task"], "facts": facts}
    return parse(json.dumps(recorded))


def replayed(name: str, *, real: bool = False) -> StepMeasurements:
    depth = len(MODELS[name][0].layers)
    measurements = StepMeasurements([Variant(recipe, depth, real=real) for recipe in RECIPES], depth)
    for message in RECORDED[name + (" real" if real else "")]:
        measurements.take(_message(message))
    return measurements


def answered(name: str, real: StepMeasurements | None = None) -> tuple[StepMeasurements, StepTimes]:
    model, run = MODELS[name]
    measurements = replayed(name)
    return measurements, step_times(measurements, RECIPES, totals(derive(model, run), run, model), run.tokens, real=real)
