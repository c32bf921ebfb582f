"""Number formats of low precision: rounding and saturation; and scales, as libraries compute them.

Rounding works on float32 tensors and gives float32 values that the format can hold, so no float8 dtype is needed to compute with.
Nothing here depends on the data: no branch on a value, no transfer to the host.

A rule says how the maximum of a tensor, a row or a block becomes its scale. It takes maxima (float32, any shape), the number
format, and the maximum of the whole tensor, which rules of two levels use. Every operation is the one of the library, in its
order, so that results are equal bit by bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import frexp

import torch
from torch import Tensor

from gemmscope.recipe.precisions import FILE, number_format, precision_facts
from gemmscope.toml import FactTable

EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format: mantissa bits, the exponent of its smallest normal number, its largest finite number."""

    name: str
    mantissa: int
    min_exponent: int
    max: float

    @property
    def overflow(self) -> float:
        """Where values are too large by more than half a step, so that saturation and not rounding makes the error."""
        return self.max + float(2.0 ** (frexp(self.max)[1] - 2 - self.mantissa))


def _format(name: str) -> NumberFormat:
    facts = number_format(name)
    return NumberFormat(name, facts["mantissa"], facts["least_exponent"], float(facts["largest"]))


FORMATS: Mapping[str, NumberFormat] = FactTable(
    {name: _format(name) for name, facts in precision_facts()["format"].items() if "largest" in facts}, FILE, "format"
)
E4M3, E5M2, E2M1 = FORMATS["e4m3"], FORMATS["e5m2"], FORMATS["e2m1"]


def _step(magnitude: Tensor, target: NumberFormat) -> Tensor:
    """The distance between neighbors of the format at that magnitude (a power of two)."""
    lowest = 127 + target.min_exponent
    exponent = (magnitude.view(torch.int32) & EXPONENT_BITS).clamp(min=lowest << 23)
    return exponent.view(torch.float32) * 2.0**-target.mantissa


def round_nearest(values: Tensor, target: NumberFormat) -> Tensor:
    """The nearest values of the format, ties to even; saturates beyond the largest one. NaN stays NaN, zeros keep their sign."""
    clamped = values.clamp(-target.max, target.max)
    shift = _step(clamped, target) * (1.5 * 2.0**23)  # added and taken away again, it leaves multiples of the step
    return torch.copysign((clamped + shift) - shift, clamped)


