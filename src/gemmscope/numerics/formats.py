"""Number formats of low precision: rounding to nearest even, saturation, stochastic rounding, and the bits that libraries store.

Rounding works on float32 tensors and gives float32 values that the format can hold, so no float8 dtype is needed to compute with.
Nothing here depends on the data: no branch on a value, no transfer to the host.
"""

from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format: mantissa bits, the exponent of its smallest normal number, its largest finite number."""

    name: str
    mantissa: int
    min_exponent: int
    max: float
    dtype: torch.dtype | None
    """The dtype that stores it, where PyTorch has one; E2M1 is stored as a code of four bits."""

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest power of two."""
        return frexp(self.max)[1] - 1

    @property
    def overflow(self) -> float:
        """Where values are too large by more than half a step, so that saturation and not rounding makes the error."""
        return self.max + float(2.0 ** (self.max_exponent - self.mantissa - 1))


E4M3 = NumberFormat("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = NumberFormat("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = NumberFormat("e2m1", 1, 0, 6.0, None)
FORMATS = {one.name: one for one in (E4M3, E5M2, E2M1)}
OVERFLOW = {one.name: one.overflow for one in FORMATS.values()}


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


def round_stochastic(values: Tensor, target: NumberFormat, generator: torch.Generator | None = None, turn: int = 0) -> Tensor:
    """One of the two neighbors in the format, the nearer one more likely; beyond the largest value it saturates.

    As in Transformer Engine (`stochastic_round_fp4_e2m1`, and the instruction `cvt.rs.satfinite.e2m1x4.f32`): eight random bits
    per value, u in 0/256 ... 255/256, are added to the magnitude in units of the step, and what is beyond the step is cut off.
    A value that lies a fraction f between its neighbors is rounded up with probability floor(256 f) / 256. NaN becomes the
    largest value. `turn` is added to the random bits, modulo 256: turns of 0, 16, ... 240 of the same bits cover them evenly.
    """
    magnitude = values.abs()
    bits = torch.randint(0, 256, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    bits = bits.add_(turn).bitwise_and_(255) if turn else bits
    moved = magnitude + bits * (_step(magnitude, target) * 2.0**-8)
    step = _step(moved, target)
    rounded = (torch.floor(moved / step) * step).nan_to_num(nan=target.max).clamp(max=target.max)
    return torch.copysign(rounded, torch.where(values.isnan(), 1.0, values))


def encode(rounded: Tensor, target: NumberFormat) -> Tensor:
    """The bits that libraries store for values of the format: a float8 tensor, or for E2M1 codes 0 to 15, one per byte.

    E2M1 has no NaN; it becomes 0, as in Transformer Engine's reference (its kernels write 6; the reference's scale of that
    block is NaN).
    """
    if target.dtype is not None:
        return rounded.to(target.dtype)
    magnitude = rounded.abs().nan_to_num(nan=0.0)
    code = torch.where(magnitude <= 2, 2 * magnitude, torch.where(magnitude <= 4, magnitude + 2, 7)).to(torch.uint8)
    return code | ((rounded.signbit() & ~rounded.isnan()).to(torch.uint8) << 3)


def decode(codes: Tensor, target: NumberFormat) -> Tensor:
    """The float32 values of stored bits."""
    if target.dtype is not None:
        return codes.to(torch.float32)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    return torch.cat([magnitudes, -magnitudes])[codes.to(torch.int32)]


def floor_to_power_of_two(values: Tensor) -> Tensor:
    """The largest power of two that is not above a positive float32; 0, Inf and NaN stay, subnormals become 0."""
    return torch.where(values.isnan(), values, (values.view(torch.int32) & EXPONENT_BITS).view(torch.float32))


def e8m0_exponents(values: Tensor, *, up: bool) -> Tensor:
    """The biased exponents (int32, 0 to 255) of positive float32 values rounded down or up to powers of two.

    Up is the instruction `cvt.rp.satfinite.ue8m0x2.f32`: Inf becomes 254, NaN becomes 255, zero 0 (2^-127).
    """
    bits = values.view(torch.int32)
    exponents = bits >> 23
    if up:
        mantissa = bits & 0x7FFFFF
        exponents = (exponents + ((mantissa > 0) & ((exponents > 0) | (mantissa > 0x400000)))).clamp(max=254)
    return torch.where(values.isnan(), 255, exponents)


def e8m0_values(exponents: Tensor) -> Tensor:
    """The float32 values of biased E8M0 exponents: 2^-127 to 2^127, and NaN for 255."""
    values = torch.where(exponents > 0, exponents << 23, 0x400000).view(torch.float32)  # 2^-127 is subnormal in float32
    return torch.where(exponents == 255, torch.nan, values)
