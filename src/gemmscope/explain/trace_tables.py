"""All tables of one diagnosis; and those of how the CPU feeds the GPU: the longest kernels, and what the CPU did in
idle time."""

from collections.abc import Mapping

from gemmscope.explain.attention_speed import attention_rows
from gemmscope.explain.collectives import collective_totals, collectives_of
from gemmscope.explain.diagnose import TraceDiagnosis
from gemmscope.explain.gemm_speed import gemm_shapes
from gemmscope.explain.step_evidence import StepEvidence
from gemmscope.explain.timeline import HOST_IDLE, frames_of
from gemmscope.explain.trace_view import TITLES, counted
from gemmscope.grouping import largest_sums
from gemmscope.results.explain import ExplainTables, IdleFrame, TopKernel

MOST_KERNELS, MOST_FRAMES = 20, 15


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
        idle_frames=idle_frames(step),
    )
