"""The collectives of a step: what they transfer, how fast, and how long a rank waits in them for the others.

A collective ends on all ranks at the same time, and the rank that enters it last spends the least time in it. With the traces of
several ranks, the time of the shortest is the transfer, and what the others take beyond it is waiting. With one trace, the
shortest collective of the same kind and size stands in for the transfer.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gemmscope.explain.recorded_trace import (
    BUS_FACTORS,
    NCCL_MARK,
    CollectiveMessage,
    GpuWork,
    Operator,
    kind_of,
    message_of_mark,
)
from gemmscope.explain.step_evidence import short_name
from gemmscope.explain.trace_view import TraceView
from gemmscope.grouping import grouped
from gemmscope.results.explain import CollectiveTotal

SAME_END_US = 200.0  # ends of one collective on several ranks differ by less, once their clocks are aligned
SAME_END = 0.25  # or by less than this share of its longest time
MOST_GROUP_NAME, MOST_MEMBERS_NAMED = 60, 16


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. `index`: of its work; `end`: in the time of the file, which ranks of one machine share;
    `exposed`: the part of its time in which nothing was computed, in microseconds."""

    index: int
    work: GpuWork
    step: str
    message: CollectiveMessage
    end: float
    exposed: float


Match = Mapping[int, Collective]
"""The same collective, by rank."""


def collectives_of(view: TraceView) -> list[Collective]:
    """The collectives of the chosen steps, in the order they ran."""
    trace = view.trace
    marks = grouped((mark.thread, mark) for mark in trace.marks if mark.name.startswith(NCCL_MARK))
    return [
        Collective(index, work, step.name, _message(work, marks), work.end + trace.zero_us, shares.of.get(index, 0.0))
        for step, shares in zip(view.steps.chosen, view.shares, strict=True)
        for index in view.indices_in(step)
        if view.work_classes[index].name == "communication" and not (work := trace.work[index]).copy
    ]


def _message(work: GpuWork, marks: Mapping[Any, list[Operator]]) -> CollectiveMessage:
    """The message of a collective: from its kernel, else from the annotation around its launch, else from its name."""
    if work.message is not None and work.message.kind:
        return work.message
    if work.call is not None and (around := marks.get(work.call.thread)):
        at = bisect_right(around, work.call.start, key=lambda mark: mark.start) - 1
        if at >= 0 and around[at].end >= work.call.start:
            return message_of_mark(around[at].name, around[at].shapes, around[at].types)
    return CollectiveMessage(kind_of(work.name))


def matched(ranks: Mapping[int, Sequence[Collective]]) -> list[Match]:
    """The collectives that several ranks ran together: the n-th of one kind and process group in a step of the same name.

    Those that a rank lacks, and those that do not end at the same time, are left out: they are not one collective.
    """
    every = ((rank, one, one.message) for rank, collectives in ranks.items() for one in collectives)
    keyed = grouped(((one.step, told.ranks or told.group, told.ranks, told.kind), (rank, one)) for rank, one, told in every)
    matches: list[Match] = []
    for key, pairs in keyed.items():
        by_rank = grouped(pairs)
        members = [rank for rank in ranks if not key[2] or rank in key[2]]
        runs = [by_rank.get(rank, []) for rank in members]
        if len(members) > 1 and len({len(run) for run in runs}) == 1:
            matches += [dict(zip(members, row, strict=True)) for row in zip(*runs, strict=True)]
    return _ending_together(matches)


def _ending_together(matches: Sequence[Match]) -> list[Match]:
    """Align the clocks of the ranks by the ends of their collectives, and drop those that still end apart."""
    centres = (median(collective.end for collective in match.values()) for match in matches)
    ends = zip(matches, centres, strict=True)
    late = grouped((rank, one.end - centre) for match, centre in ends for rank, one in match.items())
    offsets = {rank: median(values) for rank, values in late.items()}

    def together(match: Match) -> bool:
        ends = [collective.end - offsets[rank] for rank, collective in match.items()]
        return max(ends) - min(ends) <= max(SAME_END_US, SAME_END * max(collective.work.time for collective in match.values()))

    return list(filter(together, matches))


def waiting_us(matches: Iterable[Match]) -> dict[int, dict[int, float]]:
    """The time that each rank waits in each collective, by the identity of its work."""
    shortest = ((match, min(one.work.time for one in match.values())) for match in matches)
    waits = grouped((rank, (id(one.work), one.work.time - least)) for match, least in shortest for rank, one in match.items())
    return {rank: dict(pairs) for rank, pairs in waits.items()}


def collective_totals(
    collectives: Sequence[Collective], steps: int, world_size: int, known_waits: Mapping[int, float]
) -> tuple[CollectiveTotal, ...]:
    """Collectives by kind, process group and size, per step, the longest first. `known_waits`: by the identity of the work."""
    messages = ((collective.message, collective) for collective in collectives)
    groups = grouped(
        (
            (
                message.kind or short_name(collective.work.name),
                _group_name(message),
                message.size or world_size,
                message.bytes_counted,
            ),
            collective,
        )
        for message, collective in messages
    )
    totals = [_total(key, group, steps, known_waits) for key, group in groups.items()]
    return tuple(sorted(totals, key=lambda total: -total.time_ms))


def _total(
    key: tuple[str, str, int, float], group: Sequence[Collective], steps: int, known_waits: Mapping[int, float]
) -> CollectiveTotal:
    kind, name, ranks, size = key
    time_us = sum(collective.work.time for collective in group)
    known = [known_waits[id(collective.work)] for collective in group if id(collective.work) in known_waits]
    from_ranks = len(known) == len(group)
    waiting_us = sum(known) if from_ranks else time_us - len(group) * min(collective.work.time for collective in group)
    waiting = waiting_us if from_ranks or len(group) > 1 else None
    transfer_us = time_us - (waiting or 0.0)
    algorithm = size * len(group) / transfer_us / 1e3 if size and transfer_us > 0 else None
    on_bus = BUS_FACTORS[kind] * (ranks - 1) / ranks if kind in BUS_FACTORS else 1.0
    return CollectiveTotal(
        kind=kind,
        group=name,
        ranks=ranks,
        count=len(group) / steps,
        message_bytes=size or None,
        time_ms=time_us / 1000 / steps,
        exposed_ms=sum(collective.exposed for collective in group) / 1000 / steps,
        waiting_ms=waiting / 1000 / steps if waiting is not None else None,
        waiting_from="other ranks" if from_ranks else "shortest of the same size" if waiting is not None else "",
        algorithm_gbps=algorithm,
        bus_gbps=algorithm * on_bus if algorithm is not None and ranks > 1 else None,
    )


def _group_name(message: CollectiveMessage) -> str:
    if 0 < len(message.ranks) <= MOST_MEMBERS_NAMED:
        return f"{message.group} {list(message.ranks)}".strip()[:MOST_GROUP_NAME]
    return message.group[:MOST_GROUP_NAME]


def last_of(match: Match) -> int:
    """The rank that was the last to enter a collective: it spends the least time in it."""
    return min(match, key=lambda rank: match[rank].work.time)
