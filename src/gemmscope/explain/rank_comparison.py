"""Several ranks of one job: which one the others wait for, and why it is late.

The straggler is the rank that enters collectives last. It spends the least time in them, because the others already wait there.
Where the traces have no collectives in common, the rank that computes longest stands in.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from gemmscope.explain.collectives import Match, collectives_of, last_of, matched, waiting_us
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.step_replay import replayed_ranks_us
from gemmscope.explain.trace_view import EXPOSED, HOST, IDLE
from gemmscope.findings import Finding, finding
from gemmscope.grouping import add_up
from gemmscope.results.explain import RankTime

# Of the step, what the others wait for a straggler; of its delay, a reason that is named
LATE, TELLING = 0.03, 0.25


@dataclass(frozen=True)
class RankComparison:
    """The ranks side by side. `straggler`: the rank that the others wait for; None if no rank stands out."""

    times: tuple[RankTime, ...]
    explained: TraceDiagnosis
    straggler: int | None
    findings: tuple[Finding, ...]
    waits_us: Mapping[int, float]
    """Of the explained rank: its time of waiting in each collective, by the identity of the work."""


def compare_ranks(diagnoses: Sequence[TraceDiagnosis]) -> RankComparison:
    """Ranks of one job; those without a rank of their own are numbered."""
    by_rank = {number if one.trace.rank is None else one.trace.rank: one for number, one in enumerate(diagnoses)}
    matches = matched({rank: collectives_of(diagnosis.view) for rank, diagnosis in by_rank.items()})
    delays, waits, late = _delays_ms(matches, by_rank), waiting_us(matches), Counter(map(last_of, matches))
    times = tuple(
        _rank_time(rank, diagnosis, waits.get(rank), late[rank], delays.get(rank)) for rank, diagnosis in sorted(by_rank.items())
    )
    step_ms = mean(time.step_ms for time in times)
    last = max(delays, key=lambda rank: delays[rank], default=None)
    if last is not None and delays[last] >= LATE * step_ms:
        findings = [*_straggler(last, times, matches, by_rank), finding("straggler-explained", rank=last)]
        return RankComparison(times, by_rank[last], last, tuple(findings), waits.get(last, {}))
    shared = finding("ranks-in-step", ranks=len(times), waiting_ms=max(time.waiting_ms or 0.0 for time in times))
    longest = max(times, key=lambda time: time.computing_ms)
    facts = {"computing_ms": longest.computing_ms, "mean_ms": mean(time.computing_ms for time in times)}
    unmatched = finding("ranks-unmatched", ranks=len(times), rank=longest.rank, **facts)
    findings = [unmatched if last is None else shared, finding("rank-explained", rank=longest.rank)]
    return RankComparison(times, by_rank[longest.rank], None, tuple(findings), waits.get(longest.rank, {}))


def _rank_time(
    rank: int, diagnosis: TraceDiagnosis, waits: Mapping[int, float] | None, late: int, delay_ms: float | None
) -> RankTime:
    account, steps = diagnosis.account, diagnosis.view.count
    exposed, host, idle = (account.parts_ms.get(part, 0.0) for part in (EXPOSED, HOST, IDLE))
    return RankTime(
        rank=rank,
        step_ms=account.step_ms,
        computing_ms=account.busy_ms - exposed,
        exposed_ms=exposed,
        idle_ms=host + idle,
        waiting_ms=sum(waits.values()) / 1000 / steps if waits is not None else None,
        last_to_arrive=late / steps if waits is not None else None,
        delay_ms=(delay_ms or 0.0) if waits is not None else None,
    )


def _delays_ms(matches: Sequence[Match], by_rank: Mapping[int, TraceDiagnosis]) -> dict[int, float]:
    """How long the others wait for each rank, per step: in every collective they wait for the one that spends the least time."""
    lasts = ((match, last_of(match)) for match in matches)
    return add_up((last, _waited_us(match, last) / 1000 / by_rank[last].view.count) for match, last in lasts)


def _waited_us(match: Match, last: int) -> float:
    """How long the others wait on average for the rank that enters a collective last."""
    return mean(one.work.time for rank, one in match.items() if rank != last) - match[last].work.time


def _straggler(
    rank: int, times: Sequence[RankTime], matches: Sequence[Match], by_rank: Mapping[int, TraceDiagnosis]
) -> list[Finding]:
    own = next(time for time in times if time.rank == rank)
    others = [time for time in times if time.rank != rank]
    waits = [time.waiting_ms or 0.0 for time in others]
    straggler = finding(
        "ranks-straggler", rank=rank, delay_ms=own.delay_ms or 0.0, last=own.last_to_arrive or 0.0,
        collectives=len(matches) / by_rank[rank].view.count, waiting_ms=own.waiting_ms or 0.0, least_ms=min(waits),
        most_ms=max(waits),
    )  # fmt: skip
    gained = _with_it_on_time(rank, matches, by_rank)
    later = _delays_ms([{one: match[one] for one in match if one != rank} for match in matches if len(match) > 2], by_rank)
    more = {f"rank {one}": time for one, time in sorted(later.items()) if time >= LATE * own.step_ms}
    others_late = [finding("ranks-more-stragglers", rank=rank, delays=more)] if more else []
    return [straggler, *gained, *others_late, *_why_late(own, others, by_rank)]


def _with_it_on_time(rank: int, matches: Sequence[Match], by_rank: Mapping[int, TraceDiagnosis]) -> list[Finding]:
    """The steps of the other ranks, replayed together, if they did not have to wait for this one."""
    graphs = {one: diagnosis.evidence.graphs for one, diagnosis in by_rank.items()}
    if len({tuple(graph.step.name for graph in own) for own in graphs.values()}) > 1:
        return []
    own = [{one: collective.index for one, collective in match.items()} for match in matches]
    before_us = after_us = 0.0
    for steps in zip(*graphs.values(), strict=True):
        step = dict(zip(graphs, steps, strict=True))
        before_us += sum(graph.step.time for one, graph in step.items() if one != rank)
        after_us += sum(time for one, time in replayed_ranks_us(step, own, {}, on_time=(rank,)).items() if one != rank)
    count = 1000 * (len(graphs) - 1) * len(graphs[rank])
    return [finding("straggler-gain", rank=rank, after_ms=after_us / count, before_ms=before_us / count)]


def _why_late(own: RankTime, others: Sequence[RankTime], by_rank: Mapping[int, TraceDiagnosis]) -> list[Finding]:
    """Compare what the straggler does in a step with what the other ranks do."""
    usual = [by_rank[time.rank] for time in others]
    idle, busy = (median(getattr(time, name) for time in others) for name in ("idle_ms", "computing_ms"))
    more_idle, computing, least = own.idle_ms - idle, own.computing_ms - busy, TELLING * (own.delay_ms or 0.0)
    kernels, theirs = by_rank[own.rank].account.kernels, median(diagnosis.account.kernels for diagnosis in usual)
    before = (own.delay_ms or 0.0) - max(more_idle, 0.0) - max(computing, 0.0)
    longer = finding("straggler-computes", rank=own.rank, time_ms=computing, kernels=kernels, others=theirs)
    reasons = (
        (before, finding("straggler-late-start", rank=own.rank, time_ms=before)),
        (more_idle, finding("straggler-idle", rank=own.rank, time_ms=more_idle)),
        (computing, longer),
    )
    result = [reason for time, reason in reasons if time > least]
    return result or [finding("straggler-unexplained", rank=own.rank)]
