"""What the schedule and the pools exchange: units, places, and the events that pools report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Place:
    """One GPU that measures; or a machine's CPU, to try things out."""

    key: str
    """Unique in a pool, and the same again when a node comes back: the node's name and the GPU's UUID."""
    node: str
    """The name of the machine."""
    gpu: int | None = None
    """The number of the GPU in its machine; None for the CPU."""
    uuid: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """As its site reports them: `asdict(Environment)` with the one GPU of this place, and the version of gemmscope."""

    @property
    def name(self) -> str:
        """The name that people see.

        >>> Place("a", "node03", 5).name, Place("b", "node03").name
        ('node03 GPU 5', 'node03 CPU')
        """
        return f"{self.node} CPU" if self.gpu is None else f"{self.node} GPU {self.gpu}"


@dataclass(frozen=True)
class Unit:
    """One measurement. `place`: the only place that may run it, by its key; empty: any."""

    key: str
    content: Any
    """What the site is asked to do: pickled on the way."""
    place: str = ""


@dataclass(frozen=True)
class PlaceFound:
    """A place is ready for a unit: for the first time, or again after it was lost."""

    place: Place


@dataclass(frozen=True)
class PlaceLost:
    """Its site, its actor or its node died, or was ended after silence. What it was doing is lost. `again`: the pool tries to
    start another site there, and a `PlaceFound` follows if that succeeds."""

    place: str
    why: str
    again: bool = False


@dataclass(frozen=True)
class PlaceRefused:
    """Nothing can be measured there: no GPU, a GPU in use, other versions, a missing package. It does not come back.

    `place`: its key, if it was found before; the unit that it was given, if any, is measured elsewhere.
    """

    name: str
    why: str
    hint: str = ""
    place: str = ""
    gpus: int = 1
    """How many GPUs are not measured because of this."""


@dataclass(frozen=True)
class UnitProgress:
    """What a place is doing, in a few words; also a sign of life."""

    place: str
    text: str


@dataclass(frozen=True)
class UnitDone:
    """A unit was measured. `outcome`: plain data that JSON can hold, small (at most some tens of kB)."""

    place: str
    unit: str
    outcome: Any


@dataclass(frozen=True)
class UnitFailed:
    """A unit cannot be measured at this place: the message and hint of a `UserError`, or an exception. The place is fine.

    `unfit`: it needs more memory than the GPU has."""

    place: str
    unit: str
    why: str
    hint: str = ""
    unfit: bool = False


@dataclass(frozen=True)
class PoolEnded:
    """The pool itself cannot go on (Ray's head node is gone): every place of it is lost."""

    why: str
    hint: str = ""


Event = PlaceFound | PlaceLost | PlaceRefused | UnitProgress | UnitDone | UnitFailed | PoolEnded


class Pool(Protocol):
    """Where places come from. Used as a context manager: at its end, everything that it started is ended."""

    def __enter__(self) -> Pool: ...

    def __exit__(self, *_: object) -> None: ...

    def expected(self) -> int:
        """How many places are being started: a `PlaceFound` or a `PlaceRefused` follows for each, within a limited time. Places
        that were lost with `again` need not be counted."""

    def events(self, wait_s: float) -> Iterable[Event]:
        """What has happened since the last call; waits for the first event, at most `wait_s`."""

    def assign(self, place: str, unit: Unit) -> None:
        """Let a free place measure a unit. It ends with `UnitDone`, `UnitFailed` or `PlaceLost`."""

    def abandon(self, place: str) -> None:
        """End what a place is doing. A `PlaceLost` follows, and a `PlaceFound` if it can be used again."""
