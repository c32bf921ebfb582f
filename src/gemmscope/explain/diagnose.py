"""The diagnosis of one trace: its account, its causes in the order of their cost, and the verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemmscope.errors import UserError
from gemmscope.explain.account import account
from gemmscope.explain.attention import attention_causes
from gemmscope.explain.cause import NAMED, StepEvidence
from gemmscope.explain.low_causes import low_causes
from gemmscope.explain.place import UNKNOWN_PRECISION
from gemmscope.explain.step_causes import implausible_times, step_causes
from gemmscope.explain.trace import RecordedTrace
from gemmscope.explain.view import TraceView, view_trace
from gemmscope.findings import Finding, finding
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
    if not evidence.step_ms > 0:
        raise UserError(f"{trace.source} has no step that takes time: its timestamps are damaged", "record it again")
    every = (*low_causes(evidence), *step_causes(evidence), *attention_causes(evidence))
    reported = [cause for cause in every if cause.cost_ms > NAMED * evidence.step_ms or cause.code == "not-low"]
    causes = tuple(sorted(reported, key=lambda cause: -cause.cost_ms))
    findings = (*_trace_findings(view), *implausible_times(evidence))
    return TraceDiagnosis(view, evidence.account, evidence, causes, _verdict(evidence, causes), findings)


def _trace_findings(view: TraceView) -> Iterator[Finding]:
    """What the trace lacks, and what was left out or corrected."""
    trace, steps = view.trace, view.steps
    left_out = len(steps.every) - len(steps.chosen)
    if left_out:
        longest = max(step.time for step in steps.every) / 1000
        yield finding("steps-left-out", count=left_out, steps=len(steps.every), longest_ms=longest)
    if steps.marked not in (0, len(steps.every)):
        yield finding("step-count-differs", steps=len(steps.every), marked=steps.marked)
    if len(steps.every) == 1:
        yield finding("one-step-only")
    if trace.other_gpus:
        yield finding("several-gpus", gpus=trace.other_gpus + 1)
    if trace.skew_us:
        yield finding("clock-offset", offset_ms=trace.skew_us / 1000)
    if not trace.launches:
        yield finding("launches-not-recorded")
    if not trace.operators:
        yield finding("operators-not-recorded")
    unknown = sum(gemm.precision == UNKNOWN_PRECISION for gemm in view.gemms.values())
    if unknown:
        yield finding("gemm-precision-unknown", unknown=unknown, gemms=len(view.gemms))
    if trace.operators and not any(gemm.flops for gemm in view.gemms.values()):
        yield finding("shapes-not-recorded")


def _verdict(step: StepEvidence, causes: Sequence[Cause]) -> Finding:
    """The answer: the costliest cause, or that the step is as expected."""
    if causes:
        return finding("step-cause", cause=causes[0].code, title=causes[0].title, cost_ms=causes[0].cost_ms, step_ms=step.step_ms)
    if not step.precision_known:
        return finding("step-precision-unknown")
    busy, quantization = 1 - step.account.idle_share, step.account.share("quantization")
    return finding("step-as-expected", low_share=step.low_share, share_of=step.share_of, busy=busy, quantization=quantization)
