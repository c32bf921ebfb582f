"""Versions, drivers and limits that are not the same on all GPUs, each with who has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gemmscope.fleet.chips import Chip
from gemmscope.results.compare import EnvironmentDifference

MOST_VALUES = 8  # of one difference
MOST_NAMED = 4  # places or nodes of one value
FIRST = ("GPU", "driver", "CUDA", "torch")
# Settings of the GPU, by the names of `gpu/health.py`, which are expected to be the same on all GPUs.
SETTINGS = {"ecc": "ECC", "mig": "MIG", "persistence_mode": "persistence mode"}
MISSING = "not installed"


def common(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The most common value of every name; a name that most do not have is left out.

    >>> common([{"a": "1"}, {"a": "1", "b": "2"}, {"a": "3"}])
    {'a': '1'}
    """
    names = list(dict.fromkeys(name for table in tables for name in table))
    values = {name: Counter(table.get(name, "") for table in tables).most_common(1)[0][0] for name in names}
    return {name: value for name, value in values.items() if value != ""}


def different(table: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    """What differs from the usual values; empty text for what is missing.

    >>> different({"a": "1", "c": "3"}, {"a": "1", "b": "2"})
    {'c': '3', 'b': ''}
    """
    own = {name: value for name, value in table.items() if usual.get(name) != value}
    return own | {name: "" for name in usual if name not in table}


def fleet_differences(chips: Sequence[Chip]) -> list[EnvironmentDifference]:
    """Every version or limit with more than one value; GPU and driver first."""
    tables = [_facts(chip) for chip in chips]
    names = dict.fromkeys(name for name in FIRST if any(name in table for table in tables))
    names |= dict.fromkeys(name for table in tables for name in table)
    sizes = Counter(chip.node for chip in chips)
    rows = []
    for name in names:
        holders: dict[str, list[Chip]] = {}
        for chip, table in zip(chips, tables, strict=True):
            holders.setdefault(table.get(name, ""), []).append(chip)
        if len(holders) > 1:
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            values = [f"{value or MISSING} on {_who(own, sizes, first=not at)}" for at, (value, own) in enumerate(ordered)]
            more = [f"{len(values) - MOST_VALUES + 1} other values"] if len(values) > MOST_VALUES else []
            kept = values[: MOST_VALUES - len(more)] if more else values
            rows.append(EnvironmentDifference(name=name, values=(*kept, *more)))
    return rows


def _facts(chip: Chip) -> dict[str, str]:
    run = chip.runs[-1]
    facts = {"GPU": chip.product, **run.versions}
    if run.condition.power_limit_w is not None:
        facts["power limit"] = f"{run.condition.power_limit_w:.0f} W"
    if "max_sm_mhz" in run.device:
        facts["maximum SM clock"] = f"{run.device['max_sm_mhz']} MHz"
    settings = {called: str(run.condition.health[name]) for name, called in SETTINGS.items() if name in run.condition.health}
    return facts | settings


def _who(chips: Sequence[Chip], sizes: Mapping[str, int], *, first: bool) -> str:
    """Who has a value: their number for the most common one, else whole nodes or places by name."""
    count = f"{len(chips):,} GPU{'s' * (len(chips) != 1)}"
    if first and len(chips) > 1:
        return count
    nodes = Counter(chip.node for chip in chips)
    if len(chips) <= MOST_NAMED and any(own < sizes[node] for node, own in nodes.items()):
        return ", ".join(chip.place for chip in chips)
    named = [node or "?" for node in list(nodes)[:MOST_NAMED]]
    more = f" and {len(nodes) - MOST_NAMED} more nodes" if len(nodes) > MOST_NAMED else ""
    return f"{', '.join(named)}{more} ({count})" if any(nodes) else ", ".join(chip.place for chip in chips[:MOST_NAMED])