def round_stochastic(values: Tensor, target: NumberFormat, generator: torch.Generator | None = None) -> Tensor:
    """One of the two neighbors in the format, the nearer one more likely; beyond the largest value it saturates.

    As in Transformer Engine (`stochastic_round_fp4_e2m1`, and the instruction `cvt.rs.satfinite.e2m1x4.f32`): eight random bits
    per value, u in 0/256 ... 255/256, are added to the magnitude in units of the step, and what is beyond the step is cut off.
    A value that lies a fraction f between its neighbors is rounded up with probability floor(256 f) / 256. NaN becomes the
    largest value.
    """
    magnitude = values.abs()
    bits = torch.randint(0, 256, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    moved = magnitude + bits * (_step(magnitude, target) * 2.0**-8)
    step = _step(moved, target)
    rounded = (torch.floor(moved / step) * step).nan_to_num(nan=target.max).clamp(max=target.max)
    return torch.copysign(rounded, torch.where(values.isnan(), 1.0, values))


def floor_to_power_of_two(values: Tensor) -> Tensor:
    """The largest power of two that is not above a positive float32; 0, Inf and NaN stay, subnormals become 0."""
    return torch.where(values.isnan(), values, (values.view(torch.int32) & EXPONENT_BITS).view(torch.float32))


def e8m0_exponents(values: Tensor) -> Tensor:
    """The biased exponents (int32, 0 to 255) of positive float32 values rounded up to powers of two.

    As the instruction `cvt.rp.satfinite.ue8m0x2.f32`: Inf becomes 254, NaN becomes 255, zero 0 (2^-127).
    """
    bits = values.view(torch.int32)
    exponents, mantissa = bits >> 23, bits & 0x7FFFFF
    rounded = exponents + ((mantissa > 0) & ((exponents > 0) | (mantissa > 0x400000)))
    return torch.where(values.isnan(), 255, rounded.clamp(max=254))


def e8m0_values(exponents: Tensor) -> Tensor:
    """The float32 values of biased E8M0 exponents: 2^-127 to 2^127, and NaN for 255."""
    values = torch.where(exponents > 0, exponents << 23, 0x400000).view(torch.float32)  # 2^-127 is subnormal in float32
    return torch.where(exponents == 255, torch.nan, values)


FLOAT32_MAX = torch.finfo(torch.float32).max
E4M3_TINY = 2.0**-6  # its smallest normal number
TORCHAO_EPS = 1e-12  # the smallest maximum, in torchao's float8


@dataclass(frozen=True)
class Scales:
    """Scales, in the shape of the maxima they come from."""

    encode: Tensor
    """What values are multiplied by before the cast."""
    decode: Tensor
    """What the GEMM multiplies low-precision values by, without `tensor`."""
    stored: Tensor
    """The decode scales as the library stores them."""
    tensor: Tensor
    """The factor of the whole tensor, 0-dim: decode * tensor is the whole decode scale."""


Rule = Callable[[Tensor, NumberFormat, Tensor], Scales]


def _scales(encode_scales: Tensor, *, power_of_two: bool) -> Scales:
    encode_scales = floor_to_power_of_two(encode_scales) if power_of_two else encode_scales
    inverse = encode_scales.reciprocal()
    one = torch.ones((), dtype=torch.float32, device=inverse.device)
    return Scales(encode_scales, one, inverse, inverse) if inverse.dim() == 0 else Scales(encode_scales, inverse, inverse, one)


def te(amax: Tensor, target: NumberFormat, _: Tensor, *, power_of_two: bool = False) -> Scales:
    """Transformer Engine 2.20.2, recipe_common.cuh, compute_scale_from_amax: the format's maximum / amax; 1 where amax is 0, Inf
    or NaN. With `power_of_two`, rounded down to one."""
    scale = (torch.full_like(amax, target.max) / amax).clamp(max=FLOAT32_MAX)
    return _scales(torch.where((amax > 0) & (amax < torch.inf), scale, 1.0), power_of_two=power_of_two)


def torchao(amax: Tensor, target: NumberFormat, _: Tensor, *, power_of_two: bool = False) -> Scales:
    """torchao 0.18, float8/float8_utils.py, amax_to_scale: the format's maximum / amax, which is at least 1e-12, in float64; an
    amax of Inf gives 0, of NaN gives NaN. With `power_of_two`, rounded down to one."""
    scale = target.max / amax.double().clamp(min=TORCHAO_EPS)
    return _scales(scale.float(), power_of_two=power_of_two)


def _mx(exponents: Tensor, encode_scales: Tensor) -> Scales:
    stored = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return Scales(encode_scales, e8m0_values(exponents), stored, torch.ones((), dtype=torch.float32, device=exponents.device))


def mx_rceil(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """torchao 0.18, to_mx with RCEIL: amax / maximum, rounded up to a power of two.

    Where the exponent is 0 (amax below 2.6e-36), torchao does not scale at all before the cast: such blocks become 0.
    Its code for CPUs takes a logarithm in float32, which misses maxima up to 1e-6 above a power of two; the instruction that its
    kernels use does not. No bfloat16 tensor has such a maximum.
    """
    exponents = e8m0_exponents(amax / target.max)
    scale = torch.where(exponents == 0, 1.0, e8m0_values(254 - exponents.clamp(max=254)))
    return _mx(exponents, torch.where(exponents == 255, torch.nan, scale))


def mx_te(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """Transformer Engine 2.20.2, quantize_mxfp8.cuh: amax * (1 / maximum), rounded up to a power of two (read, not run)."""
    exponents = e8m0_exponents(amax * (1 / target.max))
    return _mx(exponents, torch.where(exponents == 255, torch.nan, e8m0_values(254 - exponents.clamp(max=254))))


def _tensor_encode(tensor_amax: Tensor) -> Tensor:
    """Transformer Engine's first level of NVFP4: 448 * 6 / amax in float32; 1 where that is 0 (amax is Inf)."""
    scale = (torch.full_like(tensor_amax, E4M3.max * E2M1.max) / tensor_amax).clamp(max=FLOAT32_MAX)
    return torch.where(scale == 0, 1.0, scale)


def _nvfp4(block: Tensor, encode_scales: Tensor, tensor_amax: Tensor) -> Scales:
    return Scales(encode_scales, block, block.to(torch.float8_e4m3fn), tensor_amax / (E4M3.max * E2M1.max))


def nvfp4_te(amax: Tensor, _: NumberFormat, tensor_amax: Tensor) -> Scales:
    """Transformer Engine 2.20.2, core_nvfp4.cuh and reference_nvfp4.py.

    A block scale may become 0 (its values then decode to 0). Tensors whose amax is below 7.9e-36 lose their values: their first
    level is limited to the largest float32, but the GEMM still multiplies by amax / 2688.
    """
    tensor_encode = _tensor_encode(tensor_amax)
    multiplier = tensor_encode * (1 / E2M1.max)
    block = round_nearest((amax * multiplier).clamp(max=FLOAT32_MAX), E4M3)
    return _nvfp4(block, (1.0 / (block * (1.0 / tensor_encode))).clamp(max=FLOAT32_MAX), tensor_amax)


def nvfp4_torchao_training(amax: Tensor, _: NumberFormat, tensor_amax: Tensor) -> Scales:
    """torchao 0.18, moe_training/nvfp4_training: (amax / 6) * the first level; block scales are at least 2^-6."""
    tensor_encode = torch.where(tensor_amax == 0, 1.0, _tensor_encode(tensor_amax))
    block = round_nearest((amax / E2M1.max * tensor_encode).clamp(min=E4M3_TINY, max=E4M3.max), E4M3)
    return _nvfp4(block, (1.0 / (block * (1.0 / tensor_encode))).clamp(max=FLOAT32_MAX), tensor_amax)


RULES: dict[str, Rule] = {
    "te": te,
    "te_power_of_two": partial(te, power_of_two=True),
    "torchao": torchao,
    "torchao_power_of_two": partial(torchao, power_of_two=True),
    "mx_rceil": mx_rceil,
    "mx_te": mx_te,
    "nvfp4_te": nvfp4_te,
    "nvfp4_torchao_training": nvfp4_torchao_training,
}
IGNORES_NAN = {"te", "te_power_of_two", "mx_te"}  # maxima as CUDA's fmaxf takes them; the others' maxima are NaN with any NaN


class AmaxHistory:
    """The maxima of a tensor's last steps, from which Transformer Engine's delayed scaling takes the scale of the next step.

    `amax` is what the next step is quantized with. Where the maximum of the history is 0 or not finite, the scale stays what it
    was; it begins as 1. A step whose maximum is 0 is not entered into the history, and NaN is entered as 0. As in Transformer
    Engine's `kernel_bulk` (common/recipe/delayed_scaling.cu), which `reduce_and_update_fp8_tensors` runs.
    """

    def __init__(self, target: NumberFormat, length: int = 1024, device: torch.device | str = "cpu") -> None:
        self.maxima = torch.zeros(length, dtype=torch.float32, device=device)
        self.amax = torch.full((), target.max, dtype=torch.float32, device=device)

    def push(self, amax: Tensor) -> None:
        """Add the maximum of a finished step, and drop the oldest one."""
        latest = amax.float().reshape(1)
        entered = torch.cat([self.maxima[1:], torch.where(latest.isnan(), 0.0, latest)])
        self.maxima = torch.where(latest != 0, entered, self.maxima)
        largest = self.maxima.amax()
        self.amax = torch.where((largest > 0) & largest.isfinite(), largest, self.amax)
