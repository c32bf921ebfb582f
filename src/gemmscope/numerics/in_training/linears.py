"""Linears that are modules: what a linear is, its weights, and the hooks on it in a recorded step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gemmscope.numerics.in_training.capture import LinearPlace, StepCapture, local, running_passes
from gemmscope.numerics.in_training.norm_mlp import mlp_linears, normalized
from gemmscope.workload.module_parts import tensors_in

PLAIN = {"Linear", "ColumnParallelLinear", "RowParallelLinear", "Conv1D"}
NORM_LINEAR, NORM_MLP, GROUPED, ROUTER = "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "Router"
OURS = {*PLAIN, NORM_LINEAR, NORM_MLP, GROUPED}
PACKAGES = ("transformer_engine", "megatron", "transformers")


def kind_of(module: nn.Module) -> str:
    """The linear that a module is, by the first of its classes that is known; empty if it is not one."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # of nn.MultiheadAttention, which does not call it
        return ""
    for base in type(module).__mro__:
        if base is nn.Linear or (base.__name__ in OURS and base.__module__.partition(".")[0] in PACKAGES):
            return base.__name__
    weight = module._parameters.get("weight")
    return ROUTER if weight is not None and weight.dim() == 2 and top_k_of(module) else ""


def top_k_of(module: Any) -> int:
    """How many experts a router chooses for a token; 0 if a module is no router that chooses by its largest outputs alone."""
    top_k = next((one for name in ("top_k", "topk") if isinstance(one := getattr(module, name, None), int)), 0)
    biased = any(True for _ in module.buffers(recurse=False)) or module._parameters.get("bias") is not None
    in_groups = any((getattr(module, name, 1) or 1) != 1 for name in ("num_group", "n_group", "num_expert_groups"))
    return 0 if biased or in_groups else top_k


def module_weights(module: nn.Module) -> list[Tensor]:
    """One weight, or several that one GEMM reads, as Q, K and V in Transformer Engine.

    None if it is computed when it is read, as with parametrizations: these may draw random numbers or count how often they run.
    """
    names = getattr(module, "weight_names", None) or ["weight"]
    stored = {**vars(module), **module._buffers, **module._parameters}
    return [weight for name in names if isinstance(weight := stored.get(name), Tensor)]


def first_tensor(*groups: Any) -> Tensor | None:
    """The first tensor among arguments or outputs."""
    return next(iter(tensors_in(groups)), None)


class LinearHooks:
    """The hooks on one linear module in one recorded step."""

    def __init__(self, module: nn.Module, places: list[LinearPlace], capture: StepCapture) -> None:
        self._module, self._places, self._capture = module, places, capture
        self._kind = kind_of(module)
        self._handles = [
            module.register_forward_pre_hook(capture.hook(self._before), with_kwargs=True),
            module.register_forward_hook(capture.hook(self._after), with_kwargs=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = [self._capture.linears.get(place.key) for place in self._places]
        if any(one is not None and one.waits for one in taken):
            for place, x, _ in self._inputs(args, kwargs):
                self._capture.entered(place, x)

    def _after(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        result = first_tensor(output)
        if result is None or all(map(self._capture.is_done, self._places)):
            return
        if self._kind == NORM_MLP:
            x = first_tensor(args, kwargs)
            if x is not None:
                x = local(x.detach())
                self._capture.computed(self._places, x, result, partial(mlp_linears, self._module, x))
            return
        needs_dgrad = self._kind == NORM_LINEAR or any(tensor.requires_grad for tensor in tensors_in((args, kwargs))[:1])
        for place, x, rows in self._inputs(args, kwargs):
            passes = running_passes(dgrad=needs_dgrad, wgrad=any(one.requires_grad for one in self._weights(place)))
            self._capture.left(place, x, result, partial(self._weight, place), rows, passes=passes)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[LinearPlace, Tensor, slice | None]]:
        """X of every place, and the rows of the call that it has."""
        given = first_tensor(args, kwargs)
        if given is None:
            return
        x = local(given.detach())
        x = x.reshape(-1, x.shape[-1])
        if self._kind == NORM_LINEAR:
            x = normalized(self._module, x)
        if self._kind != GROUPED:
            yield self._places[0], x, None
            return
        splits = args[1] if len(args) > 1 else kwargs["m_splits"]
        ends = torch.as_tensor(splits).cumsum(0).tolist()
        for place in self._places:
            number = place.expert or 0
            rows = slice(ends[number - 1] if number else 0, ends[number])
            yield place, x[rows], rows

    def _weights(self, place: LinearPlace) -> list[Tensor]:
        return module_weights(self._module) if place.expert is None else [getattr(self._module, f"weight{place.expert}")]

    def _weight(self, place: LinearPlace) -> Tensor:
        weights = self._weights(place)
        weight = weights[0] if len(weights) == 1 else torch.cat([local(one.detach()) for one in weights])
        return weight.detach().T if self._kind == "Conv1D" else weight
