"""Adds up where the time of a training step went: by part of the step, by class of kernel, and in counts."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from gemmscope.engine.kernels import CAST_SHARE
from gemmscope.explain.place import CLASSES, ORDER
from gemmscope.explain.timeline import HOST_IDLE, NOT_RECORDED
from gemmscope.explain.view import TimedWork, TraceView, add_up, in_launch_order
from gemmscope.parts import StepPart, in_order
from gemmscope.results.explain import PrecisionTotal, StepAccount, UnknownKernel

EXPOSED: StepPart = "exposed communication"
HOST: StepPart = "idle, host-bound"
IDLE: StepPart = "idle, other"
UNRECORDED = "GPU busy, kernels not recorded"
ROWS = (*(name for name in ORDER if name not in ("communication", "other")), EXPOSED, "other", UNRECORDED, HOST, IDLE)
PARTS: dict[str, StepPart] = {
    EXPOSED: EXPOSED,
    HOST: HOST,
    IDLE: IDLE,
    UNRECORDED: "other",
    **{entry["name"]: entry["part"] for entry in CLASSES},
}


def account(view: TraceView) -> StepAccount:
    """Milliseconds and counts per step."""
    count, items = view.count, view.items()
    times = [(EXPOSED if item.name == "communication" else item.name, item.share / 1000 / count) for item in items]
    classes = add_up(times)
    busy_ms = sum(classes.values())
    reasons = add_up((gap.why, gap.time / 1000 / count) for shares in view.shares for gap in shares.gaps)
    idle: dict[str, float] = dict(sorted(reasons.items(), key=lambda reason: -reason[1]))
    classes[UNRECORDED] = unrecorded_ms = idle.pop(NOT_RECORDED, 0.0)
    classes[HOST] = sum(time for why, time in idle.items() if why in HOST_IDLE)
    classes[IDLE] = sum(time for why, time in idle.items() if why not in HOST_IDLE)
    classes = {name: classes[name] for name in ROWS if classes.get(name, 0.0) > 0}
    # Work that runs beyond the end of a step counts for the step in which it began.
    steps = zip(view.steps.chosen, view.by_step(), strict=True)
    own = [item for step, work in steps for item in work if step.begin <= item.work.start < step.end]
    gemms = [item.gemm for item in own if item.is_gemm and not item.gemm.reduces]
    casts = sum(item.name == "quantization" for item in own)
    return StepAccount(
        step_ms=sum(step.time for step in view.steps.chosen) / 1000 / count,
        busy_ms=busy_ms,
        unrecorded_ms=unrecorded_ms,
        parts_ms=_parts(view, classes, items),
        classes_ms=classes,
        idle_ms=idle,
        hidden_ms=sum(shares.hidden for shares in view.shares) / 1000 / count,
        overlapped_ms=sum(shares.overlapped for shares in view.shares) / 1000 / count,
        gemms=_by_precision([item for item in items if item.is_gemm], count),
        kernels=len(own) / count,
        launches=len({item.work.correlation for item in own}) / count,
        micro_batches=_micro_batches(view),
        quantization_kernels=casts / count,
        low_gemms=sum(gemm.low for gemm in gemms) / count,
        kernels_per_gemm=(len(gemms) + casts) / len(gemms) if gemms else 0.0,
        named_share=1 - classes.get("other", 0.0) / busy_ms if busy_ms else 0.0,
        unknown=_unknown([item for item in items if item.name == "other"], count),
    )


def _parts(view: TraceView, classes: dict[str, float], items: Sequence[TimedWork]) -> dict[StepPart, float]:
    """The classes as parts of a step. The GEMMs of the output head belong to the head, and the share of a fused cast that does a
    norm or an activation belongs to those, as in a measured step."""
    parts = add_up((PARTS.get(name, "GEMMs"), time) for name, time in classes.items())
    head = view.ms(item for item in items if item.gemm.head)
    fused = view.ms(item for item in items if item.name == "quantization" and item.placed.fused)
    moves: list[tuple[StepPart, StepPart, float]] = [
        ("GEMMs", "head and loss", head),
        ("quantization", "norms and activations", (1 - CAST_SHARE) * fused),
    ]
    for source, target, time in moves:
        if time:
            parts[source] = parts.get(source, 0.0) - time
            parts[target] = parts.get(target, 0.0) + time
    return in_order(parts)


def _by_precision(items: Sequence[TimedWork], count: int) -> tuple[PrecisionTotal, ...]:
    counts = add_up((item.gemm.precision, float(not item.gemm.reduces)) for item in items)
    times = add_up((item.gemm.precision, item.share / 1000 / count) for item in items)
    flops = add_up((item.gemm.precision, item.gemm.flops / count) for item in items)
    own = add_up((item.gemm.precision, item.work.time / 1000 / count) for item in items if item.gemm.sized)
    totals = [
        PrecisionTotal(precision=name, count=counts[name] / count, time_ms=time, flops=flops[name], sized_ms=own.get(name, 0.0))
        for name, time in times.items()
    ]
    return tuple(sorted(totals, key=lambda total: -total.time_ms))


def _unknown(items: Sequence[TimedWork], count: int) -> tuple[UnknownKernel, ...]:
    """The kernels by name, the longest first."""
    times = add_up((item.work.name, item.share / 1000 / count) for item in items)
    counts = add_up((item.work.name, 1 / count) for item in items)
    kernels = [UnknownKernel(name=name, time_ms=times[name], count=counts[name]) for name in times]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.time_ms))


def _micro_batches(view: TraceView) -> int:
    """How many micro-batches a step runs: one for each forward that follows backward, or more.

    In a pipeline several forwards run before the first backward: they are counted by the usual number of GEMMs of one forward.
    """
    counts = []
    for items in view.by_step():
        phases = [item.scope.phase for item in in_launch_order(items) if item.is_gemm]
        runs = groupby(phase for phase in phases if phase in ("forward", "backward"))
        counts.append(sum(forwards([len(list(run)) for phase, run in runs if phase == "forward"])))
    return max(sorted(counts)[len(counts) // 2], 1) if counts else 1


def forwards(gemms: list[int]) -> list[int]:
    """Micro-batches in each stretch of forward, from the GEMMs in it: the most frequent number is one micro-batch.

    >>> forwards([64]), forwards([64, 64, 64]), forwards([256, 64, 64, 64]), forwards([64, 1]), forwards([])
    ([1], [1, 1, 1], [4, 1, 1, 1], [1, 0], [])
    """
    usual, times = Counter(count for count in gemms if count).most_common(1)[0] if any(gemms) else (1, 2)
    if times < 2:
        usual = max(gemms)
    return [round(count / usual) for count in gemms]
