"""The messages of a measuring process, one line of JSON each. The journal keeps them unchanged.

The worker makes messages and writes them with `line`; the parent reads them with `parse`, which accepts nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Kernel = tuple[str, float, int]  # name, microseconds, stream
Group = tuple[str, ...]  # the name of what is measured in one burst, by which the parent requests more of it


@dataclass(frozen=True)
class Hello:
    """The process has loaded the framework: what it runs on."""

    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    type: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Begin:
    """What it does from now on, and for which task: a crash is attributed to it. Also a sign of life."""

    task: str
    what: str
    type: Literal["begin"] = "begin"


@dataclass(frozen=True)
class Ready:
    """A task can be measured."""

    task: str
    facts: Mapping[str, Any]
    type: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Failed:
    """A task cannot be measured. `kind`: out of memory, CUDA fault, unsupported, too large, crash, hang, or error."""

    task: str
    why: str
    kind: str
    type: Literal["failed"] = "failed"


@dataclass(frozen=True)
class Sampled:
    """The times of one burst, by task, and the GPU's state after it."""

    times_ms: Mapping[str, list[float]]
    state: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    type: Literal["samples"] = "samples"


@dataclass(frozen=True)
class Health:
    """The health of the GPU under load, by the names of `gpu/health.toml`; the latest counts."""

    facts: Mapping[str, int | str]
    type: Literal["health"] = "health"


@dataclass(frozen=True)
class Round:
    """A round is complete: everything that was wanted has one burst more."""

    round: int
    type: Literal["round"] = "round"


@dataclass(frozen=True)
class Kernels:
    """The kernels of one run of a task."""

    task: str
    kernels: list[Kernel]
    type: Literal["kernels"] = "kernels"


@dataclass(frozen=True)
class Sum:
    """A task is the sum of others, and is not measured by itself."""

    task: str
    of: list[str]
    type: Literal["sum"] = "sum"


@dataclass(frozen=True)
class Profile:
    """The kernels of one training step: (part, direction, kernels) in the order in which they ran. `busy_ms`: the time in which
    any kernel ran; `steps_ms`: the same of every step that was recorded."""

    task: str
    parts: list[tuple[str, str, list[Kernel]]]
    busy_ms: float
    steps_ms: list[float] = field(default_factory=list)
    type: Literal["profile"] = "profile"


@dataclass(frozen=True)
class Launch:
    """The CPU time to launch a training step: the median, and every time that was measured."""

    task: str
    host_ms: float
    steps_ms: list[float] = field(default_factory=list)
    type: Literal["host"] = "host"


@dataclass(frozen=True)
class Noticed:
    """A finding about the measurement itself."""

    code: str
    facts: Mapping[str, Any]
    type: Literal["finding"] = "finding"


@dataclass(frozen=True)
class Attempted:
    """Written by the parent: from here on these tasks are measured together. What was measured of them before does not count."""

    tasks: list[str]
    type: Literal["attempt"] = "attempt"


@dataclass(frozen=True)
class Fatal:
    """The process cannot measure anything. `hint`: what to do about it, where that is known."""

    why: str
    hint: str = ""
    type: Literal["fatal"] = "fatal"


@dataclass(frozen=True)
class Done:
    """Everything of this attempt is measured. Said by the worker, or by the parent when it has enough."""

    type: Literal["done"] = "done"


Message = (
    Hello | Begin | Ready | Failed | Sampled | Health | Round | Kernels | Sum | Profile | Launch | Noticed | Attempted
    | Fatal | Done
)  # fmt: skip


def line(message: Message) -> str:
    """The message as one line of JSON.

    >>> line(Begin("MLP Up", "measuring"))
    '{"task": "MLP Up", "what": "measuring", "type": "begin"}'
    """
    return json.dumps(vars(message))  # not `asdict`: a burst may have tens of thousands of samples


def parse(text: str | bytes) -> Message:
    """The message in a line of JSON; a `ValueError` if it is invalid.

    >>> parse('{"task": "MLP Up", "what": "measuring", "type": "begin"}')
    Begin(task='MLP Up', what='measuring', type='begin')
    """
    return _reader().validate_json(text)


@cache
def _reader() -> TypeAdapter[Message]:
    from typing import Annotated  # only the parent reads messages: workers start without pydantic

    from pydantic import ConfigDict, Field, TypeAdapter

    tagged: Any = Annotated[Message, Field(discriminator="type")]
    return TypeAdapter(tagged, config=ConfigDict(extra="forbid"))
