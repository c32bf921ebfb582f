"""What all searches for causes share: the evidence of a step, how fast its GPU can be, what recording it cost,
and how a cause is made from them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median
from typing import Any, Literal

from gemmscope import units
from gemmscope.engine.kernels import CAST_SHARE
from gemmscope.explain.gemms import WEIGHTS
from gemmscope.explain.recorded_trace import RecordedTrace, as_list
from gemmscope.explain.step_replay import StepChange, StepGraph, replayed_speedup, step_graphs
from gemmscope.explain.timeline import LATE, OTHER_STREAM, UNKNOWN_LAUNCH, Gap
from gemmscope.explain.trace_view import HOST, TimedWork, TraceView
from gemmscope.explain.work_class import BF16, FP8, LOW, UNKNOWN_PRECISION, WEIGHT_ONLY
from gemmscope.findings import Fact, Finding, finding
from gemmscope.gpu.specs import spec_of
from gemmscope.grouping import grouped, largest_sums
from gemmscope.parts import StepPart
from gemmscope.recipe.precisions import precision_in_traces
from gemmscope.results.explain import Cause, StepAccount
from gemmscope.toml import load_data

USUAL = 0.7  # of the peak, where nobody has measured what large GEMMs reach on the GPU
# A cause that gains less than so much of its cost gets a reason: the CPU, if that takes so much of the step that is left
LESS, HOST_LIMIT = 0.6, 0.95
# The same kernels took 8% longer on an H200 that was never idle than on one that was idle for half of the step, and attention 6%
# less where the GEMMs around it ran in FP8 (tests/data/traces); `CHANGED`: from so much of the step that a fix gains
CLOCKS, CHANGED = 0.08, 0.1
RECORDED = (*LATE, UNKNOWN_LAUNCH)  # idle time that may be due to the recording
SPREAD = 1.03  # of the least speedup: a smaller range is not shown
GAINED = 1.005  # least speedup of a cause that is listed
NAMED = 0.03  # of the step: causes that cost less are not reported
WELL_NAMED = 0.95  # of GPU time in kernels of a known class, below which nothing is said about low precision
MOST_SPANS = 2000  # of one cause in a trace viewer
LARGE_FLOPS = 5e10  # of a GEMM that fills the GPU
CAUSES: dict[str, Any] = load_data("gemmscope.explain", "causes.toml")
# Parts of kernel names that say more than the template that they are an argument of
TELLING_ARGUMENTS = ("float8_copy", "AbsFunctor", "FillFunctor", "direct_copy", "CUDAFunctor_add", "MulFunctor")

CUTLASS_KERNEL = re.compile(r"cutlass\w*::Kernel2?<(cutlass\w+)>")  # whose argument is the name


class StepEvidence:
    """A trace's steps and their account, with the quantities that several searches need."""

    def __init__(self, view: TraceView, account: StepAccount) -> None:
        self.view, self.account = view, account
        self.items, self.step_ms = view.items(), account.step_ms
        self.recording = RecordingCost(view.trace, account)
        self.gpu = gpu_rates(view.trace.gpu_name)
        self.has_fp8 = has_fp8(view.trace.gpu_name, view.trace.gpu_properties)
        """Whether the GPU multiplies in FP8; None if the trace does not show it."""
        self.well_named = account.named_share >= WELL_NAMED or not account.busy_ms
        """Whether nearly all GPU time is in kernels of a known class."""

    def cause(
        self, code: str, cost_ms: float, evidence: Iterable[Finding], kernels: Iterable[TimedWork] = (), where: str = "",
        label: str = "", *, marked: Iterable[TimedWork] | None = None, shortened: Iterable[TimedWork] | None = None,
        gaps: Sequence[Gap] = (), removed: bool = False, costs_ms: tuple[float, float] | None = None, more_launches: float = 0.0,
    ) -> Cause:  # fmt: skip
        """A cause with its title and advice: for the frameworks in use first, then what holds for every training.

        Its speedup is that of the replayed step: without these `gaps`, or with the time of the `shortened` work (the kernels, if
        none is given) less by the cost. `removed`: so much of that work would not be launched at all. `label`: of the gaps in a
        trace viewer, or of the `marked` work (the kernels, if none is given). `costs_ms`: the least and the largest cost, where
        the fix decides; `more_launches`: of kernels that the fix may add.
        """
        entry, kernels = CAUSES[code], list(kernels)
        amd = "amd" in entry and is_amd(self.view.trace.gpu_name, self.view.trace.gpu_properties)
        phase = self.view.trace.phase
        advice = [line for name in phase.frameworks for line in entry.get(name, ()) if not amd]
        others = [line for name, lines in entry.get("without", {}).items() if name not in phase.frameworks for line in lines]
        spans = [(gap.begin, gap.end, label) for gap in gaps]
        if label and not gaps:
            spans = [(item.work.start, item.work.end, label) for item in (kernels if marked is None else marked)]
        work = kernels if shortened is None else list(shortened)
        speedup = self._speedup(cost_ms, work, gaps, removed)
        limits = [self._speedup(cost, work, gaps, removed) for cost in costs_ms or ()]
        between = self._range(speedup, limits, work, gaps, more_launches)
        ranged = [_why_ranged(*between, entry.get("range", ""))] if between else []
        return Cause(
            code=code,
            title=entry["title"],
            cost_ms=cost_ms,
            speedup_without=speedup,
            speedup_range=between,
            evidence=(*evidence, *ranged, *self._less_gained(cost_ms, speedup)),
            kernels=main_kernels(kernels),
            where=where,
            advice=(*advice, *entry["amd" if amd else "do"], *others),
            spans=tuple(spans[:MOST_SPANS]),
        )

    def _less_gained(self, cost_ms: float, speedup: float) -> Iterator[Finding]:
        """Why a cause gains much less than it costs: without it, the step is limited by something else."""
        gained_ms = self.step_ms * (1 - 1 / speedup)
        if gained_ms < LESS * cost_ms:
            code = "cause-gain-host" if self._host_ms > HOST_LIMIT * (self.step_ms - gained_ms) else "cause-gain-hidden"
            yield finding(code, cost_ms=cost_ms, gained_ms=gained_ms, host_ms=self._host_ms)

    def _range(
        self, speedup: float, limits: Sequence[float], work: Sequence[TimedWork], gaps: Sequence[Gap], more_launches: float
    ) -> tuple[float, float] | None:
        """The least and the largest speedup, if the trace cannot show it: the clock of the GPU depends on how busy it is and on
        the precision, the CPU needs time for more launches, and these may be late only because they were recorded."""
        if not limits and not gaps:
            return None
        step_ms = self.step_ms
        low, high = (step_ms / one for one in limits or (speedup, speedup))
        clock_ms = CLOCKS * min((1 - 1 / speedup) / CHANGED, 1.0) * (self.account.busy_ms - self.ms(work))
        if more_launches:
            low, high = max(low, self._host_ms + more_launches * self._launch_ms), high - clock_ms
        elif any(gap.why == OTHER_STREAM or (gap.why in RECORDED and self.recording.plain_ms is None) for gap in gaps):
            low = step_ms
        else:
            low += clock_ms
        result = max(step_ms / low, 1.0), step_ms / max(high, 1e-9)
        return result if result[1] > SPREAD * result[0] else None

    @cached_property
    def _host_ms(self) -> float:
        """The CPU's own time for a step."""
        return self.step_ms * sum(graph.host_us for graph in self.graphs) / sum(graph.step.time for graph in self.graphs)

    @cached_property
    def _launch_ms(self) -> float:
        """The usual time from one launch to the next."""
        return median([node.launching for graph in self.graphs for node in graph.nodes] or [0.0]) / 1000

    def _speedup(self, cost_ms: float, shortened: Sequence[TimedWork], gaps: Sequence[Gap], removed: bool) -> float:
        if gaps:
            return replayed_speedup(self.graphs, StepChange(gaps=gaps))
        time_ms = self.ms(shortened)
        if time_ms <= 0.95 * cost_ms:
            return self.step_ms / max(self.step_ms - cost_ms, 1e-9)
        share = min(max(cost_ms / time_ms, 0.0), 1.0)
        return replayed_speedup(self.graphs, StepChange.shorten(shortened, share, removed=removed))

    @cached_property
    def graphs(self) -> list[StepGraph]:
        return step_graphs(self.view)

    @cached_property
    def rates(self) -> dict[str, float]:
        """TFLOP/s of large GEMMs of linears by precision."""
        large = [item for item in self.items if item.gemm.flops >= LARGE_FLOPS and item.work.time > 0]
        large = [item for item in large if "bmm" not in item.gemm.layer]
        return {precision: tflops(items) for precision, items in grouped((item.gemm.precision, item) for item in large).items()}

    @cached_property
    def ratio(self) -> float:
        """Speedup of low-precision GEMMs over BF16: from this trace, else the usual value."""
        low = [self.rates[precision] for precision in LOW if precision in self.rates]
        if low and BF16 in self.rates:
            return max(max(low) / self.rates[BF16], 1.05)
        present = {item.gemm.precision for item in self.items}
        known = precision_in_traces()
        return max((known[name].usual_ratio for name in LOW if name in present), default=known[FP8].usual_ratio)

    def of_class(self, name: str) -> list[TimedWork]:
        return [item for item in self.items if item.name == name]

    @cached_property
    def gemms(self) -> list[TimedWork]:
        """The GEMMs of linears, without those of attention and of the output head."""
        gemms = [item for item in self.items if item.work_class.is_gemm and item.scope.phase != "optimizer"]
        return [item for item in gemms if not item.gemm.head and "bmm" not in item.gemm.layer]

    @cached_property
    def low(self) -> list[TimedWork]:
        return [item for item in self.gemms if item.gemm.low]

    @cached_property
    def high(self) -> list[TimedWork]:
        """GEMMs in BF16 or above. Those of unknown precision, or with weights in fewer bits, are neither high nor low."""
        neither = (UNKNOWN_PRECISION, *WEIGHT_ONLY)
        return [item for item in self.gemms if not item.gemm.low and item.gemm.precision not in neither]

    @cached_property
    def known_weight(self) -> float:
        """The weight of the GEMMs of linears whose precision is known."""
        return self.weight(self.low) + self.weight(self.high)

    @property
    def precision_known(self) -> bool:
        """Whether the trace shows the precision of most GEMMs."""
        return self.known_weight > 0 and self.known_weight >= 0.5 * self.weight(self.gemms)

    @cached_property
    def unknown_share(self) -> float:
        """Share of the time of linears in GEMMs whose precision the trace does not show."""
        unknown = self.ms(item for item in self.gemms if item.gemm.precision == UNKNOWN_PRECISION)
        return unknown / (self.ms(self.gemms) or 1.0)

    @property
    def low_is_certain(self) -> bool:
        """Whether kernels and the precision of GEMMs are known well enough to say that low precision is not used."""
        return self.precision_known and self.well_named and self.unknown_share <= 1 - WELL_NAMED

    @cached_property
    def casts(self) -> list[TimedWork]:
        return self.of_class("quantization")

    def ms(self, items: Iterable[TimedWork]) -> float:
        """Milliseconds per step."""
        return sum(item.share for item in items) / 1000 / self.view.count

    def time_facts(self, time_ms: float) -> dict[str, Fact]:
        """A time and its share of the step, for a finding."""
        return {"time_ms": time_ms, "share": time_ms / self.step_ms}

    def per_step(self, items: Sequence[Any]) -> float:
        return len(items) / self.view.count

    def weight(self, items: Iterable[TimedWork]) -> float:
        """FLOPs where they are known, else microseconds: the unit in which shares of GEMMs are counted."""
        return sum(item.gemm.flops if self.flops_known else item.share for item in items)

    @cached_property
    def flops_known(self) -> bool:
        gemms = [item.gemm for item in self.gemms if not item.gemm.reduces]
        return bool(gemms) and sum(gemm.flops > 0 for gemm in gemms) >= 0.95 * len(gemms)

    @property
    def share_of(self) -> Literal["FLOPs", "time"]:
        return "FLOPs" if self.flops_known else "time"

    @cached_property
    def low_share(self) -> float:
        """Share of the linears' GEMMs of known precision that ran in low precision."""
        return self.weight(self.low) / self.known_weight if self.known_weight else 0.0

    @property
    def is_low(self) -> bool:
        """Whether any linears run in low precision."""
        return self.low_share >= 0.01

    @property
    def gain_ms(self) -> float:
        """Time that the low-precision GEMMs save over BF16."""
        return self.ms(self.low) * (self.ratio - 1)

    @cached_property
    def casting_ms(self) -> float:
        """Time of quantization itself; of a kernel that also does a norm or an activation, its share."""
        fused = [item for item in self.casts if item.work_class.fused]
        return self.ms(item for item in self.casts if not item.work_class.fused) + CAST_SHARE * self.ms(fused)


