"""The diagnosis of one trace: its account, its causes in the order of their cost, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from gemmscope.explain.account import account
from gemmscope.explain.cause import NAMED, StepEvidence
from gemmscope.explain.findings import trace_findings, verdict
from gemmscope.explain.low_causes import low_causes
from gemmscope.explain.step_causes import implausible_times, step_causes
from gemmscope.explain.trace import RecordedTrace
from gemmscope.explain.view import TraceView, view_trace
from gemmscope.findings import Finding
from gemmscope.results.explain import Cause, StepAccount


@dataclass(frozen=True)
class TraceDiagnosis:
    """One trace. `causes`: the costliest first."""

    view: TraceView
    account: StepAccount
    evidence: StepEvidence
    causes: tuple[Cause, ...]
    verdict: Finding
    findings: tuple[Finding, ...]

    @property
    def trace(self) -> RecordedTrace:
        return self.view.trace


def diagnose(trace: RecordedTrace, step_count: int | None = None) -> TraceDiagnosis:
    """Everything that one trace alone shows. `step_count`: how many steps it has, if nothing in it marks them."""
    view = view_trace(trace, step_count)
    evidence = StepEvidence(view, account(view))
    every = (*low_causes(evidence), *step_causes(evidence))
    reported = [cause for cause in every if cause.cost_ms > NAMED * evidence.step_ms or cause.code == "not-low"]
    causes = tuple(sorted(reported, key=lambda cause: -cause.cost_ms))
    findings = (*trace_findings(view), *implausible_times(evidence))
    return TraceDiagnosis(view, evidence.account, evidence, causes, verdict(evidence, causes), findings)
