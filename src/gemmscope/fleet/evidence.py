"""What else is different about an outlier: clock, temperature, power, throttle reasons, memory errors, links, versions.

Each is listed only if it differs from the other GPUs of the group by a robust rule too. These are observations, not causes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from gemmscope.findings import Finding, finding
from gemmscope.fleet.robust import qn_scale
from gemmscope.fleet.rule import rule_data
from gemmscope.results.fleet import GpuCondition


class Facts(NamedTuple):
    """The condition and the versions of one GPU."""

    condition: GpuCondition
    versions: Mapping[str, str]


class Reference:
    """The GPUs of a group that are not outliers. Describes them once, however many outliers there are."""

    def __init__(self, others: Sequence[Facts]) -> None:
        self.count = len(others)
        self._others = others
        self._readings: dict[str, tuple[float, float] | None] = {}
        reasons = {reason for facts in others for reason in facts.condition.throttled}
        self.throttled = {
            reason: np.array([facts.condition.throttled.get(reason, 0.0) for facts in others]) for reason in reasons
        }
        self.health = _counted([facts.condition.health for facts in others])
        self.usual_health = {name: _usual(counts) for name, counts in self.health.items()}
        self.versions = _counted([facts.versions for facts in others])

    def reading(self, name: str) -> tuple[float, float] | None:
        """The median and the robust standard deviation of a reading; None if the driver does not give it."""
        if name not in self._readings:
            values = [value for facts in self._others if (value := getattr(facts.condition, name)) is not None]
            self._readings[name] = (median(values), qn_scale(np.array(values))) if values else None
        return self._readings[name]

    def is_rare(self, alike: int) -> bool:
        """Whether nearly none of the others is like that."""
        return bool(alike <= rule_data()["evidence"]["most_alike"] * self.count)


def _counted(tables: Sequence[Mapping[str, Any]]) -> dict[str, Counter[Any]]:
    """How often each value of each name occurs."""
    counts: dict[str, Counter[Any]] = {}
    for table in tables:
        for name, value in table.items():
            counts.setdefault(name, Counter())[value] += 1
    return counts


def _usual(counts: Counter[Any]) -> Any:
    """The median of numbers, which counters of errors need not share; else the most common value."""
    if all(isinstance(value, int) for value in counts):
        return sorted(counts.elements())[counts.total() // 2]
    return counts.most_common(1)[0][0]


def evidence(own: Sequence[Facts], others: Reference) -> tuple[Finding, ...]:
    """What differs between a GPU (or the GPUs of a node) and the others of its group."""
    if not own or not others.count:
        return ()
    return (*_readings(own, others), *_throttling(own, others), *_health(own, others), *_versions(own, others))


def _readings(own: Sequence[Facts], others: Reference) -> Iterator[Finding]:
    """Clock, temperature and power: far from the others' median by their robust spread, and by more than readings vary anyway."""
    for name, code in (("sm_mhz", "fleet-clock"), ("temperature_c", "fleet-temperature"), ("power_w", "fleet-power")):
        limits = rule_data()["evidence"][name]
        here, there = [value for facts in own if (value := getattr(facts.condition, name)) is not None], others.reading(name)
        if not here or there is None:
            continue
        value, (usual, scale) = median(here), there
        least = max(limits.get("least", 0.0), limits.get("least_share", 0.0) * usual)
        if abs(value - usual) >= max(least, rule_data()["evidence"]["distance"] * scale):
            yield finding(code, value=value, others=usual)


def _throttling(own: Sequence[Facts], others: Reference) -> Iterator[Finding]:
    """Reasons that the driver gave much more, or much less, often than on nearly all others."""
    least = rule_data()["evidence"]["throttled"]["least"]
    if all(facts.condition.sm_mhz is None for facts in own):  # nothing was read there
        return
    for reason in sorted({reason for facts in own for reason in facts.condition.throttled} | set(others.throttled)):
        share = median([facts.condition.throttled.get(reason, 0.0) for facts in own])
        there = others.throttled.get(reason, np.zeros(1))
        usual = float(np.median(there))
        alike = int((there >= share).sum() if share > usual else (there <= share).sum())
        if abs(share - usual) >= least and others.is_rare(alike):
            yield finding("fleet-throttled", reason=reason, share=share, others=usual)


def _health(own: Sequence[Facts], others: Reference) -> Iterator[Finding]:
    """Memory errors, links and settings: values that nearly none of the others has."""
    for name in sorted({name for facts in own for name in facts.condition.health}):
        there = others.health.get(name)
        if there is None or name in rule_data()["evidence"]["ignored_health"]:
            continue
        here = Counter(value for facts in own if (value := facts.condition.health.get(name)) is not None)
        value, usual = _usual(here), others.usual_health[name]
        if isinstance(value, int) and isinstance(usual, int):  # counters, widths: how many are at least as far from the usual one
            numbers = {other: count for other, count in there.items() if isinstance(other, int)}
            alike = sum(count for other, count in numbers.items() if (other >= value if value > usual else other <= value))
        else:
            alike = there[value]
        if value != usual and others.is_rare(alike):
            yield finding("fleet-health", what=name.replace("_", " "), value=value, others=usual)


def _versions(own: Sequence[Facts], others: Reference) -> Iterator[Finding]:
    """Versions that differ from that of more than half of the others."""
    for name in dict.fromkeys((*own[0].versions, *others.versions)):
        value = Counter(facts.versions.get(name, "") for facts in own).most_common(1)[0][0]
        there = others.versions.get(name, Counter())
        there = there + Counter({"": others.count - there.total()})
        usual, count = there.most_common(1)[0]
        if value != usual and 2 * count > others.count:
            yield finding("fleet-version", what=name, value=value or "not installed", others=usual or "not installed")
