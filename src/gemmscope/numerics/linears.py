"""Which modules of a model are linears, and what of a call of theirs is X: PyTorch, torchao, Transformer Engine and Megatron.

Classes are recognized by name, along their bases, so that none of these packages is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gemmscope.numerics.capture import LinearPlace, StepCapture, first_tensor, local, running_passes
from gemmscope.workload.nested import tensors_in

PLAIN = {"Linear", "ColumnParallelLinear", "RowParallelLinear", "Conv1D"}
NORM_LINEAR, NORM_MLP, GROUPED = "LayerNormLinear", "LayerNormMLP", "GroupedLinear"
OURS = {*PLAIN, NORM_LINEAR, NORM_MLP, GROUPED}
PACKAGES = ("transformer_engine", "megatron", "transformers")


def kind_of(module: nn.Module) -> str:
    """The linear that a module is, by the first of its classes that is known; empty if it is not one."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # of nn.MultiheadAttention, which does not call it
        return ""
    for base in type(module).__mro__:
        if base is nn.Linear:
            return "Linear"
        if base.__name__ in OURS and base.__module__.partition(".")[0] in PACKAGES:
            return base.__name__
    return ""


def places_of(path: str, module: nn.Module, experts: tuple[int, ...] | None = None) -> list[LinearPlace]:
    """The linears of one module: one, or those of some experts."""
    kind, tp = kind_of(module), _tensor_parallel(module)
    if kind == GROUPED:
        if not hasattr(module, "weight0"):  # all weights as one
            return []
        numbers = experts if experts is not None else range(int(module.num_gemms))
        sizes = _size(module.weight0)
        return [LinearPlace(f"{path}.{number}", sizes[1], sizes[0], number, tp) for number in numbers]
    if not kind or kind == NORM_MLP:
        return []
    if not (weights := _weights(module)):  # given in the call, as with tied embeddings in Megatron
        return []
    if weights[0].dim() == 2:
        outputs, inputs = sum(_size(weight)[0] for weight in weights), _size(weights[0])[1]
    else:  # a shard of FSDP1, which is flat
        outputs, inputs = int(module.out_features), int(module.in_features)
    return [LinearPlace(path, *((outputs, inputs) if kind == "Conv1D" else (inputs, outputs)), None, tp)]


def expert_count(module: nn.Module) -> int:
    """How many experts a grouped linear has; 0 if it is not one."""
    return int(module.num_gemms) if kind_of(module) == GROUPED else 0


def _weights(module: nn.Module) -> list[Tensor]:
    """One weight, or several that one GEMM reads, as Q, K and V in Transformer Engine."""
    names = getattr(module, "weight_names", None) or ["weight"]
    return [weight for name in names if isinstance(weight := getattr(module, name, None), Tensor)]


def _size(weight: Any) -> tuple[int, int]:
    """Rows and columns on this rank. FSDP keeps shards of whole weights: the size is that of the whole."""
    placements = getattr(weight, "placements", ())
    mesh = getattr(weight, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    shape = list(weight.shape)
    for dimension, placement in enumerate(placements):
        if len(names) > dimension and "tp" in str(names[dimension]) and placement.is_shard():
            shape[placement.dim] //= mesh.size(dimension)  # type: ignore[union-attr]
    return shape[0], shape[1]


def _tensor_parallel(module: nn.Module) -> tuple[int, int]:
    group = getattr(module, "tp_group", None)
    try:
        return (group.rank(), group.size()) if group is not None else (0, 1)
    except Exception:  # a group that is not initialized
        return (0, 1)


class LinearHooks:
    """The hooks on one linear module in one recorded step."""

    def __init__(self, module: nn.Module, places: list[LinearPlace], capture: StepCapture) -> None:
        self._module, self._places, self._capture = module, places, capture
        self._kind = kind_of(module)
        self._handles = [
            module.register_forward_pre_hook(capture.guarded(self._before), with_kwargs=True),
            module.register_forward_hook(capture.guarded(self._after), with_kwargs=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place in self._places:
            taken = self._capture.linears.get(place.key)
            if taken is not None and taken.waits:
                for one, x, _ in self._inputs(args, kwargs):
                    if one is place:
                        self._capture.entered(place, x)

    def _after(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        result = first_tensor(output)
        if result is None or all(map(self._capture.is_done, self._places)):
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
        return _weights(self._module) if place.expert is None else [getattr(self._module, f"weight{place.expert}")]

    def _weight(self, place: LinearPlace) -> Tensor:
        weights = self._weights(place)
        weight = weights[0] if len(weights) == 1 else torch.cat([local(one.detach()) for one in weights])
        return weight.detach().T if self._kind == "Conv1D" else weight


def normalized(module: Any, x: Tensor) -> Tensor:
    """The input of Transformer Engine's LayerNormLinear and LayerNormMLP after their norm, in the type of x."""
    values, weight = x.float(), local(module.layer_norm_weight.detach()).float()
    if getattr(module, "zero_centered_gamma", False):
        weight = weight + 1
    if getattr(module, "normalization", "LayerNorm") == "RMSNorm":
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + module.eps)
    else:
        values = values - values.mean(-1, keepdim=True)
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + module.eps)
    values = values * weight
    bias = getattr(module, "layer_norm_bias", None)
    return (values if bias is None else values + local(bias.detach()).float()).to(x.dtype)
