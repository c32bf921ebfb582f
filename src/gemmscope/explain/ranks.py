"""Several ranks of one job: which one computes longest and makes the others wait."""

from collections.abc import Sequence

from gemmscope.explain.account import EXPOSED, HOST, IDLE
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.findings import Finding, finding
from gemmscope.results.explain import RankTime

UNEVEN = 0.05


def rank_times(diagnoses: Sequence[TraceDiagnosis]) -> list[RankTime]:
    """In the order of ranks."""
    times = []
    for number, diagnosis in enumerate(diagnoses):
        account, rank = diagnosis.account, diagnosis.trace.rank
        exposed, host, idle = (account.parts_ms.get(part, 0.0) for part in (EXPOSED, HOST, IDLE))
        place = rank if rank is not None else number
        computing = account.busy_ms - exposed
        times.append(
            RankTime(rank=place, step_ms=account.step_ms, computing_ms=computing, exposed_ms=exposed, idle_ms=host + idle)
        )
    return sorted(times, key=lambda time: time.rank)


def slowest(diagnoses: Sequence[TraceDiagnosis]) -> TraceDiagnosis:
    """The one that the others wait for: it computes longest."""
    return max(diagnoses, key=lambda rank: rank.account.busy_ms - rank.account.parts_ms.get(EXPOSED, 0.0))


def rank_findings(ranks: Sequence[RankTime]) -> list[Finding]:
    """Whether the work is even, and which rank is explained."""
    longest = max(ranks, key=lambda time: time.computing_ms)
    mean = sum(time.computing_ms for time in ranks) / len(ranks)
    if not mean or longest.computing_ms <= (1 + UNEVEN) * mean:
        return [finding("ranks-even", ranks=len(ranks), within=UNEVEN)]
    more, computing = longest.computing_ms / mean - 1, longest.computing_ms
    return [finding("ranks-uneven", rank=longest.rank, computing_ms=computing, more=more, ranks=len(ranks))]
