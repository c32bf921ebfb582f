"""The closed form and the live model of one config: what every test of a family compares."""

from __future__ import annotations

import json
from typing import Any

from gemmscope.model import hf
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.check import Difference, differences
from gemmscope.workload.trace import ModuleTrace


def model_of(config: dict[str, Any]) -> ModelSpec:
    """The model as the reader of config.json has it."""
    model = hf.from_config(json.loads(json.dumps(config)), "config.json").model
    assert model is not None
    return model


def live(config: dict[str, Any], run: RunSpec) -> ModuleTrace:
    """The trace of the model that transformers builds from a config, in this process."""
    from gemmscope.workload import trace_worker  # imports torch

    return trace_worker.answer({"config": config, "micro_batch": run.micro_batch_size, "sequence": run.sequence_length})


def compare(config: dict[str, Any], run: RunSpec) -> list[Difference]:
    """Every difference between the two."""
    return differences(model_of(config), run, live(config, run))
