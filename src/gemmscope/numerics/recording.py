"""A recording: samples of the tensors of every linear, in one safetensors file, with the facts as JSON in its metadata.

Every pass of a linear is a GEMM of two operands, both stored with the reduced dimension last:

| pass | first operand | second operand | reduced dimension |
| --- | --- | --- | --- |
| fprop | rows of W [s, K] | rows of X [s, K] | K, input features |
| dgrad | columns of W [s, N] | rows of dY [s, N] | N, output features |
| wgrad | columns of X [s, M] | columns of dY [s, M] | M, tokens |

Of each operand, some rows are kept, drawn without replacement, each with its weight (1 / probability of being drawn). Of the
reduced dimension, some aligned blocks of 128 are kept, the same for both operands, each with its weight. What depends on values
that are not kept is recorded from the whole tensor: maxima of the tensor, of the sampled rows and of the blocks of W, energies
(sums of squares), and the norm of the exact output.

The facts can be read without torch; tensors are loaded when they are used, one linear at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from gemmscope.errors import UserError, option, shown
from gemmscope.numerics.safetensors import TensorFile, read_header, write_tensors
from gemmscope.reading import called, check_numbers, parse_json
from gemmscope.results.base import Part
from gemmscope.results.numerics import Source
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
METADATA = "gemmscope"
BLOCK = 128  # values of the reduced dimension: a multiple of the blocks of every recipe
WEIGHT_BLOCKS = (128, 16)  # square blocks of W that recipes scale together
HISTORY = 1024  # steps: Transformer Engine's default
EXPONENTS = 256  # biased exponents of float32: 0 holds zeros and subnormals, 255 Inf and NaN
ZERO_OUTPUT = "the exact output is zero"
PLACES = ("first", "second")  # of an operand in its GEMM
HINT = f"give a file that gemmscope.record_tensors wrote, or a checkpoint with {option('checkpoint')}"


class TensorFacts(Part):
    """A whole tensor in one step."""

    amax: float
    norm: float | None = None
    """Square root of the sum of squares."""
    zeros: float = 0.0
    """Share of the values that are zero."""
    nonfinite: int = 0
    """Values that are NaN or Inf. They are left out of norms and energies."""


class PassFacts(Part):
    """The GEMM of one pass: what is kept of the reduced dimension, and the exact output."""

    reduced: int
    """Length of the reduced dimension."""
    blocks: tuple[int, ...] = ()
    """Where the kept blocks begin, ascending multiples of 128."""
    weights: tuple[float, ...] = ()
    """Of every block: 1 / probability of being drawn."""
    product: float | None = None
    """Sum over the reduced dimension of the operands' energies: the squared norm of the output if its terms were uncorrelated."""
    norm: float | None = None
    """Of the exact output."""

    @property
    def widths(self) -> list[int]:
        """Of every block."""
        return [min(BLOCK, self.reduced - start) for start in self.blocks]


class StepFacts(Part):
    """A linear in one training step."""

    step: int
    tokens: int | None = None
    """M: of the micro-batch on this rank."""
    tensors: dict[TensorName, TensorFacts] = Field(default_factory=dict)
    passes: dict[Pass, PassFacts] = Field(default_factory=dict)
    """Of sampled steps; in others only the maxima of the tensors are known."""
    probes: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """GEMM errors of reference quantizers, measured with the whole tensors (probes.py)."""


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
    failure: str = ""
    """Why nothing was recorded."""


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


@dataclass(frozen=True)
class OperandSample:
    """Sampled rows of one operand of one pass. The reduced dimension is the last one."""

    tensor: TensorName
    rows: Tensor
    """[s, R]: R is the kept part of the reduced dimension."""
    weights: Tensor
    """[s] float32: 1 / probability of being drawn."""
    row_amax: Tensor
    """[s] float32: maximum of each sampled row over the whole reduced dimension."""
    energy: Tensor
    """[R] float32: sum of squares over all rows of the operand at every kept index, in units of the square of the largest finite
    value: only their ratios count, and they never leave the range of float32."""
    amax: float
    """Of the whole tensor."""
    exponents: Tensor
    """[256] float32: how many values of the whole tensor have each biased exponent (floor(log2 |x|) + 127)."""
    column_weights: Tensor
    """[R] float32: weight of every kept index of the reduced dimension, that of its block."""
    block_amax: Mapping[int, Tensor]
    """Of W: size of square blocks (128, 16) → [s, R / size], the maximum of the block that each value lies in."""


