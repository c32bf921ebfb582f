"""What a schedule returns: outcomes, failures, what became of the places, and findings about the measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gemmscope.findings import Finding, finding
from gemmscope.pool.units import Place, PlaceLost, PlaceRefused

MOST_NAMES = 8  # in one finding


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
    for cores, gpus, at_once in sorted(set(limits.values())):
        nodes = [node for node, limit in limits.items() if limit == (cores, gpus, at_once)]
        findings.append(finding("pool-few-cores", nodes=_some(nodes), cores=cores, gpus=gpus, at_once=at_once))
    refused: dict[tuple[str, str], list[str]] = {}
    for refusal in outcomes.refused:
        refused.setdefault((refusal.why, refusal.hint), []).append(refusal.name)
    for (why, hint), names in refused.items():
        findings.append(finding("pool-places-refused", places=_some(names), reason=f"{why} ({hint})" if hint else why))
    lost: dict[str, list[str]] = {}
    for loss in outcomes.lost:
        lost.setdefault(loss.why, []).append(outcomes.place_name(loss.place))
    for why, names in lost.items():
        findings.append(finding("pool-places-lost", places=_some(list(dict.fromkeys(names))), reason=why))
    if outcomes.repeated:
        findings.append(finding("pool-units-repeated", units=outcomes.repeated))
    return findings


def _some(names: list[str]) -> str:
    """Not all of them, which may be thousands."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
