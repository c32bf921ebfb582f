"""What differs among the GPUs of a fleet: versions, drivers and limits that are not the same on all of them, each with who has
it; and what else is different about an outlier: clock, temperature, power, throttle reasons, memory errors, links, versions.

Of an outlier, each is listed only if it differs from the other GPUs of the group by a robust rule too. These are observations,
not causes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from gemmscope.findings import Finding, finding
from gemmscope.fleet.chips import Chip
from gemmscope.fleet.rule import rule_data
from gemmscope.fleet.spread import qn_scale
from gemmscope.grouping import grouped
from gemmscope.results.compare import EnvironmentDifference

READINGS = {"sm_mhz": "fleet-clock", "temperature_c": "fleet-temperature", "power_w": "fleet-power"}


class Reference:
    """The GPUs of a group that are not outliers. Describes them once, however many outliers there are."""

    def __init__(self, others: Sequence[Chip]) -> None:
        self.count = len(others)
        known = {name: [value for chip in others if (value := getattr(chip.condition, name)) is not None] for name in READINGS}
        self.readings = {name: (median(values), qn_scale(np.array(values))) for name, values in known.items() if values}
        reasons = {reason for chip in others for reason in chip.condition.throttled}
        self.throttled = {reason: np.array([chip.condition.throttled.get(reason, 0.0) for chip in others]) for reason in reasons}
        self.health = _counted([chip.condition.health for chip in others])
        self.usual_health = {name: _usual(counts) for name, counts in self.health.items()}
        self.versions = _counted([chip.versions for chip in others])

    def is_rare(self, alike: int) -> bool:
        """Whether nearly none of the others is like that."""
        return bool(alike <= rule_data()["evidence"]["most_alike"] * self.count)


def _counted(tables: Sequence[Mapping[str, Any]]) -> dict[str, Counter[Any]]:
    """How often each value of each name occurs."""
    return {name: Counter(own) for name, own in grouped(item for table in tables for item in table.items()).items()}


def _usual(counts: Counter[Any]) -> Any:
    """The median of numbers, which counters of errors need not share; else the most common value."""
    if all(isinstance(value, int) for value in counts):
        return sorted(counts.elements())[counts.total() // 2]
    return counts.most_common(1)[0][0]


def evidence(own: Sequence[Chip], others: Reference) -> tuple[Finding, ...]:
    """What differs between a GPU (or the GPUs of a node) and the others of its group."""
    if not own or not others.count:
        return ()
    return (*_readings(own, others), *_throttling(own, others), *_health(own, others), *_versions(own, others))


def _readings(own: Sequence[Chip], others: Reference) -> Iterator[Finding]:
    """Clock, temperature and power: far from the others' median by their robust spread, and by more than readings vary anyway."""
    for name, code in READINGS.items():
        limits = rule_data()["evidence"][name]
        here = [value for chip in own if (value := getattr(chip.condition, name)) is not None]
        if not here or name not in others.readings:
            continue
        value, (usual, scale) = median(here), others.readings[name]
        least = max(limits.get("least", 0.0), limits.get("least_share", 0.0) * usual)
        if abs(value - usual) >= max(least, rule_data()["evidence"]["distance"] * scale):
            yield finding(code, value=value, others=usual)


def _throttling(own: Sequence[Chip], others: Reference) -> Iterator[Finding]:
    """Reasons that the driver gave much more, or much less, often than on nearly all others."""
    least = rule_data()["evidence"]["throttled"]["least"]
    if all(chip.condition.sm_mhz is None for chip in own):  # nothing was read there
        return
    for reason in sorted({reason for chip in own for reason in chip.condition.throttled} | set(others.throttled)):
        share = median([chip.condition.throttled.get(reason, 0.0) for chip in own])
        there = others.throttled.get(reason, np.zeros(1))
        usual = float(np.median(there))
        alike = int((there >= share).sum() if share > usual else (there <= share).sum())
        if abs(share - usual) >= least and others.is_rare(alike):
            yield finding("fleet-throttled", reason=reason, share=share, others=usual)


def _health(own: Sequence[Chip], others: Reference) -> Iterator[Finding]:
    """Memory errors, links and settings: values that nearly none of the others has."""
    for name in sorted({name for chip in own for name in chip.condition.health}):
        there = others.health.get(name)
        if there is None or name in rule_data()["evidence"]["ignored_health"]:
            continue
        value, usual = (
            _usual(Counter(value for chip in own if (value := chip.condition.health.get(name)) is not None)),
            others.usual_health[name],
        )
        if isinstance(value, int) and isinstance(usual, int):  # counters, widths: how many are at least as far from the usual one
            numbers = {other: count for other, count in there.items() if isinstance(other, int)}
            alike = sum(count for other, count in numbers.items() if (other >= value if value > usual else other <= value))
        else:
            alike = there[value]
        if value != usual and others.is_rare(alike):
            yield finding("fleet-health", what=name.replace("_", " "), value=value, others=usual)


