"""Adds up where the time of a training step went: by part of the step, by class of kernel, and in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from gemmscope.explain.place import ORDER
from gemmscope.explain.steps import RecordedStep
from gemmscope.explain.timeline import HOST_IDLE, Gap
from gemmscope.explain.view import TimedWork, TraceView
from gemmscope.measure.kernels import CAST_SHARE
from gemmscope.parts import StepPart, in_order
from gemmscope.results.explain import PrecisionTotal, StepAccount, UnknownKernel

EXPOSED: StepPart = "exposed communication"
HOST: StepPart = "idle, host-bound"
IDLE: StepPart = "idle, other"
CLASSES = (*(name for name in ORDER if name not in ("communication", "other")), EXPOSED, "other", HOST, IDLE)
PARTS: dict[str, StepPart] = {
    "quantization": "quantization", "attention": "attention", "norms": "norms and activations",
    "activations": "norms and activations", "elementwise": "norms and activations", "loss": "head and loss",
    "embedding and indexing": "embedding", "optimizer": "optimizer", "copies": "copies", "other": "other", EXPOSED: EXPOSED,
    HOST: HOST, IDLE: IDLE,
}  # fmt: skip


def account(view: TraceView) -> StepAccount:
    """Milliseconds and counts per step."""
    count, items = view.count, view.items()
    classes: dict[str, float] = {}
    for item in items:
        name = EXPOSED if item.placed.name == "communication" else item.placed.name
        classes[name] = classes.get(name, 0.0) + item.share / 1000 / count
    busy_ms = sum(classes.values())
    idle = _idle([gap for shares in view.shares for gap in shares.gaps], count)
    classes[HOST] = sum(time for why, time in idle.items() if why in HOST_IDLE)
    classes[IDLE] = sum(time for why, time in idle.items() if why not in HOST_IDLE)
    classes = {name: classes[name] for name in CLASSES if classes.get(name, 0.0) > 0}
    own = [item for step, work in zip(view.steps.chosen, view.by_step(), strict=True) for item in work if _begins_in(step, item)]
    gemms = [item.gemm for item in own if item.gemm is not None and not item.gemm.reduces]
    casts = sum(item.placed.name == "quantization" for item in own)
    return StepAccount(
        step_ms=sum(step.time for step in view.steps.chosen) / 1000 / count,
        busy_ms=busy_ms,
        parts_ms=_parts(view, classes, items),
        classes_ms=classes,
        idle_ms=idle,
        hidden_ms=sum(shares.hidden for shares in view.shares) / 1000 / count,
        overlapped_ms=sum(shares.overlapped for shares in view.shares) / 1000 / count,
        gemms=_by_precision(items, count),
        kernels=len(own) / count,
        launches=len({item.work.correlation for item in own}) / count,
        micro_batches=micro_batches(view),
        quantization_kernels=casts / count,
        low_gemms=sum(gemm.low for gemm in gemms) / count,
        kernels_per_gemm=(len(gemms) + casts) / len(gemms) if gemms else 0.0,
        named_share=1 - classes.get("other", 0.0) / busy_ms if busy_ms else 0.0,
        unknown=_unknown(items, count),
    )


def _parts(view: TraceView, classes: dict[str, float], items: Sequence[TimedWork]) -> dict[StepPart, float]:
    """The classes as parts of a step. The GEMMs of the output head belong to the head, and the share of a fused cast that does a
    norm or an activation belongs to those, as in a measured step."""
    parts: dict[StepPart, float] = {}
    for name, time in classes.items():
        part = PARTS.get(name, "GEMMs")
        parts[part] = parts.get(part, 0.0) + time
    head = view.ms(item for item in items if item.gemm is not None and item.gemm.head)
    if head:
        parts["GEMMs"] = parts.get("GEMMs", 0.0) - head
        parts["head and loss"] = parts.get("head and loss", 0.0) + head
    fused = view.ms(item for item in items if item.placed.name == "quantization" and item.placed.fused)
    if fused:
        parts["quantization"] -= (1 - CAST_SHARE) * fused
        parts["norms and activations"] = parts.get("norms and activations", 0.0) + (1 - CAST_SHARE) * fused
    return in_order(parts)


def _begins_in(step: RecordedStep, item: TimedWork) -> bool:
    """Work that runs beyond the end of a step counts for the step in which it began."""
    return step.begin <= item.work.start < step.end


def _idle(gaps: Iterable[Gap], count: int) -> dict[str, float]:
    times: dict[str, float] = {}
    for gap in gaps:
        times[gap.why] = times.get(gap.why, 0.0) + gap.time / 1000 / count
    return dict(sorted(times.items(), key=lambda reason: -reason[1]))


def _by_precision(items: Iterable[TimedWork], count: int) -> tuple[PrecisionTotal, ...]:
    rows: dict[str, list[float]] = {}
    for item in items:
        if item.gemm is not None and item.placed.is_gemm:
            row = rows.setdefault(item.gemm.precision, [0.0, 0.0, 0.0])
            row[0] += (not item.gemm.reduces) / count
            row[1] += item.share / 1000 / count
            row[2] += item.gemm.flops / count
    return tuple(
        PrecisionTotal(precision=precision, count=row[0], time_ms=row[1], flops=row[2])
        for precision, row in sorted(rows.items(), key=lambda row: -row[1][1])
    )


def _unknown(items: Iterable[TimedWork], count: int) -> tuple[UnknownKernel, ...]:
    """Kernels of no known class, the longest first."""
    sums: dict[str, tuple[float, float]] = {}
    for item in items:
        if item.placed.name == "other":
            time, times = sums.get(item.work.name, (0.0, 0.0))
            sums[item.work.name] = time + item.share / 1000 / count, times + 1 / count
    kernels = [UnknownKernel(name=name, time_ms=time, count=times) for name, (time, times) in sums.items()]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.time_ms))


def micro_batches(view: TraceView) -> int:
    """How many micro-batches a step runs: one for each forward that follows backward, or more.

    In a pipeline several forwards run before the first backward: they are counted by the usual number of GEMMs of one forward.
    """
    counts = []
    for items in view.by_step():
        launched = sorted(
            (item for item in items if item.gemm is not None and item.scope.launched is not None),
            key=lambda item: item.scope.launched or 0.0,
        )
        phases = [item.scope.phase for item in launched if item.scope.phase in ("forward", "backward")]
        counts.append(sum(forwards([len(list(run)) for phase, run in groupby(phases) if phase == "forward"])))
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
