"""Errors of operands and GEMMs, from samples of their tensors and from probes of the whole tensors.

A GEMM computes Y = A·Bᵀ. With quantized operands A + ΔA and B + ΔB its error is ΔA·Bᵀ + A·ΔBᵀ + ΔA·ΔBᵀ. Of each operand's part,
ΔA·Bᵀ = α·Y + EA, one term is parallel to Y (underflow and saturation make values smaller, so α < 0), and EA is orthogonal to it:

    ‖error‖²/‖Y‖² = ((1 + α)(1 + β) - 1)² + (1 + β)²·‖EA‖² + (1 + α)²·‖EB‖² + 2·r·‖EA‖·‖EB‖ + a·b·g

with ‖EA‖ and ‖EB‖ relative to ‖Y‖, and g = Σ_k ‖A[:, k]‖²·‖B[:, k]‖² / ‖Y‖². a and b are the squares of both errors relative to
that sum, for uncorrelated errors: the product of two errors does not add up where each of them may.

* The sample gives an estimate as if errors at different positions k of the reduced dimension were uncorrelated: ‖EA‖² is then the
  sum over k of ‖ΔA[:, k] - α·A[:, k]‖²·‖B[:, k]‖², with the energies ‖B[:, k]‖² of the whole tensor. It is estimated as a ratio
  to the same sum of ‖A[:, k]‖²·‖B[:, k]‖², which is recorded; that ratio varies little between rows.
* The probes (probes.py) are exact in the other operand, for reference quantizers. A recipe that rounds like one of them gets the
  probe's values, corrected by the ratio of both estimates from the sample. r, the correlation of EA and EB, is the probe's.
* Without a probe, the estimate from the sample stands alone, with a wider interval.

The variance has a part from the drawn rows, one from the drawn blocks of the reduced dimension, and the probes' own. Intervals
are symmetric in the logarithm, with Student's t for the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, isclose, sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemmscope.engine.stats import student
from gemmscope.interval import Interval
from gemmscope.numerics.probes import pair_key, probe_key, recorded_key, reference_quantizers
from gemmscope.numerics.quantizers import HADAMARD_SIZE, GemmOperand, Quantizer
from gemmscope.numerics.recording import BLOCK, LinearStep, OperandSample
from gemmscope.results.numerics import OperandError
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

UNKNOWN = 0.3
"""Without a probe: the standard deviation of ‖EA‖², relative to the estimate for uncorrelated errors."""
LEFT_OUT = 0.005
"""Standard deviation of the relative error by what the formula leaves out: products of small terms, rounding of energies."""
UNMEASURED = 0.014
"""The same, in addition, where the product of both operands' errors was not measured: delayed scaling, older recordings."""
PROBED = 100.0
"""Degrees of freedom of probes."""


@dataclass(frozen=True)
class SampledQuantization:
    """Sampled rows of one operand, before and after quantization."""

    exact: Tensor
    """[s, R] float32."""
    error: Tensor
    zero: Tensor
    """bool: not zero before, zero after."""
    saturated: Tensor


def quantize_sample(sample: OperandSample, quantizer: Quantizer, amax: float, generator: torch.Generator) -> SampledQuantization:
    """Quantize the sampled rows as parts of their whole tensor, of which `amax` is the maximum that the scale comes from."""
    exact = sample.rows.float()
    if quantizer.block == 0 and quantizer.block_rows == 1:  # a scale per row: its maximum may lie outside of the sample
        rows = torch.cat([exact, sample.row_amax.float()[:, None]], 1)
    else:
        rows = pad(exact, (0, -exact.shape[1] % HADAMARD_SIZE))
    blocks = sample.block_amax.get(quantizer.block_rows) if quantizer.block_rows > 1 else None
    result = quantizer(rows, amax=torch.tensor(amax, device=exact.device), block_amax=blocks, generator=generator)
    values, rounded, saturated = (part[:, : exact.shape[1]] for part in (result.values, result.rounded, result.saturated))
    return SampledQuantization(exact, values - exact, (rounded == 0) & (exact != 0), saturated)


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sums over drawn rows and blocks, with its variance."""

    value: float
    variance: float


@dataclass(frozen=True)
class OperandNoise:
    """The error that the quantization of one operand causes in the GEMM."""

    parallel: Ratio
    """α: the part of the output's error that is parallel to the output."""
    rest: Ratio
    """‖EA‖²/‖Y‖²: the part that is orthogonal to it."""
    freedom: float
    """Degrees of freedom of the variances."""
    alone: float
    """‖EA‖² of uncorrelated errors, relative to Σ A²·e."""


