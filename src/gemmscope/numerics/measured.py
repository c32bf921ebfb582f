"""Makes numbers of the sums that `measure.LinearMeasurement` gives, once they are on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

from gemmscope.numerics.recording import GemmNumbers, GradientFacts, OperandNumbers, StepFacts, TensorFacts
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

GROUPS = 8  # parts of the tokens, of which bias and noise of a gradient come
DIGITS = 6
Sums = Sequence[float]


def step_facts(step: int, tokens: int, sums: Mapping[str, Sums]) -> StepFacts:
    """A linear in one step. The sums are in units of the tensors' maxima."""
    tensors: dict[Any, TensorFacts] = {}
    outputs: dict[Any, float] = {}
    gemms: dict[str, dict[Pass, GemmNumbers]] = {}
    for key, values in sums.items():
        name, _, last = key.rpartition("/")
        if name == "tensor":
            tensors[last] = tensor_facts(values)
    scales = {name: one.amax if one.amax > 0 and isfinite(one.amax) else 1.0 for name, one in tensors.items()}
    groups, gradient = min(GROUPS, tokens), None
    for key, values in sums.items():
        name, _, last = key.rpartition("/")
        if name == "output":
            first, second = OPERANDS[last]  # type: ignore[index]
            outputs[last] = short(sqrt(values[0]) * scales[first] * scales[second]) if values[0] >= 0 else values[0]
        elif key == "gradient":
            gradient = _gradient(values, scales, groups)
        elif name != "tensor":
            gemm = _weight_gradient(values, groups) if last == "wgrad" else _of_tokens(values, scales)
            gemms.setdefault(name, {})[last] = gemm  # type: ignore[index]
    return StepFacts(step=step, tokens=tokens, tensors=tensors, outputs=outputs, gradient=gradient, gemms=gemms)


def tensor_facts(values: Sums) -> TensorFacts:
    """A whole tensor."""
    amax, norm, zeros, nonfinite, smallest = values
    size = norm * amax if isfinite(amax) else norm
    return TensorFacts(amax=amax, norm=short(size), zeros=zeros, nonfinite=int(nonfinite), smallest=smallest)


def operand_numbers(values: Sums) -> OperandNumbers:
    """The relative error of an operand, the share of its values that became zero, and that of saturated ones."""
    lost, kept, saturated, squares, nonzero, count = values
    return OperandNumbers(
        relative=short(sqrt(lost / squares)) if squares > 0 else 0.0,
        underflow=short(max(nonzero - kept, 0.0) / nonzero) if nonzero else 0.0,
        saturated=short(saturated / count) if count else 0.0,
    )


def short(value: float) -> float:
    """Few digits: files are smaller, and do not differ where sums are added in another order."""
    return float(f"{value:.{DIGITS}g}")


def _ratio(value: float, below: float) -> float:
    return short(value / below) if below else 0.0


def _common(sums: Sums, grams: Sums, operands: Sums) -> dict[str, Any]:
    """`sums`: of squared errors, of those of both parts, of error times output, of squared outputs. `grams`: of the drawn
    items."""
    squared, first, second, across, below = sums
    ratio = squared / below if below else 0.0
    own, both, _, exact = grams
    return {
        "squared": short(ratio),
        "variance": _ratio(max(own - 2 * ratio * both + ratio**2 * exact, 0.0), below**2),
        "first_share": _ratio(first, first + second) if first + second else 0.5,
        "parallel": _ratio(across, below),
        "operands": (operand_numbers(operands[:6]), operand_numbers(operands[6:])),
    }


def _of_tokens(values: Sums, scales: Mapping[TensorName, float]) -> GemmNumbers:
    unit = scales["X"] * scales["W"] * scales.get("dY", 1.0)
    return GemmNumbers(**_common(values[:5], values[6:10], values[10:]), damage=short(values[5] / 2 * unit**2))


def _weight_gradient(values: Sums, groups: int) -> GemmNumbers:
    bias, noise = _bias_and_noise(values[0], values[5], groups)
    return GemmNumbers(
        **_common(values[:5], values[6:10], values[10:]), bias=_ratio(bias, values[4]), noise=_ratio(noise, values[4])
    )


def _gradient(values: Sums, scales: Mapping[TensorName, float], groups: int) -> GradientFacts:
    unit = (scales["X"] * scales["dY"]) ** 2
    whole, single, energy = values
    noise = _bias_and_noise(whole, single, groups)[1]
    return GradientFacts(squared=short(whole * unit), noise=short(noise * unit), energy=short(energy * unit))


def _bias_and_noise(whole: float, single: float, groups: int) -> tuple[float, float]:
    """Of a sum over groups: the squared norm that all have in common, and the variance of the rest. `whole`: the squared norm
    of the sum; `single`: the sum of the squared norms."""
    factor = groups / max(groups - 1, 1)
    return factor * (whole - single), factor * (single - whole / groups)
