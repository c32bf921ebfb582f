"""Attention with a window, with chunks or with sinks: PyTorch's flex attention, compiled, which skips what the mask hides.

On the CPU, where it only shows that it works, the mask is a tensor.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gemmscope.model.layer_spec import AttentionSpec


@cache
def _compiled() -> Any:
    """One compiled function for all layers; in layers that are compiled, it is compiled with them."""
    return torch.compile(flex_attention, dynamic=False)


class FlexAttention(nn.Module):
    """Attention where a query sees the positions of its window, and where a learned logit of each head takes a share (sinks)."""

    def __init__(self, spec: AttentionSpec, sequence: int, device: str, precision: torch.dtype) -> None:
        super().__init__()
        self.flex = device.startswith("cuda")
        self.sinks = nn.Parameter(torch.zeros(spec.heads, device=device, dtype=precision)) if spec.sinks else None
        reach = spec.window or (sequence if spec.causal else 2 * sequence)

        def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            back = query - key
            near = (back >= 0) & (back < reach) if spec.causal else back.abs() <= reach // 2
            return near if spec.chunk is None else near & (query // spec.chunk == key // spec.chunk)

        if self.flex:
            self.mask: Any = create_block_mask(sees, None, None, sequence, sequence, device=device)
        else:
            positions = torch.arange(sequence, device=device)
            self.mask = sees(None, None, positions[:, None], positions)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = self._with_flex(q, k, v) if self.flex else self._with_mask(q, k, v)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _with_flex(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        out: torch.Tensor
        if self.sinks is None:
            out = _compiled()(q, k, v, block_mask=self.mask, enable_gqa=grouped)
            return out
        out, logs = _compiled()(q, k, v, block_mask=self.mask, enable_gqa=grouped, return_lse=True)
        return out * torch.sigmoid(logs - self.sinks[:, None])[..., None].to(out.dtype)

    def _with_mask(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
        if self.sinks is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~self.mask, float("-inf"))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1] @ v
