"""What Transformer Engine's fused modules compute before and between their linears, with the values that the training has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gemmscope.numerics.in_training.capture import ComputedLinear, local, running_passes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "srelu": lambda x: functional.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}
GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "qgeglu": "qgelu", "glu": "sigmoid"}


def normalized(module: Any, x: Tensor) -> Tensor:
    """The input of Transformer Engine's LayerNormLinear and LayerNormMLP after their norm, in the type of x."""
    values, weight = x.float(), local(module.layer_norm_weight.detach()).float()
    if getattr(module, "zero_centered_gamma", False):
        weight = weight + 1
    if getattr(module, "normalization", "LayerNorm") != "RMSNorm":
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + module.eps) * weight
    bias = getattr(module, "layer_norm_bias", None)
    return (values if bias is None else values + local(bias.detach()).float()).to(x.dtype)


def mlp_linears(module: Any, x: Tensor, dy: Tensor) -> tuple[ComputedLinear, ComputedLinear]:
    """Both linears of a LayerNormMLP, from its input and the gradient of its output, in the type of its input."""
    with torch.no_grad(), torch._C._DisableAutocast():
        first, second = (local(getattr(module, f"{name}_weight").detach()).to(x.dtype) for name in ("fc1", "fc2"))
        bias = getattr(module, "fc1_bias", None)
        bias = local(bias.detach()).to(x.dtype) if bias is not None and bias.numel() else None
        normal = normalized(module, x.reshape(-1, x.shape[-1]))
        before = functional.linear(normal, first, bias)
        arriving = dy.to(x.dtype) @ second
        kept = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)  # not those of the training
        with torch.enable_grad(), kept:
            gate, *up = before.requires_grad_().chunk(2 if module.activation in GATED else 1, dim=-1)
            active = ACTIVATIONS[GATED.get(module.activation, module.activation)](gate)
            hidden = active * up[0] if up else active
            (gradient,) = torch.autograd.grad(hidden, before, arriving)
    passes = [running_passes(dgrad=True, wgrad=getattr(module, f"{name}_weight").requires_grad) for name in ("fc1", "fc2")]
    return (normal, first, gradient, passes[0]), (hidden.detach(), second, dy, passes[1])
