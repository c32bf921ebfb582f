"""Self-attention as modules: projections from a kit, norms of queries and keys, positions, attention itself, an output gate."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmscope.model.spec import AttentionSpec, NormSpec
from gemmscope.step.kits.plain import EPS, Kit
from gemmscope.step.marks import mark
from gemmscope.step.plan import StackPlan


def attention_of(kit: Kit, spec: AttentionSpec, plan: StackPlan, norm: NormSpec | None) -> nn.Module:
    """The attention of a layer. `norm`: before its projections; None: its input is normed already."""
    return SelfAttention(kit, spec, plan, norm)


class SelfAttention(nn.Module):
    """From the hidden state to what attention adds to it."""

    def __init__(self, kit: Kit, spec: AttentionSpec, plan: StackPlan, norm: NormSpec | None) -> None:
        super().__init__()
        self.kit, hidden = kit, plan.hidden_size
        turned = spec.latent.rope_dim if spec.latent else spec.head_dim
        rotary = kit.rotary(turned, plan.sequence_length) if (spec.rotary or spec.latent) and turned % 2 == 0 else None
        self.core: nn.Module | None = None
        if spec.latent is not None:
            assert rotary is not None
            self.projections: nn.Module = LatentAttention(kit, norm, plan, spec, rotary)
        else:
            self.core = Core(kit, spec, plan, rotary)
            separate = plan.separate_projections and not spec.stored_fused
            self.projections = (SeparateProjections if separate else projections)(kit, spec, hidden, norm)
        self.out = kit.linear(spec.out_width, hidden, bias=spec.out_bias)
        self.selective = plan.recompute == "selective"

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        with self.kit.high_precision("qkv"):
            inner = self.projections(x, **how)
        if self.core is not None:
            first, *rest = inner if isinstance(inner, tuple) else (inner,)
            first = mark(first, "attention")
            inner = self.kit.checkpoint(self.core, first, *rest) if self.selective else self.core(first, *rest)
        inner = mark(inner, "attn out")
        with self.kit.high_precision("attn out"):
            return self.out(inner, **how)


def projections(kit: Kit, spec: AttentionSpec, hidden: int, norm: NormSpec | None) -> nn.Module:
    """Queries, keys and values by one GEMM."""
    width, bias = spec.q_width + spec.k_width + spec.v_width, spec.q_bias or spec.k_bias or spec.v_bias
    return kit.linear(hidden, width, bias=bias) if norm is None else kit.norm_linear(norm, hidden, width, bias=bias)


class SeparateProjections(nn.Module):
    """Queries, keys and values by a GEMM each, from the same normed input."""

    def __init__(self, kit: Kit, spec: AttentionSpec, hidden: int, norm: NormSpec | None) -> None:
        super().__init__()
        self.norm = kit.norm(norm, hidden) if norm is not None else nn.Identity()
        self.q = kit.linear(hidden, spec.q_width, bias=spec.q_bias)
        self.k = kit.linear(hidden, spec.k_width, bias=spec.k_bias)
        self.v = kit.linear(hidden, spec.v_width, bias=spec.v_bias)

    def forward(self, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        x = self.norm(x)
        return self.q(x, **how), self.k(x, **how), self.v(x, **how)


class Core(nn.Module):
    """Attention itself, on projected queries, keys and values: in one tensor side by side, or in three."""

    def __init__(self, kit: Kit, spec: AttentionSpec, plan: StackPlan, rotary: nn.Module | None) -> None:
        super().__init__()
        self.spec, self.sequence, self.rotary = spec, plan.sequence_length, rotary
        self.widths = [spec.q_width, spec.k_width, spec.v_width]
        self.norms = QkNorms(kit, plan.norm, spec) if spec.qk_norm is not None else None

    def forward(self, *projected: torch.Tensor) -> torch.Tensor:
        """All are [tokens, width]; gives [tokens, output width]."""
        spec = self.spec
        parts = projected if len(projected) > 1 else projected[0].split(self.widths, dim=-1)
        q, k, v = (part.unflatten(0, (-1, self.sequence)) for part in parts)
        if self.norms is not None:
            q, k = self.norms(q, k)
        q = q.unflatten(-1, (spec.heads, spec.head_dim))
        k = k.unflatten(-1, (spec.kv_heads, spec.head_dim))
        v = v.unflatten(-1, (spec.kv_heads, spec.value_head_dim))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return attend(spec, q, k, v)


class QkNorms(nn.Module):
    """Norms of queries and keys, [.., width] each: over a head with one weight for all heads ("head") or one for each
    ("each_head"), or over all heads ("full")."""

    def __init__(self, kit: Kit, norm: NormSpec, spec: AttentionSpec) -> None:
        super().__init__()
        self.kind, self.head_dim, self.rms = spec.qk_norm, spec.head_dim, norm.kind == "rmsnorm"
        norm = NormSpec(norm.kind, norm.weight, spec.qk_norm_bias)
        if self.kind == "each_head":
            make: dict[str, Any] = {"device": kit.device, "dtype": kit.precision}
            weights = [nn.Parameter(torch.ones(heads, spec.head_dim, **make)) for heads in (spec.heads, spec.kv_heads)]
            self.weights = nn.ParameterList(weights)
        else:
            widths = (spec.head_dim, spec.head_dim) if self.kind == "head" else (spec.q_width, spec.k_width)
            self.q, self.k = (kit.norm(norm, width) for width in widths)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "full":
            return self.q(q), self.k(k)
        q, k = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (q, k))
        if self.kind == "head":
            q, k = self.q(q), self.k(k)
        else:
            normed = functional.rms_norm if self.rms else functional.layer_norm
            q, k = (normed(each, (self.head_dim,), eps=EPS) * weight for each, weight in zip((q, k), self.weights, strict=True))
        return q.flatten(-2), k.flatten(-2)


def attend(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All are [batch, sequence, heads, head]; gives [tokens, output width]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class LatentAttention(nn.Module):
    """Queries, keys and values through a bottleneck (DeepSeek), and attention itself."""

    def __init__(self, kit: Kit, norm: NormSpec | None, plan: StackPlan, spec: AttentionSpec, rotary: nn.Module) -> None:
        super().__init__()
        latent, hidden, inner = spec.latent, plan.hidden_size, plan.norm
        assert latent is not None
        self.spec, self.latent, self.sequence, self.rotary = spec, latent, plan.sequence_length, rotary
        self.kit, self.selective = kit, plan.recompute == "selective"
        plain = spec.head_dim - latent.rope_dim
        self.norm = kit.norm(norm, hidden) if norm is not None else nn.Identity()
        if latent.q_rank is None:
            self.q_down, self.q_up = None, kit.linear(hidden, spec.q_width, bias=spec.q_bias)
        else:
            self.q_down = kit.linear(hidden, latent.q_rank, bias=latent.down_bias)
            self.q_up = kit.norm_linear(inner, latent.q_rank, spec.q_width, bias=spec.q_bias)
        self.kv_down = kit.linear(hidden, latent.kv_rank + latent.rope_dim, bias=latent.down_bias)
        self.kv_up = kit.norm_linear(inner, latent.kv_rank, spec.heads * (plain + spec.value_head_dim), bias=spec.k_bias)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        spec, latent = self.spec, self.latent
        x = self.norm(x)
        q = self.q_up(x if self.q_down is None else self.q_down(x, **how), **how)
        low, shared = self.kv_down(x, **how).split([latent.kv_rank, latent.rope_dim], dim=-1)
        plain = spec.head_dim - latent.rope_dim
        kv = self.kv_up(low.contiguous(), **how).view(-1, self.sequence, spec.heads, plain + spec.value_head_dim)
        q_plain, q_turned = q.view(-1, self.sequence, spec.heads, spec.head_dim).split([plain, latent.rope_dim], dim=-1)
        turned = self.rotary(shared.reshape(-1, self.sequence, 1, latent.rope_dim)).expand(-1, -1, spec.heads, -1)
        k_plain, v = kv.split([plain, spec.value_head_dim], dim=-1)
        q = mark(torch.cat((q_plain, self.rotary(q_turned)), dim=-1), "attention")
        k = torch.cat((k_plain, turned), dim=-1)
        attention = partial(attend, spec)
        return self.kit.checkpoint(attention, q, k, v) if self.selective else attention(q, k, v)
