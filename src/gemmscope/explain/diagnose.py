"""The diagnosis: causes in the order of what they cost, or "as expected"."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemmscope.explain.account import Account, Look, account, look
from gemmscope.explain.cause import NAMED, Cause, Evidence
from gemmscope.explain.low_causes import low_causes
from gemmscope.explain.step_causes import odd_times, step_causes
from gemmscope.explain.trace import Trace


@dataclass(frozen=True)
class Diagnosis:
    """One trace: its look, its account, and the causes found, the costliest first."""

    seen: Look
    account: Account
    evidence: Evidence
    causes: tuple[Cause, ...]

    @property
    def trace(self) -> Trace:
        return self.seen.trace

    @property
    def words(self) -> str:
        """In one line."""
        if self.causes:
            return self.causes[0].title
        found = self.evidence
        if not found.told:
            return "nothing was found wrong, but no products whose precision can be told are in these steps"
        return (
            f"as expected: {found.low_share:.0%} {found.counted_in} of the linears run low, the GPU is busy "
            f"{1 - self.account.idle_share:.0%} of the time, quantization takes {self.account.share('quantization'):.0%} of it"
        )


def diagnose(trace: Trace, step_count: int | None = None) -> Diagnosis:
    """Everything that can be told from one trace alone."""
    seen = look(trace, step_count)
    found = account(seen)
    evidence = Evidence(seen, found)
    odd = odd_times(evidence)
    if odd:
        found = replace(found, notes=(*found.notes, *odd))
        evidence = Evidence(seen, found)
    every = (*low_causes(evidence), *step_causes(evidence))
    causes = [cause for cause in every if cause.cost_ms > NAMED * found.step_ms or cause.key == "not_low"]
    return Diagnosis(seen, found, evidence, tuple(sorted(causes, key=lambda cause: -cause.cost_ms)))
