"""The diagnosis of one trace: its account, its causes in the order of their cost, and the verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemmscope.engine.kernels import may_be_gemm
from gemmscope.errors import UserError
from gemmscope.explain.account import account
from gemmscope.explain.attention import attention_causes
from gemmscope.explain.cause import NAMED, WELL_NAMED, StepEvidence, short_name
from gemmscope.explain.low_causes import low_causes
from gemmscope.explain.place import UNKNOWN_PRECISION
from gemmscope.explain.slow_gemms import implausible_times, slow_gemm_causes
from gemmscope.explain.step_causes import step_causes, unrecorded_work
from gemmscope.explain.step_times import step_findings, timed_steps
from gemmscope.explain.trace import RecordedTrace
from gemmscope.explain.view import TraceView, view_trace
from gemmscope.findings import Finding, finding
from gemmscope.results.explain import Cause, StepAccount, TracedStep

OUTSIDE = 0.01  # of all GPU work: less outside of the steps is not worth a note


@dataclass(frozen=True)
class TraceDiagnosis:
    """One trace. `causes`: the costliest first."""

    view: TraceView
    account: StepAccount
    evidence: StepEvidence
    causes: tuple[Cause, ...]
    verdict: Finding
    findings: tuple[Finding, ...]
    each_step: tuple[TracedStep, ...] = ()

    @property
    def trace(self) -> RecordedTrace:
        return self.view.trace


def diagnose(trace: RecordedTrace, step_count: int | None = None) -> TraceDiagnosis:
    """Everything that one trace alone shows. `step_count`: how many steps it has, if nothing in it marks them."""
    view = view_trace(trace, step_count)
    evidence = StepEvidence(view, account(view))
    if not evidence.step_ms > 0:
        raise UserError(f"{trace.source} has no step that takes time: its timestamps are damaged", "record it again")
    searches = (low_causes, slow_gemm_causes, step_causes, attention_causes)
    every = [cause for search in searches for cause in search(evidence)]
    reported = [cause for cause in every if cause.cost_ms > NAMED * evidence.step_ms or cause.code == "not-low"]
    causes = tuple(sorted(reported, key=lambda cause: -cause.cost_ms))
    each_step = timed_steps(view)
    findings = (
        *(*_unknown_kernels(evidence), *_trace_findings(view), *_gemm_findings(evidence)),
        *(*step_findings(each_step), *unrecorded_work(evidence), *implausible_times(evidence)),
    )
    return TraceDiagnosis(view, evidence.account, evidence, causes, _verdict(evidence, causes), findings, each_step)


def _trace_findings(view: TraceView) -> Iterator[Finding]:
    """What the trace lacks, and what was left out or corrected."""
    trace, steps = view.trace, view.steps
    if trace.inference:
        yield finding("inference", found_by=steps.found_by)
    yield from _outside_steps(view)
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
    if not trace.has_operators:
        yield finding("operators-not-recorded")
    unknown = sum(gemm.precision == UNKNOWN_PRECISION for gemm in view.gemms.values())
    if unknown:
        yield finding("gemm-precision-unknown", unknown=unknown, gemms=len(view.gemms))
    if trace.operators and view.gemms and not any(gemm.flops for gemm in view.gemms.values()):
        yield finding("shapes-not-recorded")


def _outside_steps(view: TraceView) -> Iterator[Finding]:
    """GPU work that belongs to no step: launched before the recording, in a step that was recorded in part, or after the last."""
    trace, steps = view.trace, view.steps
    begin, end = steps.every[0].begin, steps.every[-1].end
    outside = [number for number, work in enumerate(trace.work) if number not in steps.before and not begin <= work.start < end]
    least_ms = OUTSIDE * sum(work.time for work in trace.work) / 1000
    for code, numbers in (("work-before-recording", sorted(steps.before)), ("work-outside-steps", outside)):
        time_ms = sum(trace.work[number].time for number in numbers) / 1000
        if time_ms > least_ms:
            yield finding(code, count=len(numbers), time_ms=time_ms)


def _unknown_kernels(step: StepEvidence) -> Iterator[Finding]:
    """If much of the time is in kernels of no known class: nothing is said about low precision then."""
    if step.well_named:
        return
    unknown = step.account.unknown
    maybe = [kernel for kernel in unknown if may_be_gemm(kernel.name)]
    yield finding(
        "kernels-unknown", share=1 - step.account.named_share, kernels=[short_name(kernel.name) for kernel in unknown[:3]]
    )
    if maybe:
        share = sum(kernel.time_ms for kernel in maybe) / step.account.busy_ms
        yield finding("kernels-may-be-gemms", share=share, kernels=[short_name(kernel.name) for kernel in maybe[:3]])


def _gemm_findings(step: StepEvidence) -> Iterator[Finding]:
    """Which GEMMs the rates are of, and what the GPU cannot do."""
    gemms = [item.gemm for item in step.items if item.is_gemm and not item.gemm.reduces]
    sized = sum(gemm.flops > 0 for gemm in gemms)
    if 0 < sized < len(gemms):
        yield finding("gemm-sizes-partial", known=sized / step.view.count, gemms=step.per_step(gemms))
    if step.has_fp8 is False and step.gemms and not step.is_low:
        yield finding("gpu-without-fp8", gpu=step.view.trace.gpu_name or "This GPU")
    elif step.has_fp8 is None and step.gemms and step.low_is_certain and not step.is_low:
        yield finding("fp8-not-known")


def _verdict(step: StepEvidence, causes: Sequence[Cause]) -> Finding:
    """The answer: the costliest cause, or that the step is as expected."""
    unrecorded = step.account.unrecorded_ms
    if unrecorded > 0.5 * step.step_ms:
        return finding("step-not-recorded", time_ms=unrecorded, step_ms=step.step_ms)
    if causes:
        return finding("step-cause", cause=causes[0].code, title=causes[0].title, cost_ms=causes[0].cost_ms, step_ms=step.step_ms)
    if not step.well_named:
        return finding("step-kernels-unknown", share=1 - step.account.named_share)
    convolutions = step.account.parts_ms.get("convolutions", 0.0) / step.account.busy_ms if step.account.busy_ms else 0.0
    if not step.gemms and convolutions > 0:
        return finding("step-of-convolutions", share=convolutions)
    if not step.precision_known:
        return finding("step-precision-unknown")
    if not step.is_low and step.unknown_share > 1 - WELL_NAMED:
        return finding("step-precision-partly-unknown", share=step.unknown_share)
    if step.weight_only and not step.is_low:
        formats = sorted({item.gemm.precision.removesuffix(" weights") for item in step.weight_only})
        return finding("step-weight-only", formats=formats, busy=step.account.busy_share)
    if step.has_fp8 is False and not step.is_low:
        return finding("step-without-fp8", gpu=step.view.trace.gpu_name or "this GPU", busy=step.account.busy_share)
    if step.has_fp8 is None and not step.is_low:
        return finding("step-fp8-not-known", busy=step.account.busy_share)
    busy, quantization = step.account.busy_share, step.account.share("quantization")
    return finding("step-as-expected", low_share=step.low_share, share_of=step.share_of, busy=busy, quantization=quantization)
