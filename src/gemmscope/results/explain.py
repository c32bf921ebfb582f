"""The result of `gemmscope explain`: where the time of a recorded step went, and why it is not faster."""

from statistics import median
from typing import Literal

from pydantic import Field

from gemmscope.findings import Finding
from gemmscope.parts import StepPart
from gemmscope.results.base import Part, Result


class PrecisionTotal(Part):
    """The GEMMs of one precision, per step."""

    precision: str
    count: float
    time_ms: float
    flops: float
    """Of the GEMMs whose sizes are known. 0: the trace has no shapes."""
    sized_ms: float = 0.0
    """Time that the GEMMs whose sizes are known ran: `flops` over it is their rate."""

    @property
    def tflops(self) -> float | None:
        """Their rate in TFLOP/s; None if no size is known."""
        time_ms = self.sized_ms or self.time_ms
        return self.flops / time_ms / 1e9 if self.flops > 0 and time_ms else None


class UnknownKernel(Part):
    """A kernel of no known class, per step."""

    name: str
    time_ms: float
    count: float


class StepAccount(Part):
    """Milliseconds and counts per step."""

    step_ms: float
    busy_ms: float
    unrecorded_ms: float = 0.0
    """The GPU was busy, but its kernels are missing from the trace."""
    parts_ms: dict[StepPart, float]
    """Where the time goes; sums to step_ms."""
    classes_ms: dict[str, float]
    """The same by class of kernel, GEMMs by precision; sums to step_ms."""
    idle_ms: dict[str, float]
    """Idle time by reason."""
    hidden_ms: float
    """Communication hidden behind computation; copies do not hide it."""
    overlapped_ms: float
    """Time in which several kernels computed at once."""
    gemms: tuple[PrecisionTotal, ...]
    kernels: float
    launches: float
    micro_batches: int
    quantization_kernels: float
    low_gemms: float
    """GEMMs in low precision."""
    named_share: float
    """Share of GPU time in kernels of a known class."""
    unknown: tuple[UnknownKernel, ...] = ()

    @property
    def idle_share(self) -> float:
        return 1 - (self.busy_ms + self.unrecorded_ms) / self.step_ms if self.step_ms else 0.0

    @property
    def busy_share(self) -> float:
        return self.busy_ms / self.step_ms if self.step_ms else 0.0

    @property
    def hidden_share(self) -> float | None:
        """Share of communication that is hidden behind computation; None without communication."""
        return self.hidden_ms / self.communication_ms if self.communication_ms else None

    @property
    def communication_ms(self) -> float:
        """Time in which communication runs, hidden or exposed."""
        return self.hidden_ms + self.parts_ms.get("exposed communication", 0.0)

    def share(self, *parts: StepPart) -> float:
        """The share of these parts in the time of the step."""
        return sum(self.parts_ms.get(part, 0.0) for part in parts) / self.step_ms if self.step_ms else 0.0


class TracedStep(Part):
    """One step of the trace, in milliseconds."""

    name: str
    time_ms: float
    busy_ms: float
    idle_ms: float
    unrecorded_ms: float = 0.0
    averaged: bool = True
    """False: left out of all averages."""
    slow: bool = False
    extra: str = ""
    """Of a slow step: the class of work or the reason of idle time that takes most time beyond that of a usual step."""
    extra_ms: float = 0.0


class Cause(Part):
    """One reason why the step is not faster. Its title and advice are in `explain/causes.toml`."""

    code: str
    title: str
    cost_ms: float
    """An estimate of the time that the step would save without it."""
    speedup_without: float
    """Of the step, replayed without the cause: with the order of each stream, launches, waits and collectives kept."""
    speedup_range: tuple[float, float] | None = None
    """Where the trace cannot show how large the speedup is: its least and its largest value."""
    evidence: tuple[Finding, ...]
    kernels: tuple[str, ...] = ()
    where: str = ""
    advice: tuple[str, ...] = ()
    spans: tuple[tuple[float, float, str], ...] = Field(default=(), exclude=True, repr=False)
    """Begin, end and label for a trace viewer; not written to run files."""


class PartComparison(Part):
    """One part of the step on both sides, milliseconds per step."""

    part: str
    expected_ms: float | None
    """Null: nothing was predicted for it."""
    trace_ms: float
    speedup: float | None = None
    """Of all parts up to this one."""

    @property
    def difference_ms(self) -> float | None:
        return None if self.expected_ms is None else self.trace_ms - self.expected_ms


class StepComparison(Part):
    """The step compared with its BF16 twin, or with what was predicted for it."""

    title: str
    expected: str
    """What the expected times are."""
    parts: tuple[PartComparison, ...]
    findings: tuple[Finding, ...] = ()


