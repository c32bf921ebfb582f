"""Quantizers: formats bit by bit, scales as their definitions say, samples as the whole tensor, and the table of operands."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.numerics.formats import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    AmaxHistory,
    NumberFormat,
    e8m0_exponents,
    e8m0_values,
    round_nearest,
    round_stochastic,
)
from gemmscope.numerics.quantizers import Quantizer, operands, rotate, rotate_back
from gemmscope.recipe.recipes import recipes
from gemmscope.workload.ops import OPERANDS
from support.quantizer_cases import DTYPES, QUANTIZERS, cases, codes_of, comparable, encode, recorded_quantizer, tensor_amax

every_format = pytest.mark.parametrize("target", FORMATS.values(), ids=FORMATS)
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
PAIRS = [(name, one) for name, recipe in recipes().items() for one in recipe.backends]


def all_codes(target: NumberFormat) -> torch.Tensor:
    codes = torch.arange(16 if target is E2M1 else 256, dtype=torch.uint8)
    return codes if target.name not in DTYPES else codes.view(DTYPES[target.name])


def decode(codes: torch.Tensor, target: NumberFormat) -> torch.Tensor:
    """The float32 values of stored bits."""
    if target.name in DTYPES:
        return codes.to(torch.float32)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([magnitudes, -magnitudes])[codes.to(torch.int32)]


def normal(seed: int, rows: int, columns: int, spread: float = 3.0) -> torch.Tensor:
    """Values of a wide range: every row and every column has a scale of its own."""
    random = np.random.RandomState(seed)
    scales = np.exp2(random.uniform(-spread, spread, (rows, 1)) + random.uniform(-spread, spread, (1, columns)))
    return torch.from_numpy(random.standard_normal((rows, columns)) * scales).bfloat16()


@every_format
def test_every_code_survives(target: NumberFormat) -> None:
    codes = all_codes(target)
    values = decode(codes, target)
    finite = values.isfinite()
    assert torch.equal(encode(round_nearest(values[finite], target), target).view(torch.uint8), codes[finite].view(torch.uint8))
    assert values[finite].max() == target.max


@every_format
def test_every_bfloat16_goes_to_the_nearest_value(target: NumberFormat) -> None:
    """Against a search over all values of the format, in float64; ties go to the even code."""
    values = decode(all_codes(target), target).double()
    table = values[values.isfinite() & ~values.signbit()].sort().values
    x = ALL_BF16[ALL_BF16.isfinite()].float()
    magnitude = x.abs().double().clamp(max=target.max)
    upper = torch.searchsorted(table, magnitude).clamp(min=1)
    down, up = magnitude - table[upper - 1], table[upper] - magnitude
    index = torch.where((down < up) | ((down == up) & (upper % 2 == 1)), upper - 1, upper)
    assert torch.equal(round_nearest(x, target), torch.copysign(table[index].float(), x))


@pytest.mark.parametrize("target", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_rounding_is_pytorchs_own_cast(target: NumberFormat) -> None:
    random = torch.from_numpy(np.random.RandomState(0).standard_normal(50_000).astype(np.float32)) * 200
    x = torch.cat([ALL_BF16.float(), random, random / 2**10, random / 2**20])
    expected = x.clamp(-target.max, target.max).to(DTYPES[target.name])
    assert torch.equal(encode(round_nearest(x, target), target).view(torch.uint8), expected.view(torch.uint8))


def test_special_values() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e30, -1e-30])
    for target in FORMATS.values():
        rounded = round_nearest(x, target)
        assert rounded[[0, 1, 4]].tolist() == [target.max, -target.max, target.max]
        assert rounded[2].isnan()
        assert rounded[[3, 5]].signbit().all()
    assert encode(round_nearest(x, E2M1), E2M1).tolist() == [7, 15, 0, 8, 7, 8]
    assert round_stochastic(x, E2M1).tolist()[:5] == [6.0, -6.0, 6.0, -0.0, 6.0]


def stochastic_in_c(x: float, bits: int) -> float:
    """`stochastic_round_fp4_e2m1` of Transformer Engine's common/util/ptx.cuh, line by line."""
    u, a = np.float32(bits & 0xFF) * np.float32(1 / 256), np.float32(abs(x))
    step = np.float32(2.0 if a >= 4 else 1.0 if a >= 2 else 0.5)
    t = np.float32(np.float64(u) * np.float64(step) + np.float64(a))
    step_t, inv_step_t = (2.0, 0.5) if t >= 4 else (1.0, 1.0) if t >= 2 else (0.5, 2.0)
    return math.copysign(min(math.floor(np.float32(t * np.float32(inv_step_t))) * step_t, 6.0), x)


