"""Findings about the linears: fallbacks, failures, ties, slower ops, clocks.

`linear_findings` follow from the times and speedups, measured or forecast; `measurement_findings` only from a measurement.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gemmscope.bench.measurements import Measurements
from gemmscope.choices import Mode
from gemmscope.findings import Fact, Finding, finding
from gemmscope.gpu import UNHEALTHY_THROTTLING
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.recipe.frameworks import backends
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.results.bench import BenchSettings
from gemmscope.results.linears import Evidence, Linears, OpTime
from gemmscope.roles import role_named
from gemmscope.workload.cases import LEAST_BYTES_IN_FLIGHT_OVER_L2, Case

CLOCK_MOVED = 0.15  # between bursts of one recipe and mode


def linear_findings(linears: Linears) -> list[Finding]:
    """Findings that follow from times and speedups, measured or forecast."""
    return [
        *_fallbacks(linears),
        *_unproven(linears),
        *_by_reason("left-in-baseline", ((cell.recipe, cell.left_in_baseline, cell.op) for cell in linears.ops)),
        *_by_reason("not-split", ((cell.recipe, cell.not_split, cell.op) for cell in linears.ops if not cell.left_in_baseline)),
        *_same_kernels(linears),
        *_dgrad(linears),
        *_quantization(linears),
        *_slower(linears),
        *_too_close(linears),
        *_host_bound(linears),
    ]


def measurement_findings(measurements: Measurements, linears: Linears) -> list[Finding]:
    """Findings about the measurement itself."""
    tasks = measurements.tasks.values()
    sums = dict.fromkeys(result.task.recipe for result in tasks if result.facts.get("sum_of"))
    return [
        *([] if linears.ops else [finding("nothing-measured")]),
        *measurements.findings,
        *_by_reason("not-measured", ((result.task.recipe, result.failure, result.task.case.op) for result in tasks)),
        *(finding("measured-as-sum", recipe=name) for name in sums),
        *speedups_leaving_high(linears, measurements.speedup_leaving),
        *([finding("single-round")] if measurements.complete_rounds == 1 else []),
        *_warm_cache(measurements),
        *_slowed_down(measurements, linears),
        *state_findings(
            [state for name in linears.recipes for mode in linears.modes for state in _states(measurements, name, mode)]
        ),
    ]


def fixed_counts(settings: BenchSettings) -> Finding:
    """How a run with fixed counts ended."""
    assert settings.counts is not None
    facts = {"runs": settings.counts.num_iters, "warmup": settings.counts.num_warmup}
    if settings.backend in backends("cpu"):
        return finding("fixed-counts", **facts)
    return finding("fixed-counts-after-load", **facts, seconds=settings.counts.gpu_warmup)


def _fallbacks(linears: Linears) -> Iterator[Finding]:
    def every(proofs: Iterable[Evidence], field: str) -> str:
        return " and ".join(dict.fromkeys(getattr(proof, field) for proof in proofs))

    groups = grouped(
        ((cell.recipe, cell.mode, tuple(proofs), every(proofs.values(), "ran"), every(proofs.values(), "requested")), cell.op)
        for cell in linears.ops
        if (proofs := cell.fallbacks)
    )
    for (name, mode, passes, ran, requested), ops in groups.items():
        yield finding("fallback", ops=ops, recipe=name, mode=mode, passes=list(passes), ran=ran, requested=requested)


def _unproven(linears: Linears) -> Iterator[Finding]:
    """Precisions that kernel names do not prove, or that other kernels emulate: once for each reason."""
    if linears.forecast:
        return
    cells = [cell for cell in linears.ops if not cell.left_in_baseline]
    groups = grouped(
        ((proof.verdict, bool(proof.kernels), cell.recipe, proof.ran, proof.requested), f"{cell.op} {pass_name}")
        for cell in cells
        for pass_name, proof in cell.evidence.items()
        if proof.verdict in ("unproven", "emulated")
    )
    for (verdict, seen, name, ran, requested), passes in groups.items():
        if verdict == "emulated":
            yield finding("emulated", recipe=name, passes=passes, ran=ran, requested=requested)
        else:
            yield finding("unproven" if seen else "unproven-no-gemm", recipe=name, passes=passes)
    for name in dict.fromkeys(cell.recipe for cell in cells if not cell.evidence):
        if recipe(name).quantizes:
            yield finding("unproven-no-kernels", recipe=name)


def _by_reason(code: str, reasons: Iterable[tuple[str, str, str]]) -> Iterator[Finding]:
    """One finding for each recipe and reason, from (recipe, reason, op); empty reasons are skipped."""
    groups = grouped(((name, reason), op) for name, reason, op in reasons if reason)
    for (name, reason), ops in groups.items():
        yield finding(code, recipe=name, ops=list(dict.fromkeys(ops)), reason=reason)


def _same_kernels(linears: Linears) -> list[Finding]:
    names = linears.recipes if "pre-quantized" in linears.modes else ()
    others = {name: linears.measured_as(name, "pre-quantized") for name in names}
    return [finding("same-kernels", recipe=name, other=other) for name, other in others.items() if other != name]


def _dgrad(linears: Linears) -> Iterator[Finding]:
    """The dgrad/fprop time ratio: both have the same FLOPs, but different sizes and kernels."""
    for mode in linears.modes:
        sums = {name: total.pass_ms for name in linears.columns(mode) if (total := linears.total(name, mode)) is not None}
        ratios = {name: ms["dgrad"] / ms["fprop"] for name, ms in sums.items() if ms.get("dgrad") and ms.get("fprop")}
        if ratios:
            yield finding("dgrad-over-fprop", mode=mode, ratios=ratios)


def _quantization(linears: Linears) -> list[Finding]:
    shares = {name: share for name in linears.recipes if (share := linears.quantization_share(name)) is not None}
    return [finding("quantization-share", shares=shares)] if shares and "autocast" in linears.modes else []


def _op_speedups(linears: Linears) -> Iterator[tuple[str, Mode, str, Interval]]:
    """Every op's speedup over the baseline that has an interval."""
    for mode in linears.modes:
        for name in linears.columns(mode):
            for case in linears.cases:
                speedup = linears.speedup(name, mode, case.op)
                if speedup is not None and speedup.known:
                    yield name, mode, case.op, speedup


