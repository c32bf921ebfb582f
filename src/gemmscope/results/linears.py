"""The linears of a model (or bare GEMMs) in every recipe and mode, measured or forecast.

`BenchResult` and `ForecastResult` are both made of `Linears`. What was not measured is missing here, and a dash in a table; it is
never a zero. What ran in a different precision than requested has a time but no speedup.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from math import hypot, isfinite

from gemmscope.choices import Mode
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.base import Origin, Part
from gemmscope.workload.cases import Case
from gemmscope.workload.ops import PASSES, Pass

# What is quantized → the passes that it serves. A framework quantizes X, W and dY once each, or the operands of every GEMM again.
QUANTIZED_ONCE: dict[str, tuple[Pass, ...]] = {"X": ("fprop", "wgrad"), "W": ("fprop", "dgrad"), "dY": ("dgrad", "wgrad")}
QUANTIZED_PER_GEMM: dict[str, tuple[Pass, ...]] = {f"for {name}": (name,) for name in PASSES}


def quantization_by_pass(quantize: Mapping[str, float], passes: Iterable[str]) -> dict[str, float]:
    """The quantization time of each pass. That of a tensor that serves several passes is divided among those that run.

    >>> quantization_by_pass({"X": 4.0, "W": 2.0, "dY": 6.0}, ("fprop", "dgrad", "wgrad"))
    {'fprop': 3.0, 'dgrad': 4.0, 'wgrad': 5.0}
    >>> quantization_by_pass({"X": 4.0, "W": 2.0}, ("fprop",))
    {'fprop': 6.0}
    """
    shares = dict.fromkeys(passes, 0.0)
    for label, time in quantize.items():
        served = [name for name in (QUANTIZED_ONCE | QUANTIZED_PER_GEMM)[label] if name in shares]
        for name in served:
            shares[name] += time / len(served)
    return shares


class Evidence(Part):
    """Whether a pass ran in the precision requested, and the kernels that prove it."""

    verdict: str
    """as requested, fallback, emulated or unproven."""
    requested: str
    """Formats of the two operands, and their scales."""
    ran: str
    """What the kernel names show; empty where they show nothing."""
    kernels: tuple[str, ...] = ()


class OpTime(Part):
    """One op in one recipe and mode: milliseconds of one execution."""

    op: str
    recipe: str
    mode: Mode
    total_ms: Interval
    pass_ms: dict[Pass, Interval] = {}
    """Each pass, in autocast with its share of the quantization; empty where the time cannot be split."""
    quantize_ms: dict[str, float] = {}
    """Autocast: quantization by what is quantized (X, W, dY)."""
    host_ms: float = 0.0
    """CPU time to launch it."""
    evidence: dict[Pass, Evidence] = {}
    left_in_baseline: str = ""
    """Why the framework left this op in high precision on purpose; empty if it did not."""
    not_split: str = ""
    """Why the time is not split into passes; empty if it is."""

    @property
    def host_bound(self) -> bool:
        """Launching it takes longer than running it: without CUDA graphs the GPU idles."""
        return self.mode == "autocast" and self.host_ms > self.total_ms.value

    @property
    def fallbacks(self) -> dict[Pass, Evidence]:
        """The passes that did not run in the precision requested, unless the framework left the op out on purpose."""
        if self.left_in_baseline:
            return {}
        return {name: proof for name, proof in self.evidence.items() if proof.verdict == "fallback"}

    @property
    def counts(self) -> bool:
        """Whether its speedup counts as one of the recipe requested."""
        return not self.left_in_baseline and not self.fallbacks

    @property
    def quantization_ms(self) -> float:
        return sum(self.quantize_ms.values())

    @property
    def gemm_ms(self) -> dict[Pass, float]:
        """The passes without their share of the quantization; empty where the time is not split."""
        shares = quantization_by_pass(self.quantize_ms, self.pass_ms)
        return {name: time.value - shares[name] for name, time in self.pass_ms.items()}


class Speedup(Part):
    """One recipe over another: all linears, one op (`op`), or one pass of an op (`pass_name`)."""

    recipe: str
    over: str
    mode: str = ""
    op: str = ""
    pass_name: str = ""
    speedup: Interval


class LinearsTotal(Part):
    """All linears of a recipe: milliseconds of one micro-batch."""

    recipe: str
    mode: Mode
    total_ms: Interval
    quantize_ms: float
    layer_ms: float | None = None
    """One layer, where all layers are alike."""
    pass_ms: dict[Pass, float] = {}
    """One layer's passes; the model's where layers differ."""


class Memory(Part):
    """Bytes of a recipe's linears on one rank: computed from sizes, not measured."""

    recipe: str
    weights_bytes: float
    copies_bytes: float
    """Quantized copies of the weights."""
    kept_bytes: float
    """Inputs kept from forward to backward, of one micro-batch."""


