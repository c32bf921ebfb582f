"""The training step of a live module: the user's own, or a Hugging Face model.

The module is built once, with the weights, gradients and optimizer state that every recipe uses. A recipe runs a copy of it that
shares all parameters, with its linears converted by the kit, compiled as requested.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemmscope.step.conversion import Conversion, LinearUse, decide, find_layers, record_linears
from gemmscope.step.huggingface import build_huggingface
from gemmscope.step.kits.plain import Kit
from gemmscope.step.marks import mark_step
from gemmscope.step.module_plan import ModulePlan

OPTIMIZERS: dict[str, Any] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.0, "weight_decay": 0.0}),
    "adam": (torch.optim.Adam, {"lr": 0.0}),
    "sgd": (torch.optim.SGD, {"lr": 0.0, "momentum": 0.9}),
}  # the learning rate is zero: the weights stay as they are, and so does the time of a step


class ModuleError(Exception):
    """The module cannot be trained as it is: what is wrong, and what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass
class LiveModule:
    """A module on the device, its inputs, and what all its copies share."""

    objective: Objective
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    optimizer: torch.optim.Optimizer | None
    cast: bool = False  # its FP32 parameters were made BF16
    linears: dict[str, LinearUse] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)

    @classmethod
    def build(cls, plan: ModulePlan, device: str, precision: torch.dtype, optimizer: str) -> LiveModule:
        """The module of a plan, checked: it has linears, and its loss is a number with a gradient."""
        if plan.config is not None:
            module, args, kwargs, loss = build_huggingface(plan, device, precision)
            cast = False
        else:
            module, args, kwargs, loss = build_factory(plan, device)
            cast, args, kwargs = _in_precision(module, args, kwargs, precision)
        live = cls(Objective(module, loss), args, kwargs, None, cast)
        live._check()
        live.optimizer = _optimizer(module, optimizer)
        live.layers = find_layers(module)
        return live

    def _check(self) -> None:
        module = self.objective.module
        self.linears = record_linears(module, lambda: self.objective(*self.args, **self.kwargs))
        if not any(use.rows for use in self.linears.values()):
            raise ModuleError(
                f"{type(module).__name__} runs no nn.Linear: there is nothing to convert to low precision",
                "low precision is for modules whose matrix multiplications are nn.Linear layers",
            )

    def copied(self) -> Objective:
        """Another module with the same parameters and buffers."""
        tensors = [*self.objective.parameters(), *self.objective.buffers()]
        try:
            return copy.deepcopy(self.objective, {id(tensor): tensor for tensor in tensors})
        except Exception as error:
            raise ModuleError(
                f"{type(self.objective.module).__name__} cannot be copied: {error}",
                "each recipe runs a copy of the module: remove what copy.deepcopy cannot copy",
            ) from error

    def held_bytes(self) -> int:
        """Parameters, buffers and the state of the optimizer."""
        tensors: list[torch.Tensor] = [*self.objective.parameters(), *self.objective.buffers()]
        if self.optimizer is not None:
            states = [state for state in self.optimizer.state.values() if isinstance(state, Mapping)]
            tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Objective(nn.Module):
    """A module and its loss: the factory's own, the output's `.loss`, or the mean of the squares of all float outputs."""

    def __init__(self, module: nn.Module, loss: Any) -> None:
        super().__init__()
        self.module, self.given = module, loss

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.module(*args, **kwargs)
        if self.given is not None:
            loss = self.given(output)
        elif (own := _own_loss(output)) is not None:
            loss = own
        else:
            loss = _squares(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            _not_a_number(loss)
        result: torch.Tensor = loss.reshape(())
        return result

    def loss_source(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Where the loss comes from: "factory", "output" or "squares"."""
        if self.given is not None:
            return "factory"
        with torch.no_grad():
            return "squares" if _own_loss(self.module(*args, **kwargs)) is None else "output"


def _own_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _not_a_number(loss: Any) -> None:
    given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise ModuleError(f"the loss is {given}, not a single number", "return a scalar tensor, for example loss.mean()")


def _squares(output: Any) -> torch.Tensor:
    floats = [tensor for tensor in _tensors(output) if tensor.is_floating_point() and tensor.requires_grad == torch.is_grad_enabled()]
    if not floats:
        raise ModuleError(
            "the module returns no float tensor to compute a loss from",
            "let the factory return (module, inputs, loss), where loss takes what the module returns",
        )
    return torch.stack([tensor.float().square().mean() for tensor in floats]).sum()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def build_factory(plan: ModulePlan, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """The user's module on the device, its inputs, and its loss function if it has one."""
    raise NotImplementedError


def _in_precision(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: torch.dtype
) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
    """A module whose parameters are all FP32 is trained in `precision`, and its FP32 inputs with it; any other stays as it is."""
    floats = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if floats != {torch.float32} or precision == torch.float32:
        return False, args, kwargs
    module.to(precision)

    def cast(value: Any) -> Any:
        return value.to(precision) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

    return True, tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _optimizer(module: nn.Module, name: str) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ModuleError(f"{type(module).__name__} has no parameter that requires a gradient: there is nothing to train")
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
        self.conversion = decide(live.linears, live.layers, kit) if kit.recipe.quantizes else Conversion((), {})
        if kit.recipe.quantizes:
            self._convert(objective)
        if kit.compiled == "layers":
            for path in live.layers:
                parent, _, name = path.rpartition(".")
                layers: Any = objective.module.get_submodule(parent)
                setattr(layers, name, torch.compile(layers.get_submodule(name), dynamic=False))
        self._parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        self._objective = torch.compile(objective, dynamic=False) if kit.compiled == "whole" else objective

    def _convert(self, objective: Objective) -> None:
        if not self.conversion.converted:
            reason = next(iter(self.conversion.kept.values()))
            raise ModuleError(f"none of its {len(self.conversion.kept)} linears can run in {self.kit.recipe.name}: {reason}")
        self.kit.convert(objective, [f"module.{path}" for path in self.conversion.converted])

    def _forward(self) -> torch.Tensor:
        with ExitStack() as around:
            around.enter_context(self.kit.low_precision())
            loss: torch.Tensor = self._objective(*self.live.args, **self.live.kwargs)
        return loss

    def run(self) -> None:
        """All micro-batches, forward and backward, then the optimizer."""
        for _ in range(self._accumulation):
            mark_step("model", "forward")
            loss = self._forward()
            if not loss.requires_grad:
                raise ModuleError(
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
        """One forward pass, to check that the loss is finite."""
        with torch.no_grad():
            loss = float(self._forward())
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss}")
        return loss
