"""Recordings: what `gemmscope.record_tensors` measured in the user's training, as numbers, in one safetensors file.

The file has no tensors: its metadata is the JSON text of `RecordingFacts`, which can be read without torch. `step_facts` makes
numbers of the sums that `measure.LinearMeasurement` gives, once they are on the host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, log2, sqrt
from pathlib import Path
from statistics import pvariance
from typing import Any

from pydantic import Field, ValidationError

from gemmscope.choices import Switch
from gemmscope.errors import UserError, option, shown
from gemmscope.numerics.safetensors import TensorFile, read_header, write_metadata
from gemmscope.reading import called, check_numbers, parse_json
from gemmscope.results.base import Part
from gemmscope.results.numerics import Source
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

GROUPS = 8  # parts of the tokens, of which bias and noise of a gradient come
DIGITS = 6
VERSION = 3
METADATA = "gemmscope"
HISTORY = 1024  # steps: Transformer Engine's default
ZERO_OUTPUT = "the exact output is zero"
Sums = Sequence[float]
HINT = f"give a file that gemmscope.record_tensors wrote, or a checkpoint with {option('checkpoint')}"


def variant_name(recipe: str, library: str = "", without: Sequence[Switch] = ()) -> str:
    """The name of a recipe as a library quantizes it, without what is switched off.

    >>> variant_name("NVFP4", "torchao", ["stochastic"]), variant_name("BF16")
    ('NVFP4/torchao-stochastic', 'BF16')
    """
    return "-".join([f"{recipe}/{library}" if library else recipe, *without])


class TensorFacts(Part):
    """A whole tensor in one step."""

    amax: float
    norm: float | None = None
    """Square root of the sum of squares."""
    zeros: float = 0.0
    """Values that are zero."""
    nonfinite: int = 0
    """Values that are NaN or Inf. They are left out of the norm."""
    smallest: float = inf
    """The smallest magnitude that is not zero."""

    @property
    def octaves(self) -> float | None:
        """Powers of two between the largest and the smallest value."""
        return log2(self.amax / self.smallest) if 0 < self.smallest <= self.amax < inf else None


class OperandNumbers(Part):
    """One operand of a GEMM in one variant."""

    relative: float
    underflow: float
    saturated: float


class GemmNumbers(Part):
    """A GEMM in one variant of a recipe."""

    squared: float
    """Squared norm of the output's error, relative to that of the output."""
    variance: float
    """Of `squared`, because it comes from some of the tokens, or some of the features."""
    first_share: float
    """Share of the squared error that comes from the first operand."""
    parallel: float
    """The part of the error that is parallel to the output, relative to it."""
    damage: float = 0.0
    """Of fprop: half of the sum over tokens of ⟨dY_t, ΔY_t⟩²."""
    bias: float = 0.0
    """Of wgrad: the squared norm of what the errors of different tokens have in common, relative to that of the output."""
    bias_error: float = 0.0
    """Its standard error."""
    noise: float = 0.0
    """Of wgrad: the variance of the rest, relative to the squared norm of the output."""
    rerouted: float | None = None
    """Of a router: the share of tokens that get other experts."""
    operands: tuple[OperandNumbers, OperandNumbers]


class GradientFacts(Part):
    """The gradient of a weight in one micro-batch."""

    squared: float
    """Its squared norm."""
    noise: float
    """Its variance between micro-batches like this one, from the differences between parts of its tokens."""
    energy: float
    """Σ ‖X_t‖²·‖dY_t‖² over tokens: its squared norm if the tokens' parts of it were uncorrelated."""


class StepFacts(Part):
    """A linear in one training step."""

    step: int
    tokens: int | None = None
    """M: of the micro-batch on this rank."""
    tensors: dict[TensorName, TensorFacts] = Field(default_factory=dict)
    outputs: dict[Pass, float] = Field(default_factory=dict)
    """Norms of the exact outputs. Only of measured steps; of others the maxima are known."""
    gradient: GradientFacts | None = None
    gemms: dict[str, dict[Pass, GemmNumbers]] = Field(default_factory=dict)
    """By the name of the variant."""

    def problem(self, pass_name: Pass) -> str:
        """Why a pass has no error in this step; empty if it has one."""
        for tensor in OPERANDS[pass_name]:
            if tensor not in self.tensors:
                return f"{tensor} was not recorded"
            if self.tensors[tensor].nonfinite:
                return nonfinite_values(tensor)
        if not isfinite(self.outputs[pass_name]):
            return "the exact output is too large for float32"
        return "" if self.outputs[pass_name] else ZERO_OUTPUT


