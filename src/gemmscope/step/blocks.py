"""The parts of a transformer that are the same in every framework: a layer's order, attention itself, experts' routing.

What multiplies (projections, MLPs, experts) comes from a kit (`kits/`), which knows one framework. Positions and routing are
fixed beforehand: they cost what they cost in training, and nothing waits for the host.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmscope.model.spec import AttentionSpec, LayerSpec, MoeSpec, NormSpec
from gemmscope.step.kits.plain import Kit
from gemmscope.step.marks import mark
from gemmscope.step.plan import StackPlan


class Core(nn.Module):
    """Attention itself, on projected queries, keys and values."""

    def __init__(self, spec: AttentionSpec, sequence: int, rotary: nn.Module | None) -> None:
        super().__init__()
        self.spec, self.sequence, self.rotary = spec, sequence, rotary

    def forward(self, projected: torch.Tensor) -> torch.Tensor:
        """`projected` is [tokens, Q + K + V]; gives [tokens, output width]."""
        spec = self.spec
        q, k, v = projected.view(-1, self.sequence, projected.shape[-1]).split([spec.q_width, spec.k_width, spec.v_width], dim=-1)
        q = q.unflatten(-1, (spec.heads, spec.head_dim))
        k = k.unflatten(-1, (spec.kv_heads, spec.head_dim))
        v = v.unflatten(-1, (spec.kv_heads, spec.value_head_dim))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return attend(spec, q, k, v)


def attend(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All are [batch, sequence, heads, head]; gives [tokens, output width]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class LatentAttention(nn.Module):
    """Queries, keys and values through a bottleneck (DeepSeek)."""

    def __init__(self, kit: Kit, norm: NormSpec, hidden: int, spec: AttentionSpec, sequence: int, rotary: nn.Module) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None
        self.spec, self.latent, self.sequence, self.rotary = spec, latent, sequence, rotary
        plain = spec.head_dim - latent.rope_dim
        self.norm = kit.norm(norm, hidden)
        if latent.q_rank is None:
            self.q_down, self.q_up = None, kit.linear(hidden, spec.q_width, bias=spec.q_bias)
        else:
            self.q_down = kit.linear(hidden, latent.q_rank, bias=latent.down_bias)
            self.q_up = kit.norm_linear(norm, latent.q_rank, spec.q_width, bias=spec.q_bias)
        self.kv_down = kit.linear(hidden, latent.kv_rank + latent.rope_dim, bias=latent.down_bias)
        self.kv_up = kit.norm_linear(norm, latent.kv_rank, spec.heads * (plain + spec.value_head_dim), bias=spec.k_bias)

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
        q = torch.cat((q_plain, self.rotary(q_turned)), dim=-1)
        return attend(spec, mark(q, "attention"), torch.cat((k_plain, turned), dim=-1), v)


class Experts(nn.Module):
    """Router, the way to the experts, the experts, the way back; a shared expert beside them.

    The router is computed, but where tokens go is fixed: as many to each expert as planned.
    """

    def __init__(self, kit: Kit, plan: StackPlan, spec: MoeSpec, device: Any) -> None:
        super().__init__()
        hidden, rows = plan.hidden_size, plan.expert_rows
        self.spec, self.rows = spec, rows
        self.norm = kit.norm(plan.norm, hidden)
        self.router = nn.Linear(hidden, spec.experts, bias=spec.router_bias, device=device, dtype=kit.precision)
        self.experts = kit.experts(hidden, spec.expert, len(rows))
        self.shared = kit.experts(hidden, spec.shared, 1) if spec.shared is not None else None
        self._order, self._choice = _places(plan.tokens, rows, spec.top_k, device)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        normed = mark(self.norm(x), "router")
        weights = torch.softmax(self.router(normed).float(), dim=-1).topk(self.spec.top_k, dim=-1).values.to(x.dtype)
        sent = mark(normed.index_select(0, self._order), "experts")
        outputs = mark(self.experts(sent, list(self.rows), **how), "combine")
        out = torch.zeros_like(x).index_add(0, self._order, outputs * weights.flatten().index_select(0, self._choice)[:, None])
        if self.shared is not None:
            out = out + self.shared(mark(normed, "shared expert"), [x.shape[0]], **how)
        return out


def _places(tokens: int, rows: tuple[int, ...], top_k: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token each row of the experts' input is, and which of the router's choices sent it there."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(tokens, (sum(rows),), generator=generator)
    choice = order * top_k + torch.randint(top_k, order.shape, generator=generator)
    return order.to(device), choice.to(device)


class Block(nn.Module):
    """One layer: attention and the feed-forward block, each added to what comes in."""

    def __init__(self, kit: Kit, layer: LayerSpec, plan: StackPlan, device: Any) -> None:
        super().__init__()
        spec, norm, hidden, sequence = layer.attention, plan.norm, plan.hidden_size, plan.sequence_length
        assert spec is not None
        assert layer.mlp is not None
        self.kit, self.selective = kit, False
        turned = spec.latent.rope_dim if spec.latent else spec.head_dim
        rotary = kit.rotary(turned, sequence) if (spec.rotary or spec.latent) and turned % 2 == 0 else None
        if spec.latent is not None:
            assert rotary is not None
            self.attention_in: nn.Module = LatentAttention(kit, norm, hidden, spec, sequence, rotary)
            self.core: nn.Module | None = None
        else:
            width = spec.q_width + spec.k_width + spec.v_width
            self.attention_in = kit.norm_linear(norm, hidden, width, bias=spec.q_bias or spec.k_bias or spec.v_bias)
            self.core = Core(spec, sequence, rotary)
        self.attention_out = kit.linear(spec.out_width, hidden, bias=spec.out_bias)
        if isinstance(layer.mlp, MoeSpec):
            self.feed_forward: nn.Module = Experts(kit, plan, layer.mlp, device)
        else:
            self.feed_forward = kit.norm_mlp(norm, hidden, layer.mlp)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        x = mark(x, "qkv")
        with self.kit.high_precision("qkv"):
            inner = self.attention_in(x, **how)
        if self.core is not None:
            inner = mark(inner, "attention")
            inner = self.kit.checkpoint(self.core, inner) if self.selective else self.core(inner)
        inner = mark(inner, "attn out")
        with self.kit.high_precision("attn out"):
            x = x + self.attention_out(inner, **how)
        x = mark(x, "mlp")
        with self.kit.high_precision("mlp"):
            return x + self.feed_forward(x, **how)
