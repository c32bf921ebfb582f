"""The tables of an `ExplainResult`: GEMMs by shape, attention, collectives, kernels, launches, idle time, the allocator."""

from typing import Literal

from gemmscope.results.base import Part


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


class AttentionTotal(Part):
    """The attention kernels of one shape and pass, per step."""

    backend: str
    pass_name: Literal["forward", "backward", ""] = ""
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


class LaunchStatistics(Part):
    """How the CPU feeds the GPU. Counts are per step."""

    launches: float
    short_kernels: float
    """Kernels that run for less than 10 µs."""
    short_ms: float
    delay_median_us: float | None = None
    """From the launch on the CPU to the begin on the GPU."""
    delay_p90_us: float | None = None
    queue_mean: float | None = None
    """Kernels and copies that are launched and have not begun, at each launch."""
    queue_most: int | None = None
    queue_empty_share: float | None = None
    """Share of launches at which nothing else was queued or running."""


class IdleFrame(Part):
    """Idle time of the GPU by what the CPU did meanwhile, per step."""

    frame: str
    kind: Literal["annotation", "operator", "GPU API call", "Python function", "nothing recorded"]
    gaps: float
    time_ms: float


class AllocatorCall(Part):
    """Calls that allocate or free GPU memory, per step: the caching allocator makes none in a steady state."""

    name: str
    count: float
    time_ms: float


class MemoryPoint(Part):
    """Memory of the GPU at one moment, in bytes."""

    time_ms: float
    """From the beginning of the first step."""
    allocated: float
    reserved: float


class ExplainTables(Part):
    """The tables of a recorded step."""

    gemm_shapes: tuple[GemmShapeTotal, ...] = ()
    attention: tuple[AttentionTotal, ...] = ()
    collectives: tuple[CollectiveTotal, ...] = ()
    kernels: tuple[TopKernel, ...] = ()
    launches: LaunchStatistics | None = None
    idle_frames: tuple[IdleFrame, ...] = ()
    allocator: tuple[AllocatorCall, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
