"""Plain PyTorch norms and linears: the kit for the CPU, and the modules that torchao converts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from gemmscope.model.spec import MlpSpec, NormSpec
from gemmscope.recipe.recipes import Recipe
from gemmscope.step.blocks import EPS, activation_of
from gemmscope.step.plan import StackPlan


class PlainKit:
    """BF16 or FP32."""

    name = "cpu"
    compiles = False

    def __init__(self, recipe: Recipe, left_out: frozenset[str] = frozenset(), device: str = "cpu") -> None:
        self.recipe, self.left_out, self.device = recipe, left_out, device
        self.precision = torch.float32 if recipe.name == "FP32" else torch.bfloat16

    def why_not(self, plan: StackPlan) -> str:  # noqa: ARG002
        return ""

    def norm(self, norm: NormSpec, width: int) -> nn.Module:
        make: dict[str, Any] = {"eps": EPS, "device": self.device, "dtype": self.precision}
        return nn.RMSNorm(width, **make) if norm.kind == "rmsnorm" else nn.LayerNorm(width, bias=norm.bias, **make)

    def rotary(self, head_dim: int, sequence: int) -> nn.Module:
        return Rotary(head_dim, sequence, self.device, self.precision)

    def linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        return PlainLinear(inputs, outputs, bias=bias, device=self.device, dtype=self.precision)

    def norm_linear(self, norm: NormSpec, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        return Chain(self.norm(norm, inputs), self.linear(inputs, outputs, bias=bias))

    def norm_mlp(self, norm: NormSpec, hidden: int, spec: MlpSpec) -> nn.Module:
        return Chain(self.norm(norm, hidden), FeedForward(self, hidden, spec))

    def experts(self, hidden: int, spec: MlpSpec, count: int) -> nn.Module:
        return PlainExperts([FeedForward(self, hidden, spec) for _ in range(count)])

    def finish(self, block: nn.Module) -> nn.Module:
        return block

    def low_precision(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def high_precision(self, part: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        return nullcontext()

    def arguments(self, *, first: bool | None) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def checkpoint(self, function: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint.checkpoint(function, x, use_reentrant=False)
        return result


class Rotary(nn.Module):
    """Rotary position embedding: rotates halves of queries and keys."""

    def __init__(self, head_dim: int, sequence: int, device: str, precision: torch.dtype) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
        angles = torch.outer(torch.arange(sequence, device=device).float(), frequencies).repeat(1, 2)[:, None, :]
        self.cos, self.sin = angles.cos().to(precision), angles.sin().to(precision)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos + turned * self.sin


class PlainLinear(nn.Linear):
    """A linear that ignores other arguments."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class Chain(nn.Module):
    """Two modules, one after the other; the second gets the other arguments."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x), **how)
        return result


class FeedForward(nn.Module):
    """Up, activation, down; gate and up are one GEMM."""

    def __init__(self, kit: PlainKit, hidden: int, spec: MlpSpec) -> None:
        super().__init__()
        self.gated = spec.gated
        self.activation = activation_of(spec)
        self.up = kit.linear(hidden, spec.intermediate_size * (2 if spec.gated else 1), bias=spec.up_bias)
        self.down = kit.linear(spec.intermediate_size, hidden, bias=spec.down_bias)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        inner = self.up(x, **how)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(inner)
        result: torch.Tensor = self.down(inner, **how)
        return result


class PlainExperts(nn.Module):
    """Experts, one after the other, each on its own tokens."""

    def __init__(self, experts: list[FeedForward]) -> None:
        super().__init__()
        self.each = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor, rows: list[int], **how: Any) -> torch.Tensor:
        return torch.cat([expert(piece, **how) for expert, piece in zip(self.each, x.split(rows), strict=True)])
