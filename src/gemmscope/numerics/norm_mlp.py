"""Transformer Engine's LayerNormMLP in plain PyTorch: both of its linears are inside one function, where no hook reaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemmscope.numerics.capture import LinearPlace, local
from gemmscope.numerics.linears import normalized

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "srelu": lambda x: functional.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}
GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "qgeglu": "qgelu", "glu": "sigmoid"}


def norm_mlp_places(path: str, module: Any) -> list[LinearPlace]:
    """The two linears of a LayerNormMLP; none if `NormMlp` does not support it."""
    if module.activation not in {*ACTIVATIONS, *GATED} or getattr(module, "tp_size", 1) > 1:
        return []
    names = (("fc1", module.fc1_weight.shape), ("fc2", module.fc2_weight.shape))
    return [LinearPlace(f"{path}.{name}", shape[1], shape[0]) for name, shape in names]


class NormMlp(nn.Module):  # type: ignore[misc]
    """The computation of a LayerNormMLP, in the type of its input, with each linear as a module of its own."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._source = [module]  # in a list, so that it is not a submodule
        self.fc1, self.fc2 = (_linear(module, name) for name in ("fc1", "fc2"))

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        module = self._source[0]
        hidden = self.fc1(normalized(module, x))
        if module.activation in GATED:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = ACTIVATIONS[GATED[module.activation]](gate) * up
        else:
            hidden = ACTIVATIONS[module.activation](hidden)
        output: Tensor = self.fc2(hidden)
        return output


def _linear(module: Any, name: str) -> nn.Linear:
    weight, bias = local(getattr(module, f"{name}_weight").detach()), getattr(module, f"{name}_bias", None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None and bias.numel():
        linear.bias = nn.Parameter(bias.detach())
    return linear
