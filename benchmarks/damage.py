"""Checks predicted damage against what quantization does to small language models that are trained here.

    python benchmarks/damage.py OUT [--models llama4 llama8 neox moe] [--seeds 0 1 2 3 4 5] [--steps 300]
    python benchmarks/damage.py OUT --summary docs/measured/damage.json

Each model is trained on the sources of Python's standard library, as bytes, and recorded with `gemmscope.record_tensors`. Then one
linear at a time, and one layer at a time, runs in NVFP4, and the KL divergence of its predictions is measured on batches that
neither the training nor the recording has seen. Mixes that cost the same FLOPs are compared with the best one by measured KL. For
weight gradients, the backward pass of the quantized model is compared with its own backward pass in float32, over several batches:
the mean of the difference is the bias, the rest is noise.

Quantization here is code of its own: only the quantizers are those of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gemmscope
from gemmscope.numerics.quantizers import operands

BATCH, LENGTH, WIDTH = 16, 128, 128
RECIPE = "NVFP4"
MODELS = ("llama4", "llama8", "neox", "moe")
Unit = tuple[str, int | None]
"""A parameter, and the expert of a parameter with all experts."""


def build(name: str, seed: int) -> Any:
    """A model of transformers with random weights."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": WIDTH, "num_attention_heads": 4, "max_position_embeddings": LENGTH, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    if name == "neox":
        config = transformers.GPTNeoXConfig(**common, num_hidden_layers=6, intermediate_size=4 * WIDTH)
    elif name == "moe":
        config = transformers.MixtralConfig(
            **common, num_hidden_layers=4, intermediate_size=WIDTH, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
        )
    else:
        layers = int(name.removeprefix("llama"))
        config = transformers.LlamaConfig(**common, num_hidden_layers=layers, intermediate_size=3 * WIDTH, num_key_value_heads=2)
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).train()


def text() -> Tensor:
    """The sources of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


class Batches:
    """Random pieces of the first nine tenths of the text; held-out ones come from the last tenth."""

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        data = text()
        cut = len(data) * 9 // 10
        self._data = data[cut:] if held_out else data[:cut]
        self._random = torch.Generator().manual_seed(seed + 1000 * held_out)

    def next(self) -> Tensor:
        starts = torch.randint(len(self._data) - LENGTH, (BATCH,), generator=self._random).tolist()
        return torch.stack([self._data[start : start + LENGTH] for start in starts])


def train(model: nn.Module, batches: Batches, steps: int, recording: Path) -> float:
    """Train, record the last steps, and return the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1, pct_start=0.1)
    loss = torch.zeros(())
    with gemmscope.record_tensors(model, recording, steps=8, after=steps - 8) as recorder:
        for _ in range(steps):
            batch = batches.next()
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            recorder.step()
    return float(loss)


