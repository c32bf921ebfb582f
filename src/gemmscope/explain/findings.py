"""What there is to know about a trace beside its numbers, and the verdict on its step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemmscope.explain.cause import StepEvidence
from gemmscope.explain.place import UNKNOWN_PRECISION
from gemmscope.explain.view import TraceView
from gemmscope.findings import Finding, finding
from gemmscope.results.explain import Cause


def trace_findings(view: TraceView) -> Iterator[Finding]:
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
    if trace.others:
        yield finding("several-gpus", gpus=len(trace.others) + 1)
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


def verdict(step: StepEvidence, causes: Sequence[Cause]) -> Finding:
    """The answer: the costliest cause, or that the step is as expected."""
    if causes:
        return finding("step-cause", cause=causes[0].code, title=causes[0].title, cost_ms=causes[0].cost_ms, step_ms=step.step_ms)
    if not step.precision_known:
        return finding("step-precision-unknown")
    return finding(
        "step-as-expected",
        low_share=step.low_share,
        share_of=step.share_of,
        busy=1 - step.account.idle_share,
        quantization=step.account.share("quantization"),
    )
