"""A diffusion transformer in plain PyTorch, with the sizes of DiT-L/2 (arXiv 2212.09748): latents of 32 x 32, patches of 2 x 2.

The factory brings its own loss: the mean squared error of the predicted noise.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and MLP, shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        batch, tokens, width = x.shape
        inside = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(inside).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + gate1 * self.proj(context)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, width=1024, depth=24, heads=16, channels=4, size=32, patch=2, classes=1000):
        super().__init__()
        self.width, self.patch = width, patch
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, patch * patch * channels)

    def forward(self, latents, time, label):
        frequencies = torch.exp(torch.arange(128, device=time.device) * (-math.log(10_000) / 128))
        angles = time.float().unsqueeze(1) * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=1).to(latents.dtype)
        condition = self.time(waves) + self.label(label)
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return self.head(self.norm(x))


def build(micro_batch_size=64):
    latents = torch.zeros(micro_batch_size, 4, 32, 32, dtype=torch.bfloat16)
    time = torch.zeros(micro_batch_size, dtype=torch.long)
    label = torch.zeros(micro_batch_size, dtype=torch.long)

    def loss(output):
        return F.mse_loss(output.float(), torch.zeros_like(output, dtype=torch.float32))

    return DiT().bfloat16(), (latents, time, label), loss
