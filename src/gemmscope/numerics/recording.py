"""Recordings: what `gemmscope.record_tensors` measured in the user's training, as numbers, in one safetensors file.

The file has no tensors: its metadata is the JSON text of `RecordingFacts`, which can be read without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import inf, isfinite, log2
from pathlib import Path

from pydantic import Field, ValidationError

from gemmscope.errors import UserError, option, shown
from gemmscope.numerics.safetensors import TensorFile, read_header, write_tensors
from gemmscope.reading import called, check_numbers, parse_json
from gemmscope.results.base import Part
from gemmscope.results.numerics import Source
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

VERSION = 2
METADATA = "gemmscope"
HISTORY = 1024  # steps: Transformer Engine's default
ZERO_OUTPUT = "the exact output is zero"
HINT = f"give a file that gemmscope.record_tensors wrote, or a checkpoint with {option('checkpoint')}"


def variant_name(recipe: str, library: str = "") -> str:
    """The name of a recipe as a library quantizes it."""
    return f"{recipe}/{library}" if library else recipe


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
    noise: float = 0.0
    """Of wgrad: the variance of the rest, relative to the squared norm of the output."""
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
    write_tensors(path, {}, {METADATA: text})


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
