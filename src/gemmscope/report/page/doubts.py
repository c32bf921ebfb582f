"""What to know beside the numbers of recorded rows, in sentences: the reasons to doubt them first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.bench_notes import CLOCKS_MOVED, SLOWED_DOWN, names_of, state_words
from gemmscope.report.page.parts import Finding
from gemmscope.report.page.rows import Rows, fallback
from gemmscope.store.benchfile import TaskRecord


def findings(found: Rows) -> list[Finding]:
    """Fallbacks, failures, doubts, what loses, what is too close to call, the host, the clocks."""
    return [
        *_fallbacks(found),
        *_failures(found.tasks),
        *_unproven(found),
        *_left_as_is(found),
        *_losers(found),
        *_too_close(found),
        *_host(found),
        *_clocks(found),
    ]


def _fallbacks(found: Rows) -> Iterator[Finding]:
    ops: dict[tuple[str, str, str], list[str]] = {}
    for row in found.rows:
        if words := fallback(row):
            ops.setdefault((row.recipe, row.mode, words), []).append(row.op)
    for (name, mode, words), where in ops.items():
        yield Finding("alarm", f"FALLBACK: {names_of(where)} in {name}, {mode}: {words}; left out of the speedups")


def _failures(tasks: Sequence[TaskRecord]) -> Iterator[Finding]:
    ops: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        if task.failure:
            ops.setdefault((task.recipe, task.failure), []).append(task.op)
    for (name, reason), where in ops.items():
        yield Finding("warning", f"not measured: {name}, {names_of(where)}: {reason}")


def _unproven(found: Rows) -> Iterator[Finding]:
    where: dict[tuple[str, str, str], list[str]] = {}
    for row in found.rows:
        for pass_name, proof in row.evidence.items():
            if not row.note and proof.verdict in ("unproven", "emulated"):
                where.setdefault((proof.verdict, row.recipe, proof.words), []).append(f"{row.op} {pass_name}")
    for (verdict, name, words), places in where.items():
        yield Finding("warning", f"{verdict}: {name}: {words} ({names_of(places)})")


def _left_as_is(found: Rows) -> Iterator[Finding]:
    ops: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        if row.note:
            ops.setdefault((row.recipe, row.note), []).append(row.op)
    for (name, words), where in ops.items():
        yield Finding("note", f"{name}, {names_of(where)}: {words}")


def _losers(found: Rows) -> Iterator[Finding]:
    for one in found.speedups:
        high = one.speedup.high
        if one.op and one.over == BASELINE and high is not None and high < 1:
            yield Finding("warning", f"{one.op} loses with {one.recipe}, {one.mode}: {one.speedup.value:.3f}x")


def _too_close(found: Rows) -> Iterator[Finding]:
    ops: dict[tuple[str, str], list[str]] = {}
    for one in found.speedups:
        low, high = one.speedup.low, one.speedup.high
        if one.op and one.over == BASELINE and low is not None and high is not None and low <= 1 <= high:
            ops.setdefault((one.recipe, one.mode), []).append(one.op)
    for (name, mode), where in ops.items():
        words = f"too close to call: whether {name}, {mode}, is faster than {BASELINE} for {names_of(where)}"
        yield Finding("note", words)


def _host(found: Rows) -> Iterator[Finding]:
    """Where launching all linears takes the CPU longer than running them takes the GPU."""
    for name in found.recipes:
        rows = [row for row in found.rows if (row.recipe, row.mode) == (name, "autocast")]
        if found.bare:
            bound = names_of(row.op for row in rows if row.host_bound)
            if bound:
                yield Finding("warning", f"HOST-BOUND: {name}: {bound} take longer to launch than to run")
            continue
        host_ms = sum(row.host_ms * row.count for row in rows)
        gpu_ms = sum(row.total_ms.value * row.count for row in rows)
        if any(row.host_bound for row in rows) and host_ms > gpu_ms:
            times = f"the CPU {host_ms:.1f} ms to launch and the GPU {gpu_ms:.1f} ms to run"
            yield Finding("warning", f"HOST-BOUND: {name}: all linears take {times}; without CUDA graphs, training waits there")


def _clocks(found: Rows) -> Iterator[Finding]:
    every: list[dict[str, Any]] = []
    for mode in found.modes:
        for name in found.recipes:
            states = [state for state in found.states(name, mode) if state.get("sm_mhz")]
            every += states
            slow = sorted({reason for state in states for reason in state.get("throttle", ()) if reason in SLOWED_DOWN})
            if slow:
                yield Finding("warning", f"{name}, {mode}, ran under {', '.join(slow)}: its times are those of a chip in trouble")
            speeds = [state["sm_mhz"] for state in states]
            if speeds and max(speeds) > min(speeds) * (1 + CLOCKS_MOVED):
                moved = f"the clock moved from {min(speeds)} to {max(speeds)} MHz between bursts of {name}, {mode}"
                yield Finding("warning", f"{moved}: its rounds were not measured in one state")
    if every:
        yield Finding("note", state_words(every))
