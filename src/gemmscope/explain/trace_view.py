"""Everything known about the steps of a trace: each piece of work with its operators, its class, its GEMM and its time; and the
account of where the time went: by part of the step, by class of kernel, and in counts."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gemmscope.engine.kernels import CAST_SHARE
from gemmscope.explain.gemms import NO_GEMM, TracedGemm, traced_gemms
from gemmscope.explain.recorded_trace import GpuWork, RecordedTrace
from gemmscope.explain.scopes import Scope, find_scopes
from gemmscope.explain.steps import RecordedStep, Steps, find_steps
from gemmscope.explain.timeline import HOST_IDLE, NOT_RECORDED, Shares, share_out
from gemmscope.explain.work_class import CLASSES, ORDER, WorkClass, classify_work
from gemmscope.grouping import Key, add_up, grouped, largest_sums
from gemmscope.parts import StepPart, in_order
from gemmscope.results.explain import PrecisionTotal, StepAccount, UnknownKernel

EXPOSED: StepPart = "exposed communication"
HOST: StepPart = "idle, host-bound"
IDLE: StepPart = "idle, other"
UNRECORDED = "GPU busy, kernels not recorded"
TITLES = {name: CLASSES[name]["title"] if name in CLASSES else name for name in ORDER}
ROW_TITLES = {**TITLES, "communication": EXPOSED}  # the time in which nothing else runs
LAST_ROWS = ("communication", "other")
ROWS = (
    *(title for name, title in ROW_TITLES.items() if name not in LAST_ROWS), *(ROW_TITLES[name] for name in LAST_ROWS),
    UNRECORDED, HOST, IDLE,
)  # fmt: skip
PARTS: dict[str, StepPart] = {
    HOST: HOST,
    IDLE: IDLE,
    UNRECORDED: "other",
    **{ROW_TITLES[name]: facts["part"] for name, facts in CLASSES.items()},
}


@dataclass(frozen=True, slots=True)
class TimedWork:
    """One piece of work in one step. `share` is its part of the step's time, in microseconds; `gemm`: NO_GEMM if it is none."""

    index: int
    work: GpuWork
    scope: Scope
    work_class: WorkClass
    share: float
    gemm: TracedGemm

    @property
    def name(self) -> str:
        """The class of the kernel."""
        return self.work_class.name

    def multiplies_in(self, precision: str) -> bool:
        """Whether it is a GEMM, or a convolution, in this precision."""
        own = self.gemm.precision if self.work_class.is_gemm else self.work_class.multiplies
        return own == precision and self.scope.phase != "optimizer"

    def mentions(self, *texts: str) -> bool:
        """Whether the name of the kernel contains one of the texts."""
        return any(text in self.work.name for text in texts)


@dataclass
class TraceView:
    """A trace with its steps. `shares`: how the time of each chosen step is divided; `every_shares`: of each step."""

    trace: RecordedTrace
    steps: Steps
    scopes: list[Scope]
    work_classes: list[WorkClass]
    gemms: dict[int, TracedGemm]
    shares: list[Shares]
    every_shares: list[Shares]

    @cached_property
    def by_step(self) -> list[list[TimedWork]]:
        """The work of each chosen step, in the order it ran."""
        work, scopes, work_classes, gemms = self.trace.work, self.scopes, self.work_classes, self.gemms
        return [
            [
                TimedWork(index, work[index], scopes[index], work_classes[index], share, gemms.get(index, NO_GEMM))
                for index, share in sorted(shares.of.items())
            ]
            for shares in self.shares
        ]

    def indices_in(self, step: RecordedStep) -> range:
        """All work that begins in a step, also what is hidden behind other work."""
        begin, end = (bisect_left(self.trace.work, moment, key=lambda work: work.start) for moment in (step.begin, step.end))
        return range(begin, end)

    def items(self) -> list[TimedWork]:
        return [item for step in self.by_step for item in step]

    @property
    def count(self) -> int:
        """How many steps are averaged."""
        return len(self.steps.chosen)


def view_trace(trace: RecordedTrace, step_count: int | None) -> TraceView:
    """Find the steps and divide the time of each among its work."""
    steps = find_steps(trace, step_count)
    sources = find_scopes(trace)
    work_classes = classify_work(trace, sources)
    gemms = traced_gemms(trace, sources, work_classes)
    shares = share_out(trace, sources, steps.every, [work.rank for work in work_classes], steps.before)
    chosen = shares[len(steps.every) - len(steps.chosen) :]  # only first ones are left out
    return TraceView(trace, steps, sources, work_classes, gemms, chosen, shares)


def counted(pairs: Iterable[tuple[Key, float]]) -> dict[Key, tuple[int, float]]:
    """How many values each key has and their sum, the largest sum first.

    >>> counted([("norms", 1.0), ("loss", 5.0), ("norms", 3.0)])
    {'loss': (1, 5.0), 'norms': (2, 4.0)}
    """
    sums = {key: (len(values), sum(values)) for key, values in grouped(pairs).items()}
    return dict(sorted(sums.items(), key=lambda pair: -pair[1][1]))