def _why_ranged(low: float, high: float, reason: str) -> Finding:
    """What decides where in its range a speedup lies."""
    if reason:
        return finding("cause-range", low=low, high=high, reason=reason)
    return finding("cause-range-clock" if low > 1.0 else "cause-range-recording", low=low, high=high)


def main_kernels(items: Iterable[TimedWork], count: int = 2) -> tuple[str, ...]:
    """The names of the kernels that took the most time."""
    names = largest_sums((item.work.name, item.share) for item in items)
    return tuple(map(short_name, list(names)[:count]))


def short_name(name: str) -> str:
    """A kernel's name without its template arguments.

    >>> short_name("void at::native::reduce_kernel<512, 1, Op<float>>(Op)"), short_name("nvjet_sm90_tst_128x64")
    ('at::native::reduce_kernel', 'nvjet_sm90_tst_128x64')
    >>> short_name("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64>(cutlass_80_simt_sgemm_128x64::Params)")
    'cutlass_80_simt_sgemm_128x64'
    """
    plain = units.CONDITION.sub("", name).removeprefix("void ").replace("(anonymous namespace)::", "")
    if cutlass := CUTLASS_KERNEL.match(plain):
        return cutlass[1][:100]
    cut = min((at for at in (plain.find("<"), plain.find("(")) if at > 0), default=len(plain))
    inner = next((f" ({argument})" for argument in TELLING_ARGUMENTS if argument in name), "")
    return plain[:cut][:100] + (inner if cut < len(plain) else "")


