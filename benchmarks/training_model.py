"""The model and the text of `train_recipes.py`: a small Llama in plain PyTorch, and the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

HELD_OUT = 20  # one file of so many is validation text
VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of one step."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch


SIZES = {
    "30M": Size(hidden=640, intermediate=1792, layers=6, heads=10, sequence=512, batch=16),
    "toy": Size(hidden=128, intermediate=384, layers=3, heads=2, sequence=64, batch=8),
}


class Attention(nn.Module):
    """Causal attention with rotary positions; one linear makes queries, keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv_proj = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv_proj(x).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, sequence, hidden))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    """SwiGLU; one linear makes gate and up."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(size.hidden, 2 * size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Layer(nn.Module):
    """Attention and feed-forward block, each after a norm and around a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.self_attn, self.mlp = Attention(size), FeedForward(size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """A language model over bytes. Called with ids [batch, sequence + 1], it returns the mean loss."""

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(VOCABULARY, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_block = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / (2 * size.layers) ** 0.5 if ends_block else 0.02
                nn.init.normal_(parameter, std=deviation, generator=generator)
        head = size.hidden // size.heads
        frequencies = 10000.0 ** (-torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(size.sequence), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def low_precision_linears(self) -> list[str]:
        """All linears of the layers. The head stays in BF16, as in other trainings."""
        paths = [path for path, part in self.named_modules() if isinstance(part, nn.Linear)]
        return [path for path in paths if path != "lm_head"]


def standard_library() -> tuple[bytes, bytes]:
    """Training text and validation text: different files of Python's standard library, no file twice."""
    root, seen = Path(sysconfig.get_path("stdlib")), set[bytes]()
    training, validation = [], []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue
        text = file.read_bytes()
        if text in seen:
            continue
        seen.add(text)
        held_out = zlib.crc32(path.as_posix().encode()) % HELD_OUT == 0
        (validation if held_out else training).append(text)
    return b"\0".join(training), b"\0".join(validation)


class Text:
    """Windows of the training text in a random order that depends on the seed only, and fixed windows of the validation text."""

    def __init__(self, size: Size, steps: int, seed: int, windows: int, device: str) -> None:
        training, validation = standard_library()
        self.description = {"training_bytes": len(training), "validation_bytes": len(validation), "crc32": zlib.crc32(training)}
        self._training, self._validation = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) for text in (training, validation)
        )
        generator = torch.Generator().manual_seed(seed)
        length = size.sequence + 1
        self._starts = torch.randint(len(training) - length, (steps, size.batch), generator=generator).to(device)
        apart = (len(validation) - length) // windows
        if apart < 1:
            raise SystemExit(f"the validation text has {len(validation)} bytes: fewer than {windows} windows of {length}")
        self._windows = (torch.arange(windows) * apart).view(-1, min(size.batch, windows)).to(device)
        self._offsets = torch.arange(length, device=device)

    def batch(self, step: int) -> torch.Tensor:
        return self._training[self._starts[step][:, None] + self._offsets].long()

    def validation(self) -> list[torch.Tensor]:
        return [self._validation[starts[:, None] + self._offsets].long() for starts in self._windows]
