"""Transformer Engine's fused modules: a norm and its linear in one (`LayerNormLinear`), a norm and its MLP (`LayerNormMLP`).

They write FP8 straight from the norm or the activation, which is why a step gains more than its linears measured alone.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe as te_recipes
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.quantization import FP8GlobalState, FP8GlobalStateManager

from gemmscope.model.layer_spec import AttentionSpec, MlpSpec
from gemmscope.model.spec import NormSpec
from gemmscope.recipe.recipes import Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.step.kits.plain import EPS, FeedForward, Kit, Routing
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.stack_plan import StackPlan, activation_kind

# (activation, gated) -> Transformer Engine's name
ACTIVATIONS: dict[tuple[str | None, bool], str] = {
    ("silu", True): "swiglu", ("relu", True): "reglu", ("relu2", True): "sreglu", ("quick_gelu", True): "qgeglu",
    ("silu", False): "silu", ("relu", False): "relu", ("relu2", False): "srelu", ("quick_gelu", False): "qgelu",
}  # fmt: skip
# In the errors of Transformer Engine and cuDNN where neither has a kernel for an attention. Any other error is a fault.
NO_KERNEL = ("No dot product attention", "No execution plan", "No valid execution plan", "No valid engine config")
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


class TransformerEngineKit(Kit):
    """Its modules in one recipe; `left_out` parts run in BF16, or in the precision that a mix keeps them in."""

    name = "transformer_engine"

    def __init__(
        self, recipe: Recipe, left_out: frozenset[str] = frozenset(), device: str = "cuda", compiled: str = "none"
    ) -> None:
        super().__init__(recipe, left_out, device, compiled)
        self._make: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
        self._state = FP8GlobalState()  # separate: delayed scaling would otherwise run in the steps of every recipe
        self._precision = _recipe_of(recipe)
        self._higher = _recipe_of(recipe_named(recipe.kept.recipe)) if recipe.kept is not None else None

    def why_not(self, plan: StackPlan | ModulePlan) -> str:
        return "" if isinstance(plan, ModulePlan) else plan.misaligned(self.recipe)

    def _like(self, linear: nn.Linear) -> nn.Module:
        make: dict[str, Any] = {"params_dtype": linear.weight.dtype, "device": self.device}
        return te.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, **make)

    def norm(self, norm: NormSpec, width: int) -> nn.Module:
        return getattr(te, NORMS[norm.kind])(width, eps=EPS, dtype=torch.bfloat16, device=self.device)

    def rotary(self, head_dim: int, sequence: int) -> nn.Module:
        return FusedRotary(head_dim, sequence, self.device)

    def masked_attention(self, spec: AttentionSpec, sequence: int) -> nn.Module:
        """Its own attention for windows where it has a fused kernel (cuDNN, FlashAttention); else flex attention."""
        own = not spec.sinks and spec.chunk is None and _attends(spec, sequence, self.device)
        return WindowedAttention(spec) if own else super().masked_attention(spec, sequence)

    def linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        return te.Linear(inputs, outputs, bias=bias, **self._make)

    def norm_linear(self, norm: NormSpec | None, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        if norm is None:
            return self.linear(inputs, outputs, bias=bias)
        return te.LayerNormLinear(inputs, outputs, eps=EPS, bias=bias, normalization=NORMS[norm.kind], **self._make)

    def mlp(self, norm: NormSpec | None, hidden: int, spec: MlpSpec, *, separate: bool = False) -> nn.Module:
        if norm is None or separate:
            return super().mlp(norm, hidden, spec, separate=separate)
        if len(self.left_out & {"mlp up", "mlp down"}) == 1:  # LayerNormMLP has one precision for both
            return self._feed_forward(hidden, spec, norm=norm)
        whole = te.LayerNormMLP(
            hidden,
            spec.intermediate_size,
            eps=EPS,
            bias=spec.up_bias or spec.down_bias,
            normalization=NORMS[norm.kind],
            activation=_activation(spec),
            **self._make,
        )
        return self.part("mlp up", whole)

    def experts(self, hidden: int, spec: MlpSpec, count: int, name: str = "experts") -> nn.Module:
        up = te.GroupedLinear(count, hidden, spec.intermediate_size * (1 + spec.gated), bias=spec.up_bias, **self._make)
        down = te.GroupedLinear(count, spec.intermediate_size, hidden, bias=spec.down_bias, **self._make)
        return FeedForward(spec, self.part(f"{name} up", up), self.part(f"{name} down", down))

    def routing(self, tokens: int, rows: tuple[int, ...]) -> Routing:
        return FusedRouting(tokens, rows, self.device) if hasattr(te, "moe_permute") else super().routing(tokens, rows)

    def autocast(self, *, kept: bool = False) -> AbstractContextManager[Any]:
        FP8GlobalStateManager.quantization_state = self._state
        if self._precision is None:
            return nullcontext()
        precision = self._higher if kept else self._precision
        entered: AbstractContextManager[Any] = te.autocast(enabled=precision is not None, recipe=precision)
        return entered

    def arguments(self, *, first: bool | None) -> dict[str, Any]:
        return {"is_first_microbatch": first}

    def checkpoint(self, function: Any, *x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(function, *x, use_reentrant=False)


def _recipe_of(recipe: Recipe) -> Any:
    """Its recipe; None if nothing is quantized."""
    return getattr(te_recipes, recipe.settings["transformer_engine"]["class"])() if recipe.quantizes else None


def _activation(spec: MlpSpec) -> str:
    """Its own name for it; a GELU, the only one it has, for every GELU and for what it does not know."""
    return ACTIVATIONS.get((activation_kind(spec.activation), spec.gated), "geglu" if spec.gated else "gelu")


class FusedRouting(Routing):
    """Transformer Engine's kernels for it, as with Megatron's `--moe-permute-fusion`."""

    def send(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        sent, places = te.moe_permute(x, self.experts, num_out_tokens=self.rows, map_type="index")
        return sent, places

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor, places: Any) -> torch.Tensor:
        combined: torch.Tensor = te.moe_unpermute(outputs, places, self.by_slot(weights).contiguous(), map_type="index")
        return combined


class WindowedAttention(nn.Module):
    """Transformer Engine's attention, where a query sees the positions of its window."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        assert spec.window is not None
        sizes = spec.head_dim if spec.value_dim is None else (spec.head_dim, spec.value_dim)
        reach = (spec.window - 1, 0) if spec.causal else (spec.window // 2, spec.window // 2)
        self.attention = te.DotProductAttention(
            spec.heads,
            sizes,
            num_gqa_groups=spec.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal" if spec.causal else "no_mask",
            window_size=reach,
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(q, k, v)
        return out.flatten(0, 1)


@cache
def _attends(spec: AttentionSpec, sequence: int, device: str) -> bool:
    """Whether Transformer Engine has a fused kernel for this attention: its unfused one keeps all scores."""
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    sizes = ((spec.heads, spec.head_dim), (spec.kv_heads, spec.head_dim), (spec.kv_heads, spec.value_head_dim))
    try:
        WindowedAttention(spec)(*(torch.randn(1, sequence, *size, **make) for size in sizes)).sum().backward()
    except (ValueError, RuntimeError) as error:
        if not any(text in str(error) for text in NO_KERNEL):
            raise
        return False
    return True


class FusedRotary(nn.Module):
    """Transformer Engine's kernel for it."""

    def __init__(self, head_dim: int, sequence: int, device: str) -> None:
        super().__init__()
        self.angles = te.RotaryPositionEmbedding(head_dim)(sequence).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(x, self.angles, tensor_format="bshd", fused=True)
