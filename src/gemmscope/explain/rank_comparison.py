"""Several ranks of one job: which one the others wait for, and why it is late.

The straggler is the rank that enters collectives last. It spends the least time in them, because the others already wait there.
Where the traces have no collectives in common, the rank that computes longest stands in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from gemmscope.explain.collectives import Collective, Match, collectives_of, last_to_arrive, matched, waiting_us
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.trace_view import EXPOSED, HOST, IDLE
from gemmscope.findings import Finding, finding
from gemmscope.results.explain import RankTime

UNEVEN = 0.05  # more computation than the mean
LATE = 0.03  # of the step: what the others wait for the straggler
TELLING = 0.25  # of its delay: a cause that makes up less is not named
MORE_KERNELS = 1.05
SLOWER = 1.02


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
    by_rank = {_rank(number, diagnosis): diagnosis for number, diagnosis in enumerate(diagnoses)}
    matches = matched({rank: collectives_of(diagnosis.view) for rank, diagnosis in by_rank.items()})
    delays = _delays_ms(matches, by_rank)
    waits = waiting_us(matches)
    late = last_to_arrive(matches)
    times = tuple(
        _rank_time(rank, diagnosis, waits.get(rank), late[rank], delays.get(rank)) for rank, diagnosis in sorted(by_rank.items())
    )
    step_ms = mean(time.step_ms for time in times)
    straggler = max(delays, key=lambda rank: delays[rank], default=None)
    if straggler is None:
        chosen = max(times, key=lambda time: time.computing_ms).rank
        findings = [*_by_computation(times), finding("rank-explained", rank=chosen)]
    elif delays[straggler] < LATE * step_ms:
        chosen, straggler = max(times, key=lambda time: time.computing_ms).rank, None
        shared = max(time.waiting_ms or 0.0 for time in times)
        findings = [finding("ranks-in-step", ranks=len(times), waiting_ms=shared), finding("rank-explained", rank=chosen)]
    else:
        chosen = straggler
        findings = [*_straggler(straggler, times, matches, by_rank), finding("straggler-explained", rank=straggler)]
    return RankComparison(times, by_rank[chosen], straggler, tuple(findings), waits.get(chosen, {}))


def _rank(number: int, diagnosis: TraceDiagnosis) -> int:
    return number if diagnosis.trace.rank is None else diagnosis.trace.rank


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
    delays: dict[int, float] = {}
    for match in matches:
        last = min(match, key=lambda rank: match[rank].time)
        others = mean(collective.time for rank, collective in match.items() if rank != last)
        delays[last] = delays.get(last, 0.0) + (others - match[last].time) / 1000 / by_rank[last].view.count
    return delays


def _by_computation(ranks: Sequence[RankTime]) -> list[Finding]:
    """Without collectives in common: whether the ranks compute for the same time."""
    longest = max(ranks, key=lambda time: time.computing_ms)
    usual = mean(time.computing_ms for time in ranks)
    if not usual or longest.computing_ms <= (1 + UNEVEN) * usual:
        return [finding("ranks-even", ranks=len(ranks), within=UNEVEN)]
    more, computing = longest.computing_ms / usual - 1, longest.computing_ms
    return [finding("ranks-uneven", rank=longest.rank, computing_ms=computing, more=more, ranks=len(ranks))]


def _straggler(
    rank: int, times: Sequence[RankTime], matches: Sequence[Match], by_rank: Mapping[int, TraceDiagnosis]
) -> list[Finding]:
    own = next(time for time in times if time.rank == rank)
    others = [time.waiting_ms or 0.0 for time in times if time.rank != rank]
    result = [
        finding(
            "ranks-straggler", rank=rank, delay_ms=own.delay_ms or 0.0, last=own.last_to_arrive or 0.0,
            collectives=len(matches) / by_rank[rank].view.count, waiting_ms=own.waiting_ms or 0.0, least_ms=min(others),
            most_ms=max(others),
        )
    ]  # fmt: skip
    return result + _why_late(rank, matches, by_rank)


@dataclass
class _Interval:
    """What a rank did between two collectives, in microseconds."""

    computing: float = 0.0
    idle: float = 0.0
    kernels: int = 0
    total: float = 0.0
    first: bool = False  # from the begin of the step


def _why_late(rank: int, matches: Sequence[Match], by_rank: Mapping[int, TraceDiagnosis]) -> list[Finding]:
    """Compare what the straggler does before each collective that it enters last with what the other ranks do there."""
    members = sorted({member for match in matches for member in match})
    lanes = {member: _intervals(by_rank[member], [match[member] for match in matches if member in match]) for member in members}
    steps = by_rank[rank].view.count
    before = idle = computing = delay = 0.0
    kernels = others_kernels = own_computing = others_computing = 0.0
    for match in matches:
        if min(match, key=lambda member: match[member].time) != rank:
            continue
        own = lanes[rank][id(match[rank].work)]
        others = [lanes[member][id(collective.work)] for member, collective in match.items() if member != rank]
        waited = mean(collective.time for member, collective in match.items() if member != rank) - match[rank].time
        delay += waited
        idle += own.idle - median(other.idle for other in others)
        computing += own.computing - median(other.computing for other in others)
        kernels, others_kernels = kernels + own.kernels, others_kernels + median(other.kernels for other in others)
        own_computing += own.computing
        others_computing += median(other.computing for other in others)
        if own.first:
            before += max(waited - max(own.total - median(other.total for other in others), 0.0), 0.0)
    result, least = [], TELLING * delay
    if before > least:
        result.append(finding("straggler-late-start", rank=rank, time_ms=before / 1000 / steps))
    if idle > least:
        result.append(finding("straggler-idle", rank=rank, time_ms=idle / 1000 / steps))
    if computing > least:
        if kernels > MORE_KERNELS * others_kernels:
            more = {"kernels": kernels / steps, "others": others_kernels / steps}
            result.append(finding("straggler-more-work", rank=rank, time_ms=computing / 1000 / steps, **more))
        elif others_computing and own_computing > SLOWER * others_computing:
            ratio = own_computing / others_computing
            result.append(finding("straggler-slower", rank=rank, time_ms=computing / 1000 / steps, ratio=ratio))
    return result or [finding("straggler-unexplained", rank=rank)]


def _intervals(diagnosis: TraceDiagnosis, collectives: Sequence[Collective]) -> dict[int, _Interval]:
    """Before each collective, by the identity of its work: since the end of the one before it, or since the begin of its step."""
    result: dict[int, _Interval] = {}
    view = diagnosis.view
    for step, items, shares in zip(view.steps.chosen, view.by_step(), view.shares, strict=True):
        inside = sorted(
            (collective.work for collective in collectives if collective.step == step.name), key=lambda work: work.start
        )
        begin = step.begin
        at = gap_at = 0
        gaps = sorted(shares.gaps, key=lambda gap: gap.begin)
        for number, work in enumerate(inside):
            interval = _Interval(total=max(work.start - begin, 0.0), first=number == 0)
            while at < len(items) and items[at].work.start < work.start:
                if items[at].name != "communication" and items[at].work.start >= begin:
                    interval.computing += items[at].share
                    interval.kernels += 1
                at += 1
            while gap_at < len(gaps) and gaps[gap_at].begin < work.start:
                interval.idle += max(min(gaps[gap_at].end, work.start) - max(gaps[gap_at].begin, begin), 0.0)
                gap_at += 1
            result[id(work)] = interval
            begin = max(begin, work.end)
    return result