def tflops(items: Sequence[TimedWork]) -> float:
    """TFLOP/s of GEMMs together."""
    return sum(item.gemm.flops for item in items) / sum(item.work.time for item in items) / 1e6


def sizes_of(items: Iterable[TimedWork], count: int = 3) -> list[str]:
    """The sizes of GEMMs as MxKxN, most time first."""
    sizes = largest_sums((item.gemm.size, item.share) for item in items if item.gemm.size)
    return ["x".join(map(str, size)) for size in list(sizes)[:count]]


@dataclass(frozen=True)
class GpuRates:
    """Peak rates in TFLOP/s by format. `usual`: the share of them that large GEMMs reach in training, where it was measured."""

    peaks: dict[str, float]
    bandwidth_tbps: float
    usual: float | None = None

    def peak(self, precision: str) -> float | None:
        """The rate that holds for this precision, the first that the GPU has. Weights in fewer bits are multiplied in BF16."""
        known = precision_in_traces().get(BF16 if precision.endswith(WEIGHTS) else precision)
        return next((self.peaks[name] for name in (known.rates if known else ()) if name in self.peaks), None)

    def least_us(self, precision: str, flops: float, size_bytes: float) -> float | None:
        """What a GEMM takes at the usual rate, or at the bandwidth of the memory."""
        times = self.times_us(precision, flops, size_bytes)
        return max(times[0] / (self.usual or USUAL), times[1]) if times else None

    def times_us(self, precision: str, flops: float, size_bytes: float) -> tuple[float, float] | None:
        """What the FLOPs of a GEMM take at the peak, and its bytes at the bandwidth of the memory."""
        peak, bandwidth = self.peak(precision), self.bandwidth_tbps
        return (flops / peak / 1e6, size_bytes / bandwidth / 1e6 if bandwidth else 0.0) if peak else None


