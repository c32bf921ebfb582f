"""Synthetic tensors for the linears of a model: to compare recipes before there is a training run. Results always say that they
are synthetic.

Real activations and gradients are neither normal nor independent: synthetic tensors show how recipes react to a kind of
distribution, not what they do to a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from gemmscope.numerics.measure import LinearMeasurement
from gemmscope.numerics.names import number_of
from gemmscope.numerics.recording import LinearFacts, RecordingFacts, step_facts
from gemmscope.roles import key_of

TOKENS = 1024
BLOCK = 128  # sizes stay multiples of it
LARGEST = 2048  # features: all sizes are scaled down by one factor until the largest fits
FREEDOM = 4  # degrees of freedom of Student's t
OUTLIER_SHARE, OUTLIER_RANGE = 0.005, (20.0, 100.0)  # of channels, and how much larger they are: as in trained language models
GRADIENT_SCALE = 1e-4
SPREAD = 1.0  # standard deviation of the logarithm of dY's scale over tokens
MARK = "SYNTHETIC"

Draw = Callable[[int, int, torch.Generator], Tensor]
Maker = Callable[[int, int, int, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator)


def _student(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    squares = torch.randn(rows, columns, FREEDOM, generator=generator).square().mean(-1)
    return _normal(rows, columns, generator) / squares.sqrt()


def _scaled(draw: Draw, tokens: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY, all of one distribution."""
    x, w, dy = (draw(rows, columns, generator) for rows, columns in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    return x, w * inputs**-0.5, dy * GRADIENT_SCALE


def _outlier_tensors(tokens: int, inputs: int, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Normal, but a few channels of X are 20 to 100 times larger, and the scale of dY differs from token to token."""
    x, w, dy = _scaled(_normal, tokens, inputs, outputs, generator)
    count = max(round(OUTLIER_SHARE * inputs), 1)
    channels = torch.randperm(inputs, generator=generator)[:count]
    low, high = OUTLIER_RANGE
    x[:, channels] *= low * (high / low) ** torch.rand(count, generator=generator)
    return x, w, dy * torch.exp(SPREAD * torch.randn(tokens, 1, generator=generator))


MAKERS: dict[str, Maker] = {
    "normal": partial(_scaled, _normal),
    "heavy": partial(_scaled, _student),
    "outliers": _outlier_tensors,
}
TITLES = {
    "normal": "normal",
    "heavy": f"heavy-tailed (Student's t, {FREEDOM} degrees of freedom)",
    "outliers": "normal with outlier channels (0.5% of them 20 to 100 times larger)",
}


def synthetic_recording(
    kind: str, sizes: Mapping[str, tuple[int, int]], *, tokens: int = TOKENS, seed: int = 0, model: str = "", device: str = "cpu"
) -> tuple[RecordingFacts, Iterator[LinearFacts]]:
    """Tensors of one kind for linears of these sizes (op → inputs and outputs), in bfloat16: each is measured when it is asked
    for."""
    smaller, title = scaled(sizes), f"{MARK}: {TITLES[kind]}"

    def measured(linear: LinearFacts) -> LinearFacts:
        op, _, layer = linear.name.partition(",")
        drawn = f"{key_of(op)},{layer}"  # a change of the name that people see changes no number
        generator = torch.Generator().manual_seed(number_of(seed, drawn, kind))
        whole = MAKERS[kind](tokens, linear.inputs, linear.outputs, generator)
        x, w, dy = (tensor.to(device, torch.bfloat16) for tensor in whole)
        numbers = LinearMeasurement(x, w, dy, torch.bfloat16, number_of(seed, drawn)).numbers()
        step = step_facts(0, tokens, {key: values.tolist() for key, values in numbers.items()})
        return linear.model_copy(update={"steps": (step,)})

    notes = (title, *([f"sizes are scaled down, so that none exceeds {LARGEST}"] if smaller != sizes else []))
    linears = tuple(
        LinearFacts(
            name=name, linear=name, op=name.partition(",")[0], kind=MARK, inputs=inputs, outputs=outputs, dtype="bfloat16"
        )
        for name, (inputs, outputs) in smaller.items()
    )
    facts = RecordingFacts(
        source="synthetic", origin=title, model=model, steps=(0,), seed=seed, packages={"torch": torch.__version__}, notes=notes,
        linears=linears,
    )  # fmt: skip
    return facts, map(measured, linears)


def scaled(sizes: Mapping[str, tuple[int, int]]) -> Mapping[str, tuple[int, int]]:
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
