"""`gemmscope.record_tensors` on Transformer Engine's modules in FP8, on a GPU: complete, and the training unchanged bit for bit.

    python benchmarks/record_transformer_engine.py

The norms that are recorded of the linears inside LayerNormMLP, which are computed by a stand-in, are compared with those of the
same layer built of LayerNormLinear and Linear.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling

import gemmscope
from gemmscope.numerics.recording import read_recording

HIDDEN, TOKENS, EXPERTS = 512, 1024, 4


class Layer(nn.Module):
    """Every kind of linear, fused and not."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        kwargs: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, normalization="RMSNorm", **kwargs)
        self.proj = te.Linear(3 * HIDDEN, HIDDEN, **kwargs)
        self.fused = fused
        if fused:
            self.mlp = te.LayerNormMLP(HIDDEN, 4 * HIDDEN, activation="swiglu", normalization="RMSNorm", **kwargs)
        else:
            self.fc1 = te.LayerNormLinear(HIDDEN, 8 * HIDDEN, normalization="RMSNorm", **kwargs)
            self.fc2 = te.Linear(4 * HIDDEN, HIDDEN, **kwargs)
        self.experts = te.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.qkv(x))
        if self.fused:
            x = x + self.mlp(x)
        else:
            gate, up = self.fc1(x).chunk(2, dim=-1)
            x = x + self.fc2(nn.functional.silu(gate) * up)
        return x + self.experts(x, [TOKENS // EXPERTS] * EXPERTS)


def train(path: Path | None, *, fused: bool, fp8: bool) -> list[float]:
    """Losses of 12 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(fused), Layer(fused))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel() % 1000))
            if parameter.dim() == 2:
                parameter.copy_(values * (0.3 if "expert" in name else 1.0) / parameter.shape[1] ** 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = torch.Generator().manual_seed(1)
    recording = gemmscope.record_tensors(model, path, steps=4, after=4) if path is not None else None
    if recording is not None:
        recording.__enter__()
    losses = []
    for _ in range(12):
        x = torch.randn(TOKENS, HIDDEN, generator=batches).to("cuda", torch.bfloat16).requires_grad_()
        with te.autocast(enabled=fp8, recipe=DelayedScaling()):
            output = model(x)
        loss = (output.float() - x.detach().float().flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recording is not None:
            recording.step()
    return losses


def main() -> None:
    """FP8 with and without recording, then the stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / "fused.safetensors", Path(folder) / "plain.safetensors"
        same = train(None, fused=True, fp8=True) == train(path, fused=True, fp8=True)
        print("FP8Delayed, losses of 12 steps with and without recording:", "the same, bit for bit" if same else "DIFFERENT")
        for linear in read_recording(path).linears:
            passes = [tuple(step.outputs) for step in linear.measured]
            print(f"  {linear.name:20} {linear.kind:16} {linear.op:14} {len(linear.steps)} steps {passes} {linear.failure}")
        train(path, fused=True, fp8=False)
        train(other, fused=False, fp8=False)
        for name, twin in (("mlp.fc1", "fc1"), ("mlp.fc2", "fc2")):
            norms = []
            for file, linear in ((path, name), (other, twin)):
                recorded = next(one for one in read_recording(file).linears if one.name == f"1.{linear}")
                norms.append(recorded.measured[0].outputs)
            print(f"  norms of {name}, stand-in and plain:", norms)


if __name__ == "__main__":
    main()
