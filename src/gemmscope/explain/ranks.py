"""Several ranks of one job: who computes longest, and makes the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmscope.explain.account import EXPOSED, HOST, IDLE
from gemmscope.explain.diagnose import Diagnosis

UNEVEN = 0.05


@dataclass(frozen=True)
class RankRow:
    """One rank, milliseconds per step."""

    rank: int
    step_ms: float
    computing_ms: float
    exposed_ms: float
    idle_ms: float


def rank_rows(found: Sequence[Diagnosis]) -> list[RankRow]:
    """In the order of ranks."""
    rows = []
    for number, each in enumerate(found):
        classes = each.account.classes
        exposed, idle = classes.get(EXPOSED, 0.0), classes.get(HOST, 0.0) + classes.get(IDLE, 0.0)
        rank = each.trace.rank if each.trace.rank is not None else number
        rows.append(RankRow(rank, each.account.step_ms, each.account.busy_ms - exposed, exposed, idle))
    return sorted(rows, key=lambda row: row.rank)


def slowest(found: Sequence[Diagnosis]) -> Diagnosis:
    """The one the others wait for: it computes longest."""
    return max(found, key=lambda each: each.account.busy_ms - each.account.classes.get(EXPOSED, 0.0))


def rank_words(rows: Sequence[RankRow]) -> list[str]:
    """Whether the work is even."""
    longest = max(rows, key=lambda row: row.computing_ms)
    mean = sum(row.computing_ms for row in rows) / len(rows)
    if mean and longest.computing_ms > (1 + UNEVEN) * mean:
        more = longest.computing_ms / mean - 1
        return [
            f"uneven: rank {longest.rank} computes {longest.computing_ms:.1f} ms per step, {more:.0%} more than the mean of "
            f"{len(rows)} ranks; the others wait for it in communication"
        ]
    return [f"{len(rows)} ranks compute equally long, within {UNEVEN:.0%}"]
