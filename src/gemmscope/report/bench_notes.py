"""What to know beside the numbers of `gemmscope bench`, in sentences: the reasons to doubt them first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gemmscope.interval import Interval
from gemmscope.measure.findings import Findings, known, too_close
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.report.bench import digits, times_faster
from gemmscope.report.units import percent
from gemmscope.workload.cases import LEAST_BYTES_IN_FLIGHT_OVER_L2, Case, Mode

SLOWED_DOWN = ("HW slowdown", "SW thermal slowdown", "HW thermal slowdown", "HW power brake")
CLOCKS_MOVED = 0.15  # between rounds of one recipe and mode
MOST_NAMED = 8  # ops in one sentence
LEFT_HIGH = ("LM Head", "Router")  # most frameworks do not quantize these


def sentences(report: Findings) -> list[str]:
    """All of them: fallbacks, failures, notes, what low precision loses, host, clocks."""
    return [
        *(f"warning: {words}" for words in report.results.warnings),
        *_fallbacks(report),
        *_failures(report),
        *_doubts(report),
        *_left_as_is(report),
        *_not_split(report),
        *_same(report),
        *_sums(report),
        *_dgrad(report),
        *_quantization(report),
        *_left_high(report),
        *_losers(report),
        *_too_close(report),
        *_no_interval(report),
        *_warm_cache(report),
        *_host(report),
        *_state(report),
        *_slowed_down(report),
    ]


def _fallbacks(report: Findings) -> list[str]:
    found: dict[tuple[str, Mode, str], list[str]] = {}
    for mode in report.modes:
        for name in report.columns(mode):
            for case in report.cases:
                if words := report.fallback(case, name, mode):
                    found.setdefault((name, mode, words), []).append(case.op)
    return [
        f"FALLBACK: {names_of(ops)} in {name}, {mode}: {words}; left out of the speedups"
        for (name, mode, words), ops in found.items()
    ]


def _failures(report: Findings) -> list[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for result in report.results.tasks.values():
        if result.failure:
            by_reason.setdefault((result.task.recipe, result.failure), []).append(result.task.case.op)
    return [f"not measured: {name}, {names_of(ops)}: {reason}" for (name, reason), ops in by_reason.items()]


def _doubts(report: Findings) -> list[str]:
    """Precisions that kernel names do not prove, or that other kernels stand in for: once for each reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in report.cells():
        for pass_name, proof in cell.evidence.items():
            if not cell.left_as_is and proof.verdict in ("unproven", "emulated"):
                found.setdefault((proof.verdict, cell.recipe, proof.words), []).append(f"{cell.case.op} {pass_name}")
    lines = [f"{verdict}: {name}: {words} ({names_of(where)})" for (verdict, name, words), where in found.items()]
    blind = dict.fromkeys(
        cell.recipe for cell in report.cells() if recipe(cell.recipe).quantizes and not cell.evidence and not cell.left_as_is
    )
    return lines + [f"unproven: {name}: no kernels were recorded that would show its precision" for name in blind]


def _left_as_is(report: Findings) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for mode in report.modes:
        for name in report.columns(mode):
            for case in report.cases:
                if words := report.left_as_is(case, name, mode):
                    found.setdefault((name, words), []).append(case.op)
    return [f"{name}, {names_of(ops)}: {words}; no speedup is formed for it alone" for (name, words), ops in found.items()]


def _left_high(report: Findings) -> list[str]:
    """What frameworks keep in high precision was measured in low precision too: what all together gain without it."""
    left = [case for case in report.cases if case.op in LEFT_HIGH]
    if not left or len(left) == len(report.cases):
        return []
    lines = []
    for mode in report.modes:
        for name in report.columns(mode):
            if recipe(name).quantizes and report.speedup(name, mode) is not None:
                found = report.results.speedup_leaving(name, mode, left)
                if found is not None:
                    lines.append(
                        f"{mode}, {name}, with {names_of([case.op for case in left])} left in {BASELINE}: {times_faster(found)}"
                    )
    return lines


def _not_split(report: Findings) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for cell in report.cells():
        if cell.note and not cell.left_as_is:
            found.setdefault((cell.recipe, cell.note), []).append(cell.case.op)
    return [f"{name}, {names_of(ops)}: {words}" for (name, words), ops in found.items()]


def _same(report: Findings) -> list[str]:
    if "pre-quantized" not in report.modes:
        return []
    alike = {name: report.measured_as(name, "pre-quantized") for name in report.recipes}
    return [f"pre-quantized {name} is the same kernel as {other}: see there" for name, other in alike.items() if other != name]


def _sums(report: Findings) -> list[str]:
    """Where a linear and its products are one measurement."""
    alike = dict.fromkeys(result.task.recipe for result in report.results.tasks.values() if result.facts.get("sum_of"))
    return [f"autocast {name} runs the kernels of its products and nothing else: measured once, as their sum" for name in alike]


def _dgrad(report: Findings) -> list[str]:
    """Dgrad against fprop: as many FLOPs, but other sizes, and other kernels."""
    lines = []
    for mode in () if report.bare else report.modes:
        sums = {name: report.pass_ms(name, mode) for name in report.columns(mode)}
        ratios = [f"{name} {each['dgrad'] / each['fprop']:.2f}" for name, each in sums.items() if each["dgrad"] and each["fprop"]]
        if ratios:
            lines.append(f"dgrad takes so many times as long as fprop, {mode}: {', '.join(ratios)}")
    return lines