@cache
def gpu_rates(name: str) -> GpuRates | None:
    """The GPU with this driver name; None if it is not known.

    >>> gpu_rates("NVIDIA H200").peak("BF16"), gpu_rates("Tesla V100-SXM2-16GB").peak("FP16"), gpu_rates("NVIDIA Something")
    (989.0, 125, None)
    """
    if (spec := spec_of(name)) is not None:
        return GpuRates(dict(spec.tflops), spec.bandwidth_tbps, spec.usual_share)
    rules = (rule for rule in load_data("gemmscope.gpu", "other_gpus.toml")["gpu"] if re.search(rule["device"], name))
    return next((GpuRates(rule["tflops"], rule["bandwidth_tbps"]) for rule in rules), None)


def has_fp8(name: str, properties: dict[str, Any]) -> bool | None:
    """Whether the GPU multiplies in FP8: by its table, its name, or the compute capability in the trace; None if nothing shows
    it.

    >>> has_fp8("NVIDIA H100 80GB HBM3", {}), has_fp8("Tesla V100-SXM2-16GB", {}), has_fp8("AMD Instinct MI250X", {})
    (True, False, False)
    >>> has_fp8("", {"computeMajor": 7, "computeMinor": 5, "warpSize": 32}), has_fp8("", {}), has_fp8("AMD Something", {})
    (False, None, None)
    """
    rates, facts = gpu_rates(name), load_data("gemmscope.gpu", "other_gpus.toml")["no_fp8"]
    if rates is not None:
        return "fp8" in rates.peaks
    if shown := re.search(f"({facts['names']})|{facts['have']}", name):
        return shown[1] is None
    capability = compute_capability(properties)
    if capability is None or is_amd(name, properties):
        return None
    return capability >= float(facts["first_capability"])