def _versions(own: Sequence[Chip], others: Reference) -> Iterator[Finding]:
    """Versions that differ from that of more than half of the others."""
    for name in dict.fromkeys((*own[0].versions, *others.versions)):
        value = Counter(chip.versions.get(name, "") for chip in own).most_common(1)[0][0]
        there = others.versions.get(name, Counter())
        usual, count = (there + Counter({"": others.count - there.total()})).most_common(1)[0]
        if value != usual and 2 * count > others.count:
            yield finding("fleet-version", what=name, value=value or "not installed", others=usual or "not installed")


MOST_VALUES = 8  # of one difference
MOST_NAMED = 4  # places or nodes of one value
FIRST = ("GPU", "driver", "CUDA", "torch")
# Settings of the GPU, by the names of `gpu/health.toml`, which are expected to be the same on all GPUs.
SETTINGS = {"ecc": "ECC", "mig": "MIG", "persistence_mode": "persistence mode"}
MISSING = "not installed"


def common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The most common value of every name; a name that most do not have is left out.

    >>> common([{"a": "1"}, {"a": "1", "b": "2"}, {"a": "3"}])
    {'a': '1'}
    """
    names = list(dict.fromkeys(name for table in tables for name in table))
    values = {name: Counter(table.get(name, "") for table in tables).most_common(1)[0][0] for name in names}
    return {name: value for name, value in values.items() if value != ""}


def different(table: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the usual values; empty text for what is missing.

    >>> different({"a": "1", "c": "3"}, {"a": "1", "b": "2"})
    {'c': '3', 'b': ''}
    """
    return {name: value for name, value in table.items() if usual.get(name) != value} | {
        name: "" for name in usual if name not in table
    }


def fleet_differences(chips: Sequence[Chip]) -> list[EnvironmentDifference]:
    """Every version or limit with more than one value; GPU and driver first."""
    tables = [_facts(chip) for chip in chips]
    names = dict.fromkeys(name for name in FIRST if any(name in table for table in tables))
    names |= dict.fromkeys(name for table in tables for name in table)
    sizes = Counter(chip.gpu.node for chip in chips)
    rows = []
    for name in names:
        holders = grouped((table.get(name, ""), chip) for chip, table in zip(chips, tables, strict=True))
        if len(holders) > 1:
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            values = [f"{value or MISSING} on {_who(own, sizes, first=not at)}" for at, (value, own) in enumerate(ordered)]
            if len(values) > MOST_VALUES:
                values[MOST_VALUES - 1 :] = [f"{len(values) - MOST_VALUES + 1} other values"]
            rows.append(EnvironmentDifference(name=name, values=tuple(values)))
    return rows


def _facts(chip: Chip) -> dict[str, str]:
    run = chip.runs[-1]
    facts = {"GPU": chip.product, **run.versions}
    if run.condition.power_limit_w is not None:
        facts["power limit"] = f"{run.condition.power_limit_w:.0f} W"
    if "max_sm_mhz" in run.device:
        facts["maximum SM clock"] = f"{run.device['max_sm_mhz']} MHz"
    health = run.condition.health
    return facts | {called: str(health[name]) for name, called in SETTINGS.items() if name in health}


def _who(chips: Sequence[Chip], sizes: Mapping[str, int], *, first: bool) -> str:
    """Who has a value: their number for the most common one, else whole nodes or places by name."""
    count = f"{len(chips):,} GPU{'s' * (len(chips) != 1)}"
    if first and len(chips) > 1:
        return count
    nodes = Counter(chip.gpu.node for chip in chips)
    if len(chips) <= MOST_NAMED and any(own < sizes[node] for node, own in nodes.items()):
        return ", ".join(chip.gpu.place for chip in chips)
    named = [node or "?" for node in list(nodes)[:MOST_NAMED]]
    more = f" and {len(nodes) - MOST_NAMED} more nodes" if len(nodes) > MOST_NAMED else ""
    return f"{', '.join(named)}{more} ({count})" if any(nodes) else ", ".join(chip.gpu.place for chip in chips[:MOST_NAMED])
