"""How the maximum of a tensor, a row or a block becomes its scale, as each library computes it.

A rule takes maxima (float32, any shape), the number format, and the maximum of the whole tensor, which rules of two levels use.
Every operation is the one of the library, in its order, so that results are equal bit by bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gemmscope.numerics.formats import (
    E2M1,
    E4M3,
    NumberFormat,
    e8m0_exponents,
    e8m0_values,
    encode,
    floor_to_power_of_two,
    round_nearest,
)

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny
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


def _scales(encode_scales: Tensor) -> Scales:
    inverse = encode_scales.reciprocal()
    one = torch.ones((), device=inverse.device)
    return Scales(encode_scales, one, inverse, inverse) if inverse.dim() == 0 else Scales(encode_scales, inverse, inverse, one)


def _te_scale(amax: Tensor, target: NumberFormat) -> Tensor:
    """Transformer Engine 2.20.2, recipe_common.cuh, compute_scale_from_amax."""
    scale = (torch.full_like(amax, target.max) / amax).clamp(max=FLOAT32_MAX)
    return torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)


def te(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """Format's maximum / amax; 1 where amax is 0, Inf or NaN."""
    return _scales(_te_scale(amax, target))


def te_power_of_two(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """The same, rounded down to a power of two."""
    return _scales(floor_to_power_of_two(_te_scale(amax, target)))


def _torchao_scale(amax: Tensor, target: NumberFormat) -> Tensor:
    """torchao 0.18, float8/float8_utils.py, amax_to_scale: divided in float64; an amax of Inf gives 0, of NaN gives NaN."""
    return (target.max / amax.double().clamp(min=TORCHAO_EPS)).float()


def torchao(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """Format's maximum / amax, the maximum being at least 1e-12."""
    return _scales(_torchao_scale(amax, target))


def torchao_power_of_two(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """The same, rounded down to a power of two."""
    return _scales(floor_to_power_of_two(_torchao_scale(amax, target)))


def _mx(exponents: Tensor, encode_scales: Tensor) -> Scales:
    stored = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return Scales(encode_scales, e8m0_values(exponents), stored, torch.ones((), device=exponents.device))


def mx_floor(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """torchao 0.18, to_mx with FLOOR: the amax's power of two over the format's, so that the largest values may saturate.

    Where the exponent is 0, torchao divides by 2^-126 and not by the 2^-127 that it stores; a block with NaN becomes NaN.
    """
    exponents = torch.where(amax.isnan(), 255, (e8m0_exponents(amax, up=False) - target.max_exponent).clamp(min=0))
    divisors = (exponents << 23).view(torch.float32).clamp(min=FLOAT32_TINY)
    return _mx(exponents, divisors.reciprocal())


def mx_rceil(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """torchao 0.18, to_mx with RCEIL: amax / maximum, rounded up to a power of two.

    Where the exponent is 0 (amax below 2.6e-36), torchao does not scale at all before the cast: such blocks become 0.
    Its code for CPUs takes a logarithm in float32, which misses maxima up to 1e-6 above a power of two; the instruction that its
    kernels use does not. No bfloat16 tensor has such a maximum.
    """
    exponents = e8m0_exponents(amax / target.max, up=True)
    scale = torch.where(exponents == 0, 1.0, e8m0_values(254 - exponents.clamp(max=254)))
    return _mx(exponents, torch.where(exponents == 255, torch.nan, scale))


def mx_te(amax: Tensor, target: NumberFormat, _: Tensor) -> Scales:
    """Transformer Engine 2.20.2, quantize_mxfp8.cuh: amax * (1 / maximum), rounded up to a power of two (read, not run)."""
    exponents = e8m0_exponents(amax * (1 / target.max), up=True)
    return _mx(exponents, torch.where(exponents == 255, torch.nan, e8m0_values(254 - exponents.clamp(max=254))))


def _tensor_encode(tensor_amax: Tensor) -> Tensor:
    """Transformer Engine's first level of NVFP4: 448 * 6 / amax in float32; 1 where that is 0 (amax is Inf)."""
    scale = (torch.full_like(tensor_amax, E4M3.max * E2M1.max) / tensor_amax).clamp(max=FLOAT32_MAX)
    return torch.where(scale == 0, 1.0, scale)


def _nvfp4(block: Tensor, encode_scales: Tensor, tensor_amax: Tensor) -> Scales:
    return Scales(encode_scales, block, encode(block, E4M3), tensor_amax / (E4M3.max * E2M1.max))


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


def nvfp4_torchao(amax: Tensor, _: NumberFormat, tensor_amax: Tensor) -> Scales:
    """torchao 0.18, mx_formats/nvfp4_tensor.py, nvfp4_quantize with a scale of the tensor: what its NVFP4Tensor holds."""
    tensor_scale = tensor_amax / (E4M3.max * E2M1.max)
    block = round_nearest((amax / E2M1.max / tensor_scale).clamp(min=E4M3_TINY, max=E4M3.max), E4M3)
    return _nvfp4(block, (1.0 / tensor_scale) / block, tensor_amax)


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        te,
        te_power_of_two,
        torchao,
        torchao_power_of_two,
        mx_floor,
        mx_rceil,
        mx_te,
        nvfp4_te,
        nvfp4_torchao_training,
        nvfp4_torchao,
    )
}
IGNORES_NAN = {"te", "te_power_of_two", "mx_te"}  # maxima as CUDA's fmaxf takes them; the others' maxima are NaN with any NaN


class AmaxHistory:
    """The maxima of a tensor's last steps, from which Transformer Engine's delayed scaling takes the scale of the next step.

    `amax` is what the next step is quantized with. Where the maximum of the history is 0 or not finite, the scale stays what it
    was; it begins as 1. A step whose maximum is 0 is not entered into the history, and NaN is entered as 0. As in Transformer
    Engine's `kernel_bulk` (common/recipe/delayed_scaling.cu), which `reduce_and_update_fp8_tensors` runs.
    """

    def __init__(self, target: NumberFormat, length: int = 1024, device: torch.device | str = "cpu") -> None:
        self.maxima = torch.zeros(length, device=device)
        self.amax = torch.full((), target.max, device=device)

    def push(self, amax: Tensor) -> None:
        """Add the maximum of a finished step, and drop the oldest one."""
        latest = amax.float().reshape(1)
        entered = torch.cat([self.maxima[1:], torch.where(latest.isnan(), 0.0, latest)])
        self.maxima = torch.where(latest != 0, entered, self.maxima)
        largest = self.maxima.amax()
        self.amax = torch.where((largest > 0) & largest.isfinite(), largest, self.amax)
