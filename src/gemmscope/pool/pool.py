"""What the schedule and the pools exchange: units, places, and the events that pools report; and what a schedule returns:
outcomes, failures, what became of the places, and findings about the measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gemmscope import units
from gemmscope.findings import Finding, finding
from gemmscope.grouping import grouped


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
    """As its place worker reports them: `asdict(Environment)` with the one GPU of this place, and the version of gemmscope."""
    turn: int = 1
    """Which of the places that share its GPU it is: they take turns."""

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
    """What the place worker is asked to do: pickled on the way."""
    place: str = ""


@dataclass(frozen=True)
class PlaceFound:
    """A place is ready for a unit: for the first time, or again after it was lost."""

    place: Place


@dataclass(frozen=True)
class PlaceLost:
    """Its worker, its actor or its node died, or was ended after silence. What it was doing is lost. `again`: the pool tries to
    start another place worker there, and a `PlaceFound` follows if that succeeds."""

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
    node: str = ""
    """The name of the machine, where `name` says more."""


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


class UnitOutcome(NamedTuple):
    """What came of a unit, and where it was measured."""

    place: Place
    outcome: Any


class UnitFailure(NamedTuple):
    """Why a unit was not measured. `place`: the name of the place where it was tried last; empty if it was not tried. `lost`:
    GPUs were lost; the unit itself gave no reason. `unfit`: it needs more memory than the GPU has."""

    place: str
    why: str
    hint: str = ""
    lost: bool = True
    unfit: bool = False


@dataclass
class Outcomes:
    """Everything, by the keys of units and places. Every unit is in `done`, in `failed`, or, if `interrupted`, in neither."""

    done: dict[str, UnitOutcome] = field(default_factory=dict)
    failed: dict[str, UnitFailure] = field(default_factory=dict)
    refused: list[PlaceRefused] = field(default_factory=list)
    lost: list[PlaceLost] = field(default_factory=list)
    """Every loss, also of places that came back; without those that were ended because they were not needed."""
    places: dict[str, Place] = field(default_factory=dict)
    """Every place that was found, also one that was lost later."""
    interrupted: bool = False
    findings: list[Finding] = field(default_factory=list)
    resumed: int = 0
    """How many units were done by an earlier run."""
    repeated: int = 0
    """How many times a unit was begun again because its place was lost."""

    def place_name(self, key: str) -> str:
        """The name of the place with this key, as shown to people."""
        return self.places[key].name if key in self.places else key


def place_findings(outcomes: Outcomes, most_at_once: dict[str, int], limits: dict[str, tuple[int, int, int]]) -> list[Finding]:
    """Findings about the places. `most_at_once`: how many units ran at the same time on each node; `limits`: the nodes with
    few CPU cores: cores, GPUs, and how many of these were used at the same time."""
    findings = []
    if (most := max(most_at_once.values(), default=0)) > 1:
        on_cpu = all(place.gpu is None for place in outcomes.places.values())
        findings.append(finding("pool-shares-cpu" if on_cpu else "pool-shares-host", most=most))
    limited = grouped((limit, node) for node, limit in limits.items())
    for (cores, gpus, at_once), nodes in sorted(limited.items()):
        findings.append(finding("pool-few-cores", nodes=units.names(nodes), cores=cores, gpus=gpus, at_once=at_once))
    refused = grouped((f"{one.why} ({one.hint})" if one.hint else one.why, one.name) for one in outcomes.refused)
    findings += [finding("pool-places-refused", places=units.names(names), reason=why) for why, names in refused.items()]
    lost = grouped((loss.why, outcomes.place_name(loss.place)) for loss in outcomes.lost)
    findings += [finding("pool-places-lost", places=units.names(names), reason=why) for why, names in lost.items()]
    if outcomes.repeated:
        findings.append(finding("pool-units-repeated", units=outcomes.repeated))
    return findings