def account_of(view: TraceView) -> StepAccount:
    """Milliseconds and counts per step."""
    count, items = view.count, view.items()
    classes = add_up((ROW_TITLES[item.name], item.share / 1000 / count) for item in items)
    busy_ms = sum(classes.values())
    idle = largest_sums((str(gap.why), gap.time / 1000 / count) for shares in view.shares for gap in shares.gaps)
    classes[UNRECORDED] = unrecorded_ms = idle.pop(NOT_RECORDED, 0.0)
    classes[HOST] = sum(time for why, time in idle.items() if why in HOST_IDLE)
    classes[IDLE] = sum(time for why, time in idle.items() if why not in HOST_IDLE)
    classes = {name: classes[name] for name in ROWS if classes.get(name, 0.0) > 0}
    # Work that runs beyond the end of a step counts for the step in which it began.
    steps = zip(view.steps.chosen, view.by_step, strict=True)
    own = [item for step, work in steps for item in work if step.begin <= item.work.start < step.end]
    gemms = [item.gemm for item in own if item.work_class.is_gemm and not item.gemm.reduces]
    casts = sum(item.name == "quantization" for item in own)
    return StepAccount(
        step_ms=sum(step.time for step in view.steps.chosen) / 1000 / count,
        busy_ms=busy_ms,
        unrecorded_ms=unrecorded_ms,
        parts_ms=_parts(classes, items, count),
        classes_ms=classes,
        idle_ms=idle,
        hidden_ms=sum(shares.hidden for shares in view.shares) / 1000 / count,
        overlapped_ms=sum(shares.overlapped for shares in view.shares) / 1000 / count,
        gemms=_by_precision([item for item in items if item.work_class.is_gemm], count),
        kernels=len(own) / count,
        launches=len({item.work.correlation for item in own}) / count,
        micro_batches=_micro_batches(view),
        quantization_kernels=casts / count,
        low_gemms=sum(gemm.low for gemm in gemms) / count,
        named_share=1 - classes.get(TITLES["other"], 0.0) / busy_ms if busy_ms else 0.0,
        unknown=_unknown([item for item in items if item.name == "other"], count),
    )


def _parts(classes: dict[str, float], items: Sequence[TimedWork], count: int) -> dict[StepPart, float]:
    """The classes as parts of a step. The GEMMs of the output head belong to the head, and the share of a fused cast that does a
    norm or an activation belongs to those, as in a measured step."""
    parts = [(PARTS.get(name, "GEMMs"), time) for name, time in classes.items()]
    head = sum(item.share for item in items if item.gemm.head) / 1000 / count
    fused = sum(item.share for item in items if item.name == "quantization" and item.work_class.fused)
    beside = (1 - CAST_SHARE) * fused / 1000 / count
    moved: list[tuple[StepPart, float]] = [("GEMMs", -head), ("head and loss", head)] if head else []
    moved += [("quantization", -beside), ("norms and activations", beside)] if beside else []
    return in_order(add_up([*parts, *moved]))


def _by_precision(items: Sequence[TimedWork], count: int) -> tuple[PrecisionTotal, ...]:
    groups = grouped((item.gemm.precision, item) for item in items)
    rows = [
        PrecisionTotal(
            precision=name,
            count=sum(not item.gemm.reduces for item in own) / count,
            time_ms=sum(item.share for item in own) / 1000 / count,
            flops=sum(item.gemm.flops for item in own) / count,
            sized_ms=sum(item.work.time for item in own if item.gemm.sized) / 1000 / count,
        )
        for name, own in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_ms))


def _unknown(items: Sequence[TimedWork], count: int) -> tuple[UnknownKernel, ...]:
    """The kernels by name, the longest first."""
    times = counted((item.work.name, item.share / 1000 / count) for item in items)
    return tuple(UnknownKernel(name=name, time_ms=time, count=runs / count) for name, (runs, time) in times.items())


def _micro_batches(view: TraceView) -> int:
    """How many micro-batches a step runs."""
    counts = sorted(sum(batches for _, batches in forward_stretches(items)) for items in view.by_step)
    return max(counts[len(counts) // 2], 1) if counts else 1


def forward_stretches(items: Iterable[TimedWork]) -> list[tuple[list[TimedWork], int]]:
    """The work of each stretch of forward in the order of its launches, and how many micro-batches it holds: one for each forward
    that follows backward, or more.

    In a pipeline several forwards run before the first backward: they are counted by the usual number of GEMMs of one forward.
    """
    stretches: list[list[TimedWork]] = [[]]
    launched = (item for item in items if item.scope.launched is not None)
    for item in sorted(launched, key=lambda item: item.scope.launched or 0.0):
        if item.scope.phase == "forward":
            stretches[-1].append(item)
        elif item.scope.phase == "backward" and item.work_class.is_gemm:
            stretches.append([])
    batches = forwards([sum(item.work_class.is_gemm for item in stretch) for stretch in stretches])
    return list(zip(stretches, batches, strict=True))


def forwards(gemms: list[int]) -> list[int]:
    """Micro-batches in each stretch of forward, from the GEMMs in it: the most frequent number is one micro-batch.

    >>> forwards([64]), forwards([64, 64, 64]), forwards([256, 64, 64, 64]), forwards([64, 1]), forwards([])
    ([1], [1, 1, 1], [4, 1, 1, 1], [1, 0], [])
    """
    usual, times = Counter(count for count in gemms if count).most_common(1)[0] if any(gemms) else (1, 2)
    if times < 2:
        usual = max(gemms)
    return [round(count / usual) for count in gemms]