@given(x=st.floats(-8, 8, width=32), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_stochastic_rounding_is_transformer_engines(x: float, seed: int) -> None:
    values = torch.full((16,), x)
    bits = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    rounded = round_stochastic(values, E2M1, torch.Generator().manual_seed(seed))
    assert rounded.tolist() == [stochastic_in_c(x, one) for one in bits.tolist()]


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of many roundings is the value, less what eight random bits cut off: up to 1/256 of a step, by definition."""
    count = 40_000
    x = torch.linspace(-6, 6, 49)[:, None] + torch.tensor([0.0, 0.013, 0.101, 0.2371])  # 196 values, on the grid and between
    x = x.flatten().clamp(-6, 6)
    rounded = round_stochastic(x.repeat(count, 1), E2M1, torch.Generator().manual_seed(1))
    magnitude = x.abs()
    step = torch.where(magnitude >= 4, 2.0, torch.where(magnitude >= 2, 1.0, 0.5))
    fraction = (magnitude / step).frac().mul(256).floor() / 256
    expected = torch.sign(x) * ((magnitude / step).floor() + fraction) * step
    deviation = (fraction * (1 - fraction)).sqrt() * step / count**0.5
    error = (rounded.mean(0) - expected).abs()
    assert torch.equal(error[deviation == 0], torch.zeros_like(error[deviation == 0]))
    assert (error[deviation > 0] / deviation[deviation > 0]).max() < 4.5  # of 196 values: 1 seed of 1000 would fail
    assert ((expected - x).abs() < step / 256).all()
    nearest = round_nearest(x, E2M1)
    assert ((nearest - x).abs() > 10 * (rounded.mean(0) - x).abs()).sum() > 50  # rounding to nearest would fail this test


def exponent_in_c(value: float) -> int:
    """`float_to_e8m0` of Transformer Engine's common/util/ptx_arch_spec.cuh, for GPUs without the instruction."""
    if math.isnan(value):
        return 0xFF
    if math.isinf(value):
        return 0xFE
    bits = int(np.float32(value).view(np.uint32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return exponent + (mantissa > 0 and exponent != 0xFE and not (exponent == 0 and mantissa <= 0x400000))


@given(st.lists(st.floats(0, width=32) | st.sampled_from([2.0**-127, 2.0**-126, 2.0**127, math.inf, math.nan, 0.0]), min_size=1))
@settings(max_examples=100, deadline=None)
def test_powers_of_two_are_rounded_up_as_the_instruction_does(values: list[float]) -> None:
    x = torch.tensor(values)
    exponents = e8m0_exponents(x)
    assert exponents.tolist() == [exponent_in_c(one) for one in values]
    powers = e8m0_values(exponents).tolist()
    assert all(power >= one or power == 2.0**127 for power, one in zip(powers, values, strict=True) if not math.isnan(one))


def scale_in_c(amax: float, largest: float, *, power_of_two: bool) -> float:
    """`compute_scale_from_amax` of Transformer Engine's common/recipe/recipe_common.cuh, line by line."""
    if math.isinf(amax) or amax == 0 or math.isnan(amax):
        return 1.0
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / np.float32(amax)
    if np.isinf(scale):
        scale = np.finfo(np.float32).max
    bits = scale.view(np.uint32) & np.uint32(0xFF800000)
    return float(bits.view(np.float32)) if power_of_two else float(scale)


@pytest.mark.parametrize("name", ["te_tensor_e4m3", "te_tensor_e5m2", "te_1x128", "te_128x128"])
def test_transformer_engines_fp8_is_what_its_sources_say(name: str) -> None:
    """Block by block with PyTorch's own cast: maxima without NaN (fmaxf), then x * scale, saturated, to the nearest."""
    quantizer = recorded_quantizer(name)
    target = FORMATS[quantizer.format]
    for case, x in cases():
        quantized = quantizer(x)
        rows, width = quantizer.block_rows or len(x), quantizer.block or x.shape[1]
        for top in range(0, len(x), rows):
            for left in range(0, x.shape[1], width):
                block = (slice(top, top + rows), slice(left, left + width))
                values = x[block].float()
                scale = scale_in_c(tensor_amax(values).item(), target.max, power_of_two=quantizer.rule == "te_power_of_two")
                expected = (values * scale).clamp(-target.max, target.max).to(DTYPES[target.name])
                assert torch.equal(comparable(codes_of(quantized, quantizer.format)[block]), comparable(expected)), case
                stored = quantized.scales if quantizer.per_tensor else quantized.scales[top : top + rows, left // width]
                assert (stored == 1 / np.float32(scale)).all(), case


def test_transformer_engines_mxfp8_is_what_its_sources_say() -> None:
    """quantize_mxfp8.cuh: the exponent of amax * (1 / 448) rounded up; values times its reciprocal, down to 2^-127."""
    quantizer = recorded_quantizer("te_mx")
    for case, x in cases():
        quantized = quantizer(x)
        maxima = x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).unflatten(1, (-1, 32)).amax(-1)
        products = (maxima * torch.tensor(1 / 448)).tolist()
        exponents = torch.tensor([[exponent_in_c(one) for one in row] for row in products])
        assert torch.equal(quantized.scales.view(torch.uint8).int(), exponents.int()), case
        factors = torch.exp2(127.0 - exponents.double()).float().repeat_interleave(32, 1)
        expected = (x.float() * factors).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(comparable(codes_of(quantized, quantizer.format)), comparable(expected)), case


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 40), columns=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("recipe", [name for name, recipe in recipes().items() if recipe.quantizes])
def test_a_sample_of_rows_is_quantized_as_the_whole_tensor(recipe: str, seed: int, rows: int, columns: int) -> None:
    """With the maxima of the whole tensor; stochastic rounding aside, and with a Hadamard transform given the rotated maximum."""
    x = normal(seed, rows, 16 * columns)
    sample = torch.from_numpy(np.random.RandomState(seed).permutation(rows)[: max(1, rows // 3)])
    for pass_name in OPERANDS:
        for operand in operands(recipe, pass_name):
            if operand.quantizer.stochastic:
                continue
            quantizer = operand.quantizer
            whole = quantizer(x)
            amax = (rotate(x, quantizer.signs) if quantizer.signs else x.float()).abs().amax()
            sample = torch.arange(min(sample.min() // 128 * 128, rows), rows) if quantizer.block_rows > 1 else sample
            part = quantizer(x[sample], amax=amax)
            assert torch.equal(part.values, whole.values[sample])
            assert torch.equal(part.saturated, whole.saturated[sample])
            assert (
                quantizer.per_tensor
                or quantizer.format == "bf16"
                or torch.equal(part.scales.float(), whole.scales.float()[sample])
            )


@pytest.mark.parametrize("recipe", [name for name, recipe in recipes().items() if recipe.quantizes])
@given(seed=st.integers(0, 2**31), exponent=st.integers(-60, 60))
@settings(max_examples=10, deadline=None)
def test_values_are_codes_times_scales(recipe: str, seed: int, exponent: int) -> None:
    x = normal(seed, 32, 160) * 2.0**exponent
    for pass_name in OPERANDS:
        for quantizer in (operand.quantizer for operand in operands(recipe, pass_name) if operand.quantizer.format in FORMATS):
            quantized = quantizer(x, generator=torch.Generator().manual_seed(seed))
            codes = decode(codes_of(quantized, quantizer.format), FORMATS[quantizer.format])
            assert torch.equal(codes, quantized.rounded)
            tensor_scale = quantized.tensor_scale.double()
            scales = quantized.scales.double() if quantizer.two_levels else quantized.scales.double() / tensor_scale
            blocks = scales if quantizer.per_tensor else scales.repeat_interleave(quantizer.block or 160, 1)[:, :160]
            exact = codes.double() * blocks  # without the factor of the whole tensor
            assert torch.equal(exact.bfloat16().double(), exact)
            values = exact * tensor_scale
            if quantizer.signs:
                values = rotate_back(values.float(), quantizer.signs).double()
            assert (quantized.values.double() - values).abs().max() <= 1e-6 * values.abs().max()
            assert torch.equal((quantized.values / quantized.tensor_scale).bfloat16().double(), exact) or quantizer.signs


@pytest.mark.parametrize(("recipe", "bound"), [("FP8Current", 1 / 16), ("FP8Block", 1 / 16), ("MXFP8", 1 / 16), ("NVFP4", 0.35)])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_errors_are_within_half_a_step(recipe: str, bound: float, seed: int) -> None:
    """Values in the upper part of their block's range lose at most half a step of the format, and saturate nowhere."""
    x = normal(seed, 48, 256, spread=0.5)
    for operand in operands(recipe, "fprop"):
        quantized = operand.quantizer(x)
        large = x.abs() > x.abs().max() / 8
        relative = ((quantized.values - x) / x).abs()[large]
        assert relative.max() <= bound
        assert not quantized.saturated.any()


def test_delayed_scaling_saturates_beyond_its_history() -> None:
    quantizer = recorded_quantizer("te_delayed_e4m3")
    x = torch.tensor([[1.0, -2.0, 4.0, 1.02, 0.0]])
    quantized = quantizer(x, amax=torch.tensor(1.0))
    assert quantized.values.tolist() == [[1.0, -1.0, 1.0, 1.0, 0.0]]
    assert quantized.saturated.tolist() == [[False, True, True, False, False]]  # 1.02 is rounded: half a step above 1 is 1.036
    assert torch.equal(quantizer(x).values, recorded_quantizer("te_tensor_e4m3")(x).values)


def test_history_of_maxima() -> None:
    history, seen = AmaxHistory(E4M3, length=3), []
    for amax in (2.0, 1.0, 0.5, 0.25, 0.0, 0.0, math.nan, math.inf, 8.0, 1.0, 4.0):
        history.push(torch.tensor(amax))
        seen.append(history.amax.item())
    assert seen == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 8.0]  # 0 is not entered, NaN is as 0; kept while it is Inf
    assert AmaxHistory(E5M2).amax == E5M2.max  # a scale of 1 before the first step


def test_the_hadamard_transform_keeps_gemms_and_spreads_outliers() -> None:
    signs = operands("NVFP4", "wgrad")[0].quantizer.signs
    x, dy = normal(1, 24, 160), normal(2, 40, 160)
    rotated = rotate(x, signs)
    assert (rotate_back(rotated, signs) - x).abs().max() < 0.004 * x.abs().max()
    product = rotated @ rotate(dy, signs).T
    assert (product - x.float() @ dy.float().T).abs().max() < 0.01 * product.abs().max()
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 100.0
    assert rotate(outlier, signs).abs().unique().tolist() == [25.0]
    assert rotate(outlier, signs)[0, 0] == -25.0  # the sign of the fourth value is -1


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_operands_have_the_formats_of_the_recipe(name: str, backend: str) -> None:
    for pass_name, (first, second) in OPERANDS.items():
        pair = operands(name, pass_name, backend)
        assert tuple(one.tensor for one in pair) == (first, second)
        assert tuple(one.quantizer.format for one in pair) == recipes()[name].operands[pass_name]
        reduced_first = {"fprop": set(), "dgrad": {"W"}, "wgrad": {"X", "dY"}}[pass_name]
        assert {one.tensor for one in pair if one.columnwise} == reduced_first
        blocks = {"tensor": 0, "row": 0, "block128": 128, "block32": 32, "block16": 16, "none": 0}[recipes()[name].scales]
        assert {one.quantizer.block for one in pair if one.quantizer.format != "bf16"} <= {blocks}


def test_only_gradients_are_rounded_stochastically_and_only_wgrad_rotates() -> None:
    for backend in ("transformer_engine", "torchao"):
        quantizers = {
            (pass_name, one.tensor): one.quantizer for pass_name in OPERANDS for one in operands("NVFP4", pass_name, backend)
        }
        assert {key for key, one in quantizers.items() if one.stochastic} == {("dgrad", "dY"), ("wgrad", "dY")}
        assert {key for key, one in quantizers.items() if one.signs} == {("wgrad", "X"), ("wgrad", "dY")}
        assert {key for key, one in quantizers.items() if one.block_rows == 16} == {("fprop", "W"), ("dgrad", "W")}


def test_bad_input_has_one_message() -> None:
    with pytest.raises(UserError, match="2-D"):
        operands("FP8Current", "fprop")[0].quantizer(torch.zeros(2, 3, 4))
    with pytest.raises(UserError, match="pad it to 48"):
        operands("NVFP4", "wgrad")[0].quantizer(torch.zeros(2, 40))
    with pytest.raises(UserError, match="transformer_engine"):
        operands("FP8Current", "fprop", "torchao")


@pytest.mark.parametrize("shape", [(0, 32), (4, 0)])
def test_experts_without_tokens_have_nothing_to_quantize(shape: tuple[int, int]) -> None:
    for quantizer in map(recorded_quantizer, QUANTIZERS):
        quantized = quantizer(torch.zeros(shape, dtype=torch.bfloat16))
        assert quantized.values.shape == quantized.saturated.shape == shape
        assert codes_of(quantized, quantizer.format).numel() == 0
        assert quantized.values.dtype == torch.float32


def test_bf16_is_a_cast() -> None:
    x = torch.tensor([[1.0 + 2**-9, 3.4e38, torch.nan]])
    quantized = Quantizer("bf16")(x)
    assert quantized.values.tolist()[0][:2] == [1.0, torch.inf]
    assert quantized.saturated.tolist() == [[False, True, False]]
    assert codes_of(quantized, "bf16").dtype == torch.bfloat16
