"""A fleet that was measured on a pool: which measurements there are, and what became of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gemmscope.errors import in_shell
from gemmscope.findings import Finding, finding
from gemmscope.fleet.gather import Run
from gemmscope.grouping import grouped
from gemmscope.pool.pool import Outcomes, Place, PlaceRefused, UnitFailure
from gemmscope.results.fleet import FleetGpu
from gemmscope.units import slug


@dataclass(frozen=True)
class Measurement:
    """One measurement of one GPU. `number`: which of its repeats."""

    place: Place
    kind: str
    number: int

    @property
    def key(self) -> str:
        """Its name as a unit of the pool."""
        return f"{self.place.key} {self.kind} {self.number}"

    @property
    def file(self) -> str:
        """The name of its run file."""
        return file_name(self.place.node, self.place.gpu, self.place.uuid, repeat=self.number, turn=self.place.turn)


def file_name(node: str, gpu: int | None, uuid: str = "", *, repeat: int = 1, rank: int = 0, turn: int = 1) -> str:
    """The name of the run file of one GPU. Where a process sees only its own GPU, that is number 0: the UUID tells GPUs apart.

    >>> file_name("node03.cluster", 5, "GPU-5c1f0a44-77b0"), file_name("node03", None, rank=2), file_name("a", 0, repeat=2)
    ('node03-cluster-gpu5-5c1f0a44.json', 'node03-cpu-2.json', 'a-gpu0-run2.json')
    """
    parts = [slug(node), "cpu" if gpu is None else f"gpu{gpu}", slug(uuid.removeprefix("GPU-")[:8]) if uuid else ""]
    parts += [str(rank) if rank and gpu is None else "", f"turn{turn}" if turn > 1 else "", f"run{repeat}" if repeat > 1 else ""]
    return f"{'-'.join(part for part in parts if part)}.json"


@dataclass(frozen=True)
class MeasuredFleet:
    """The outcomes of the measurements of every GPU. `folder`: where their run files are."""

    outcomes: Outcomes
    kind: str
    repeat: int
    folder: Path | None = None

    @cached_property
    def measurements(self) -> dict[str, Measurement]:
        """Those of every place that is known, also from an earlier run, by their keys."""
        places = {place.key: place for place, _ in self.outcomes.done.values()} | self.outcomes.places
        every = (Measurement(place, self.kind, number + 1) for place in places.values() for number in range(self.repeat))
        return {measurement.key: measurement for measurement in every}

    @cached_property
    def measured(self) -> set[str]:
        """The keys of the places that were measured at least once."""
        return {place.key for place, _ in self.outcomes.done.values()}

    def runs(self) -> list[Run]:
        runs = []
        for key, (place, outcome) in self.outcomes.done.items():
            file = self.folder / self.measurements[key].file if self.folder is not None else None
            runs.append(Run(outcome, _gpu(place, file=(str(file) if file is not None and file.is_file() else ""))))
        return runs

    def failed(self) -> list[FleetGpu]:
        """GPUs that were not measured at all, and why."""
        failures = [(place, failure) for place, failure in self._failures() if place.key not in self.measured]
        failed = {place.key: _gpu(place, reason(failure)) for place, failure in failures}
        for refusal in self.outcomes.refused:
            known = self.outcomes.places.get(refusal.place)
            if known is not None and known.key not in self.measured:
                failed[known.key] = _gpu(known, reason(refusal))
            elif known is None:
                for number in range(1, refusal.gpus + 1):  # 0: a node without GPUs, which the findings name
                    name = refusal.name if refusal.gpus == 1 else f"{refusal.name} ({number} of {refusal.gpus})"
                    failed[name] = FleetGpu(place=name, node=refusal.node or refusal.name, failure=reason(refusal))
        return list(failed.values())

    def _failures(self) -> Iterator[tuple[Place, UnitFailure]]:
        for key, failure in self.outcomes.failed.items():
            if (measurement := self.measurements.get(key)) is not None:
                yield measurement.place, failure

    def findings(self) -> list[Finding]:
        """Findings about the measurement. Places that refused are listed as GPUs not measured, except those without a GPU."""
        findings = [entry for entry in self.outcomes.findings if entry.code != "pool-places-refused"]
        refused = [refusal for refusal in self.outcomes.refused if not refusal.gpus]
        findings += [finding("pool-places-refused", places=[place.name], reason=place.why) for place in refused]
        missing = grouped((reason(failure), place.name) for place, failure in self._failures() if place.key in self.measured)
        findings += [
            finding("fleet-repeats-missing", places=list(dict.fromkeys(places)), reason=why) for why, places in missing.items()
        ]
        if self.outcomes.interrupted:
            findings.insert(0, finding("fleet-interrupted"))
        if self.folder is not None:
            names = sorted({self.measurements[key].file for key in self.outcomes.done})
            if unwritten := [name for name in names if not (self.folder / name).is_file()]:
                findings.append(finding("fleet-files-missing", files=unwritten, folder=str(self.folder)))
        return findings


def reason(failure: UnitFailure | PlaceRefused) -> str:
    """Why a GPU was not measured, and what to do about it."""
    return in_shell(f"{failure.why} ({failure.hint})" if failure.hint else failure.why)


def _gpu(place: Place, failure: str = "", file: str = "") -> FleetGpu:
    return FleetGpu(place=place.name, node=place.node, index=place.gpu, uuid=place.uuid, failure=failure, file=file)
