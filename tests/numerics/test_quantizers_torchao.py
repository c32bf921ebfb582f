"""Our quantizers against torchao's own code on the CPU, bit by bit, for any bfloat16 values."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gemmscope.numerics.quantizers import Quantizer, operands
from gemmscope.workload.ops import OPERANDS
from support.quantizer_cases import cases, codes_of, comparable, recorded_quantizer

casts = pytest.importorskip("support.torchao_casts", reason="compares with torchao, where it is installed")
every_block_cast = pytest.mark.parametrize("name", casts.BLOCK_CASTS)


def from_bits(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def numbers(seed: int, exponent: int, spread: int) -> torch.Tensor:
    """Normal values around 2^exponent, every 32 of them scaled by their own power of two."""
    random = np.random.RandomState(seed)
    tiles = np.exp2(random.uniform(-spread, spread, (8, 4)) + exponent).repeat(32, 1)
    return torch.from_numpy(random.standard_normal((8, 128)) * tiles).bfloat16()


any_bits = arrays(np.uint16, (3, 64), elements=st.integers(0, 0xFFFF)).map(from_bits)
any_numbers = st.builds(numbers, st.integers(0, 2**32 - 1), st.integers(-140, 127), st.integers(0, 20))
any_values = st.one_of(any_bits, any_numbers)


def same(quantizer: Quantizer, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    quantized = quantizer(x)
    assert torch.equal(comparable(quantized.scales), comparable(scales))
    own = codes_of(quantized, quantizer.format)
    if quantizer.format == "e2m1":  # which has no NaN
        own = torch.where(quantized.rounded.isnan(), codes, own)
    assert torch.equal(comparable(own), comparable(codes))


@pytest.mark.parametrize("recipe", casts.RECIPES)
@given(x=any_values)
@settings(max_examples=40, deadline=None)
def test_float8_recipes(recipe: str, x: torch.Tensor) -> None:
    for pass_name in OPERANDS:
        for operand in operands(recipe, pass_name):
            if operand.quantizer.format == "bf16":
                assert casts.stays_high_precision(recipe, pass_name, operand.tensor)
            else:
                same(operand.quantizer, x, *casts.float8(x, recipe, pass_name, operand.tensor))


@every_block_cast
@given(x=any_values)
@settings(max_examples=100, deadline=None)
@example(torch.zeros(2, 64, dtype=torch.bfloat16))
@example(torch.full((2, 64), 448.0, dtype=torch.bfloat16))
@example(torch.full((2, 64), -torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16))
def test_block_formats(name: str, x: torch.Tensor) -> None:
    same(recorded_quantizer(name), x, *casts.BLOCK_CASTS[name](x))


@every_block_cast
@pytest.mark.parametrize("case", dict(cases()))
def test_block_formats_at_the_ends_of_the_range(name: str, case: str) -> None:
    x = dict(cases())[case]
    same(recorded_quantizer(name), x, *casts.BLOCK_CASTS[name](x))


@given(x=any_values)
@settings(max_examples=40, deadline=None)
def test_dequantized_values(x: torch.Tensor) -> None:
    codes, scales = casts.mx(x)
    expected = casts.mx_values(codes, scales)
    assert torch.equal(comparable(recorded_quantizer("ao_mx")(x).values), comparable(expected))