def ratio_of(numerators: Tensor, denominators: Tensor, rows: Tensor, blocks: Tensor) -> Ratio:
    """Σ rows·blocks·numerators over the same sum of denominators [s, b]; `rows` [s] and `blocks` [b] are weights of the draw.

    Rows and blocks are drawn independently. The variance of either is that of a ratio estimator, with the correction for a draw
    without replacement (1 - 1 / weight): what was certain to be drawn adds none.
    """
    below = float(rows @ denominators @ blocks)
    if not below > 0:
        return Ratio(0.0, 0.0)
    value = float(rows @ numerators @ blocks) / below
    residuals = numerators - value * denominators
    variance = 0.0
    for weights, sums in ((rows, residuals @ blocks), (blocks, rows @ residuals)):
        count = max(len(weights), 2)
        variance += float(((1 - 1 / weights) * (weights * sums).square()).sum()) * count / (count - 1)
    return Ratio(value, variance / below**2)


def sums_of(quantized: SampledQuantization, energy: Tensor, parallel: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ A²·e, Σ A·ΔA·e and Σ (ΔA - α·A)²·e, each by row and block, in common units."""
    scale = max(float(quantized.exact.abs().max()), 1e-30)
    exact, error = quantized.exact / scale, quantized.error / scale
    weighted = energy / energy.max().clamp(min=1e-30)
    squares = (exact.square(), exact * error, (error - parallel * exact).square())
    padding = (0, -len(weighted) % BLOCK)
    below, across, above = (pad(values * weighted, padding).unflatten(1, (-1, BLOCK)).sum(2) for values in squares)
    return below, across, above


def probed_noise(probe: tuple[float, ...], own: OperandNoise, reference: OperandNoise, ratio: Ratio) -> OperandNoise:
    """The probe's values, corrected by what the sample says of the recipe (`own`) and of the probe's quantizer (`reference`);
    `ratio` is that of their errors."""
    rest, rest_sd, parallel, parallel_sd = probe[:4]
    rest = max(rest, 0.0)  # where all values underflow, it is a difference of equal numbers
    difference = own.parallel.value - reference.parallel.value
    return OperandNoise(
        Ratio(parallel + difference, parallel_sd**2 + (0.0 if difference == 0 else own.parallel.variance)),
        Ratio(rest * ratio.value, (rest_sd * ratio.value) ** 2 + rest**2 * ratio.variance),
        PROBED if ratio.variance == 0 else own.freedom,
        own.alone,
    )


def operand_error(sample: OperandSample, quantizer: Quantizer, quantized: SampledQuantization) -> OperandError:
    """The error of the operand itself: its relative error, and the values that are lost."""
    weights, columns = sample.weights.float(), sample.column_weights

    def total(values: Tensor) -> float:
        return float(weights @ (values.float() @ columns))

    scale = max(float(quantized.exact.abs().max()), 1e-38)
    norm = total((quantized.exact / scale).square())
    nonzero = total(quantized.exact != 0)
    present = torch.nonzero(sample.exponents[1:255]).flatten()  # subnormals of float32 count as zero
    return OperandError(
        tensor=sample.tensor,
        format=quantizer.format,
        relative=sqrt(total((quantized.error / scale).square()) / norm) if norm else 0.0,
        underflow=total(quantized.zero) / nonzero if nonzero else 0.0,
        saturated=total(quantized.saturated) / float(weights.sum() * columns.sum()),
        octaves=float(present[-1] - present[0]) if len(present) else None,
    )


def sampled_error(sample: OperandSample, quantizer: Quantizer, seed: int, amax: float) -> OperandError:
    """The error of one operand by itself; `amax`: the maximum that its scale comes from."""
    generator = torch.Generator(sample.rows.device).manual_seed(seed)
    return operand_error(sample, quantizer, quantize_sample(sample, quantizer, amax, generator))


@dataclass(frozen=True)
class GemmNoise:
    """The squared relative error of a GEMM, and what it consists of."""

    squared: float
    variance: float
    freedom: float
    first_share: float
    cosine: float


def gemm_noise(first: OperandNoise, second: OperandNoise, gain: float, correlation: tuple[float, ...]) -> GemmNoise:
    """The noise of a GEMM from that of both operands; `correlation` is that of their parts, with its standard deviation, and what
    the product of their errors adds, where that was measured."""
    alpha, beta = first.parallel.value, second.parallel.value
    change = (1 + alpha) * (1 + beta) - 1
    from_first, from_second = (1 + beta) ** 2 * first.rest.value, (1 + alpha) ** 2 * second.rest.value
    if len(correlation) > 2:
        change = alpha + beta
        from_first, from_second, product = first.rest.value, second.rest.value, correlation[2]
    else:
        product = first.alone * second.alone * gain
    both = 2 * sqrt(from_first * from_second)
    noise = max(from_first + from_second + both * correlation[0] + product, 0.0)
    variance = (
        (2 * change) ** 2 * (first.parallel.variance + second.parallel.variance)
        + first.rest.variance
        + second.rest.variance
        + (both * correlation[1]) ** 2
    )
    if len(correlation) <= 2:
        variance += (2 * UNMEASURED * (change**2 + noise)) ** 2
    shares = (alpha**2 + from_first, beta**2 + from_second)
    whole = sqrt((1 + change) ** 2 + noise)
    return GemmNoise(
        squared=change**2 + noise,
        variance=variance,
        freedom=min(first.freedom, second.freedom),
        first_share=shares[0] / sum(shares) if sum(shares) else 0.5,
        cosine=(1 + change) / whole if whole else 0.0,
    )


def relative_error(noises: Sequence[GemmNoise]) -> Interval:
    """The relative error with its 95% interval; of several steps, the root mean square."""
    squared = sum(one.squared for one in noises) / len(noises)
    if squared == 0:
        return Interval(0.0, 0.0, 0.0)
    deviation = hypot(sqrt(sum(one.variance for one in noises)) / len(noises) / squared / 2, LEFT_OUT)
    reach = exp(min(student(min(one.freedom for one in noises)) * deviation, 50.0))
    value = sqrt(squared)
    return Interval(value, value / reach, value * reach)


class SampledGemm:
    """One GEMM of one recorded step: estimates its error in any recipe."""

    def __init__(self, step: LinearStep, pass_name: Pass, seed: int = 0) -> None:
        """`seed`: of stochastic rounding."""
        facts = step.facts.passes[pass_name]
        assert facts.product
        assert facts.norm
        self.step, self._pass, self._probes = step, pass_name, step.facts.probes
        self.sides = tuple(step.sample(pass_name, tensor) for tensor in OPERANDS[pass_name])
        self._blocks = self.sides[0].energy.new_tensor(facts.weights)
        self._gain = facts.product / facts.norm**2  # Σ A²·e over ‖Y‖²
        self._generator = torch.Generator(self._blocks.device).manual_seed(seed)
        self._references: dict[str, tuple[SampledQuantization, OperandNoise]] = {}

    def noise(
        self, pair: tuple[GemmOperand, GemmOperand], history: Mapping[TensorName, float]
    ) -> tuple[GemmNoise, tuple[SampledQuantization, SampledQuantization]]:
        """The error of the GEMM, and the quantized samples. `history`: maxima of earlier steps, for delayed scaling."""
        first, second = (self._operand(place, operand, history) for place, operand in enumerate(pair))
        key = recorded_key(pair_key(self._pass, pair[0].quantizer, pair[1].quantizer), self._probes)
        noise = gemm_noise(first[1], second[1], self._gain, self._probes.get(key, (0.0, 0.0)))
        return noise, (first[0], second[0])

    def _operand(
        self, place: int, operand: GemmOperand, history: Mapping[TensorName, float]
    ) -> tuple[SampledQuantization, OperandNoise]:
        quantizer, own = operand.quantizer, self.step.facts.tensors[operand.tensor].amax
        amax = history.get(operand.tensor, own) if quantizer.delayed else own
        key = recorded_key(probe_key(self._pass, operand.tensor, quantizer), self._probes)
        if quantizer.signs and key in self._probes:
            amax = self._probes[key][4]  # that of the rotated tensor
        if key not in self._probes:
            quantized, noise = self._estimate(place, quantizer, amax)
            unknown = (UNKNOWN * noise.rest.value) ** 2
            return quantized, replace(noise, rest=replace(noise.rest, variance=noise.rest.variance + unknown))
        reference = reference_quantizers(self._pass, operand.tensor)[key]
        probed = self._probes[key][4]
        if key not in self._references:
            self._references[key] = self._estimate(place, reference, probed)
        known, expected = self._references[key]
        if quantizer == reference and (not quantizer.delayed or isclose(amax, probed, rel_tol=1e-6)):
            return known, probed_noise(self._probes[key], expected, expected, Ratio(1.0, 0.0))
        quantized, noise = self._estimate(place, quantizer, amax)
        energy = self.sides[1 - place].energy
        sums = [sums_of(values, energy, one.parallel.value)[2] for values, one in ((quantized, noise), (known, expected))]
        ratio = ratio_of(sums[0], sums[1], self.sides[place].weights, self._blocks)
        return quantized, probed_noise(self._probes[key], noise, expected, ratio)

    def _estimate(self, place: int, quantizer: Quantizer, amax: float) -> tuple[SampledQuantization, OperandNoise]:
        """The estimate from the sample, for uncorrelated errors."""
        sample, energy = self.sides[place], self.sides[1 - place].energy
        quantized = quantize_sample(sample, quantizer, amax, self._generator)
        below, across, _ = sums_of(quantized, energy, 0.0)
        parallel = ratio_of(across, below, sample.weights, self._blocks)
        alone = ratio_of(sums_of(quantized, energy, parallel.value)[2], below, sample.weights, self._blocks)
        rest = Ratio(alone.value * self._gain, alone.variance * self._gain**2)
        return quantized, OperandNoise(parallel, rest, len(sample.weights) - 1, alone.value)
