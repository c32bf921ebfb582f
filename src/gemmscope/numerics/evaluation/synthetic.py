"""Synthetic tensors for the linears of a model: to compare recipes before there is a training run. Results always say that they
are synthetic.

Real activations and gradients are neither normal nor independent: synthetic tensors show how recipes react to a kind of
distribution, not what they do to a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.numerics.probes import measure_linear
from gemmscope.numerics.recording import BLOCK, LinearFacts, RecordingFacts, TensorRecording, assembled, tensor_key
from gemmscope.numerics.sample import random_for
from gemmscope.workload.derive import HEAD, Workload
from gemmscope.workload.ops import Linear

TOKENS = 1024
LARGEST = 2048  # features: all sizes are scaled down by one factor until the largest fits
FREEDOM = 4  # degrees of freedom of Student's t
OUTLIER_SHARE, OUTLIER_RANGE = 0.005, (20.0, 100.0)  # of channels, and how much larger they are: as in trained language models
GRADIENT_SCALE = 1e-4
SPREAD = 1.0  # standard deviation of the logarithm of dY's scale over tokens
MARK = "SYNTHETIC"

Maker = Callable[[int, int, int, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator)


def _student(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    squares = torch.randn(rows, columns, FREEDOM, generator=generator).square().mean(-1)
    return _normal(rows, columns, generator) / squares.sqrt()


def _normal_tensors(tokens: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY, all normal."""
    x, w, dy = (_normal(rows, columns, generator) for rows, columns in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    return x, w * inputs**-0.5, dy * GRADIENT_SCALE


def _heavy_tensors(tokens: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY, all of Student's t with 4 degrees of freedom."""
    x, w, dy = (_student(rows, columns, generator) for rows, columns in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    return x, w * inputs**-0.5, dy * GRADIENT_SCALE


def _outlier_tensors(tokens: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Normal, but a few channels of X are 20 to 100 times larger, and the scale of dY differs from token to token."""
    x, w, dy = _normal_tensors(tokens, inputs, outputs, generator)
    count = max(round(OUTLIER_SHARE * inputs), 1)
    channels = torch.randperm(inputs, generator=generator)[:count]
    low, high = OUTLIER_RANGE
    x[:, channels] *= low * (high / low) ** torch.rand(count, generator=generator)
    return x, w, dy * torch.exp(SPREAD * torch.randn(tokens, 1, generator=generator))


KINDS: dict[str, Maker] = {"normal": _normal_tensors, "heavy": _heavy_tensors, "outliers": _outlier_tensors}
TITLES = {
    "normal": "normal",
    "heavy": f"heavy-tailed (Student's t, {FREEDOM} degrees of freedom)",
    "outliers": "normal with outlier channels (0.5% of them 20 to 100 times larger)",
}


def synthetic_recording(
    kind: str, workload: Workload, *, tokens: int = TOKENS, seed: int = 0, megabytes: float = 64, model: str = ""
) -> TensorRecording:
    """Tensors of one kind for every linear that a recipe quantizes, sampled as in a recording, in bfloat16."""
    if kind not in KINDS:
        message = f"{option('synthetic', kind)} is not a kind of tensors"
        raise UserError(message, f"use one of {', '.join(KINDS)}" + _meant(kind))
    sizes = linear_sizes(workload)
    if not sizes:
        raise UserError("the model has no linears that recipes quantize", "give a model with linears of at least 128 features")
    kept: dict[str, Any] = {}
    linears = []
    for name, (inputs, outputs) in scaled(sizes).items():
        generator = torch.Generator().manual_seed(int(random_for(seed, name, kind).integers(2**62)))
        x, w, dy = (tensor.to(torch.bfloat16) for tensor in KINDS[kind](tokens, inputs, outputs, generator))
        budget = int(megabytes * 1e6 / len(sizes)) - 10_000
        facts, tensors = measure_linear(x, w, dy, dtype=torch.bfloat16, budget=budget, random=random_for(seed, name))
        kept |= {tensor_key(name, 0, key): tensor for key, tensor in tensors.items()}
        linears.append(
            LinearFacts(
                name=name,
                linear=name,
                op=name.partition(",")[0],
                kind=MARK,
                inputs=inputs,
                outputs=outputs,
                dtype="bfloat16",
                steps=(facts,),
            )
        )
    smaller = [f"sizes are scaled down, so that none exceeds {LARGEST}"] if scaled(sizes) != sizes else []
    notes = (f"{MARK}: {TITLES[kind]}", *smaller)
    described = RecordingFacts(
        source="synthetic", origin=kind, model=model, steps=(0,), seed=seed, packages={"torch": torch.__version__}, notes=notes,
        linears=tuple(linears),
    )  # fmt: skip
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    return assembled(described, f"{MARK}: {TITLES[kind]}", size, lambda linear, step, key: kept[tensor_key(linear, step, key)])


def _meant(kind: str) -> str:
    near = closest(shown(kind).strip("'"), KINDS)
    return f"; did you mean {near[0]}?" if near else ""


def linear_sizes(workload: Workload) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linears that recipes quantize, each once; with the kind of layer where sizes differ."""
    sizes: dict[str, tuple[int, int]] = {}
    for op in workload.ops:
        if not isinstance(op, Linear) or not op.quantized or op.section == HEAD:
            continue
        size = (op.inputs, op.outputs)
        if sizes.get(op.name, size) == size:
            sizes[op.name] = size
        else:
            sizes[f"{op.name}, {op.section}"] = size
    return sizes


def scaled(sizes: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """All sizes divided by one factor; multiples of 128 stay multiples of 128.

    >>> scaled({"QKV Proj": (4096, 6144), "MLP Down": (14336, 4096)})
    {'QKV Proj': (640, 896), 'MLP Down': (2048, 640)}
    """
    largest = max(max(pair) for pair in sizes.values())
    if largest <= LARGEST:
        return sizes

    def smaller(size: int) -> int:
        return max(round(size * LARGEST / largest / BLOCK), 1) * BLOCK if size >= BLOCK else size

    return {name: (smaller(inputs), smaller(outputs)) for name, (inputs, outputs) in sizes.items()}
