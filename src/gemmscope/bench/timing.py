"""What a bench is asked to do: how to time and for how long, and which sizes of bare GEMMs are possible."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from gemmscope.choices import TIMINGS
from gemmscope.engine.rule import StoppingRule, check_limits
from gemmscope.errors import UserError, option, reject, shown
from gemmscope.options.measuring import MeasuringOptions, TimingOptions
from gemmscope.options.values import Shape
from gemmscope.recipe.frameworks import backends
from gemmscope.results.bench import BenchSettings, Counts

LADDER = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bare GEMMs where none are named: squares of these sizes."""
LARGEST_SIZE = 10**7
MOST_RUNS = 10**6
FIXED = ("num_iters", "num_warmup", "gpu_warmup")


def check_timing(options: TimingOptions) -> None:
    """A `UserError` for an invalid value, and for options that exclude each other."""
    fixed = [name for name in FIXED if getattr(options, name) is not None]
    until = [name for name in ("precision", "time_limit") if getattr(options, name) is not None]
    if fixed and until:
        message = f"{option(fixed[0])} measures a fixed number of times, so {option(until[0])} has no effect"
        raise UserError(message, "use only one of them")
    if options.timing not in TIMINGS:
        raise UserError(f"{option('timing')} {shown(options.timing)} is not known", f"it can be {' or '.join(TIMINGS)}")
    check_limits(*limits(options))
    iterations, warmup, seconds = options.num_iters, options.num_warmup, options.gpu_warmup
    reject(
        (
            iterations is not None and iterations < 1,
            f"{option('num_iters', iterations)} measures nothing",
            "it must be 1 or more",
        ),
        *(
            ((runs or 0) > MOST_RUNS, f"{option(name)} must be at most {MOST_RUNS}, got {runs}", "100 is usual")
            for name, runs in (("num_iters", iterations), ("num_warmup", warmup))
        ),
        (warmup is not None and warmup < 0, f"{option('num_warmup', warmup)} is invalid", "it must be 0 or more"),
        (
            seconds is not None and not 0 <= seconds < float("inf"),
            f"{option('gpu_warmup', f'{seconds or 0:g}')} is invalid",
            "it is a number of seconds, 0 for none",
        ),
    )


def limits(options: MeasuringOptions, precision: float = 0.01, time_limit: float = 120.0) -> tuple[float, float]:
    """How precisely every speedup is to be known, and the time limit in seconds: as given, or these."""
    return (
        options.precision if options.precision is not None else precision,
        options.time_limit if options.time_limit is not None else time_limit,
    )


def counts_of(options: TimingOptions) -> Counts | None:
    """Fixed counts, if any was given: they replace precision and time limit."""
    given: dict[str, Any] = {name: value for name in FIXED if (value := getattr(options, name)) is not None}
    return Counts(**given) if given else None


def bench_settings(
    options: TimingOptions, backend: str, *, for_nsight: bool = False, as_te_benchmark: bool = False
) -> BenchSettings:
    """What the worker is told."""
    counts = counts_of(options)
    # a burst of fixed counts sends nothing until its end, and may be as long as was requested
    fixed: dict[str, Any] = {"max_rounds": counts.rounds, "silence_s": 3600.0} if counts else {}
    if backend in backends("cpu"):  # it has no clock to settle
        fixed |= {"drop_ms": 5.0, "keep_ms": 30.0}
    return BenchSettings(
        backend,
        counts=counts,
        timing=options.timing,
        cache_weights=options.cache_weights,
        filter_layers=options.torchao_filter,
        for_nsight=for_nsight,
        as_te_benchmark=as_te_benchmark,
        **fixed,
    )


def stopping_rule(options: TimingOptions) -> StoppingRule:
    """When to stop; with fixed counts, never before the worker does."""
    if counts_of(options):
        return StoppingRule(target=-1.0, longest_s=float("inf"))
    precision, time_limit = limits(options)
    return StoppingRule(target=precision, least_rounds=2, longest_s=time_limit)


def check_te_benchmark(*, model: bool, cache_weights: bool) -> None:
    """A `UserError` for what does not go together with counting as Transformer Engine's script does. `model`: not bare
    GEMMs."""
    name = option("as_te_benchmark")
    bare = f"{name} applies to the linears of a model; bare GEMMs are already single forward calls"
    cached = f"{name} quantizes the weight in every call, but {option('cache_weights')} never does"
    reject((not model, bare, f"remove {name}"), (cache_weights, cached, "use only one of them"))


def check_bare(shapes: Sequence[Shape] | None, *, model: bool) -> None:
    """A `UserError` for bare GEMMs beside a model, and for sizes that are not those of a matrix."""
    if model and shapes is not None:
        raise UserError(f"{option('shapes')} measures bare GEMMs, but a model was given", "use only one of them")
    for shape in shapes or ():
        check_shape(shape)


def check_shape(shape: Shape) -> None:
    """A `UserError` for sizes that are not those of a matrix."""
    if len(shape) != 3 or not all(isinstance(side, Integral) for side in shape):
        raise UserError(f"{shown(shape)} is not a shape: it must be three sizes", "for example (8192, 4096, 14336)")
    written = "x".join(map(str, shape))
    large, example = f"{shown(written)} is too large: a size can be at most {LARGEST_SIZE}", "for example 8192x4096x14336"
    small = f"{written} is not a shape: every size must be at least 1"
    reject((min(shape) < 1, small, example), (max(shape) > LARGEST_SIZE, large, example))
