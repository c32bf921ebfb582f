"""Well-known models cut down to two layers, to see that their steps can be built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemmscope.model import presets
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.model.spec import RunSpec
from gemmscope.step.stack_plan import StackPlan, plan_step, share_weights
from support.preset_names import ORIGINALS

MOST_EXPERTS = 8
NOT_RUN = ("deepseek-v4-flash", "deepseek-v4-pro", "gemma-3n-e4b", "zamba2-7b")  # presets whose layers the stack does not have
RUN = tuple(name for name in ORIGINALS if name not in NOT_RUN)


def two_layers(name: str, **run: Any) -> StackPlan:
    """One layer of each of two kinds, or two of the same; experts are shared among many ranks."""
    model = presets.load(name).model
    assert model is not None
    experts = next((layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoeSpec)), 1)
    ranks = next(ep for ep in range(1, experts + 1) if experts % ep == 0 and experts // ep <= MOST_EXPERTS)
    whole, _ = plan_step(model, RunSpec(1, 192, ep=ranks, **run))
    kinds = tuple(dict.fromkeys(whole.model.layers))[:2]
    layers = kinds if len(kinds) == 2 else kinds * 2
    return replace(whole, model=replace(whole.model, layers=layers), slots=share_weights(layers))