def is_amd(name: str, properties: dict[str, Any]) -> bool:
    """Whether this is a GPU of AMD: by its name, or the width of its wavefronts.

    >>> is_amd("AMD Instinct MI300X", {}), is_amd("", {"warpSize": 64}), is_amd("NVIDIA H100", {"warpSize": 32})
    (True, True, False)
    """
    return re.search(r"\bAMD\b|Instinct|Radeon|\bMI\d+", name) is not None or (not name and properties.get("warpSize") == 64)


def compute_capability(properties: dict[str, Any]) -> float | None:
    """The compute capability as a number, such as 8.9; None if it is not known.

    >>> compute_capability({"computeMajor": 8, "computeMinor": 9}), compute_capability({"computeMajor": "x"})
    (8.9, None)
    """
    major, minor = properties.get("computeMajor"), properties.get("computeMinor", 0)
    whole = all(isinstance(part, int) and not isinstance(part, bool) and 0 <= part < 100 for part in (major, minor))
    return float(f"{major}.{minor}") if whole else None


@dataclass(frozen=True)
class RecordingCost:
    """How much longer the recorded steps of a trace took than steps without the profiler, which slows launches. `trace_me` times
    steps before it records; other traces only show which options were on."""

    trace: RecordedTrace
    account: StepAccount

    @cached_property
    def plain_ms(self) -> float | None:
        """A step without the profiler; None where that was not timed."""
        times = [time for time in as_list(self.trace.facts.get("plain_steps_ms")) if isinstance(time, (int, float)) and time > 0]
        return median(times) if times else None

    @property
    def host_ms(self) -> float:
        """The time in which the recorded step waits for launches, not for other work of the CPU."""
        return sum(self.account.idle_ms.get(why, 0.0) for why in LATE)

    @property
    def excess_ms(self) -> float:
        """The part of that which only the recorded step has; 0 where it is not known."""
        return min(max(self.account.step_ms - (self.plain_ms or self.account.step_ms), 0.0), self.host_ms)

    @property
    def unknown(self) -> bool:
        """Whether the step might be faster without the profiler, and nobody timed it."""
        slows = bool(self.trace.slowing_options) and self.host_ms > NAMED * self.account.step_ms
        return slows and self.plain_ms is None

    @property
    def step_ms(self) -> float:
        """The step without what recording adds, as far as that is known."""
        return self.account.step_ms - self.excess_ms

    @property
    def parts_ms(self) -> dict[StepPart, float]:
        """The parts of that step."""
        times = self.account.parts_ms
        return times | {HOST: times[HOST] - self.excess_ms} if self.excess_ms else times

    def findings(self) -> Iterator[Finding]:
        """What recording changed in this trace, or may have changed."""
        facts = {"step_ms": self.account.step_ms, "host_ms": self.host_ms}
        if self.unknown:
            yield finding("recording-may-slow", options=sorted(self.trace.slowing_options), **facts)
        elif self.excess_ms > NAMED * self.account.step_ms:
            yield finding("recording-slows", plain_ms=self.plain_ms or 0.0, excess_ms=self.excess_ms, **facts)