@dataclass(frozen=True)
class LinearStep:
    """A linear in one step. `load` gives a tensor by its name."""

    facts: StepFacts
    load: Callable[[str], Tensor]

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that samples exist of."""
        return tuple(self.facts.passes)

    def problem(self, pass_name: Pass) -> str:
        """Why a pass has no error in this step; empty if it has one."""
        for tensor in OPERANDS[pass_name]:
            if tensor not in self.facts.tensors:
                return f"{tensor} was not recorded"
            if self.facts.tensors[tensor].nonfinite:
                return nonfinite_values(tensor)
        facts = self.facts.passes[pass_name]
        if not all(value is not None and isfinite(value) for value in (facts.norm, facts.product)):
            return "the exact output is too large for float32"
        return "" if facts.norm and facts.product else ZERO_OUTPUT

    def sample(self, pass_name: Pass, tensor: TensorName) -> OperandSample:
        """One operand of a pass; from a checkpoint only W is known."""
        facts, prefix = self.facts.passes[pass_name], f"{pass_name}.{PLACES[OPERANDS[pass_name].index(tensor)]}"
        weights = self.load(f"{prefix}.weights")
        return OperandSample(
            tensor=tensor,
            rows=self.load(f"{prefix}.rows"),
            weights=weights,
            row_amax=self.load(f"{prefix}.row_amax"),
            energy=self.load(f"{prefix}.energy"),
            amax=self.facts.tensors[tensor].amax,
            exponents=self.load(f"{tensor}.exponents"),
            column_weights=weights.new_tensor(facts.weights).repeat_interleave(weights.new_tensor(facts.widths).long()),
            block_amax={size: self.load(f"{prefix}.amax{size}") for size in WEIGHT_BLOCKS} if tensor == "W" else {},
        )


@dataclass(frozen=True)
class RecordedLinear:
    """One linear, with the steps that it was recorded in."""

    facts: LinearFacts
    steps: tuple[LinearStep, ...]

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def sampled_steps(self) -> tuple[LinearStep, ...]:
        return tuple(step for step in self.steps if step.facts.passes)


@dataclass(frozen=True)
class TensorRecording:
    """Samples of the tensors of all linears: from training, from a checkpoint (W alone), or synthetic."""

    facts: RecordingFacts
    linears: tuple[RecordedLinear, ...]
    origin: str
    """The file, or what the tensors were made for."""
    sampled_bytes: int


def nonfinite_values(tensor: TensorName) -> str:
    """Why a tensor cannot be quantized."""
    return f"{tensor} has NaN or Inf values"


def earlier_maxima(steps: Iterable[StepFacts], step: int) -> dict[TensorName, float]:
    """The largest maximum of every tensor in the recorded steps before this one. Empty if there are none."""
    history = [one.tensors.items() for one in steps if step - HISTORY <= one.step < step]
    maxima = [(facts.amax, tensor) for tensors in history for tensor, facts in tensors if isfinite(facts.amax) and facts.amax > 0]
    return {tensor: amax for amax, tensor in sorted(maxima)}  # the last one of a tensor is the largest


def scale_maxima(steps: Sequence[StepFacts], own: StepFacts) -> dict[TensorName, float]:
    """What the scales of delayed scaling come from in the step `own`: the maxima of earlier steps, as far as they are known.

    The maximum of a few recorded steps is often exceeded by the next step, that of a history of 1024 hardly ever. So where fewer
    steps were recorded, the history is taken to hold a maximum as large as the step's own: nothing saturates.
    """
    earlier = earlier_maxima(steps, own.step)
    if sum(one.step < own.step for one in steps) >= HISTORY:
        return earlier
    known = {tensor: facts.amax for tensor, facts in own.tensors.items() if isfinite(facts.amax)}
    return {tensor: max(amax, known.get(tensor, 0.0)) for tensor, amax in earlier.items()}


def assembled(facts: RecordingFacts, origin: str, sampled_bytes: int, load: Callable[[str], Any]) -> TensorRecording:
    """A recording of these facts; `load` gives a tensor by its key."""

    def loader(linear: LinearFacts, step: StepFacts) -> Callable[[str], Any]:
        return lambda name: load(tensor_key(linear.name, step.step, name))

    linears = tuple(
        RecordedLinear(linear, tuple(LinearStep(step, loader(linear, step)) for step in linear.steps)) for linear in facts.linears
    )
    return TensorRecording(facts, linears, origin, sampled_bytes)


def in_memory(facts: RecordingFacts, origin: str, tensors: Mapping[str, Tensor]) -> TensorRecording:
    """A recording of tensors that are not in a file."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return assembled(facts, origin, size, tensors.__getitem__)


