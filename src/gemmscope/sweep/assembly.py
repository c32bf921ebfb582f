"""From the outcomes of points to the result of a measured sweep; also while some are missing."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from gemmscope.errors import in_python
from gemmscope.findings import Finding, Notes, applicable, finding, without_repeats
from gemmscope.grouping import grouped
from gemmscope.pool.pool import Outcomes, UnitOutcome
from gemmscope.recipe.recipes import BASELINE, recipes
from gemmscope.results.sweep import MeasuredPoint, MeasuredSweep, SweepGpu, SweepResult, break_evens
from gemmscope.sweep.axes import by_reason

POINT_CODES = (
    "precision-reached", "all-measured", "time-limit-reached", "time-limit-no-interval", "time-limit-no-speedup",
    "too-close-to-call", "ops-too-close",
)  # fmt: skip
"""Findings that a sweep reports for all points at once, or shows for each point in its table."""

POINTS_WITHOUT_TIMES = ("sweep-point-lost", "sweep-point-not-measured", "sweep-point-does-not-fit", "sweep-point-not-possible")


def point_key(values: Mapping[str, int]) -> str:
    """The name of a point in the journal and in messages.

    >>> point_key({"micro_batch_size": 2, "sequence_length": 4096})
    'micro_batch_size=2 sequence_length=4096'
    """
    return " ".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Assembly:
    """Builds the result from the outcomes so far. `about`: the fields that name the model."""

    of: Literal["bench", "step"]
    sizes: tuple[str, ...]
    possible: Sequence[dict[str, int]]
    impossible: Sequence[tuple[dict[str, int], str]]
    about: Mapping[str, Any]
    settings: Mapping[str, Any]

    def result(self, outcomes: Outcomes, *, interrupted: bool) -> SweepResult:
        """Every point that was measured, that failed, and that is not possible, in the order of their sizes."""
        done = {
            key: measured for values in self.possible if (measured := outcomes.done.get(key := point_key(values))) is not None
        }
        modes = list(dict.fromkeys(mode for measured in done.values() for mode in measured.outcome["modes"])) or [""]
        gpus = _gpus(done.values())
        sweeps = tuple(self._sweep(mode, done, outcomes, complete=not interrupted) for mode in modes)
        return SweepResult(
            **self.settings,
            **self.about,
            of=self.of,
            backend=next((str(measured.outcome["backend"]) for measured in done.values()), ""),
            wanted=len(self.possible),
            interrupted=interrupted,
            gpus=gpus,
            sweeps=sweeps,
            findings=tuple(self._findings(sweeps, gpus, done, outcomes, interrupted=interrupted)),
        )

    def _sweep(self, mode: str, done: Mapping[str, UnitOutcome], outcomes: Outcomes, *, complete: bool) -> MeasuredSweep:
        points = [_measured(values, done[key], mode) for values in self.possible if (key := point_key(values)) in done]
        seen = {name for point in points for name in (*point.times_ms, *point.unfit, *point.not_possible)}
        names = tuple(name for name in recipes() if name in seen)
        for values in self.possible:
            if (failed := outcomes.failed.get(point_key(values))) is not None:
                unfit = (names or (BASELINE,)) if failed.unfit else ()
                points.append(MeasuredPoint(values=values, gpu=failed.place, failure=in_python(failed.why), unfit=unfit))
        points += [MeasuredPoint(values=values, why_not=why) for values, why in self.impossible]
        points.sort(key=lambda point: tuple(point.values.values()))
        types = dict.fromkeys(str(measured.outcome["device"].get("name", "")) for measured in done.values())
        return MeasuredSweep(
            gpu=", ".join(filter(None, types)) or "this machine",
            what="training step" if self.of == "step" else "GEMM" if self.about.get("shape") is not None else "linears",
            mode=mode,
            sizes=self.sizes,
            recipes=names,
            points=tuple(points),
            break_even=break_evens(points, names) if complete else (),
        )

    def _findings(
        self,
        sweeps: Sequence[MeasuredSweep],
        gpus: Sequence[SweepGpu],
        done: Mapping[str, UnitOutcome],
        outcomes: Outcomes,
        *,
        interrupted: bool,
    ) -> Iterable[Finding]:
        if interrupted:
            yield finding("sweep-incomplete", points=len(done), wanted=len(self.possible))
        yield from without_repeats(entry for sweep in sweeps for entry in _point_findings(sweep, done))
        lost = {key for key, failure in outcomes.failed.items() if failure.lost}
        without: dict[str, list[MeasuredPoint]] = {code: [] for code in POINTS_WITHOUT_TIMES}
        for point in sweeps[0].points:
            if point.reason:
                without[_why_without_times(point, lost)].append(point)
        for code, points in without.items():
            for reason, places in by_reason(points).items():
                yield finding(code, places=places, reason=reason)
        yield from _gpu_findings(gpus)
        inputs = {measured.outcome.get("inputs") for measured in done.values()}
        if len(done) > 1 and len(inputs) == 1 and (fixed := inputs.pop()) is not None:
            yield finding("sweep-inputs-fixed", inputs=str(fixed))
        if limited := sum(bool(measured.outcome.get("limit_reached")) for measured in done.values()):
            yield finding("sweep-limit-reached", points=limited, of=len(done))
        yield from outcomes.findings
        yield from _common([measured.outcome["findings"] for measured in done.values()])


def _why_without_times(point: MeasuredPoint, lost: Collection[str]) -> str:
    """The code of the finding about a point without times. `lost`: the keys of points that were lost with their GPUs."""
    if point.why_not:
        return "sweep-point-not-possible"
    if point_key(point.values) in lost:
        return "sweep-point-lost"
    return "sweep-point-does-not-fit" if point.unfit else "sweep-point-not-measured"


def _measured(values: dict[str, int], measured: UnitOutcome, mode: str) -> MeasuredPoint:
    data = {name: value for name, value in measured.outcome["modes"].get(mode, {}).items() if name != "fallbacks"}
    point = MeasuredPoint(**data, values=values, gpu=measured.place.name, uuid=measured.place.uuid)
    why = "out of memory" if BASELINE in point.unfit else point.not_possible.get(BASELINE, "not measured")
    failure = f"{BASELINE}: {why}" if BASELINE not in point.times_ms else ""  # nothing to compare with
    return point.model_copy(update={"failure": failure})


def _gpus(done: Iterable[UnitOutcome]) -> tuple[SweepGpu, ...]:
    """The GPUs that measured points, in the order of their names; told apart by their UUID."""
    gpus = []
    for measured in grouped((outcome.place.uuid or outcome.place.key, outcome) for outcome in done).values():
        first = measured[0]
        versions = {name: str(version) for name, version in first.outcome["versions"].items()}
        name = str(first.outcome["device"].get("name", ""))
        gpus.append(SweepGpu(place=first.place.name, uuid=first.place.uuid, name=name, versions=versions, points=len(measured)))
    return tuple(sorted(gpus, key=lambda gpu: gpu.place))


def _gpu_findings(gpus: Sequence[SweepGpu]) -> list[Finding]:
    types = list(dict.fromkeys(gpu.name for gpu in gpus))
    names = dict.fromkeys(name for gpu in gpus for name in gpu.versions)
    versions = {name: dict.fromkeys(gpu.versions.get(name, "none") for gpu in gpus) for name in names}
    different = [f"{name} {' and '.join(values)}" for name, values in versions.items() if len(values) > 1]
    notes: Notes = {
        "sweep-gpu-types-differ": (len(types) > 1, {"types": types}),
        "sweep-versions-differ": (different, {"differences": different}),
        "sweep-several-gpus": (len(gpus) > 1, {"gpus": len(gpus)}),
    }
    return applicable(notes)


def _point_findings(sweep: MeasuredSweep, done: Mapping[str, UnitOutcome]) -> Iterable[Finding]:
    """Findings about recipes (fallbacks, out of memory, not measured, host-bound), each with its points."""
    modes = {point.place: done[key].outcome["modes"] for point in sweep.points if (key := point_key(point.values)) in done}
    yield from _with_recipes(
        "sweep-fallback", {place: of_point.get(sweep.mode, {}).get("fallbacks", ()) for place, of_point in modes.items()}
    )
    yield from _with_recipes("sweep-out-of-memory", {point.place: point.unfit for point in sweep.points if not point.failure})
    failed = [point for point in sweep.points if point.not_possible and not point.failure]
    reasons = grouped(((tuple(point.not_possible), next(iter(point.not_possible.values()))), point.place) for point in failed)
    for (names, reason), places in reasons.items():
        yield finding("sweep-recipe-not-measured", places=places, recipes=list(names), reason=reason)
    yield from _with_recipes("sweep-launch-bound", {point.place: point.host_bound for point in sweep.points})


def _with_recipes(code: str, recipes_at: Mapping[str, Sequence[str]]) -> Iterable[Finding]:
    """A finding with the points that have any of these recipes."""
    if places := [place for place, names in recipes_at.items() if names]:
        yield finding(code, places=places, recipes=list(dict.fromkeys(chain(*recipes_at.values()))))


def _common(by_point: Sequence[Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """The findings that every point has."""
    if len(by_point) < 2:
        return []
    first, *others = by_point
    shared = [entry for entry in first if entry["code"] not in POINT_CODES and all(entry in other for other in others)]
    return [Finding(entry["code"], entry["level"], dict(entry["facts"])) for entry in shared]