class RankTime(Part):
    """One rank, milliseconds per step."""

    rank: int
    step_ms: float
    computing_ms: float
    exposed_ms: float
    """Exposed communication."""
    idle_ms: float
    waiting_ms: float | None = None
    """In collectives, for ranks that enter them later. Null: the ranks have no collectives in common."""
    last_to_arrive: float | None = None
    """Collectives that this rank enters last."""
    delay_ms: float | None = None
    """How long the others wait for this rank, on average."""


class GemmShapeTotal(Part):
    """The GEMMs of one shape and precision, per step."""

    m: int
    n: int
    k: int
    batch: int = 1
    """How many GEMMs one kernel runs (bmm)."""
    passes: tuple[str, ...] = ()
    precision: str
    count: float
    time_ms: float
    tflops: float
    """TFLOP/s."""
    sustained_share: float | None = None
    """Of the rate that large GEMMs of this precision reach on the GPU. Null: the GPU or the precision is not known."""
    roofline_share: float | None = None
    """Of the time that the GPU's published rate and memory bandwidth allow."""
    bound: Literal["compute", "memory", ""] = ""
    alignment_bytes: int
    """The largest power of two, up to 16, that the rows of all operands are a multiple of."""
    kernel: str
    better: str = ""
    """The recipe in which the same GEMM takes the least time, if that is less than now."""
    better_ms: float | None = None
    """The time of all of them in it, per step, casts of the activations included; a forecast."""


AttentionPass = Literal["forward", "backward", ""]


class AttentionTotal(Part):
    """The attention kernels of one shape and pass, per step."""

    backend: str
    pass_name: AttentionPass = ""
    batch: int | None = None
    heads: int | None = None
    queries: int | None = None
    keys: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    """Null: the trace does not show it."""
    precision: str = ""
    count: float
    time_ms: float
    tflops: float | None = None
    """TFLOP/s. Null: the shape is not recorded."""
    kernel: str
    faster: str = ""
    """A backend that is faster for this shape on this GPU."""
    faster_ms: float | None = None
    """Its time per step, at the rate known for it."""


class CollectiveTotal(Part):
    """The collectives of one kind, process group and size, per step."""

    kind: str
    group: str
    ranks: int
    count: float
    message_bytes: float | None
    """Of one collective on one rank. Null: not recorded."""
    time_ms: float
    exposed_ms: float
    waiting_ms: float | None = None
    """Time in which this rank waits for others; the rest is the transfer. Null: it ran once, and no other rank is given."""
    waiting_from: Literal["other ranks", "shortest of the same size", ""] = ""
    algorithm_gbps: float | None = None
    """Bytes of the message over the time of the transfer, in GB/s."""
    bus_gbps: float | None = None
    """The same in bytes on each link, as NCCL's tests count them."""


class TopKernel(Part):
    """One kernel by name, per step."""

    name: str
    kernel_class: str
    count: float
    time_ms: float
    mean_us: float


FrameKind = Literal["annotation", "operator", "GPU API call", "Python function", "nothing recorded"]


class IdleFrame(Part):
    """Idle time of the GPU by what the CPU did meanwhile, per step."""

    frame: str
    kind: FrameKind
    gaps: float
    time_ms: float


class ExplainTables(Part):
    """The tables of a recorded step."""

    gemm_shapes: tuple[GemmShapeTotal, ...] = ()
    attention: tuple[AttentionTotal, ...] = ()
    collectives: tuple[CollectiveTotal, ...] = ()
    kernels: tuple[TopKernel, ...] = ()
    idle_frames: tuple[IdleFrame, ...] = ()


class ExplainResult(Result):
    """The result of `gemmscope explain`: what a recorded step did, and why it is not faster."""

    kind: Literal["explain"] = "explain"
    trace: str
    gpu: str
    rank: int | None = None
    world_size: int = 1
    steps: int
    steps_found_by: str
    each_step: tuple[TracedStep, ...] = ()
    """All steps of the trace, in order."""
    phase: str = ""
    """What the trace shows: training, a forward pass, an inference server, …; empty if nothing shows it."""
    judged: bool = True
    """Causes and advice are given for training only."""
    account: StepAccount
    low_share: float
    """Share of the linears' FLOPs (of their time, where shapes are not known) in low precision, the output head left out."""
    low_share_of: Literal["FLOPs", "time"]
    framework: str = ""
    verdict: Finding
    causes: tuple[Cause, ...]
    comparisons: tuple[StepComparison, ...] = ()
    ranks: tuple[RankTime, ...] = ()
    straggler: int | None = None
    """The rank that the others wait for."""
    tables: ExplainTables = ExplainTables()

    @property
    def step_range_ms(self) -> tuple[float, float, float] | None:
        """Shortest, median and longest of the averaged steps; None if there is only one."""
        times = [step.time_ms for step in self.each_step if step.averaged]
        return (min(times), median(times), max(times)) if len(times) > 1 else None