def tensor_key(linear: str, step: int, name: str) -> str:
    """The name of a tensor in the file.

    >>> tensor_key("model.layers.0.mlp.up_proj", 12, "fprop.first.rows")
    'model.layers.0.mlp.up_proj/12/fprop.first.rows'
    """
    return f"{linear}/{step}/{name}"


def write_recording(path: str | Path, facts: RecordingFacts, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, replaced as a whole."""
    # not by pydantic, which would drop maxima that are NaN
    text = json.dumps(facts.model_dump(exclude_defaults=True), separators=(",", ":"))
    write_tensors(path, tensors, {METADATA: text})


def read_recording(path: str | Path) -> TensorRecording:
    """Open a recording: its facts at once, its tensors when they are used. A `UserError` for anything else."""
    file = read_header(path, HINT)
    facts = _facts(file, path)
    problem = next(_problems(facts, file), "")
    if problem:
        raise UserError(f"{called(path)} is damaged: {problem}", "record it again")
    return assembled(facts, called(path), file.data_bytes, file.load)


def _facts(file: TensorFile, path: str | Path) -> RecordingFacts:
    text = file.metadata.get(METADATA)
    if text is None:
        raise UserError(f"{called(path)} is a safetensors file, but not a recording", HINT)
    data = parse_json(text, path, HINT)
    version = data.get("version", VERSION) if isinstance(data, dict) else None
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


def _problems(facts: RecordingFacts, file: TensorFile) -> Iterator[str]:
    """Problems that would fail later: duplicate names, missing tensors, wrong shapes."""
    names = [linear.name for linear in facts.linears]
    if len(set(names)) < len(names):
        yield "a linear occurs twice"
    for linear in facts.linears:
        if len({step.step for step in linear.steps}) < len(linear.steps):
            yield f"{linear.name} has a step twice"
        for step in linear.steps:
            for pass_name, one in step.passes.items():
                if not _valid_blocks(linear, step, pass_name, one):
                    yield f"the blocks of {linear.name}, {pass_name}, are invalid"
            for key, shape in _expected_shapes(linear, step, file):
                stored = file.tensors.get(key)
                if stored is None or stored.shape != shape:
                    yield f"{key} is {'missing' if stored is None else f'of shape {stored.shape}, not {shape}'}"


def _valid_blocks(linear: LinearFacts, step: StepFacts, pass_name: Pass, facts: PassFacts) -> bool:
    reduced = {"fprop": linear.inputs, "dgrad": linear.outputs, "wgrad": step.tokens}[pass_name]
    inside = all(start % BLOCK == 0 and 0 <= start < facts.reduced for start in facts.blocks)
    ascending = list(facts.blocks) == sorted(set(facts.blocks))
    return facts.reduced == reduced and inside and ascending and 0 < len(facts.blocks) == len(facts.weights)


def _expected_shapes(linear: LinearFacts, step: StepFacts, file: TensorFile) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a sampled step with their shapes. How many rows were drawn is only known from the file."""
    for pass_name, facts in step.passes.items():
        for place, tensor in zip(PLACES, OPERANDS[pass_name], strict=True):
            if tensor not in step.tensors:
                continue
            prefix = tensor_key(linear.name, step.step, f"{pass_name}.{place}.")
            rows = file.tensors.get(f"{prefix}rows")
            count = rows.shape[0] if rows is not None and len(rows.shape) == 2 else 0
            yield f"{prefix}rows", (max(count, 1), sum(facts.widths))
            yield from ((f"{prefix}{name}", (count,)) for name in ("weights", "row_amax"))
            yield f"{prefix}energy", (sum(facts.widths),)
            for size in WEIGHT_BLOCKS if tensor == "W" else ():
                yield f"{prefix}amax{size}", (count, sum(-(-width // size) for width in facts.widths))
    for tensor in step.tensors if step.passes else ():
        yield tensor_key(linear.name, step.step, f"{tensor}.exponents"), (EXPONENTS,)
