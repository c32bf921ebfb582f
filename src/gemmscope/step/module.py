"""The training step of a live module: the user's own, or a Hugging Face model.

The module is built once, with the weights, gradients and optimizer state that every recipe uses. A recipe runs a copy of it that
shares all parameters, with its linears converted by the kit, compiled as requested.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemmscope.errors import option
from gemmscope.step.conversion import Conversion, LinearUse, decide, find_head, record_linears
from gemmscope.step.huggingface import ModelKernels, live_huggingface, mixers
from gemmscope.step.kits.plain import Kit, compiled_module
from gemmscope.step.marks import mark_step
from gemmscope.step.module_plan import ModulePlan
from gemmscope.workload.factory import Built, load_factory, own_loss
from gemmscope.workload.failures import TraceError, naming
from gemmscope.workload.layers import find_layers
from gemmscope.workload.nested import tensors_in, with_tensors

OPTIMIZERS: dict[str, Any] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.0, "weight_decay": 0.0}),
    "adam": (torch.optim.Adam, {"lr": 0.0}),
    "sgd": (torch.optim.SGD, {"lr": 0.0, "momentum": 0.9}),
}  # the learning rate is zero: the weights stay as they are, and so does the time of a step


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
HALF = "; optimizers overflow in FP16: return the module in FP32 or BF16, or add --optimizer none"


@dataclass
class LiveModule:
    """A module on the device, its inputs, and what all its copies share."""

    built: Built
    objective: Objective
    linears: dict[str, LinearUse]
    layers: list[str]
    head: str | None
    optimizer: torch.optim.Optimizer | None
    cast: bool  # its FP32 parameters were made BF16
    masked: bool | None  # whether its attention has an explicit mask, when it is not compiled; None: it has no attention

    @classmethod
    def build(cls, plan: ModulePlan, device: str, precision: torch.dtype, optimizer: str) -> LiveModule:
        """The module of a plan, run forward once: it has linears, and a loss that is a number."""
        if plan.module is not None:
            built = load_factory(plan.module, plan.micro_batch_size or None, plan.sequence_length or None, device)
            built, cast = _in_precision(built, precision)
            folder: Path | None = Path(plan.module.rpartition(":")[0]).resolve().parent
        else:
            built, folder, cast = live_huggingface(plan, device, precision), None, False
        objective = Objective(built)
        with naming("running the module", folder):
            linears, masked = record_linears(built.module, objective.tried(built))
        name = type(built.module).__name__
        if not any(use.rows for use in linears.values()):
            raise TraceError(
                f"{name} runs no nn.Linear: there is nothing to convert to low precision",
                "only matrix multiplications in nn.Linear layers can be converted",
            )
        trained = [parameter for parameter in built.module.parameters() if parameter.requires_grad]
        if not trained:
            raise TraceError(f"{name} has no parameter that requires a gradient: there is nothing to train")
        sparse = [path for path, part in built.module.named_modules() if isinstance(part, EMBEDDINGS) and part.sparse]
        if sparse and optimizer != "none" and not (optimizer == "sgd" and device == "cpu"):  # fused, SGD does not support them
            raise TraceError(
                f"the gradients of {sparse[0]} are sparse, and {optimizer} does not support them on {device}",
                f"add {option('optimizer', 'none')}, or build it with sparse=False",
            )
        layers = find_layers(built.module)
        return cls(
            built=built,
            objective=objective,
            linears=linears,
            layers=layers,
            head=find_head(built.module, linears, layers),
            optimizer=_optimizer(trained, optimizer),
            cast=cast,
            masked=any(masked) if masked else None,
        )

    def copied(self) -> Objective:
        """Another module with the same parameters and buffers."""
        tensors = [*self.objective.parameters(), *self.objective.buffers()]
        try:
            return copy.deepcopy(self.objective, {id(tensor): tensor for tensor in tensors})
        except Exception as error:
            raise TraceError(
                f"{type(self.built.module).__name__} cannot be copied: {error}",
                "each recipe runs a copy of the module, so copy.deepcopy must be able to copy it",
            ) from error

    def held_bytes(self) -> int:
        """Parameters, buffers and the state of the optimizer."""
        tensors: list[torch.Tensor] = [*self.objective.parameters(), *self.objective.buffers()]
        if self.optimizer is not None:
            states = [state for state in self.optimizer.state.values() if isinstance(state, Mapping)]
            tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Objective(nn.Module):
    """A module and its loss: the factory's own, the module's own, or the mean of the squares of all float outputs."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.module, self.given = built.module, built.loss
        self.squares = False

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.module(*args, **kwargs)
        loss = self.given(output) if self.given is not None else _squares(output) if self.squares else own_loss(output)
        if not isinstance(loss, torch.Tensor):
            raise TraceError(f"the loss is of type {type(loss).__name__}, not a tensor", "return a scalar tensor from the loss")
        if loss.numel() != 1:
            shape = " x ".join(map(str, loss.shape))
            raise TraceError(f"the loss is a tensor of shape {shape}, not a scalar", "end it with .mean() or .sum()")
        return loss.reshape(())

    def compiled(self) -> nn.Module:
        """Compiled as users do it: a module that computes its own loss is compiled alone, any other together with its loss."""
        if self.given is not None or self.squares:
            return compiled_module(self)
        self.module = compiled_module(self.module)
        return self

    def tried(self, built: Built) -> Callable[[], object]:
        """A first call, which shows whether the module has a loss of its own."""

        def call() -> None:
            output = built.module(*built.args, **built.kwargs)
            self.squares = self.given is None and own_loss(output) is None

        return call


