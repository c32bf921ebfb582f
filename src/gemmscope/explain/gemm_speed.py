"""How fast the GEMMs of a step are: by shape, and how close they come to what the GPU can do; and why some are slow: the GPU runs
below its speed, or the sizes do not fit its tensor cores."""

from collections.abc import Iterator, Sequence
from math import gcd
from statistics import median
from typing import Any

from gemmscope.explain.gemms import HIGH_BYTES, Size
from gemmscope.explain.recorded_trace import as_list, as_table
from gemmscope.explain.step_evidence import LARGE_FLOPS, StepEvidence, main_kernels, sizes_of, tflops
from gemmscope.explain.trace_view import TimedWork
from gemmscope.findings import Fact, Finding, finding
from gemmscope.gpu import UNHEALTHY_THROTTLING
from gemmscope.grouping import grouped, largest_sums
from gemmscope.recipe.precisions import precision_in_traces
from gemmscope.results.explain import Cause, GemmShapeTotal

SLOW_CLOCK = 0.55  # of the highest clock
SLOW_RATE = 0.6  # of the rate that large GEMMs usually reach on this GPU
IMPOSSIBLE_RATE = 0.02  # of the peak: no clock is that slow, so the times in the file are not microseconds
LOADED_BYTES = 16  # that tensor cores load at once
TOO_SLOW = 2.0  # times what the FLOPs or bytes of a GEMM need
SMALLEST = 256  # of all sides of a GEMM that can fill the GPU
POOR, ALIKE = 0.8, 4.0  # of the rate of shapes whose FLOPs differ by less than this factor
MOST_SHAPES = 200

Key = tuple[Size, int, str]  # size, GEMMs in one kernel, precision


def gemm_causes(step: StepEvidence) -> Iterator[Cause]:
    """All causes, in no order."""
    yield from _throttled(step)
    yield from _slow_shapes(step)


def _throttled(step: StepEvidence) -> Iterator[Cause]:
    """A GPU that ran slowly: by the clock recorded with the trace, else if the best GEMM of every precision is slow for it."""
    clock, slow, busy_ms = recorded_clock(step.view.trace.facts), _slow_gemms(step), step.account.busy_ms
    computing = [item for item in step.items if item.work_class.rank == 0]
    if clock is not None:
        mean, highest, reasons = clock
        bad = [reason for reason in reasons if reason in UNHEALTHY_THROTTLING]
        evidence = [finding("cause-throttle-reasons", reasons=bad)] if bad else []
        if (
            mean < SLOW_CLOCK * highest
            and (slow or step.gpu is None or step.gpu.usual is None or not step.rates)
            and step.account.idle_share < 0.5
        ):
            evidence = [finding("cause-clock", clock_mhz=mean, highest_mhz=highest, reasons=reasons or ["a clock lock"])]
        if evidence:
            lost = max(1 - mean / (0.8 * highest), 0.0)
            yield step.cause("throttled", busy_ms * lost, [*evidence, *slow], shortened=computing)
    elif slow and step.gpu is not None and step.gpu.usual is not None:
        share = max(_peak_shares(step, best_rates(step)).values()) / step.gpu.usual
        yield step.cause("throttled", busy_ms * max(1 - share, 0.0), slow, shortened=computing)


def recorded_clock(facts: dict[str, Any]) -> tuple[float, float, list[str]] | None:
    """Mean SM clock in MHz during the recording, the highest possible, and the throttle reasons; None if not recorded."""
    clock = as_table(facts.get("clock"))
    readings = [reading for reading in map(as_table, as_list(clock.get("readings"))) if _is_clock(reading.get("sm_mhz"))]
    highest = clock.get("max_sm_mhz")
    if not readings or not _is_clock(highest):
        return None
    reasons = sorted({str(reason) for reading in readings for reason in as_list(reading.get("throttle"))})
    return sum(reading["sm_mhz"] for reading in readings) / len(readings), float(highest or 0.0), reasons


