"""Compares fleets: the same measurement on the same GPUs, before and after a change.

GPUs are matched by their UUID, else by their place. The change of a fleet is the median of the changes of its GPUs, so the spread
from chip to chip cancels. A GPU has its own row if it changed more than the others by more than chance allows: the rule that
calls outliers in a fleet, applied to the changes. Where there are too few GPUs for the rule, each has its own row, with the
uncertainty of its measurement, as in `rows`.

The intervals of all GPUs and figures hold together with 95% (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, isfinite, sqrt

import numpy as np

from gemmscope.compare.runs import BETWEEN_RUNS, CONFIDENCE, change, differing, interval_width, judged, with_verdict
from gemmscope.errors import UserError
from gemmscope.findings import Finding, finding
from gemmscope.fleet.rule import MEDIAN_ERROR, RuleOutcome, Sample, apply_rule, rule_data
from gemmscope.fleet.spread import NORMAL_95, median_interval
from gemmscope.interval import Interval
from gemmscope.results.compare import Change, ComparedRow, CompareResult, EnvironmentDifference, Verdict
from gemmscope.results.fleet import FleetFigure, FleetGpu, FleetResult

MOST_ROWS = 200  # GPUs that have a row of their own, those that changed most


def compare_fleets(
    fleets: Sequence[FleetResult], names: Sequence[str], *, limit: float | None = None, command: str = ""
) -> CompareResult:
    """Compare the first fleet with each of the others. They must have measured the same."""
    first = fleets[0]
    for fleet, name in zip(fleets[1:], names[1:], strict=True):
        if (fleet.of, fleet.fingerprint) != (first.of, first.fingerprint):
            raise UserError(
                f"{names[0]} and {name} did not measure the same: {_what(first)} and {_what(fleet)}",
                "compare fleets of the same model, batch and settings",
            )
    matched = [_matched(first, fleet) for fleet in fleets[1:]]
    # The times of the first fleet that another one has, too; speedups follow from them. One group after the other.
    figures = [
        figure
        for figure in first.figures
        if figure.unit == "ms" and any(fleet.figure(figure.name, figure.group) is not None for fleet in fleets[1:])
    ]
    changes = [[_changes(pairs, figure) for pairs in matched] for figure in figures]
    for number, (fleet, name) in enumerate(zip(fleets[1:], names[1:], strict=True)):
        if not matched[number]:
            raise UserError(f"{names[0]} and {name} have no GPU in common", "compare the same GPUs before and after a change")
        if not any(row[number].places for row in changes):
            times = " and ".join(map(_measured_times, (first, fleet)))
            raise UserError(
                f"{names[0]} and {name} have no time in common: {times}",
                "compare fleets of the same GPU type, power limit and recipes",
            )
    tests = len(figures) * len(matched)
    medians = [[fleet.figure(figure.name, figure.group) for fleet in fleets] for figure in figures]
    times_ms = [tuple(median.center.value if median is not None else None for median in row) for row in medians]
    rows = (_rows(*row, tests) for row in zip(figures, times_ms, changes, strict=True))
    return with_verdict(
        CompareResult(
            command=command,
            runs=tuple(names),
            rows=tuple(chain(*rows)),
            differences=tuple(_differences(fleets)),
            limit=limit,
            findings=tuple(
                note for fleet, name in zip(fleets[1:], names[1:], strict=True) for note in _findings(first, fleet, name)
            ),
        )
    )


def _what(fleet: FleetResult) -> str:
    batch = f", batch {fleet.run.micro_batch_size}x{fleet.run.sequence_length}" if fleet.run is not None else ""
    return f"{fleet.of} of {fleet.name}{batch}"


def _measured_times(fleet: FleetResult) -> str:
    """The GPU types and the recipes of a fleet, for a message."""
    times = [figure for figure in fleet.figures if figure.unit == "ms"]
    groups, recipes = dict.fromkeys(figure.group for figure in times), dict.fromkeys(figure.recipe for figure in times)
    return f"{', '.join(groups)} ({', '.join(recipes)})" if times else "nothing"


def _matched(before: FleetResult, after: FleetResult) -> list[tuple[FleetGpu, FleetGpu]]:
    """The GPUs that both fleets measured."""
    by_key = {_key(gpu): gpu for gpu in after.measured}
    return [(gpu, by_key[_key(gpu)]) for gpu in before.measured if _key(gpu) in by_key]


@dataclass(frozen=True)
class _Changes:
    """How the GPUs of a group changed in one figure: their places, old and new times, and the logarithms of new over old time."""

    places: list[str]
    times: list[tuple[Interval, Interval]]
    sample: Sample


def _changes(matched: Sequence[tuple[FleetGpu, FleetGpu]], figure: FleetFigure) -> _Changes:
    """The GPUs of the figure's group that have a time in both fleets."""
    places, times = [], list[tuple[Interval, Interval]]()
    for old, new in matched:
        before, after = old.figures.get(figure.name), new.figures.get(figure.name)
        if old.group == new.group == figure.group and before and after and min(before.value, after.value) > 0:
            places.append(old.place)
            times.append((before, after))
    ratios = np.array([after.value / before.value for before, after in times], dtype=float)
    errors = np.array([np.hypot(before.half_width, after.half_width) for before, after in times], dtype=float) / NORMAL_95
    return _Changes(places, times, Sample(figure.name, np.log(ratios), np.where(np.isfinite(errors), errors, np.nan)))


