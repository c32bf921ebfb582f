"""A small network, trained with and without `record_tensors`; Transformer Engine's modules, as far as recording looks at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemmscope
from gemmscope.numerics import measure
from gemmscope.numerics.recording import LinearFacts, step_facts


class Block(nn.Module):
    """Dropout, and a buffer that every call changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.down_proj(functional.gelu(self.up_proj(self.norm(x))))
        return x + functional.dropout(hidden, 0.2)


class Network(nn.Module):
    """Two blocks and a head, with recomputation if wanted."""

    def __init__(self, width: int = 32, recompute: str = "") -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, width)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant") if self.recompute else layer(x)
        return self.head(x)


def measure_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure two recipes instead of all, which takes time: one with stochastic rounding, one with a history."""
    every = measure.variants()
    few = {name: every[f"{name}/transformer_engine"] for name in ("NVFP4", "FP8Delayed")}
    monkeypatch.setattr(measure, "variants", lambda: {f"{name}/transformer_engine": one for name, one in few.items()})


def measured_linear(name: str, x: Tensor, w: Tensor, dy: Tensor, **facts: Any) -> LinearFacts:
    """A linear as it is in a recording, measured in one step."""
    sums = measure.LinearMeasurement(x, w, dy, x.dtype, 0).numbers()
    step = step_facts(0, len(x), {key: values.tolist() for key, values in sums.items()})
    outputs, inputs = w.shape
    return LinearFacts(**{"name": name, "linear": name, "inputs": inputs, "outputs": outputs, "steps": (step,)} | facts)


LINEARS = ["embed", "layers.0.up_proj", "layers.0.down_proj", "layers.1.up_proj", "layers.1.down_proj", "head"]


def prepared(kind: str) -> nn.Module:
    """The network as the training loop calls it."""
    torch.manual_seed(0)
    model: Any = Network(recompute=kind if kind in ("reentrant", "non-reentrant") else "")
    if kind == "layers":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    elif kind == "wrapped layers":
        model.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in model.layers)
    elif kind == "whole":
        model = torch.compile(model, backend="aot_eager")
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model  # type: ignore[no-any-return]


def trained(
    model: nn.Module, path: Path | None, *, micro_batches: int = 1, loop: int = 20, bf16: bool = False, **settings: Any
) -> list[Any]:
    """Losses, weights, buffers, gradients and the random state after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(1)
    recording = None
    if path is not None:
        recording = gemmscope.record_tensors(model, path, **({"steps": 4, "after": 5} | settings))
        recording.__enter__()
    losses = []
    for _ in range(loop):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            x = torch.randn(4, 16, 32, generator=batches, requires_grad=True)
            with torch.autocast("cpu", enabled=bf16, dtype=torch.bfloat16):
                loss = (model(x).float() - x.flip(-1)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        if recording is not None:
            recording.step()
    if recording is not None:
        recording.__exit__(None, None, None)
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [*losses, *model.parameters(), *model.buffers(), *gradients]
    full = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    return [*(value.detach().clone() for value in full if value is not None), torch.get_rng_state()]


def te_class(name: str, forward: Any) -> type[nn.Module]:
    """A class that looks like one of Transformer Engine."""
    return type(name, (nn.Module,), {"forward": forward, "__module__": "transformer_engine.pytorch.module"})