def _is_clock(value: Any) -> bool:
    """Whether this is a plausible clock rate.

    >>> _is_clock(1980), _is_clock(float("nan")), _is_clock("1980"), _is_clock(True)
    (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e6


def best_rates(step: StepEvidence) -> dict[str, float]:
    """TFLOP/s of the fastest size of each precision, among GEMMs that are large in every direction."""
    fit = [item for item in step.items if item.gemm.flops >= LARGE_FLOPS and item.work.time > 0 and item.gemm.size]
    large = [item for item in fit if min(item.gemm.sides) >= SMALLEST and not _misaligned(item)]
    best: dict[str, float] = {}
    for (precision, _), items in grouped(((item.gemm.precision, item.gemm.sides), item) for item in large).items():
        best[precision] = max(best.get(precision, 0.0), tflops(items))
    return best


def _peak_shares(step: StepEvidence, rates: dict[str, float]) -> dict[str, float]:
    """Rates as shares of the GPU's peak, where that is known."""
    known = precision_in_traces()
    measured = [name for name in rates if name in known and known[name].timed_as]
    peaks = {name: step.gpu.peak(name) for name in measured} if step.gpu is not None else {}
    return {name: rates[name] / peak for name, peak in peaks.items() if peak}


def _slow_gemms(step: StepEvidence) -> list[Finding]:
    """If the best GEMM of every precision is slow; a single slow precision is a matter of its kernels."""
    rates = best_rates(step)
    shares = _peak_shares(step, rates)
    if step.gpu is None or not shares or step.gpu.usual is None:
        return []
    usual, reached = step.gpu.usual, {name: rates[name] for name in shares}
    if any(share > SLOW_RATE * usual or share < IMPOSSIBLE_RATE for share in shares.values()):
        return []
    return [finding("cause-slow-gemms", tflops=reached, shares=shares, usual=usual, gpu=step.view.trace.gpu_name)]


def implausible_times(step: StepEvidence) -> list[Finding]:
    """If GEMMs are so slow or fast for the GPU that the times in the file cannot be microseconds."""
    shares = _peak_shares(step, step.rates).values()
    if not shares or IMPOSSIBLE_RATE <= max(shares) <= 1.5:
        return []
    return [finding("times-not-microseconds", share=max(shares), gpu=step.view.trace.gpu_name)]


def _misaligned(item: TimedWork) -> bool:
    """Whether the rows of an operand begin between the 16 bytes that tensor cores load at once."""
    known = precision_in_traces().get(item.gemm.precision)
    multiple = LOADED_BYTES / known.bytes if known else 1
    return item.gemm.size is not None and any(side % multiple for side in item.gemm.size[1:])


def _slow_shapes(step: StepEvidence) -> Iterator[Cause]:
    """Shapes that run far slower than their sizes need: misaligned ones, and large ones below the rate of their neighbours."""
    best = best_rates(step)
    sized = [item for item in step.items if item.gemm.flops > 0 and item.gemm.size and item.work.time > 0]
    judged = [item for item in sized if item.scope.phase != "optimizer"]
    shapes = grouped(((item.gemm.precision, item.gemm.pass_name, item.gemm.size), item) for item in judged)
    fills = {key: items[0].gemm.flops >= LARGE_FLOPS and min(items[0].gemm.sides) >= SMALLEST for key, items in shapes.items()}
    odd: list[tuple[TimedWork, float]] = []
    for key, items in shapes.items():
        first, rate = items[0], tflops(items)
        if _misaligned(first):
            least = [(item, _least_us(step, item, best)) for item in items]
            slow = [(item, us) for item, us in least if us is not None and item.work.time > TOO_SLOW * us]
            odd += [(item, item.share * (1 - us / item.work.time)) for item, us in slow]
        elif fills[key]:
            others = [own for other, own in shapes.items() if fills[other] and other != key and other[0] == key[0]]
            near = [tflops(own) for own in others if 1 / ALIKE < own[0].gemm.flops / first.gemm.flops < ALIKE]
            if len(near) > 1 and rate < POOR * median(near):
                facts: dict[str, Fact] = {"tflops": rate, "usual": median(near), "precision": key[0], "others": len(near)}
                evidence = finding("cause-poor-gemm", sizes=sizes_of(items), **facts, **step.time_facts(step.ms(items)))
                yield step.cause("poor-gemm", step.ms(items) * (1 - rate / median(near)), [evidence], items, key[1], "slow")
    if odd:
        items = [item for item, _ in odd]
        where = "attention" if all("bmm" in item.gemm.layer for item in items) else ""
        cost_ms = sum(cost for _, cost in odd) / 1000 / step.view.count
        yield step.cause("misaligned", cost_ms, _misfit_facts(step, items, best), items, where, "misaligned")