class Winner(Part):
    """The fastest recipe, by the one rule of `find_winner`. `rivals` are too close to call against it."""

    best: str
    speedup: Interval | None
    """Over BF16; null if BF16 itself is the fastest."""
    rivals: tuple[str, ...] = ()

    @property
    def beats_baseline(self) -> bool:
        """Whether the best recipe is faster than BF16 beyond its interval."""
        return self.speedup is not None and self.speedup.above_one


class Linears(Part):
    """Everything about the linears. Look values up with the methods; they know which recipes share kernels."""

    origin: Origin
    cases: tuple[Case, ...]
    recipes: tuple[str, ...]
    modes: tuple[Mode, ...]
    layers: int | None = None
    """How many layers the rank holds, where all are alike."""
    layer_counts: dict[str, int] = {}
    """How often one layer runs each op, where all layers are alike."""
    as_te_benchmark: bool = False
    """Every GEMM is a forward call of its own, as Transformer Engine's GEMM benchmark script runs them: three for each op."""
    cache_weights: bool = False
    """Quantization of the weights is left out: it happens once per step."""
    ops: tuple[OpTime, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    totals: tuple[LinearsTotal, ...] = ()
    memory: tuple[Memory, ...] = ()
    winners: dict[Mode, Winner] = {}

    @property
    def forecast(self) -> bool:
        return self.origin == "forecast"

    @property
    def bare(self) -> bool:
        """Whether these are bare GEMMs of given sizes, not the linears of a model."""
        return not self.as_te_benchmark and all(case.passes == PASSES[:1] for case in self.cases)

    @cached_property
    def _ops(self) -> dict[tuple[str, str, str], OpTime]:
        return {(cell.op, cell.recipe, cell.mode): cell for cell in self.ops}

    @cached_property
    def _speedups(self) -> dict[tuple[str, str, str, str, str], Interval]:
        return {
            (speedup.recipe, speedup.over, speedup.mode, speedup.op, speedup.pass_name): speedup.speedup
            for speedup in self.speedups
        }

    @cached_property
    def _totals(self) -> dict[tuple[str, str], LinearsTotal]:
        return {(total.recipe, total.mode): total for total in self.totals}

    def measured_as(self, name: str, mode: Mode) -> str:
        """The recipe whose numbers stand for this one: pre-quantized, some recipes run the same kernels."""
        return same_kernels(name, mode, self.recipes)

    def columns(self, mode: Mode) -> list[str]:
        """The recipes with numbers of their own in this mode."""
        return [name for name in self.recipes if self.measured_as(name, mode) == name]

    def op_time(self, op: str, name: str, mode: Mode) -> OpTime | None:
        return self._ops.get((op, self.measured_as(name, mode), mode))

    def speedup(self, name: str, mode: Mode, op: str = "", over: str = BASELINE, pass_name: str = "") -> Interval | None:
        """The speedup over another recipe; None if it was not measured, fell back, or both run the same kernels."""
        return self._speedups.get((self.measured_as(name, mode), self.measured_as(over, mode), mode, op, pass_name))

    def total(self, name: str, mode: Mode) -> LinearsTotal | None:
        return self._totals.get((self.measured_as(name, mode), mode))

    def falls_back(self, name: str, mode: Mode, op: str = "") -> bool:
        """Whether any op (or this one) ran in a different precision than requested."""
        return any(
            cell is not None and cell.fallbacks
            for cell in [self.op_time(case.op, name, mode) for case in self.cases if op in ("", case.op)]
        )

    def quantization_share(self, name: str) -> float | None:
        """The share of quantization in the linears' time in autocast mode; None where it is not known."""
        cells = [(cell, case.count) for case in self.cases if (cell := self.op_time(case.op, name, "autocast"))]
        known = [(cell, count) for cell, count in cells if cell.quantize_ms]
        spent = sum(cell.quantization_ms * count for cell, count in known)
        return spent / sum(cell.total_ms.value * count for cell, count in known) if spent else None


def same_kernels(name: str, mode: Mode, names: tuple[str, ...] | list[str]) -> str:
    """The recipe that is measured for this one: pre-quantized, FP8Delayed runs the kernels of FP8Current.

    >>> same_kernels("FP8Delayed", "pre-quantized", ["BF16", "FP8Current", "FP8Delayed"])
    'FP8Current'
    """
    other = recipe(name).same_kernels_as
    return other if mode == "pre-quantized" and other is not None and other in names else name


def linears_total(
    name: str, mode: Mode, total_ms: Interval, cases: tuple[Case, ...], ops: dict[str, OpTime], layer_counts: dict[str, int]
) -> LinearsTotal:
    """The total of all linears of a recipe. `ops`: all ops by name. With `layer_counts`, passes are summed over one layer."""
    counts = layer_counts or {case.op: case.count for case in cases}
    pass_ms = {
        pass_name: sum(ops[op].pass_ms[pass_name].value * count for op, count in counts.items())
        for pass_name in PASSES
        if all(pass_name in ops[op].pass_ms for op in counts)
    }
    return LinearsTotal(
        recipe=name,
        mode=mode,
        total_ms=total_ms,
        quantize_ms=sum(ops[case.op].quantization_ms * case.count for case in cases),
        layer_ms=sum(ops[op].total_ms.value * count for op, count in layer_counts.items()) if layer_counts else None,
        pass_ms=pass_ms,
    )


# --- the winner -----------------------------------------------------------------------------------------------------------

Ratio = Callable[[str, str], Interval | None]


def find_winner(speedups: Mapping[str, Interval], ratio: Ratio) -> Winner:
    """The one rule for calling a winner, used by every command, page and figure.

    The best candidate has the highest speedup of those that are certainly faster than BF16, or of all if none is. It beats
    another one if the interval of *their ratio* lies above one; an error that both sides share cancels in that ratio. Every
    candidate that it does not beat is a rival, BF16 among them: the two are too close to call.

    `speedups`: each candidate over BF16. `ratio(a, b)`: how much faster `a` is than `b`; None if that is not known.

    A ratio without an interval cannot tell two candidates apart.

    >>> gains = {"A": Interval(1.50, 1.40, 1.60), "B": Interval(1.45, 1.35, 1.55)}
    >>> find_winner(gains, lambda a, b: gains[a] if b == "BF16" else Interval(1.034, 1.02, 1.05)).rivals
    ()
    >>> find_winner(gains, lambda a, b: gains[a] if b == "BF16" else Interval(1.034, 0.98, 1.09)).rivals
    ('B',)
    >>> find_winner({**gains, "C": Interval(1.6, 0.9, 2.4)}, lambda a, b: Interval(0.95, 0.6, 1.7)).best
    'A'
    """
    best = _fastest(speedups) if speedups else BASELINE
    if best == BASELINE or speedups[best].value <= 1:
        return Winner(best=BASELINE, speedup=None, rivals=tuple(name for name, gain in speedups.items() if not gain.below_one))
    others = [BASELINE, *(name for name in speedups if name != best)]
    rivals = tuple(name for name in others if not _beats(speedups[best] if name == BASELINE else ratio(best, name)))
    return Winner(best=best, speedup=speedups[best], rivals=rivals)


def independent_ratio(value: float, one: Interval, other: Interval) -> Interval:
    """A ratio with the interval that follows from those of two independent times."""
    reach = hypot(one.half_width, other.half_width)
    return Interval(value, value / (1 + reach), value * (1 + reach)) if isfinite(reach) else Interval(value)


def winner_among(speedups: Mapping[str, Interval], ratio: Ratio, left_out: Collection[str]) -> Winner | None:
    """The winner where some candidates do not count, because they do not fit in memory; None if none is left.

    Where BF16 itself is left out, the best of the others wins, still with its speedup over BF16.

    >>> gains = {"A": Interval(0.9, 0.8, 0.99), "B": Interval(0.5, 0.4, 0.6)}
    >>> winner_among(gains, lambda a, b: Interval(1.8, 1.5, 2.0), ["BF16"]).best
    'A'
    """
    counted = {name: gain for name, gain in speedups.items() if name not in left_out}
    if BASELINE not in left_out:
        return find_winner(counted, ratio)
    if not counted:
        return None
    best = _fastest(counted)
    return Winner(
        best=best, speedup=counted[best], rivals=tuple(name for name in counted if name != best and not _beats(ratio(best, name)))
    )


def _fastest(speedups: Mapping[str, Interval]) -> str:
    """The fastest of those that are certainly faster than BF16; of all, if none is."""
    return max(
        [name for name, speedup in speedups.items() if speedup.above_one] or speedups, key=lambda name: speedups[name].value
    )


def too_close(ratio: Interval | None) -> bool:
    """Whether a ratio calls neither side the faster one: its interval includes one, or is not known."""
    return ratio is None or not (ratio.above_one or ratio.below_one)


def _beats(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.above_one
