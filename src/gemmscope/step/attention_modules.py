"""Self-attention as modules: projections from a kit, norms of queries and keys, positions, attention itself, an output gate."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmscope.model.layer_spec import AttentionSpec
from gemmscope.model.spec import NormSpec
from gemmscope.step.kits.plain import EPS, Kit
from gemmscope.step.marks import mark
from gemmscope.step.stack_plan import StackPlan, projected_widths


class SelfAttention(nn.Module):
    """The attention block: from the hidden state to what is added to it. `norm`: before its projections; None: its input is
    normed already."""

    def __init__(self, kit: Kit, spec: AttentionSpec, plan: StackPlan, norm: NormSpec | None) -> None:
        super().__init__()
        self.kit, hidden = kit, plan.model.hidden_size
        turned = spec.latent.rope_dim if spec.latent else spec.rotary_dim or spec.head_dim
        rotary = kit.rotary(turned, plan.sequence_length) if (spec.rotary or spec.latent) and turned % 2 == 0 else None
        self.core: nn.Module | None = None
        if spec.latent is not None:
            assert rotary is not None
            self.projections: nn.Module = LatentAttention(kit, norm, plan, spec, rotary)
        else:
            self.core = Core(kit, spec, plan, rotary)
            if plan.run.separate_projections and not spec.stored_fused:
                self.projections = SeparateProjections(kit, spec, hidden, norm)
            else:  # by one GEMM
                self.projections = kit.norm_linear(norm, hidden, sum(projected_widths(spec)), bias=spec.qkv_bias)
        self.out = kit.linear(spec.out_width, hidden, bias=spec.out_bias)
        self.selective = plan.run.recompute == "selective"

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        with self.kit.autocast_of("qkv"):
            inner = self.projections(x, **how)
        if self.core is not None:
            first, *rest = inner if isinstance(inner, tuple) else (inner,)
            first = mark(first, "attention")
            inner = self.kit.checkpoint(self.core, first, *rest) if self.selective else self.core(first, *rest)
        inner = mark(inner, "attn out")
        with self.kit.autocast_of("attn out"):
            return self.out(inner, **how)


class SeparateProjections(nn.Module):
    """Queries, keys and values by a GEMM each, from the same normed input."""

    def __init__(self, kit: Kit, spec: AttentionSpec, hidden: int, norm: NormSpec | None) -> None:
        super().__init__()
        self.norm = kit.norm(norm, hidden) if norm is not None else nn.Identity()
        self.linears = nn.ModuleList(kit.linear(hidden, width, bias=spec.qkv_bias) for width in projected_widths(spec))

    def forward(self, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        x = self.norm(x)
        return tuple(linear(x, **how) for linear in self.linears)


class Core(nn.Module):
    """Attention itself, on projected queries, keys and values: in one tensor side by side, or in three."""

    def __init__(self, kit: Kit, spec: AttentionSpec, plan: StackPlan, rotary: nn.Module | None) -> None:
        super().__init__()
        self.spec, self.sequence, self.rotary = spec, plan.sequence_length, rotary
        self.widths = projected_widths(spec)
        self.kept = _kept(kit, spec, plan) if spec.shares_kv else ()
        self.scales = torch.ones(self.sequence, 1, 1, device=kit.device, dtype=kit.precision) if spec.temperature else None
        self.norms = QkNorms(kit, plan.model.norm, spec) if spec.qk_norm is not None else None
        sequence = plan.sequence_length
        chunk = min(spec.chunk or sequence, sequence)  # chunks that divide the sequence are sequences of their own
        masked = spec.sinks or (spec.window is not None and spec.window < sequence) or sequence % chunk != 0
        self.attention = kit.masked_attention(spec, sequence) if masked else FullAttention(spec, sequence)

    def forward(self, *projected: torch.Tensor) -> torch.Tensor:
        """All are [tokens, width]; gives [tokens, output width]."""
        spec = self.spec
        parts = projected if len(projected) > 1 else projected[0].split(self.widths, dim=-1)
        q, *rest = (part.unflatten(0, (-1, self.sequence)) for part in parts)
        k, v = self.kept or (rest if len(rest) > 1 else (rest[0], rest[0]))
        gate = None
        if spec.gated:
            q, gate = q.chunk(2, dim=-1)
        if self.norms is not None:
            q, k = self.norms(q, k)
        q = q.unflatten(-1, (spec.heads, spec.head_dim))
        k = k.unflatten(-1, (spec.kv_heads, spec.head_dim))
        v = v.unflatten(-1, (spec.kv_heads, spec.value_head_dim))
        if self.rotary is not None:
            q, k = self._turned(q), self._turned(k)
        if spec.v_norm:
            v = functional.rms_norm(v, (spec.value_head_dim,), eps=EPS)
        if self.scales is not None:
            q = q * self.scales
        out = self.attention(q, k, v)
        return out if gate is None else out * torch.sigmoid(gate.flatten(0, 1))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys rotated by their position: the whole head, or its first part."""
        assert self.rotary is not None
        part = self.spec.rotary_dim
        if part is None or part == self.spec.head_dim:
            return self.rotary(x)
        turned, rest = x.split([part, self.spec.head_dim - part], dim=-1)
        return torch.cat((self.rotary(turned), rest), dim=-1)


