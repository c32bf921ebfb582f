"""Compares fleets: the same measurement on the same GPUs, before and after a change.

GPUs are matched by their UUID, else by their place. The change of a fleet is the median of the changes of its GPUs, so the spread
from chip to chip cancels. A GPU has its own row if it changed more than the others by more than chance allows: the rule that
calls outliers in a fleet, applied to the changes. Where there are too few GPUs for the rule, each has its own row, with the
uncertainty of its measurement, as in `rows`.

The intervals of all GPUs and figures hold together with 95% (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    pairs = [_Pair(first, fleet) for fleet in fleets[1:]]
    figures = _figures(first, pairs)
    for pair, name in zip(pairs, names[1:], strict=True):
        if not pair.matched:
            raise UserError(f"{names[0]} and {name} have no GPU in common", "compare the same GPUs before and after a change")
        if not any(pair.changes(figure)[0] for figure in figures):
            times = " and ".join(map(_measured_times, (first, pair.after)))
            raise UserError(
                f"{names[0]} and {name} have no time in common: {times}",
                "compare fleets of the same GPU type, power limit and recipes",
            )
    tests = len(figures) * len(pairs)
    return with_verdict(
        CompareResult(
            command=command,
            runs=tuple(names),
            rows=tuple(row for figure in figures for row in _rows(figure, pairs, tests)),
            differences=tuple(_differences(fleets)),
            limit=limit,
            findings=tuple(note for pair, name in zip(pairs, names[1:], strict=True) for note in pair.findings(name)),
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


def _figures(first: FleetResult, pairs: Sequence[_Pair]) -> list[FleetFigure]:
    """The times of the first fleet that another one has, too; speedups follow from them. One group after the other."""
    return [
        figure
        for figure in first.figures
        if figure.unit == "ms" and any(pair.after.figure(figure.name, figure.group) is not None for pair in pairs)
    ]


class _Pair:
    """The first fleet and another one, GPU by GPU."""

    def __init__(self, before: FleetResult, after: FleetResult) -> None:
        self.before, self.after = before, after
        self.by_key = {_key(gpu): gpu for gpu in after.measured}
        self.matched = [(gpu, self.by_key[_key(gpu)]) for gpu in before.measured if _key(gpu) in self.by_key]

    def changes(self, figure: FleetFigure) -> tuple[list[FleetGpu], Sample]:
        """The GPUs of a group that both fleets measured, and the logarithms of new over old time."""
        gpus, values, errors = [], [], []
        for old, new in self.matched:
            times = old.figures.get(figure.name), new.figures.get(figure.name)
            if old.group == new.group == figure.group and times[0] is not None and times[1] is not None:
                if min(times[0].value, times[1].value) <= 0:
                    continue
                gpus.append(old)
                values.append(times[1].value / times[0].value)
                errors.append(np.hypot(times[0].half_width, times[1].half_width) / NORMAL_95)
        own = np.array(errors, dtype=float)
        return gpus, Sample(figure.name, np.log(np.array(values, dtype=float)), np.where(np.isfinite(own), own, np.nan))

    def findings(self, name: str) -> Iterator[Finding]:
        """The GPUs that became slow, are no longer slow, were replaced, are missing or are new."""
        old, new = {_key(gpu): gpu.place for gpu in self.before.measured}, {_key(gpu): gpu.place for gpu in self.after.measured}
        gone = [place for key, place in old.items() if key not in new]
        added = [place for key, place in new.items() if key not in old]
        replaced = [place for place in gone if place in set(added)]  # another UUID in the same place
        slow = [{outlier.where for outlier in fleet.outliers if outlier.side == "slow"} for fleet in (self.before, self.after)]
        yield finding("fleets-compared", gpus=len(self.matched), name=name)
        for code, places in (
            ("fleets-became-slow", sorted(slow[1] - slow[0])),
            ("fleets-no-longer-slow", sorted(slow[0] - slow[1])),
            ("fleets-replaced", replaced),
            ("fleets-missing", [place for place in gone if place not in replaced]),
            ("fleets-new", [place for place in added if place not in replaced]),
        ):
            if places:
                yield finding(code, gpus=len(places), places=places, name=name)


def _key(gpu: FleetGpu) -> str:
    return gpu.uuid or gpu.place


def _rows(figure: FleetFigure, pairs: Sequence[_Pair], tests: int) -> Iterator[ComparedRow]:
    """All GPUs of a group in one figure, then those that changed differently; each GPU, if they are too few to tell. `tests`: how
    many figures are compared, over all fleets."""
    kept = [pair.changes(figure) for pair in pairs]
    medians = [pair.after.figure(figure.name, figure.group) for pair in pairs]
    times = (figure.center.value, *(median.center.value if median is not None else None for median in medians))
    changes = tuple(_fleet_change(sample, tests) for _, sample in kept)
    yield ComparedRow(what=f"{figure.group}, all GPUs", recipe=figure.recipe, mode=figure.mode, times_ms=times, changes=changes)
    outcomes = [_test(sample, tests) for _, sample in kept]
    if all(outcome is None for outcome in outcomes):
        yield from _single_rows(figure, pairs, tests)
        return
    outside: dict[str, float] = {}
    for (gpus, _), test in zip(kept, outcomes, strict=True):
        if test is not None:
            for row in np.flatnonzero(test.outside).tolist():
                outside[gpus[row].place] = max(abs(float(test.deviations[row])), outside.get(gpus[row].place, 0.0))
    for place in sorted(outside, key=lambda name: -outside[name])[:MOST_ROWS]:
        yield _gpu_row(place, figure, [(gpus, sample, test) for (gpus, sample), test in zip(kept, outcomes, strict=True)])


def _single_rows(figure: FleetFigure, pairs: Sequence[_Pair], tests: int) -> Iterator[ComparedRow]:
    """Every GPU of a group that is too small for the rule."""
    matched = [{gpu.place: gpu for gpu in pair.changes(figure)[0]} for pair in pairs]
    places = dict.fromkeys(place for gpus in matched for place in gpus)
    width = interval_width(tests * len(places))
    if len(places) == 1:  # the row of all GPUs has it
        return
    for place in places:
        old = next(gpus[place] for gpus in matched if place in gpus)
        new = [pair.by_key.get(_key(old)) if place in gpus else None for pair, gpus in zip(pairs, matched, strict=True)]
        times = [gpu.figures.get(figure.name) if gpu is not None else None for gpu in (old, *new)]
        yield ComparedRow(
            what=place,
            recipe=figure.recipe,
            mode=figure.mode,
            times_ms=tuple(time.value if time is not None else None for time in times),
            changes=tuple(change(times[0], time, width) for time in times[1:]),
        )


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


def _gpu_row(place: str, figure: FleetFigure, kept: Sequence[tuple[list[FleetGpu], Sample, RuleOutcome | None]]) -> ComparedRow:
    """One GPU that changed differently from the others in at least one of the fleets."""
    times: list[float | None] = [None]
    changes = []
    for gpus, sample, test in kept:
        row = next((number for number, gpu in enumerate(gpus) if gpu.place == place), None)
        if row is None:
            times.append(None)
            changes.append(Change(ratio=None, verdict="missing"))
            continue
        old, change = gpus[row].figures[figure.name].value, float(sample.speeds[row])
        times[0] = old
        times.append(old * exp(change))
        reach = test.critical * test.scale if test is not None else 0.0
        called = test is not None and bool(test.outside[row])
        verdict: Verdict = ("slower" if change > 0 else "faster") if called else "too close to call"
        changes.append(Change(ratio=Interval(exp(change), exp(change - reach), exp(change + reach)), verdict=verdict))
    return ComparedRow(what=place, recipe=figure.recipe, mode=figure.mode, times_ms=tuple(times), changes=tuple(changes))


def _differences(fleets: Sequence[FleetResult]) -> list[EnvironmentDifference]:
    """Versions that differ between the fleets, and versions that differ between the GPUs of a fleet."""
    values = differing([fleet.versions for fleet in fleets])
    inside = differing([{row.name: "; ".join(row.values) for row in fleet.differences} for fleet in fleets])
    values |= {f"{name} of single GPUs": texts for name, texts in inside.items()}
    return [EnvironmentDifference(name=name, values=texts) for name, texts in values.items()]
