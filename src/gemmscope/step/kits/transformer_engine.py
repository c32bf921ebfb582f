"""Transformer Engine's fused modules: a norm and its linear in one (`LayerNormLinear`), a norm and its MLP (`LayerNormMLP`).

They write FP8 straight from the norm or the activation, which is why a step gains more than its linears measured alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe as te_recipes
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.quantization import FP8GlobalState, FP8GlobalStateManager

from gemmscope.model.spec import MlpSpec, NormSpec
from gemmscope.recipe.recipes import Recipe
from gemmscope.step.kits.plain import EPS, FeedForward, Kit
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.plan import StackPlan, activation_kind

# (activation, gated) -> Transformer Engine's name
ACTIVATIONS: dict[tuple[str | None, bool], str] = {
    ("silu", True): "swiglu", ("relu", True): "reglu", ("relu2", True): "sreglu", ("quick_gelu", True): "qgeglu",
    ("silu", False): "silu", ("relu", False): "relu", ("relu2", False): "srelu", ("quick_gelu", False): "qgelu",
}  # fmt: skip
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


class TransformerEngineKit(Kit):
    """Its modules in one recipe; `left_out` parts run in BF16."""

    name = "transformer_engine"

    def __init__(
        self, recipe: Recipe, left_out: frozenset[str] = frozenset(), device: str = "cuda", compiled: str = "none"
    ) -> None:
        super().__init__(recipe, left_out, device, compiled)
        self.precision = torch.bfloat16
        self._make: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
        self._state = FP8GlobalState()  # of its own: delayed scaling's bookkeeping would else run in every other recipe's steps
        self._precision = getattr(te_recipes, recipe.settings[self.name]["class"])() if recipe.quantizes else None

    def why_not(self, plan: StackPlan | ModulePlan) -> str:
        return "" if isinstance(plan, ModulePlan) else self.recipe.misaligned(plan.low_precision_sizes())

    def _converted(self, linear: nn.Linear) -> nn.Module:
        make: dict[str, Any] = {"params_dtype": linear.weight.dtype, "device": self.device}
        converted = te.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, **make)
        converted.weight = linear.weight
        if linear.bias is not None:
            converted.bias = linear.bias
        return converted.train(linear.training)

    def norm(self, norm: NormSpec, width: int) -> nn.Module:
        norm_class = te.RMSNorm if norm.kind == "rmsnorm" else te.LayerNorm
        return norm_class(width, eps=EPS, dtype=torch.bfloat16, device=self.device)

    def rotary(self, head_dim: int, sequence: int) -> nn.Module:
        return FusedRotary(head_dim, sequence, self.device)

    def linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        return te.Linear(inputs, outputs, bias=bias, **self._make)

    def norm_linear(self, norm: NormSpec, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        return te.LayerNormLinear(inputs, outputs, eps=EPS, bias=bias, normalization=NORMS[norm.kind], **self._make)

    def norm_mlp(self, norm: NormSpec, hidden: int, spec: MlpSpec) -> nn.Module:
        return te.LayerNormMLP(
            hidden,
            spec.intermediate_size,
            eps=EPS,
            bias=spec.up_bias or spec.down_bias,
            normalization=NORMS[norm.kind],
            activation=_activation(spec),
            **self._make,
        )

    def experts(self, hidden: int, spec: MlpSpec, count: int) -> nn.Module:
        up = te.GroupedLinear(count, hidden, spec.intermediate_size * (1 + spec.gated), bias=spec.up_bias, **self._make)
        down = te.GroupedLinear(count, spec.intermediate_size, hidden, bias=spec.down_bias, **self._make)
        return FeedForward(spec, up, down)

    def low_precision(self) -> AbstractContextManager[Any]:
        FP8GlobalStateManager.quantization_state = self._state
        if self._precision is None:
            return nullcontext()
        entered: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=self._precision)
        return entered

    def high_precision(self, part: str) -> AbstractContextManager[Any]:
        if part not in self.left_out or self._precision is None:
            return nullcontext()
        left: AbstractContextManager[Any] = te.autocast(enabled=False)
        return left

    def arguments(self, *, first: bool | None) -> dict[str, Any]:
        return {"is_first_microbatch": first}

    def checkpoint(self, function: Any, *x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(function, *x, use_reentrant=False)


def _activation(spec: MlpSpec) -> str:
    """Its own name for it; a GELU, the only one it has, for every GELU and for what it does not know."""
    return ACTIVATIONS.get((activation_kind(spec.activation), spec.gated), "geglu" if spec.gated else "gelu")


class FusedRotary(nn.Module):
    """Transformer Engine's kernel for it."""

    def __init__(self, head_dim: int, sequence: int, device: str) -> None:
        super().__init__()
        self.angles = te.RotaryPositionEmbedding(head_dim)(sequence).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(x, self.angles, tensor_format="bshd", fused=True)