def _quantization(report: Findings) -> list[str]:
    shares = []
    for name in report.recipes:
        cells = [cell for case in report.cases if (cell := report.cell(case, name, "autocast")) and cell.quantize_ms]
        spent = sum(sum(cell.quantize_ms.values()) * cell.case.count for cell in cells)
        if spent:
            shares.append(f"{name} {percent(spent / sum(cell.total.value * cell.case.count for cell in cells))}")
    return [f"time spent quantizing: {', '.join(shares)}"] if shares else []


def _speedups(report: Findings) -> Iterator[tuple[str, Mode, Case, Interval]]:
    """Every op's speedup over the baseline."""
    for mode in report.modes:
        for name in report.columns(mode):
            for case in report.cases:
                found = report.speedup(name, mode, case)
                if found is not None and known(found):
                    yield name, mode, case, found


def _losers(report: Findings) -> list[str]:
    """What is slower in low precision, without doubt."""
    return [
        f"{case.op} loses with {name}, {mode}: {times_faster(found)}"
        for name, mode, case, found in _speedups(report)
        if found.high < 1
    ]


def _too_close(report: Findings) -> list[str]:
    close: dict[tuple[str, Mode], list[str]] = {}
    for name, mode, case, found in _speedups(report):
        if too_close(found):
            close.setdefault((name, mode), []).append(case.op)
    return [
        f"too close to call: whether {name}, {mode}, is faster than {BASELINE} for {names_of(ops)}"
        for (name, mode), ops in close.items()
    ]


def _no_interval(report: Findings) -> list[str]:
    return ["one round was measured: times and speedups have no interval"] if report.results.complete_rounds == 1 else []


def _host(report: Findings) -> list[str]:
    """Where launching takes longer than running. One linear may: others give the CPU time to catch up. All together may not."""
    lines = []
    for name in report.recipes:
        cells = [cell for case in report.cases if (cell := report.cell(case, name, "autocast"))]
        bound = [cell for cell in cells if cell.host_bound]
        if report.bare and bound:
            lines.append(f"HOST-BOUND: {name}: {names_of([cell.case.op for cell in bound])} take longer to launch than to run")
            continue
        host_ms = sum(cell.host_ms * cell.case.count for cell in cells)
        gpu_ms = sum(cell.total.value * cell.case.count for cell in cells)
        if bound and host_ms > gpu_ms:
            worst = max(bound, key=lambda cell: cell.host_ms / cell.total.value)
            times = f"the CPU {digits(host_ms)} ms to launch and the GPU {digits(gpu_ms)} ms to run"
            of_worst = f"worst: {worst.case.op}, {digits(worst.host_ms)} against {digits(worst.total.value)} ms"
            lines.append(f"HOST-BOUND: {name}: all linears take {times} ({of_worst}); without CUDA graphs, training waits there")
    return lines


def _warm_cache(report: Findings) -> list[str]:
    """Shapes so small that all their sets of buffers together stay in the cache."""
    cache = report.results.hello.get("device", {}).get("l2_bytes") or 0
    warm = [
        result.task.case.op
        for result in report.results.tasks.values()
        if result.measured
        and result.task.case.bytes_touched * int(result.facts.get("copies", 1)) < LEAST_BYTES_IN_FLIGHT_OVER_L2 * cache
    ]
    return [f"small enough to stay in the cache, and measured so: {names_of(warm)}"] if warm else []


def _states(report: Findings, name: str, mode: Mode) -> list[dict[str, Any]]:
    return [state for result in report.results.of(name, mode) for state in result.states if state.get("sm_mhz")]


def _state(report: Findings) -> list[str]:
    states = [state for name in report.recipes for mode in report.modes for state in _states(report, name, mode)]
    return [state_words(states)] if states else []


def state_words(states: Sequence[Mapping[str, Any]]) -> str:
    """Clock, power, temperature and what held the chip back, over all bursts."""
    clocks = sorted(state["sm_mhz"] for state in states)
    power = sorted(state["power_w"] for state in states if state.get("power_w"))
    hottest = max((state["temperature_c"] for state in states if state.get("temperature_c")), default=None)
    reasons = sorted({reason for state in states for reason in state.get("throttle", ())})
    line = f"while measuring: SM clock {clocks[0]} to {clocks[-1]} MHz"
    line += f", power {power[len(power) // 2]:.0f} W" if power else ""
    line += f", up to {hottest} °C" if hottest else ""
    return line + (f", held back by {', '.join(reasons)}" if reasons else "")


def _slowed_down(report: Findings) -> list[str]:
    """States that a training run in good health would not be in, or not stay in."""
    lines = []
    for mode in report.modes:
        for name in report.columns(mode):
            states = _states(report, name, mode)
            slow = sorted({reason for state in states for reason in state.get("throttle", ()) if reason in SLOWED_DOWN})
            if slow:
                lines.append(f"warning: {name}, {mode}, ran under {', '.join(slow)}: its times are those of a chip in trouble")
            clocks = [state["sm_mhz"] for state in states]
            if clocks and max(clocks) > min(clocks) * (1 + CLOCKS_MOVED):
                lines.append(
                    f"warning: the clock moved from {min(clocks)} to {max(clocks)} MHz between bursts of {name}, {mode}: "
                    "its rounds were not measured in one state"
                )
    return lines


def names_of(ops: Iterable[str], most: int = MOST_NAMED) -> str:
    """Each once, and not too many.

    >>> names_of(["a", "b", "a"]), names_of("abcdef", 4)
    ('a, b', 'a, b, c, d and 2 more')
    """
    distinct: Sequence[str] = list(dict.fromkeys(ops))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return ", ".join(distinct[:most]) + more