class Quantized(torch.autograd.Function):
    """A linear whose forward GEMM, and whose backward GEMMs if `backward`, have quantized operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, backward: bool, random: torch.Generator) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.backward, ctx.random = backward, random
        return gemm("fprop", {"W": w, "X": x}, random).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        if not ctx.backward:
            return dy @ w, dy.T @ x, None, None
        tensors = {"X": x, "W": w, "dY": dy}
        return gemm("dgrad", tensors, ctx.random).T, gemm("wgrad", tensors, ctx.random).T, None, None


def gemm(pass_name: Any, tensors: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
    """The GEMM of a pass with quantized operands: the first one times the second one transposed."""
    values = []
    for operand in operands(RECIPE, pass_name):
        rows = tensors[operand.tensor]
        rows = (rows.T if operand.columnwise else rows).contiguous()
        extra = -rows.shape[1] % 16
        quantized = operand.quantizer(nn.functional.pad(rows, (0, extra)), generator=random)
        values.append(quantized.values[:, : rows.shape[1]])
    return values[0] @ values[1].T


@dataclass
class Quantize(TorchFunctionMode):
    """Runs the linears with these weights in the recipe: `nn.Linear`, and experts that are slices of one parameter."""

    model: nn.Module
    units: set[Unit]
    backward: bool = False
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        super().__init__()
        parameters = dict(self.model.named_parameters())
        self._places = {}
        for name, expert in self.units:
            parameter = parameters[name] if expert is None else parameters[name][expert]
            self._places[parameter.data_ptr()] = (name, expert)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and args[1].data_ptr() in self._places:
            x, w, *bias = args
            bias = bias or [(kwargs or {}).get("bias")]
            if not x.numel():
                return func(*args, **(kwargs or {}))
            output = Quantized.apply(x.reshape(-1, x.shape[-1]), w, self.backward, self.random).view(*x.shape[:-1], len(w))
            return output if bias[0] is None else output + bias[0]
        return func(*args, **(kwargs or {}))


def units_of(model: nn.Module) -> dict[str, list[Unit]]:
    """The linears inside the layers: path → their weights; the experts of a layer count together."""
    units: dict[str, list[Unit]] = {}
    for name, parameter in model.named_parameters():
        if ".layers." not in name or parameter.dim() < 2 or "norm" in name or ".gate.weight" in name:
            continue
        if parameter.dim() == 3:
            units[name] = [(name, expert) for expert in range(len(parameter))]
        else:
            units[name.removesuffix(".weight")] = [(name, None)]
    return units


def layer_of(path: str) -> int:
    """The number of the layer."""
    return int(path.partition(".layers.")[2].partition(".")[0])


def logits(model: Any, batch: Tensor) -> Tensor:
    """The logarithms of the predicted probabilities."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=batch).logits.flatten(0, 1), -1)


def divergences(model: Any, sets: Mapping[str, Sequence[Unit]], batches: Sequence[Tensor]) -> dict[str, float]:
    """KL divergence per token of the model with these linears quantized, from the model as it is."""
    exact = [logits(model, batch) for batch in batches]
    measured = {}
    for name, units in sets.items():
        total = 0.0
        for batch, reference in zip(batches, exact, strict=True):
            with Quantize(model, set(units)):
                changed = logits(model, batch)
            total += float((reference.exp() * (reference - changed)).sum(1).mean())
        measured[name] = total / len(batches)
    return measured


def gradient_errors(model: Any, units: Mapping[str, Sequence[Unit]], batches: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """Of every weight gradient, in the model with all linears quantized: squared bias and noise of the backward pass against its own
    backward pass in float32, and the noise of the gradient from batch to batch."""
    every = {unit for own in units.values() for unit in own}
    parameters = dict(model.named_parameters())
    names = list(dict.fromkeys(name for name, _ in every))
    sums: dict[str, list[Any]] = {name: [0.0, 0.0, 0.0, 0.0] for name in names}
    random = torch.Generator().manual_seed(1)
    for batch in batches:
        gradients = []
        for backward in (False, True):
            with Quantize(model, every, backward, random):
                loss = model(input_ids=batch, labels=batch).loss
            gradients.append(torch.autograd.grad(loss, [parameters[name] for name in names]))
        for name, exact, low in zip(names, *gradients, strict=True):
            error, own = low - exact, sums[name]
            own[0], own[1] = own[0] + error, own[1] + error.square()
            own[2], own[3] = own[2] + exact, own[3] + exact.square()
    count, errors = len(batches), {}
    for path, own_units in units.items():
        error, squares, exact, exact_squares = sums[own_units[0][0]]
        noise = (squares.sum() - (error / count).square().sum() * count) / (count - 1)
        own_noise = (exact_squares.sum() - (exact / count).square().sum() * count) / (count - 1)
        bias = (error / count).square().sum() - noise / count
        errors[path] = {"bias": float(bias), "noise": float(noise), "own_noise": float(own_noise),
                        "gradient": float((exact / count).square().sum() - own_noise / count)}  # fmt: skip
    return errors
