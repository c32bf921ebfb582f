"""The diagnosis of one trace: its account, its causes in the order of what fixing them would gain, the verdict, and each step
beside the others: how long it took, what made it slow, and whether the steps fall into two groups. It can be written into
a copy of the trace, on tracks of its own, for Perfetto and chrome://tracing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gemmscope.engine.kernels import may_be_gemm
from gemmscope.errors import UserError
from gemmscope.explain.attention_speed import attention_causes
from gemmscope.explain.gemm_speed import gemm_causes, implausible_times
from gemmscope.explain.low_precision_causes import low_precision_causes
from gemmscope.explain.phase import framework_titles
from gemmscope.explain.recorded_trace import GRAPH_LAUNCH, RecordedTrace
from gemmscope.explain.step_causes import step_causes, unrecorded_work
from gemmscope.explain.step_evidence import GAINED, NAMED, WELL_NAMED, StepEvidence, short_name
from gemmscope.explain.steps import SIMILAR
from gemmscope.explain.timeline import NOT_RECORDED, Shares
from gemmscope.explain.trace_file import EventStream, write_trace
from gemmscope.explain.trace_view import ROW_TITLES, UNRECORDED, TraceView, account_of, view_trace
from gemmscope.explain.work_class import UNKNOWN_PRECISION
from gemmscope.findings import Fact, Finding, finding
from gemmscope.grouping import add_up, largest_sums
from gemmscope.results.explain import Cause, StepAccount, TracedStep

OUTSIDE = 0.01  # of all GPU work: less outside of the steps is not worth a note
GROUPS_APART, SMALLEST_GROUP = 1.5, 0.2  # ratio of the shortest slow step to the longest fast one; share of all steps
MAIN_REASON = 0.1  # of a step's extra time: what takes less is not named


@dataclass(frozen=True)
class TraceDiagnosis:
    """One trace. `causes`: first those whose fix would gain most."""

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
    evidence = StepEvidence(view, account_of(view))
    if not evidence.step_ms > 0:
        raise UserError(f"{trace.source} has no step that takes time: its timestamps are damaged", "record it again")
    searches = (low_precision_causes, gemm_causes, step_causes, attention_causes) if trace.phase.judged else ()
    every = [cause for search in searches for cause in search(evidence)]
    listed = (cause for cause in every if cause.cost_ms > NAMED * evidence.step_ms or cause.code == "not-low")
    reported = [cause for cause in listed if cause.speedup_without >= GAINED]
    causes = tuple(sorted(reported, key=lambda cause: (-round(cause.speedup_without, 2), -cause.cost_ms)))
    each_step = timed_steps(view)
    findings = (
        *(evidence.recording.findings() if trace.phase.judged else ()),
        *(*_unknown_kernels(evidence), *_trace_findings(evidence)),
        *(*step_findings(each_step), *unrecorded_work(evidence), *implausible_times(evidence)),
    )
    return TraceDiagnosis(view, evidence.account, evidence, causes, _verdict(evidence, causes), findings, each_step)


def _trace_findings(step: StepEvidence) -> Iterator[Finding]:
    """What the trace lacks, and what was left out or corrected."""
    view, trace, steps, gemms = step.view, step.view.trace, step.view.steps, step.view.gemms.values()
    own = [item.gemm for item in step.items if item.work_class.is_gemm and not item.gemm.reduces]
    sized, odd = sum(gemm.flops > 0 for gemm in own), [item for item in step.items if item.work_class.disagrees]
    if trace.phase.name:
        yield finding("phase", phase=trace.phase.name, evidence=trace.phase.evidence, found_by=steps.found_by)
    if trace.phase.frameworks:
        yield finding(
            "frameworks",
            names=[
                f"{title} ({shown})"
                for title, shown in zip(framework_titles(trace.phase.frameworks), trace.phase.frameworks.values(), strict=True)
            ],
        )
    yield from _outside_steps(view)
    unknown = sum(gemm.precision == UNKNOWN_PRECISION for gemm in gemms)
    replayed = [work for work in trace.work if work.call is not None and GRAPH_LAUNCH in work.call.name]
    graphs = {work.correlation for work in replayed}
    shapes = "shapes-inside-graphs" if replayed and "operator shapes" in trace.slowing_options else "shapes-not-recorded"
    notes = (
        (steps.marked not in (0, len(steps.every)), finding("step-count-differs", steps=len(steps.every), marked=steps.marked)),
        (len(steps.every) == 1, finding("one-step-only")),
        (trace.other_gpus, finding("several-gpus", gpus=trace.other_gpus + 1)),
        (trace.skew_us, finding("clock-offset", offset_ms=trace.skew_us / 1000)),
        (not trace.launches, finding("launches-not-recorded")),
        (not trace.has_operators, finding("operators-not-recorded")),
        (0 < sized < len(own), finding("gemm-sizes-partial", known=sized / view.count, gemms=step.per_step(own))),
        (
            odd,
            finding(
                "classes-disagree",
                time_ms=step.ms(odd),
                kernels=sorted({short_name(item.work.name) for item in odd})[:3],
            ),
        ),
        (unknown, finding("gemm-precision-unknown", unknown=unknown, gemms=len(gemms))),
        (replayed, finding("graph-launches", share=len(replayed) / len(trace.work), launches=len(graphs) / len(steps.every))),
        (trace.operators and gemms and not any(gemm.flops for gemm in gemms), finding(shapes)),
    )
    yield from (note for applies, note in notes if applies)


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
    unknown, share = step.account.unknown, 1 - step.account.named_share
    yield finding("kernels-unknown", share=share, kernels=[short_name(kernel.name) for kernel in unknown[:3]])
    if maybe := [kernel for kernel in unknown if may_be_gemm(kernel.name)]:
        share = sum(kernel.time_ms for kernel in maybe) / step.account.busy_ms
        yield finding("kernels-may-be-gemms", share=share, kernels=[short_name(kernel.name) for kernel in maybe[:3]])


def _verdict(step: StepEvidence, causes: Sequence[Cause]) -> Finding:
    """The answer: the cause whose fix would gain most, or that the step is as expected."""
    unrecorded, busy, gpu = step.account.unrecorded_ms, step.account.busy_share, step.view.trace.gpu_name or "this GPU"
    phase = step.view.trace.phase
    part, time = max(step.account.parts_ms.items(), key=lambda pair: pair[1] if pair[0] != "other" else 0.0)
    unknown_fp8 = step.has_fp8 is None and not step.is_low
    quantization, convolutions = (
        step.account.share("quantization"),
        step.account.parts_ms.get("convolutions", 0.0) / (step.account.busy_ms or 1),
    )
    judged: dict[str, Fact] = {"phase": phase.name, "busy": busy, "part": part, "time_ms": time, "share": time / step.step_ms}
    verdicts = (
        (unrecorded > 0.5 * step.step_ms, finding("step-not-recorded", time_ms=unrecorded, step_ms=step.step_ms)),
        (not phase.judged, finding("step-not-judged", **judged)),
        *(
            (True, finding("step-cause", cause=one.code, title=one.title, cost_ms=one.cost_ms, step_ms=step.step_ms))
            for one in causes
        ),
        (not step.well_named, finding("step-kernels-unknown", share=1 - step.account.named_share)),
        (not step.gemms and convolutions > 0, finding("step-of-convolutions", share=convolutions)),
        (not step.precision_known, finding("step-precision-unknown")),
        (
            not step.is_low and step.unknown_share > 1 - WELL_NAMED,
            finding("step-precision-partly-unknown", share=step.unknown_share),
        ),
        (unknown_fp8, finding("step-fp8-not-known", busy=busy)),
        (step.has_fp8 is False and not step.is_low, finding("step-without-fp8", gpu=gpu, busy=busy)),
    )
    expected = finding("step-as-expected", low_share=step.low_share, share_of=step.share_of, busy=busy, quantization=quantization)
    return next((verdict for applies, verdict in verdicts if applies), expected)


def timed_steps(view: TraceView) -> tuple[TracedStep, ...]:
    """A row for each step, those that are not averaged included."""
    profiles = [_profile(view, shares) for shares in view.every_shares]
    averaged = len(view.steps.every) - len(view.steps.chosen)  # only first ones are left out
    fast = _usual_times([step.time for step in view.steps.chosen])
    typical = median(fast) / 1000
    alike = [profile for profile, step in zip(profiles[averaged:], view.steps.chosen, strict=True) if step.time <= fast[-1]]
    usual = {name: median(own.get(name, 0.0) for own in alike) for name in {name for own in alike for name in own}}
    rows = []
    for number, (step, profile) in enumerate(zip(view.steps.every, profiles, strict=True)):
        time, unrecorded = step.time / 1000, profile.get(UNRECORDED, 0.0)
        idle = sum(gap.time for gap in view.every_shares[number].gaps if gap.why != NOT_RECORDED) / 1000
        beyond = largest_sums((name, own - usual.get(name, 0.0)) for name, own in profile.items())
        extra, extra_ms = next(iter(beyond.items()), ("", 0.0))
        slow = time > SIMILAR * typical
        named = slow and extra_ms >= MAIN_REASON * (time - typical)
        rows.append(
            TracedStep(
                name=step.name, time_ms=time, busy_ms=max(time - idle - unrecorded, 0.0), idle_ms=idle, unrecorded_ms=unrecorded,
                averaged=number >= averaged, slow=slow, extra=extra if named else "", extra_ms=extra_ms if named else 0.0,
            )
        )  # fmt: skip
    return tuple(rows)


def _usual_times(times: Sequence[float]) -> list[float]:
    """The sorted times that slow steps are compared with: those of the fast group, or else of all steps."""
    return (two_groups(times) or [sorted(times)])[0]


def _profile(view: TraceView, shares: Shares) -> dict[str, float]:
    """Milliseconds of one step by class of work and by reason of idle time."""
    titles = {**ROW_TITLES, NOT_RECORDED: UNRECORDED}
    work = ((view.work_classes[number].name, share) for number, share in shares.of.items())
    gaps = ((str(gap.why), gap.time) for gap in shares.gaps)
    return {titles.get(name, name): time / 1000 for name, time in add_up([*work, *gaps]).items()}


def step_findings(rows: Sequence[TracedStep]) -> Iterator[Finding]:
    """What the times of the steps show: one left out, slow ones, two groups."""
    averaged = [row for row in rows if row.averaged]
    times = [row.time_ms for row in averaged]
    typical = median(_usual_times(times))
    for row in rows:
        if not row.averaged:
            extra: dict[str, Fact] = {"extra": row.extra or "work on the GPU", "extra_ms": row.extra_ms or row.time_ms - typical}
            yield finding(
                "first-step-left-out", time_ms=row.time_ms, times=row.time_ms / max(typical, 1e-9), median_ms=typical, **extra
            )
    if len(times) < 2:
        return
    slow = [row for row in averaged if row.slow]
    reasons = largest_sums((row.extra, row.extra_ms) for row in slow if row.extra)
    reason, reason_ms = next(iter(reasons.items()), ("work on the GPU", 0.0))
    share = min(reason_ms / sum(row.time_ms - typical for row in slow), 1.0) if slow else 0.0
    if groups := two_groups(times):
        fast, others = groups
        means: dict[str, Fact] = {"fast_ms": fmean(fast), "slow_ms": fmean(others), "mean_ms": fmean(times)}
        yield finding("steps-in-two-groups", fast=len(fast), slow=len(others), **means, extra=reason, share=share)
    elif slow:
        compared: dict[str, Fact] = {"ratio": SIMILAR, "median_ms": typical, "longest_ms": max(times)}
        yield finding("steps-slow", count=len(slow), steps=len(times), **compared, extra=reason, share=share)


def two_groups(times: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """The times of fast and slow steps, if they are far apart and neither group is an exception.

    >>> two_groups([118.1, 115.7, 1014.7, 1068.4, 1076.1])
    ([115.7, 118.1], [1014.7, 1068.4, 1076.1])
    >>> two_groups([10, 11, 12, 13, 14, 15]), two_groups([10, 10, 10, 10, 90])
    (None, None)
    """
    ordered = sorted(times)
    least = max(2, round(SMALLEST_GROUP * len(ordered)))
    places = range(least, len(ordered) - least + 1)
    at = max(places, key=lambda place: ordered[place] / max(ordered[place - 1], 1e-9), default=None)
    if at is None or ordered[at] < GROUPS_APART * ordered[at - 1]:
        return None
    return ordered[:at], ordered[at:]


PROCESS = "gemmscope diagnosis"
NAMING = ("process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index")


def events_of(diagnosis: TraceDiagnosis) -> Iterator[dict[str, Any]]:
    """One track with the steps and one for each cause, in the time of the trace."""
    zero = diagnosis.trace.zero_us + diagnosis.trace.skew_us
    steps, verdict = diagnosis.view.steps.chosen, diagnosis.verdict.text
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "args": {"name": PROCESS}}
    yield {"ph": "M", "name": "process_sort_index", "pid": PROCESS, "tid": 0, "args": {"sort_index": -1}}
    facts = {"verdict": verdict, **{name: f"{time:.3f} ms" for name, time in diagnosis.account.classes_ms.items()}}
    for step in steps:
        yield _event(f"{step.name}: {verdict}", zero + step.begin, step.time, "steps", facts)
    for number, cause in enumerate(diagnosis.causes, start=1):
        facts = {"cost": f"{cause.cost_ms:.2f} ms per step", "evidence": " ".join(proof.text for proof in cause.evidence)}
        for begin, end, label in cause.spans or [(step.begin, step.end, cause.title) for step in steps]:
            yield _event(label, zero + begin, end - begin, f"{number}. {cause.title}", facts)


def _event(name: str, start: float, time: float, track: str, facts: dict[str, str]) -> dict[str, Any]:
    return {"ph": "X", "cat": "gemmscope", "name": name, "pid": PROCESS, "tid": track, "ts": round(start, 3),
            "dur": round(time, 3), "args": facts}  # fmt: skip


def write_annotated(diagnosis: TraceDiagnosis, target: str | Path) -> None:
    """All events of the trace, followed by the diagnosis; gzipped if the name ends in .gz.

    Metadata that a viewer does not need is not copied: it may hold anything.
    """
    path, stream = Path(target), EventStream(diagnosis.trace.source)
    events = chain(stream, events_of(diagnosis))
    shown = (event for event in events if event.get("ph") != "M" or event.get("name") in NAMING)
    write_trace(path, shown, stream.head, packed=path.suffix == ".gz")