def _slower(linears: Linears) -> list[Finding]:
    """Ops that are slower in low precision, beyond the interval."""
    slower = (
        (mode, (f"{op} in {name}", speedup.value)) for name, mode, op, speedup in _op_speedups(linears) if speedup.below_one
    )
    return [finding("ops-slower", mode=mode, speedups=dict(speedups)) for mode, speedups in grouped(slower).items()]


def _too_close(linears: Linears) -> Iterator[Finding]:
    close = (((name, mode), op) for name, mode, op, speedup in _op_speedups(linears) if speedup.includes_one)
    for (name, mode), ops in grouped(close).items():
        yield finding("ops-too-close", recipe=name, mode=mode, ops=ops)
    for mode, winner in linears.winners.items():
        for other in winner.rivals:
            yield finding("too-close-to-call", recipe=winner.best, over=other, what=f"all linears, {mode}")


def _host_bound(linears: Linears) -> Iterator[Finding]:
    """Where launching takes longer than running: of all linears together, because one op leaves the CPU time to catch up with
    another; of each bare GEMM."""
    for name in linears.recipes:
        cells = [(cell, case.count) for case in linears.cases if (cell := linears.op_time(case.op, name, "autocast"))]
        bound = [cell for cell, _ in cells if cell.host_bound]
        if linears.bare and bound:
            yield finding("host-bound-gemms", recipe=name, ops=[cell.op for cell in bound])
            continue
        host_ms = sum(cell.host_ms * count for cell, count in cells)
        gpu_ms = sum(cell.total_ms.value * count for cell, count in cells)
        if bound and host_ms > gpu_ms:
            worst: OpTime = max(bound, key=lambda cell: cell.host_ms / cell.total_ms.value)
            of_worst: dict[str, Fact] = {"op": worst.op, "op_host_ms": worst.host_ms, "op_gpu_ms": worst.total_ms.value}
            yield finding("host-bound-linears", recipe=name, host_ms=host_ms, gpu_ms=gpu_ms, **of_worst)


