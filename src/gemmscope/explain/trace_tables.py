"""All tables of one diagnosis; and those of how the CPU feeds the GPU: the longest kernels, launches and their queue, what the
CPU did in idle time."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from gemmscope.explain.attention_speed import attention_rows
from gemmscope.explain.collectives import collective_totals, collectives_of
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.gemm_speed import gemm_shapes
from gemmscope.explain.step_evidence import StepEvidence
from gemmscope.explain.timeline import HOST_IDLE, SHORT_US, frames_of
from gemmscope.explain.trace_view import TITLES, counted, largest_sums
from gemmscope.results.explain import ExplainTables, IdleFrame, LaunchStatistics, TopKernel

MOST_KERNELS = 20
MOST_FRAMES = 15


def top_kernels(step: StepEvidence) -> tuple[TopKernel, ...]:
    """The kernels that take the most time."""
    times = counted((item.work.name, item.work.time) for item in step.items)
    shares, steps = largest_sums(((item.work.name, TITLES[item.name]), item.share) for item in step.items), step.view.count
    classes = dict(reversed(shares))  # of each kernel, the class in which it takes most of its time
    return tuple(
        TopKernel(
            name=name, kernel_class=classes[name], count=count / steps, time_ms=time / 1000 / steps, mean_us=time / count,
        )
        for name, (count, time) in list(times.items())[:MOST_KERNELS]
    )  # fmt: skip


def launch_statistics(step: StepEvidence) -> LaunchStatistics:
    """How the work that begins in the chosen steps was launched."""
    view, trace = step.view, step.view.trace
    steps = view.count
    own = [trace.work[index] for chosen in view.steps.chosen for index in view.indices_in(chosen)]
    short = [work.time for work in own if not work.copy and work.time < SHORT_US]
    known = [work for work in trace.work if work.call is not None]
    launched = sorted(work.call.start for work in trace.work if work.call is not None)
    started, ended = sorted(work.start for work in known), sorted(work.end for work in known)
    pairs = [(work.call.start, work) for work in own if work.call is not None]
    delays = sorted(work.start - moment for moment, work in pairs)
    # Of everything launched before each launch: what has not begun, and what has not ended.
    before = [(bisect_left(launched, moment), moment) for moment, _ in pairs]
    depths = [max(count - bisect_right(started, moment), 0) for count, moment in before]
    empty = sum(count <= bisect_right(ended, moment) for count, moment in before)
    return LaunchStatistics(
        launches=len({work.correlation for work in own}) / steps,
        short_kernels=len(short) / steps,
        short_ms=sum(short) / 1000 / steps,
        delay_median_us=delays[len(delays) // 2] if delays else None,
        delay_p90_us=delays[int(0.9 * (len(delays) - 1))] if delays else None,
        queue_mean=sum(depths) / len(depths) if depths else None,
        queue_most=max(depths, default=None),
        queue_empty_share=empty / len(pairs) if pairs else None,
    )


def idle_frames(step: StepEvidence) -> tuple[IdleFrame, ...]:
    """Idle time in which the CPU was late, by what it did: the innermost activity that covers most of the gap."""
    gaps = sorted((gap for shares in step.view.shares for gap in shares.gaps if gap.why in HOST_IDLE), key=lambda gap: gap.begin)
    frames = zip(frames_of(step.view.trace, gaps), (gap.time for gap in gaps), strict=True)
    steps = step.view.count
    return tuple(
        IdleFrame(frame=name, kind=kind, gaps=count / steps, time_ms=time / 1000 / steps)
        for (name, kind), (count, time) in list(counted(frames).items())[:MOST_FRAMES]
    )


def explain_tables(diagnosis: TraceDiagnosis, waits_us: Mapping[int, float]) -> ExplainTables:
    """`waits_us`: how long this rank waits in each collective, by the identity of its work, if other ranks show it."""
    step, view = diagnosis.evidence, diagnosis.view
    return ExplainTables(
        gemm_shapes=gemm_shapes(step),
        attention=tuple(row for row, _ in attention_rows(step)),
        collectives=collective_totals(collectives_of(view), view.count, view.trace.world_size, waits_us),
        kernels=top_kernels(step),
        launches=launch_statistics(step),
        idle_frames=idle_frames(step),
    )