def _misfit_facts(step: StepEvidence, items: Sequence[TimedWork], best: dict[str, float]) -> list[Finding]:
    precision = next(iter(largest_sums((item.gemm.precision, item.share) for item in items)))
    own = [item for item in items if item.gemm.precision == precision]
    shown: dict[str, Fact] = {"gemms": step.per_step(items), "tflops": tflops(own), "precision": precision}
    multiple = int(LOADED_BYTES / precision_in_traces()[precision].bytes)
    sides = sorted({side for item in own for side in (item.gemm.size or ())[1:] if side % multiple})
    facts = [
        finding("cause-misaligned-gemms", **shown, **step.time_facts(step.ms(items))),
        finding("cause-gemm-sizes", sizes=sizes_of(items)),
        finding("cause-misaligned-sizes", sizes=list(map(str, sides[:5])), multiple=multiple, precision=precision),
    ]
    return facts + ([finding("cause-best-gemm", tflops=best[precision], precision=precision)] if precision in best else [])


def _least_us(step: StepEvidence, item: TimedWork, best: dict[str, float]) -> float | None:
    """What the GEMM would take with sizes that fit: by the GPU's rates, else at the rate of the best GEMM of the step."""
    gemm, known = item.gemm, precision_in_traces().get(item.gemm.precision)
    if gemm.size is None or known is None:
        return None
    if step.gpu is not None:
        return step.gpu.least_us(gemm.precision, gemm.flops, gemm.bytes_in(gemm.precision))
    return gemm.flops / best[gemm.precision] / 1e6 if best.get(gemm.precision) else None


def gemm_shapes(step: StepEvidence) -> tuple[GemmShapeTotal, ...]:
    """The shapes by time, the longest first. GEMMs of unknown size are left out."""
    groups: dict[Key, list[TimedWork]] = {}
    for item in step.items:
        size = item.gemm.size
        if size is not None and min(size) > 0 and item.gemm.flops > 0 and item.work.time > 0:
            batch = max(round(item.gemm.flops / (2.0 * size[0] * size[1] * size[2])), 1)
            groups.setdefault((size, batch, item.gemm.precision), []).append(item)
    rows = [_row(step, key, items) for key, items in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.time_ms)[:MOST_SHAPES])


def _row(step: StepEvidence, key: Key, items: Sequence[TimedWork]) -> GemmShapeTotal:
    (m, k, n), batch, precision = key
    time_us = sum(item.work.time for item in items)
    passes = tuple(sorted({item.gemm.pass_name for item in items} - {""}))
    size_bytes = sum(item.gemm.bytes_in(precision) for item in items)
    flops = sum(item.gemm.flops for item in items)
    times = step.gpu.times_us(precision, flops, size_bytes) if step.gpu is not None else None
    usual = step.gpu.usual if step.gpu is not None else None
    return GemmShapeTotal(
        m=m, n=n, k=k, batch=batch, passes=passes, precision=precision,
        count=step.per_step(items), time_ms=time_us / 1000 / step.view.count, tflops=tflops(items),
        sustained_share=times[0] / usual / time_us if times and usual else None,
        roofline_share=max(times) / time_us if times else None,
        bound="" if times is None else "memory" if times[1] > times[0] else "compute",
        alignment_bytes=alignment(m if passes == ("wgrad",) else k, n, precision), kernel=main_kernels(items, 1)[0],
    )  # fmt: skip


def alignment(inner: int, columns: int, precision: str) -> int:
    """The largest power of two, up to 16, of which the rows of operands and result are a multiple, in bytes.

    >>> alignment(64, 3137, "BF16"), alignment(4096, 4096, "BF16"), alignment(4090, 4096, "FP8")
    (2, 16, 2)
    """
    known = precision_in_traces().get(precision)
    bits = round(8 * (known.bytes if known else HIGH_BYTES))
    whole = gcd(gcd(inner * bits, columns * bits), 8 * LOADED_BYTES)
    return max(whole // 8, 1)
