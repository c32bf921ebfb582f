"""Several ranks of one job: which one computes longest and makes the others wait."""

from __future__ import annotations

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
        exposed = account.parts_ms.get(EXPOSED, 0.0)
        times.append(
            RankTime(
                rank=rank if rank is not None else number,
                step_ms=account.step_ms,
                computing_ms=account.busy_ms - exposed,
                exposed_ms=exposed,
                idle_ms=account.parts_ms.get(HOST, 0.0) + account.parts_ms.get(IDLE, 0.0),
            )
        )
    return sorted(times, key=lambda time: time.rank)


def slowest(diagnoses: Sequence[TraceDiagnosis]) -> TraceDiagnosis:
    """The one that the others wait for: it computes longest."""
    return max(diagnoses, key=lambda each: each.account.busy_ms - each.account.parts_ms.get(EXPOSED, 0.0))


def rank_findings(ranks: Sequence[RankTime]) -> list[Finding]:
    """Whether the work is even, and which rank is explained."""
    longest = max(ranks, key=lambda time: time.computing_ms)
    mean = sum(time.computing_ms for time in ranks) / len(ranks)
    if mean and longest.computing_ms > (1 + UNEVEN) * mean:
        return [
            finding("ranks-uneven", rank=longest.rank, computing_ms=longest.computing_ms, more=longest.computing_ms / mean - 1,
                    ranks=len(ranks))
        ]  # fmt: skip
    return [finding("ranks-even", ranks=len(ranks), within=UNEVEN)]