class LinearFacts(Part):
    """One linear: W is [outputs, inputs]."""

    name: str
    """The module's path: model.layers.3.mlp.down_proj; of one expert with its number at the end."""
    linear: str
    """The path without the layer: mlp.down_proj."""
    layer: int | None = None
    op: str = ""
    """The op of the model that it belongs to, as `shapes` calls it; empty where that is not known."""
    kind: str = ""
    """Class of the module."""
    inputs: int = Field(gt=0)
    outputs: int = Field(gt=0)
    dtype: str = ""
    """As the GEMM reads its operands without quantization: bfloat16, float16 or float32."""
    expert: int | None = None
    experts: int = 1
    """Of the layer, on this rank."""
    top_k: int = 0
    """Of a router: how many experts it chooses for a token."""
    steps: tuple[StepFacts, ...] = ()
    weights: dict[str, OperandNumbers] = Field(default_factory=dict)
    """Of a checkpoint, where only W is known: by the name of the variant."""
    failure: str = ""
    """Why nothing was recorded."""

    @property
    def measured(self) -> tuple[StepFacts, ...]:
        """The steps in which errors were measured."""
        return tuple(step for step in self.steps if step.outputs)


class ProbeFacts(Part):
    """A measured divergence of the model's predictions."""

    recipe: str
    layer: int | None = None
    """The only layer in low precision; null: all of them."""
    divergence: float
    """KL, in nats for each prediction."""
    linears: int = 0
    """Calls of linears that were quantized."""


class RecordingFacts(Part):
    """The metadata of a recording."""

    version: int = VERSION
    source: Source
    origin: str = ""
    """The checkpoint, or the kind of synthetic tensors."""
    model: str = ""
    """Class of the model, or its name."""
    steps: tuple[int, ...] = ()
    """Recorded training steps, counted from 0."""
    seed: int = 0
    rank: int = 0
    packages: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What could not be recorded."""
    linears: tuple[LinearFacts, ...] = ()
    probes: tuple[ProbeFacts, ...] = ()
    """What the user's own forward pass measured, if it was asked for."""


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
    return GemmNumbers(
        **_common(values[:5], values[6:10], values[10:22]),
        damage=short(values[5] / 2 * unit**2),
        rerouted=next(iter(values[22:]), None),
    )


def _weight_gradient(values: Sums, groups: int) -> GemmNumbers:
    across, single = values[21 : 21 + groups], values[21 + groups :]
    bias, noise = _bias_and_noise(values[0], sum(single), groups)
    factor = 2 * groups**2 / max((groups - 1) * (groups - 2), 1)
    error = sqrt(
        (groups - 1) * pvariance(factor * (one - own) for one, own in zip(across, single, strict=True))
    )  # of parts left out
    common, below = _common(values[:5], values[5:9], values[9:21]), values[4]
    return GemmNumbers(**common, bias=_ratio(bias, below), bias_error=_ratio(error, below), noise=_ratio(noise, below))


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


def nonfinite_values(tensor: TensorName) -> str:
    """Why a tensor cannot be quantized."""
    return f"{tensor} has NaN or Inf values"


def earlier_maxima(steps: Iterable[StepFacts], step: int) -> dict[TensorName, float]:
    """The largest maximum of every tensor in the recorded steps before this one. Empty if there are none."""
    history = [one.tensors.items() for one in steps if step - HISTORY <= one.step < step]
    maxima = [(facts.amax, tensor) for tensors in history for tensor, facts in tensors if isfinite(facts.amax) and facts.amax > 0]
    return {tensor: amax for amax, tensor in sorted(maxima)}  # the last one of a tensor is the largest


def write_recording(path: str | Path, facts: RecordingFacts) -> None:
    """One safetensors file, replaced as a whole."""
    # not by pydantic, which would drop maxima that are NaN
    data = facts.model_dump(exclude_defaults=True) | {"version": VERSION}
    text = json.dumps(data, separators=(",", ":"))
    write_metadata(path, {METADATA: text})


def read_recording(path: str | Path) -> RecordingFacts:
    """Read a recording. A `UserError` for anything else."""
    facts = _facts(read_header(path, HINT), path)
    if problem := _problem(facts.linears):
        raise UserError(f"{called(path)} is damaged: {problem}", "record it again")
    return facts


def _facts(file: TensorFile, path: str | Path) -> RecordingFacts:
    text = file.metadata.get(METADATA)
    if text is None:
        raise UserError(f"{called(path)} is a safetensors file, but not a recording", HINT)
    data = parse_json(text, path, HINT)
    version = data.get("version", 1) if isinstance(data, dict) else None
    if not isinstance(data, dict) or version != VERSION:
        raise UserError(
            f"{called(path)} is a recording of version {shown(version)}; this gemmscope reads version {VERSION}",
            "record it again, or install the gemmscope version that wrote it",
        )
    check_numbers(data, path, "record it again", finite=False)
    try:
        return RecordingFacts.model_validate(data)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{called(path)} is damaged: {place}: {error.errors()[0]['msg']}", "record it again") from None


def _problem(linears: Sequence[LinearFacts]) -> str:
    """What would fail later."""
    names = [linear.name for linear in linears]
    if len(set(names)) < len(names):
        return "a linear occurs twice"
    for linear in linears:
        if len({step.step for step in linear.steps}) < len(linear.steps):
            return f"{linear.name} has a step twice"
        for step in linear.steps:
            if missing := {name for passes in step.gemms.values() for name in passes} - set(step.outputs):
                return f"{linear.name} has no output of {min(missing)}"
    return ""
