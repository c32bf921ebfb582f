"""What a bench is asked to do: how to time and for how long, and which sizes of bare GEMMs are possible."""

from dataclasses import dataclass
from typing import Any

from gemmscope.engine.rule import StoppingRule, check_limits
from gemmscope.errors import UserError, option, shown
from gemmscope.recipe.frameworks import backends
from gemmscope.results.bench import BenchSettings, Counts

Shape = tuple[int, int, int]
LARGEST_SIZE = 10**7
MOST_RUNS = 10**6


@dataclass(frozen=True)
class BenchTiming:
    """How to time, and for how long. Fixed counts, if any is given, replace `precision` and `time_limit`."""

    timing: str = "cuda-events"
    """Or "profiler": by the kernels' own timestamps."""
    precision: float = 0.01
    """Continue until every speedup is known this precisely."""
    time_limit: float = 120.0
    """Time limit in seconds."""
    num_warmup: int | None = None
    num_iters: int | None = None
    gpu_warmup: float | None = None
    cache_weights: bool = False
    """Exclude weight quantization from the times, as if weights were quantized once per step."""
    torchao_filter: bool = True
    """Keep the layers in BF16 that torchao's own filter skips."""

    def check(self) -> None:
        """A `UserError` for an invalid value."""
        if self.timing not in ("cuda-events", "profiler"):
            raise UserError(f"{option('timing')} {shown(self.timing)} is not known", "it can be cuda-events or profiler")
        check_limits(self.precision, self.time_limit)
        if self.num_iters is not None and self.num_iters < 1:
            raise UserError(f"{option('num_iters', self.num_iters)} measures nothing", "it must be 1 or more")
        for name in ("num_iters", "num_warmup"):
            if (getattr(self, name) or 0) > MOST_RUNS:
                raise UserError(f"{option(name)} must be at most {MOST_RUNS}, got {getattr(self, name)}", "100 is usual")
        if self.num_warmup is not None and self.num_warmup < 0:
            raise UserError(f"{option('num_warmup', self.num_warmup)} is invalid", "it must be 0 or more")
        if self.gpu_warmup is not None and not 0 <= self.gpu_warmup < float("inf"):
            raise UserError(f"{option('gpu_warmup', f'{self.gpu_warmup:g}')} is invalid", "it is a number of seconds, 0 for none")

    def counts(self) -> Counts | None:
        """Fixed counts, if any was given."""
        names = ("num_warmup", "num_iters", "gpu_warmup")
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return Counts(**given) if given else None

    def settings(self, backend: str, *, for_nsight: bool = False, as_te_benchmark: bool = False) -> BenchSettings:
        """What the worker is told."""
        counts = self.counts()
        # a burst of fixed counts sends nothing until its end, and may be as long as was requested
        fixed: dict[str, Any] = {"max_rounds": counts.rounds, "silence_s": 3600.0} if counts else {}
        if backend in backends("cpu"):  # it has no clock to settle
            fixed |= {"drop_ms": 5.0, "keep_ms": 30.0}
        return BenchSettings(
            backend,
            counts=counts,
            timing="profiler" if self.timing == "profiler" else "cuda-events",
            cache_weights=self.cache_weights,
            filter_layers=self.torchao_filter,
            for_nsight=for_nsight,
            as_te_benchmark=as_te_benchmark,
            **fixed,
        )

    def rule(self) -> StoppingRule:
        """When to stop; with fixed counts, never before the worker does."""
        if self.counts():
            return StoppingRule(target=-1.0, longest_s=float("inf"))
        return StoppingRule(target=self.precision, least_rounds=2, longest_s=self.time_limit)


DEFAULT_TIMING = BenchTiming()


def check_te_benchmark(*, model: bool, cache_weights: bool) -> None:
    """A `UserError` for what does not go together with counting as Transformer Engine's script does. `model`: not bare
    GEMMs."""
    name = option("as_te_benchmark")
    if not model:
        raise UserError(
            f"{name} applies to the linears of a model; bare GEMMs are already single forward calls", f"remove {name}"
        )
    if cache_weights:
        problem = f"{name} quantizes the weight in every call, but {option('cache_weights')} never does"
        raise UserError(problem, "use only one of them")


def check_shape(shape: Shape) -> None:
    """A `UserError` for sizes that are not those of a matrix."""
    written = "x".join(map(str, shape))
    if min(shape) < 1:
        raise UserError(f"{written} is not a shape: every size must be at least 1", "for example 8192x4096x14336")
    if max(shape) > LARGEST_SIZE:
        raise UserError(f"{shown(written)} is too large: a size can be at most {LARGEST_SIZE}", "for example 8192x4096x14336")
