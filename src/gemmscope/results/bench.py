"""The result of `gemmscope bench`: what was measured, sample by sample, and what follows from it."""

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from gemmscope.choices import Timing
from gemmscope.results.base import OneGpuResult, Samples
from gemmscope.results.linears import Linears
from gemmscope.workload.cases import Task


@dataclass(frozen=True)
class Counts:
    """Fixed numbers of runs instead of a precision: `num_iters` of each task in total, spread over a few rounds, `num_warmup`
    before those of each round, and `gpu_warmup` seconds of load before the first."""

    num_warmup: int = 10
    num_iters: int = 100
    gpu_warmup: float = 5.0

    @property
    def rounds(self) -> int:
        return min(5, self.num_iters)


@dataclass(frozen=True)
class BenchSettings:
    """How to measure. A burst runs `drop_ms` to reach its steady state, then `keep_ms` that count."""

    backend: str
    drop_ms: float = 80.0
    keep_ms: float = 750.0  # the power control swings with a period of about 0.8 s: a shorter burst sees a part of a swing
    rest_ms: float = 0.0  # idle time before each burst, which then holds one op alone: the GPU runs at its highest clock
    max_rounds: int = 1_000_000  # in practice no limit: precision and time decide
    counts: Counts | None = None  # instead of a precision and a time limit
    timing: Timing = "cuda-events"
    cache_weights: bool = False  # weights are quantized once per step: the timed micro-batch is not the first
    filter_layers: bool = True  # leave those layers in BF16 that the framework's own filter would leave
    as_te_benchmark: bool = False  # linears are forward calls whose X needs no gradient, as in Transformer Engine's script
    for_nsight: bool = False  # run everything once between cudaProfilerStart and Stop, in NVTX ranges, and time nothing
    silence_s: float = 120.0  # a worker that sends nothing for this long is considered hung
    seed: int = field(default_factory=lambda: random.randrange(1 << 30))  # of the order of bursts


@dataclass(repr=False)
class TaskResult(Samples):
    """One task with its samples, and the kernels of one run."""

    task: Task
    kernels: list[list[Any]] = field(default_factory=list)


class BenchResult(OneGpuResult):
    """The result of `gemmscope bench`: the linears in every recipe and mode, and every sample behind them."""

    kind: Literal["bench"] = "bench"
    settings: BenchSettings
    precision: float | None = None
    """Measured until every speedup was known to this precision."""
    time_limit_s: float | None = None
    """Or until this much time had passed."""
    rounds: int
    linears: Linears
    tasks: tuple[TaskResult, ...]

    @property
    def sample_count(self) -> int:
        return sum(task.sample_count for task in self.tasks)
