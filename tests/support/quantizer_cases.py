"""Inputs of quantizer checks, the same on every machine: from NumPy's legacy generator, whose stream never changes."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gemmscope.numerics.formats import FORMATS, NumberFormat
from gemmscope.numerics.quantizers import HIGH_PRECISION, QuantizedOperand, Quantizer, quantizer_named, rotate
from gemmscope.toml import load_data

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # that store the formats which PyTorch has
QUANTIZERS = tuple(load_data("gemmscope.recipe", "quantizers.toml")["quantizers"])  # their names
ROWS, COLUMNS = 144, 160  # multiples of 16 with an incomplete block of 128 each way


def recorded_quantizer(name: str) -> Quantizer:
    """The quantizer of a check: its name in quantizers.toml, and the format of the values where several are possible."""
    base, number_format = name, "e2m1" if "nvfp4" in name else "e4m3"
    if name.endswith(("_e4m3", "_e5m2")):
        base, _, number_format = name.rpartition("_")
    return replace(quantizer_named(base.replace("delayed", "tensor"), number_format), delayed="delayed" in base)


def _normal(seed: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32))


def _put(values: Tensor, seed: int, *specials: float) -> Tensor:
    """A few values replaced, in different rows and blocks."""
    spots = np.random.RandomState(seed).permutation(ROWS * COLUMNS)[: 3 * len(specials)]
    values = values.clone()
    values.view(-1)[torch.from_numpy(spots)] = torch.tensor(specials).repeat(3)
    return values


def _tiles(seed: int, low: int, high: int) -> Tensor:
    """A power of two for every 16 x 16 values."""
    exponents = np.random.RandomState(seed).randint(low, high, (ROWS // 16, COLUMNS // 16))
    return torch.exp2(torch.from_numpy(exponents).float()).repeat_interleave(16, 0).repeat_interleave(16, 1)


def cases() -> Iterator[tuple[str, Tensor]]:
    """Name and bfloat16 tensor: ordinary values, and the ends of the range."""
    normal = _normal(1)
    channels = torch.where(torch.arange(COLUMNS) % 37 == 5, 150.0, 1.0)
    rows = torch.exp2(torch.from_numpy(np.random.RandomState(2).uniform(-12, 12, (ROWS, 1)).astype(np.float32)))
    half_zero = torch.where(_normal(3) > 0, normal, torch.where(_normal(4) > 0, 0.0, -0.0))
    grid = torch.from_numpy(np.random.RandomState(5).randint(-448 * 4, 448 * 4 + 1, (ROWS, COLUMNS))).float() / 4
    grid[::7, ::16] = 448.0  # with this maximum scales are powers of two, so that values lie between two neighbors exactly
    yield "random", normal.bfloat16()
    yield "outlier channels", (normal * channels).bfloat16()
    yield "scaled rows", (normal * rows).bfloat16()
    yield "scaled tiles", (normal * _tiles(6, -24, 24)).bfloat16()
    yield "ties", grid.bfloat16()
    yield "1e-30", (normal * 1e-30).bfloat16()
    yield "1e-36", (normal * 1e-36 * _tiles(7, -6, 6)).bfloat16()
    yield "subnormal", (normal * 1e-39).bfloat16()
    yield "1e30", (normal * 1e30).bfloat16()
    yield "3e38", (normal / normal.abs().max() * 3.3e38).bfloat16()
    yield "half zero", half_zero.bfloat16()
    yield "zero tiles", (normal * (_tiles(8, 0, 3) > 2)).bfloat16()
    yield "all zero", torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    yield "NaN", _put(normal, 9, torch.nan).bfloat16()
    yield "Inf", _put(normal, 10, torch.inf, -torch.inf).bfloat16()
    yield "NaN and Inf", _put(_put(normal * channels, 11, torch.nan), 12, torch.inf, -torch.inf).bfloat16()


def encode(rounded: Tensor, target: NumberFormat) -> Tensor:
    """The bits that libraries store for values of the format: a float8 tensor, or for E2M1 codes 0 to 15, one per byte.

    E2M1 has no NaN; it becomes 0, as in Transformer Engine's reference (its kernels write 6; the reference's scale of that
    block is NaN).
    """
    if target.name in DTYPES:
        return rounded.to(DTYPES[target.name])
    magnitude = rounded.abs().nan_to_num(nan=0.0)
    code = torch.where(magnitude <= 2, 2 * magnitude, torch.where(magnitude <= 4, magnitude + 2, 7)).to(torch.uint8)
    return code | ((rounded.signbit() & ~rounded.isnan()).to(torch.uint8) << 3)


def codes_of(quantized: QuantizedOperand, number_format: str) -> Tensor:
    """The low-precision values as libraries store them."""
    dtype = HIGH_PRECISION.get(number_format)
    return quantized.rounded.to(dtype) if dtype is not None else encode(quantized.rounded, FORMATS[number_format])


def comparable(codes: Tensor) -> Tensor:
    """Stored bits as bytes, every NaN of a float8 with the same bits: libraries differ in its sign."""
    if codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return torch.where(codes.float().isnan(), 127, codes.view(torch.uint8))
    if codes.dtype == torch.float32:
        return torch.where(codes.isnan(), 0x7FC00000, codes.view(torch.int32))
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e8m0fnu else codes


def tensor_amax(x: Tensor) -> Tensor:
    """The maximum as CUDA's fmaxf takes it: without NaN."""
    return x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax()


def quantized_values(quantizer: Quantizer, x: Tensor) -> Tensor:
    """What is scaled and rounded: x, or its Hadamard transform."""
    return rotate(x, quantizer.signs) if quantizer.signs else x