def _kept(kit: Kit, spec: AttentionSpec, plan: StackPlan) -> tuple[torch.Tensor, ...]:
    """Random keys and values in place of those of an earlier layer. Their gradients are computed, and dropped."""
    make: dict[str, Any] = {"device": kit.device, "dtype": kit.precision, "requires_grad": True}
    shape = (plan.micro_batch_size, plan.sequence_length)
    kept = tuple(torch.randn(*shape, width, **make) for width in (spec.k_width, spec.v_width))
    for tensor in kept:
        tensor.register_post_accumulate_grad_hook(drop_gradient)
    return kept


def drop_gradient(tensor: torch.Tensor) -> None:
    """A hook for a gradient that is complete, and that nothing uses."""
    tensor.grad = None


class QkNorms(nn.Module):
    """Norms of queries and keys, [.., width] each: over a head with one weight for all heads ("head") or one for each
    ("each_head"), or over all heads ("full")."""

    def __init__(self, kit: Kit, norm: NormSpec, spec: AttentionSpec) -> None:
        super().__init__()
        self.kind, self.head_dim, self.rms = spec.qk_norm, spec.head_dim, norm.kind == "rmsnorm"
        norm = NormSpec(norm.kind, norm.weight, spec.qk_norm_bias)
        self.weights: nn.ParameterList | None = None
        if not spec.qk_norm_weight:
            self.q, self.k = (
                nn.RMSNorm(spec.head_dim if self.kind != "full" else width, eps=EPS, elementwise_affine=False)
                for width in (spec.q_width, spec.k_width)
            )
        elif self.kind == "each_head":
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
        if self.weights is None:
            q, k = self.q(q), self.k(k)
        else:
            normed = functional.rms_norm if self.rms else functional.layer_norm
            q, k = (
                normed(tensor, (self.head_dim,), eps=EPS) * weight for tensor, weight in zip((q, k), self.weights, strict=True)
            )
        return q.flatten(-2), k.flatten(-2)


class FullAttention(nn.Module):
    """PyTorch's attention: a position sees the whole sequence, or all of it before itself."""

    def __init__(self, spec: AttentionSpec, sequence: int) -> None:
        super().__init__()
        self.causal, self.chunk = spec.causal, min(spec.chunk or sequence, sequence)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """All are [batch, sequence, heads, head]; gives [tokens, output width]. Chunks are sequences of their own."""
        q, k, v = (tensor.flatten(0, 1).unflatten(0, (-1, self.chunk)).transpose(1, 2) for tensor in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class LatentAttention(nn.Module):
    """Queries, keys and values through a bottleneck (DeepSeek), and attention itself."""

    def __init__(self, kit: Kit, norm: NormSpec | None, plan: StackPlan, spec: AttentionSpec, rotary: nn.Module) -> None:
        super().__init__()
        latent, hidden, inner = spec.latent, plan.model.hidden_size, plan.model.norm
        assert latent is not None
        self.spec, self.latent, self.sequence, self.rotary = spec, latent, plan.sequence_length, rotary
        self.kit, self.selective = kit, plan.run.recompute == "selective"
        self.attention = FullAttention(spec, plan.sequence_length)
        plain = spec.head_dim - latent.rope_dim
        self.norm = kit.norm(norm, hidden) if norm is not None else nn.Identity()
        self.q_down = kit.linear(hidden, latent.q_rank, bias=latent.down_bias) if latent.q_rank is not None else None
        self.q_up = kit.norm_linear(
            inner if latent.q_rank is not None else None, latent.q_rank or hidden, spec.q_width, bias=spec.qkv_bias
        )
        self.kv_down = kit.linear(hidden, latent.kv_rank + latent.rope_dim, bias=latent.down_bias)
        self.kv_up = kit.norm_linear(inner, latent.kv_rank, spec.heads * (plain + spec.value_head_dim), bias=spec.qkv_bias)

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
        return self.kit.checkpoint(self.attention, q, k, v) if self.selective else self.attention(q, k, v)
