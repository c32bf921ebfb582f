"""A training step of a Hugging Face model, built from its config with a few layers: its own class and attention, fused AdamW.

Every layer has its own weights; the step of the whole model is computed from two depths. The kit converts and compiles the
layers; embedding, final norm and head stay unchanged.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemmscope.errors import UserError, option
from gemmscope.step.kits.plain import Kit
from gemmscope.step.marks import mark_step
from gemmscope.step.plan import StackPlan
from gemmscope.workload.trace_worker import huggingface_model


class HuggingFaceStep:
    """One optimizer step of the first `plan.depth` layers, to `run` repeatedly."""

    def __init__(self, config: Mapping[str, Any], plan: StackPlan, kit: Kit, device: str) -> None:
        self._model = huggingface_model(_truncated(config, plan.depth), device, kit.precision)
        layers = _layers(self._model, plan.depth)
        for index, layer in enumerate(layers):
            layers[index] = kit.finish(layer)
        self._accumulation = plan.accumulation
        if plan.recompute == "full":
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=parameters[0].is_cuda)
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        self._tokens = torch.randint(vocabulary, (plan.micro_batch_size, plan.sequence_length), device=device)

    mixer_kernels = None  # its own class chooses them

    def run(self) -> None:
        """All micro-batches, forward and backward, then the optimizer."""
        for _ in range(self._accumulation):
            mark_step("model", "forward")
            self._model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        mark_step("optimizer")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def loss(self) -> float:
        """One forward pass, to check that the loss is finite."""
        with torch.no_grad():
            loss = float(self._model(input_ids=self._tokens, labels=self._tokens).loss)
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss}")
        return loss


def _truncated(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The same model with fewer layers.

    >>> _truncated({"num_hidden_layers": 3, "layer_types": ["a", "b", "a"]}, 2)
    {'num_hidden_layers': 2, 'layer_types': ['a', 'b']}
    """
    name = next((key for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in config), None)
    if name is None:
        raise UserError("this config does not say how many layers there are", f"leave out {option('hugging_face')}")
    whole = config[name]
    by_layer = {key: value[:depth] for key, value in config.items() if isinstance(value, list) and len(value) == whole}
    return {**config, **by_layer, name: depth}


def _layers(model: nn.Module, depth: int) -> nn.ModuleList:
    """Its layers: the first list of that length."""
    layers = next((module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth), None)
    if layers is None:
        raise UserError("the layers of this model are in no list, and cannot be found", f"leave out {option('hugging_face')}")
    return layers