def _findings(first: FleetResult, fleet: FleetResult, name: str) -> Iterator[Finding]:
    """The GPUs that became slow, are no longer slow, were replaced, are missing or are new."""
    old, new = ({_key(gpu): gpu.place for gpu in side.measured} for side in (first, fleet))
    gone = [place for key, place in old.items() if key not in new]
    added = [place for key, place in new.items() if key not in old]
    replaced = [place for place in gone if place in set(added)]  # another UUID in the same place
    before, after = ({outlier.where for outlier in side.outliers if outlier.side == "slow"} for side in (first, fleet))
    yield finding("fleets-compared", gpus=len(_matched(first, fleet)), name=name)
    for code, places in (
        ("fleets-became-slow", sorted(after - before)),
        ("fleets-no-longer-slow", sorted(before - after)),
        ("fleets-replaced", replaced),
        ("fleets-missing", [place for place in gone if place not in replaced]),
        ("fleets-new", [place for place in added if place not in replaced]),
    ):
        if places:
            yield finding(code, gpus=len(places), places=places, name=name)


def _key(gpu: FleetGpu) -> str:
    return gpu.uuid or gpu.place


def _rows(
    figure: FleetFigure, times_ms: tuple[float | None, ...], fleets: Sequence[_Changes], tests: int
) -> Iterator[ComparedRow]:
    """All GPUs of a group in one figure, then those that changed differently; each GPU, if there are too few to tell. `fleets`:
    how each changed; `tests`: how many figures are compared, over all fleets."""
    group = tuple(_fleet_change(one.sample, tests) for one in fleets)
    yield ComparedRow(what=f"{figure.group}, all GPUs", recipe=figure.recipe, mode=figure.mode, times_ms=times_ms, changes=group)
    outcomes = [_test(one.sample, tests) for one in fleets]
    outside: dict[str, float] = {}
    tested = [(one.places, test) for one, test in zip(fleets, outcomes, strict=True) if test is not None]
    for places, test in tested:
        for row in np.flatnonzero(test.outside).tolist():
            outside[places[row]] = max(abs(float(test.deviations[row])), outside.get(places[row], 0.0))
    shown = sorted(outside, key=lambda name: -outside[name])[:MOST_ROWS]
    if not tested:
        shown = list(dict.fromkeys(place for one in fleets for place in one.places))
        shown = shown if len(shown) > 1 else []  # the row of all GPUs has it
    width = interval_width(tests * len(shown))
    for place in shown:
        old: float | None = None
        later, changes = list[float | None](), list[Change]()
        for one, outcome in zip(fleets, outcomes, strict=True):
            row = one.places.index(place) if place in one.places else None
            before, after = one.times[row] if row is not None else (None, None)
            old = before.value if before is not None else old
            later.append(after.value if after is not None else None)
            changes.append(change(before, after, width) if row is None or not tested else _called(one.sample, outcome, row))
        yield ComparedRow(what=place, recipe=figure.recipe, mode=figure.mode, times_ms=(old, *later), changes=tuple(changes))


def _fleet_change(sample: Sample, tests: int) -> Change:
    """The median change of all GPUs. The interval is that of order statistics; with too few GPUs for it, that of the noise."""
    if not len(sample.speeds):
        return Change(ratio=None, verdict="missing")
    middle = float(np.median(sample.speeds))
    ends = median_interval(sample.speeds, (1 - CONFIDENCE) / tests)
    if ends is None:
        variance = float(np.mean(sample.errors**2)) + 2 * BETWEEN_RUNS**2
        if not isfinite(variance):
            return judged(Interval(exp(middle)))
        reach = interval_width(tests) * MEDIAN_ERROR * sqrt(variance / len(sample.speeds))
        ends = middle - reach, middle + reach
    return judged(Interval(exp(middle), exp(ends[0]), exp(ends[1])))


def _test(sample: Sample, tests: int) -> RuleOutcome | None:
    """Which GPUs changed differently from the others; None for too few GPUs."""
    rule = rule_data()
    return (
        apply_rule(sample, rule["false_alarms"] / tests, rule["tolerance"]) if len(sample.speeds) >= rule["least_gpus"] else None
    )


def _called(sample: Sample, test: RuleOutcome | None, row: int) -> Change:
    """The change of one GPU, which is called where the rule says so."""
    change, reach = float(sample.speeds[row]), test.critical * test.scale if test is not None else 0.0
    called = test is not None and bool(test.outside[row])
    verdict: Verdict = ("slower" if change > 0 else "faster") if called else "too close to call"
    return Change(ratio=Interval(exp(change), exp(change - reach), exp(change + reach)), verdict=verdict)


def _differences(fleets: Sequence[FleetResult]) -> list[EnvironmentDifference]:
    """Versions that differ between the fleets, and versions that differ between the GPUs of a fleet."""
    values = differing([fleet.versions for fleet in fleets])
    inside = differing([{row.name: "; ".join(row.values) for row in fleet.differences} for fleet in fleets])
    values |= {f"{name} of single GPUs": texts for name, texts in inside.items()}
    return [EnvironmentDifference(name=name, values=texts) for name, texts in values.items()]