def speedups_leaving_high(
    linears: Linears, speedup_leaving: Callable[[str, Mode, Sequence[Case]], Interval | None]
) -> list[Finding]:
    """The speedup of all linears without those that frameworks keep in high precision, which were measured in low precision too.

    `speedup_leaving(recipe, mode, cases)`: with these cases left in the baseline's precision.
    """
    left = [case for case in linears.cases if (known := role_named(case.op)) is not None and known.usually_high]
    if not left or len(left) == len(linears.cases):
        return []
    ops = [case.op for case in left]
    return [
        finding("speedup-leaving-ops", recipe=name, mode=mode, ops=ops, over=BASELINE, speedup=speedup)
        for mode in linears.modes
        for name in linears.columns(mode)
        if recipe(name).quantizes and linears.speedup(name, mode) is not None
        if (speedup := speedup_leaving(name, mode, left)) is not None
    ]


def _warm_cache(measurements: Measurements) -> list[Finding]:
    """Shapes so small that all their sets of buffers together stay in the cache."""
    enough = LEAST_BYTES_IN_FLIGHT_OVER_L2 * (measurements.hello.device.get("l2_bytes") or 0)
    measured = [result for result in measurements.tasks.values() if result.measured]
    in_flight = [(one.task.case.op, one.task.case.bytes_touched * int(one.facts.get("copies", 1))) for one in measured]
    warm = [op for op, bytes_in_flight in in_flight if bytes_in_flight < enough]
    return [finding("warm-cache", ops=list(dict.fromkeys(warm)))] if warm else []


def _states(measurements: Measurements, name: str, mode: Mode) -> list[dict[str, Any]]:
    return [state for result in measurements.of(name, mode) for state in result.states if state.get("sm_mhz")]


def state_findings(states: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The GPU's state while it was measured: one finding for each quantity that the driver reports."""
    if not states:
        return []
    clocks = sorted(state["sm_mhz"] for state in states)
    power = sorted(state["power_w"] for state in states if state.get("power_w"))
    hottest = max((state["temperature_c"] for state in states if state.get("temperature_c")), default=None)
    reasons = sorted({reason for state in states for reason in state.get("throttle", ())})
    return [
        finding("clock-while-measuring", lowest_mhz=clocks[0], highest_mhz=clocks[-1]),
        *([finding("power-while-measuring", watts=power[len(power) // 2])] if power else []),
        *([finding("temperature-while-measuring", celsius=hottest)] if hottest else []),
        *([finding("clock-limited-by", reasons=reasons)] if reasons else []),
    ]


def _slowed_down(measurements: Measurements, linears: Linears) -> Iterator[Finding]:
    """Findings about GPU states that do not occur, or do not last, in a healthy training run."""
    for mode in linears.modes:
        for name in linears.columns(mode):
            states = _states(measurements, name, mode)
            slow = sorted({reason for state in states for reason in state.get("throttle", ()) if reason in UNHEALTHY_THROTTLING})
            if slow:
                yield finding("throttled", recipe=name, mode=mode, reasons=slow)
            clocks = [state["sm_mhz"] for state in states]
            if clocks and max(clocks) > min(clocks) * (1 + CLOCK_MOVED):
                yield finding("clock-moved", recipe=name, mode=mode, lowest_mhz=min(clocks), highest_mhz=max(clocks))