def _squares(output: Any) -> torch.Tensor:
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    if torch.is_grad_enabled():
        floats = [tensor for tensor in floats if tensor.requires_grad]
    if not floats:
        raise TraceError(
            "the module returns no float tensor to compute a loss from",
            "return (module, inputs, loss) from the function, where loss(output) takes the output of the module",
        )
    return torch.stack([tensor.float().square().mean() for tensor in floats]).sum()


def _in_precision(built: Built, precision: torch.dtype) -> tuple[Built, bool]:
    """A module whose parameters are all FP32 is trained in `precision`, and its FP32 inputs with it; any other stays as it is."""
    formats = {parameter.dtype for parameter in built.module.parameters() if parameter.is_floating_point()}
    if formats != {torch.float32} or precision == torch.float32:
        return built, False

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(precision) if tensor.dtype == torch.float32 else tensor

    inputs = {"args": with_tensors(built.args, cast), "kwargs": with_tensors(built.kwargs, cast)}
    module = built.module._apply(lambda tensor: tensor.to(precision) if tensor.is_floating_point() else tensor)
    return replace(built, module=module, **inputs), True  # unlike module.to, this keeps complex tensors


def _optimizer(trained: list[nn.Parameter], name: str) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    optimizer_class, settings = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = optimizer_class(trained, **settings, fused=trained[0].is_cuda)
    return optimizer


class ModuleStep:
    """One optimizer step of a live module in one recipe, to `run` repeatedly."""

    def __init__(self, live: LiveModule, kit: Kit, accumulation: int = 1) -> None:
        self.live, self.kit, self._accumulation = live, kit, accumulation
        objective = live.copied()
        self.conversion = decide(live.linears, live.head, kit) if kit.recipe.quantizes else Conversion((), {})
        if kit.recipe.quantizes:
            self._convert(objective)
        for path in live.layers:
            parent, _, name = path.rpartition(".")
            holder = objective.module.get_submodule(parent)
            setattr(holder, name, kit.compile_layer(holder.get_submodule(name)))
        self._parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        whole = kit.compiled == "whole" or (kit.compiled == "layers" and not live.layers)
        self._objective = objective.compiled() if whole else objective

    @property
    def mixer_kernels(self) -> ModelKernels | None:
        """Where the functions of its mixers come from; None if it has none."""
        kernels = mixers(self.live.built.module, compiled=self.kit.compiled != "none")
        return kernels if kernels.sources else None

    def _convert(self, objective: Objective) -> None:
        if not self.conversion.converted:
            reason = next(iter(self.conversion.kept.values()))
            raise TraceError(f"none of its {len(self.conversion.kept)} linears can run in {self.kit.recipe.name}: {reason}")
        self.kit.convert(objective, [f"module.{path}" for path in self.conversion.converted])

    def _forward(self) -> torch.Tensor:
        with self.kit.low_precision():
            loss: torch.Tensor = self._objective(*self.live.built.args, **self.live.built.kwargs)
        return loss

    def run(self) -> None:
        """All micro-batches, forward and backward, then the optimizer."""
        for _ in range(self._accumulation):
            mark_step("model", "forward")
            loss = self._forward()
            if not loss.requires_grad:
                raise TraceError(
                    "the loss does not require a gradient: backward has nothing to compute",
                    "compute it from the outputs, without torch.no_grad() and .detach()",
                )
            loss.backward()
        mark_step("optimizer")
        if self.live.optimizer is not None:
            self.live.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def loss(self) -> float:
        """One forward pass, to check that the loss is finite. With gradients: without, it would be compiled again."""
        loss = float(self._forward().detach())
        if not math.isfinite(loss):
            half = any(parameter.dtype == torch.float16 for parameter in self._parameters)
            raise ArithmeticError(f"the loss is {loss}" + (HALF if half else ""))
        return loss
