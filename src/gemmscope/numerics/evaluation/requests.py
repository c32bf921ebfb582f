"""What the process that computes errors is asked, what it sends, and how it is run. Ctrl-C keeps what has arrived.

The request and the messages are one line of JSON each, so that finished linears are not lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from gemmscope.choices import Switch
from gemmscope.errors import UserError
from gemmscope.grouping import grouped
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.process import POLL_S, ProcessEndedError, WorkerProcess
from gemmscope.results.numerics import DepthError, LinearError, NumericsResult, Source, StaleScale
from gemmscope.signals import DeferredSignals, defer_signals
from gemmscope.workload.derive import HEAD, derive
from gemmscope.workload.ops import Linear

WORKER = "gemmscope.numerics.evaluation.worker"
USUAL_SEQUENCE = 512


@dataclass(frozen=True)
class ModelLinears:
    """The linears of a model in closed form, to compare a checkpoint with: the number of layers, and by role the sizes that its
    linears may have: (inputs, outputs). The head is left out: vocabularies may be padded."""

    layers: int
    sizes: Mapping[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class TensorSource:
    """Where tensors come from: a file of `gemmscope.record_tensors`, the weights of a checkpoint, or a kind of random tensors."""

    kind: Source
    origin: str
    """The file, or the kind of random tensors."""
    expected: ModelLinears | None = None
    """What a checkpoint is compared with."""
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of the linears that get random tensors: op → (inputs, outputs)."""
    model: str = ""
    """The name of their model."""


@dataclass(frozen=True)
class DepthModel:
    """The model to run for errors along depth: `file.py:factory`, or a Hugging Face config."""

    module: str | None = None
    config: dict[str, Any] | None = None
    micro_batch: int | None = None
    sequence: int | None = None


@dataclass(frozen=True)
class ErrorsRequest:
    """What to compute, of which tensors. `backend`: whose variants of the recipes."""

    source: TensorSource
    recipes: tuple[str, ...]
    backend: str = ""
    without: tuple[Switch, ...] = ()
    """What is switched off in recipes that have it."""
    device: str = "cpu"
    seed: int = 0
    depth: DepthModel | None = None


@dataclass(frozen=True)
class TensorsOpened:
    """The tensors are there. `result`: without errors yet. `count`: of linears."""

    result: NumericsResult
    count: int
    type: Literal["opened"] = "opened"


@dataclass(frozen=True)
class LinearComputed:
    """One linear in every recipe, and its stale scales."""

    errors: tuple[LinearError, ...]
    stale: tuple[StaleScale, ...] = ()
    type: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DepthReport:
    """The errors of every recipe along depth, and notes for the reader."""

    depth: tuple[DepthError, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str = ""
    """Why there are no errors."""


@dataclass(frozen=True)
class NotComputed:
    """Nothing can be computed: a `UserError`."""

    message: str
    hint: str = ""
    type: Literal["error"] = "error"


@dataclass(frozen=True)
class AllComputed:
    """The last message, after all linears."""

    depth: DepthReport = DepthReport()
    type: Literal["done"] = "done"


ErrorsMessage = TensorsOpened | LinearComputed | NotComputed | AllComputed
Kind = TypeVar("Kind")
REQUEST: TypeAdapter[ErrorsRequest] = TypeAdapter(ErrorsRequest)
MESSAGE: TypeAdapter[ErrorsMessage] = TypeAdapter(Annotated[ErrorsMessage, Field(discriminator="type")])


def to_line(kind: TypeAdapter[Kind], value: Kind) -> str:
    """A request or a message as one line of JSON. Not written by pydantic, which would drop values that are not finite.

    >>> to_line(MESSAGE, NotComputed("no weights"))
    '{"message": "no weights", "hint": "", "type": "error"}'
    """
    return json.dumps(kind.dump_python(value, mode="json", by_alias=True))


def from_line(kind: TypeAdapter[Kind], line: str | bytes) -> Kind:
    """What `to_line` wrote."""
    return kind.validate_python(json.loads(line))


@dataclass
class ComputedErrors:
    """The messages of the worker so far, as one result."""

    opened: TensorsOpened | None = None
    done: int = 0
    """Linears that were computed."""
    linears: list[LinearError] = field(default_factory=list)
    stale: list[StaleScale] = field(default_factory=list)
    depth: DepthReport = DepthReport()
    complete: bool = False
    ended: str = ""
    """How the worker ended, if that was before the last linear."""

    @property
    def tensors(self) -> TensorsOpened:
        """What is known of the tensors; always there once a linear was computed."""
        assert self.opened is not None
        return self.opened

    def take(self, message: ErrorsMessage) -> None:
        """Add a message of the worker."""
        if isinstance(message, NotComputed):
            raise UserError(message.message, message.hint)
        if isinstance(message, TensorsOpened):
            self.opened = message
        elif isinstance(message, LinearComputed):
            self.linears += message.errors
            self.stale += message.stale
            self.done += 1
        else:
            self.depth, self.complete = message.depth, True


def compute_errors(request: ErrorsRequest, progress: Callable[[int, int], None]) -> ComputedErrors:
    """Compute errors in a worker. `progress` is called with the number of linears that are done, and of all linears.

    An interruption, or a worker that dies, ends it early: the result then holds what was computed, if anything was.
    """
    result = ComputedErrors()
    with defer_signals() as signals:
        for message in _messages(request, signals, result):
            result.take(message)
            progress(result.done, result.tensors.count)
        if not result.complete and signals.first is not None:
            if not result.linears:
                raise signals.interruption()
            signals.answered = True
            signals.outcome = f"{result.done} of {result.tensors.count} linears are computed"
    if not result.complete and not result.linears:
        raise UserError(f"the process that computes errors {result.ended or 'ended without a result'}")
    return result


def _messages(request: ErrorsRequest, signals: DeferredSignals, result: ComputedErrors) -> Iterator[ErrorsMessage]:
    """The worker's messages until it ends, or a signal arrives."""
    with WorkerProcess(WORKER) as worker:
        worker.send(to_line(REQUEST, request).encode() + b"\n")
        try:
            while signals.first is None:
                worker.wait(POLL_S, signals)
                yield from map(partial(from_line, MESSAGE), worker.lines())
        except ProcessEndedError as end:
            killed, ending = "was killed, perhaps because memory ran out", end.ending
            result.ended = killed if ending.killed else f"ended with {ending.how}{ending.detail}"


def model_linears(model: ModelSpec) -> ModelLinears:
    """What a checkpoint of this model contains."""
    ops = derive(model, RunSpec(micro_batch_size=1, sequence_length=model.positions or USUAL_SEQUENCE)).ops
    sizes = grouped((op.role, (op.inputs, op.outputs)) for op in ops if isinstance(op, Linear) and op.section != HEAD)
    return ModelLinears(len(model.layers), {op: tuple(sorted(set(known))) for op, known in sizes.items()})
