"""Factories for `--module` of modules that are not language models: a vision transformer, T5 and a diffusion transformer.

    gemmscope step --module benchmarks/any_modules.py:vit
    gemmscope forecast --module benchmarks/any_modules.py:t5 --gpu h200

`tiny_vit`, `tiny_t5` and `tiny_dit` are the same in toy sizes, to try them on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def vit(batch: int = 64, *, hidden: int = 1024, layers: int = 24, heads: int = 16, image: int = 224) -> Any:
    """ViT-L/16 of transformers, which computes the loss itself."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden, image_size=image,
        num_labels=1000,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(batch, 3, image, image), "labels": torch.randint(1000, (batch,))}
    return ViTForImageClassification(config), inputs


def t5(batch: int = 32, *, hidden: int = 1024, layers: int = 24, heads: int = 16, length: int = 512) -> Any:
    """T5 v1.1 large: an encoder and a decoder, whose attention has a bias for positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=hidden, d_kv=hidden // heads, d_ff=hidden * 11 // 4, num_layers=layers, num_heads=heads,
        feed_forward_proj="gated-gelu", vocab_size=32128, tie_word_embeddings=False, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(32000, (batch, length))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, : length // 4].contiguous()}


class DiTBlock(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by what the condition says (adaLN-Zero)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(hidden, 6 * hidden)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """`x` is [batch, tokens, hidden], the condition [batch, hidden]."""
        parts = self.modulation(functional.silu(condition))[:, None].chunk(6, dim=-1)
        inner = self.norm1(x) * (1 + parts[1]) + parts[0]
        q, k, v = self.qkv(inner).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.proj(attended)
        inner = self.norm2(x) * (1 + parts[4]) + parts[3]
        return x + parts[5] * self.down(functional.gelu(self.up(inner), approximate="tanh"))


class DiT(nn.Module):
    """Peebles and Xie 2023 (arXiv 2212.09748): patches of latents, a time, a class; it predicts the noise."""

    def __init__(self, hidden: int, layers: int, heads: int, latent: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, hidden, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.zeros(1, (latent // 2) ** 2, hidden))
        self.times = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.classes = nn.Embedding(1000, hidden)
        self.blocks = nn.ModuleList([DiTBlock(hidden, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.final = nn.Linear(hidden, 2 * 2 * 8)

    def forward(self, latents: torch.Tensor, times: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Latents [batch, 4, size, size], embedded times [batch, 256], class numbers."""
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.times(times) + self.classes(classes)
        for block in self.blocks:
            x = block(x, condition)
        return self.final(self.norm(x))


def dit(batch: int = 64, *, hidden: int = 1152, layers: int = 28, heads: int = 16, latent: int = 32) -> Any:
    """DiT-XL/2 on latents of 256 x 256 images, with a loss of its own: the mean square of the noise that is left."""
    inputs = (torch.randn(batch, 4, latent, latent), torch.randn(batch, 256), torch.randint(1000, (batch,)))
    return DiT(hidden, layers, heads, latent), inputs, lambda noise: noise.float().square().mean()


def tiny_vit() -> Any:
    """A vision transformer of two layers."""
    return vit(2, hidden=128, layers=2, heads=4, image=64)


def tiny_t5() -> Any:
    """T5 with two layers on each side."""
    return t5(2, hidden=128, layers=2, heads=4, length=64)


def tiny_dit() -> Any:
    """A diffusion transformer of two layers."""
    return dit(2, hidden=128, layers=2, heads=4, latent=8)
