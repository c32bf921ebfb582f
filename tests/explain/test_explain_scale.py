"""The work of `explain` grows in proportion to the trace, whatever its shape. Counted in calls of functions, not in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gemmscope.explain.diagnose import diagnose
from gemmscope.explain.recorded_trace import read_trace
from support.calls import count_calls
from support.traces import ADAM, BF16, CAST, FP8, Builder

FEWER = 150
GROWTH = 6.0  # for four times as much: 4 in proportion, 16 if it were quadratic


def overlapping(count: int) -> Builder:
    """Kernels on many streams that all run at the same time, every other one communication."""
    builder = Builder()
    for number in range(count):
        name = "ncclDevKernel_AllReduce" if number % 2 else FP8
        builder.kernel(name, 1000.0 + number, 2.0 * count, stream=number % 100, launched=float(number))
    builder.mark("ProfilerStep#1", 0, 4 * count + 1000)
    return builder


def nested(count: int) -> Builder:
    """Operators inside each other, each of which launches a kernel."""
    builder = Builder()
    for number in range(count):
        arguments = {"External id": number + 1, "Input Dims": [[128, 128], [128, 128]]}
        builder.mark(f"Function{number}", number, 4 * count - 2 * number, "cpu_op", args=arguments)
        builder.kernel("elementwise", 1000.0 + 10 * number, 5.0, launched=number + 0.5, args={"External id": number + 1})
    builder.mark("ProfilerStep#1", 0, 12 * count + 1000)
    return builder


def staggered(count: int) -> Builder:
    """Operators that overlap without being nested."""
    builder = Builder()
    for number in range(count):
        builder.mark("Function", number, count / 2, "cpu_op")
        builder.kernel("elementwise", 1000.0 + 10 * number, 5.0, launched=number + 0.5)
    builder.mark("ProfilerStep#1", 0, 12 * count + 1000)
    return builder


def many_steps(count: int) -> Builder:
    """Short steps, and one kernel that runs through all of them."""
    builder, moment = Builder(), 1000.0
    for step in range(count):
        builder.mark(f"ProfilerStep#{step}", moment - 900, 40)
        for name in (FP8, FP8, ADAM):
            builder.kernel(name, moment, 10.0, launched=moment - 890)
            moment += 11
    builder.kernel("through everything", 1.0, moment, stream=9, launched=0.0)
    return builder


def optimizer_marks(count: int) -> Builder:
    """Annotations of optimizers that all contain the whole backward."""
    builder, moment = Builder(), 1000.0
    for number in range(count):
        builder.mark("Optimizer.step#Adam", 1 + number / 1000, 50 * count - number)
        builder.mark("autograd::engine::evaluate_function: X", 2 + number, 1, "cpu_op")
        for _ in range(3):
            builder.kernel(FP8, moment, 10.0, launched=moment - 900)
            moment += 11
    return builder


def sizes(count: int) -> Builder:
    """GEMMs of as many sizes as there are GEMMs, forward in FP8 and backward in BF16."""
    builder = Builder()
    for number in range(2 * count):
        forward, size = number < count, 64 + number % count
        arguments = {"External id": number + 1, "Input Dims": [[size, 128], [128, 256 + size]]}
        if not forward:
            builder.mark("autograd::engine::evaluate_function: X", number * 4 - 0.1, 3, "cpu_op")
        builder.mark("aten::mm", number * 4, 2, "cpu_op", args=arguments)
        builder.kernel(
            FP8 if forward else BF16, 10.0 + 10 * number, 9.0, launched=number * 4 + 1.0, args={"External id": number + 1}
        )
    builder.mark("ProfilerStep#1", 0, 25 * count)
    return builder


def repeated_casts(count: int) -> Builder:
    """Micro-batches that cast their weights again."""
    builder, moment = Builder(), 100.0
    for _ in range(4):
        for function in ("_Linear", "autograd::engine::evaluate_function: _LinearBackward"):
            for number in range(count // 8):
                arguments = {"Input Dims": [[128, 128], [64, 128]], "Sequence number": number}
                builder.mark(function, moment - 50, 20, "cpu_op", args=arguments)
                for name in (CAST, CAST, CAST, FP8):
                    builder.kernel(name, moment, 3.0, launched=moment - 49)
                    moment += 3.5
    builder.mark("ProfilerStep#1", 0, moment)
    return builder


def names_and_marks(count: int) -> Builder:
    """As many names of kernels and annotations as there are kernels, with idle time between them."""
    builder = Builder()
    for number in range(count):
        builder.kernel(f"mystery_{number}", 1000.0 + 2000 * number, 5.0, launched=995.0 + 2000 * number)
        builder.mark(f"loading {number}", 0, 2000 * count + 1000)
    builder.mark("ProfilerStep#1", 0, 2000 * count + 1000)
    return builder


def calls(path: Path) -> int:
    trace = read_trace(path)
    return count_calls(lambda: diagnose(trace))


@pytest.mark.parametrize(
    "make", [overlapping, nested, staggered, many_steps, optimizer_marks, sizes, repeated_casts, names_and_marks]
)
def test_work_grows_in_proportion(make: Callable[[int], Builder], tmp_path: Path) -> None:
    calls(make(4 * FEWER).write(tmp_path / "warm.json"))  # fills the caches
    few, many = (calls(make(count).write(tmp_path / f"{count}.json")) for count in (FEWER, 4 * FEWER))
    assert many < GROWTH * few, f"{few} calls, then {many}"


def test_overlapping_kernels_share_their_time(tmp_path: Path) -> None:
    diagnosis = overlapping(200).diagnose(tmp_path / "t.json")
    parts = diagnosis.account.parts_ms
    assert sum(parts.values()) == pytest.approx(diagnosis.account.step_ms)
    [shares] = diagnosis.view.shares
    alone_and_with_others = sum(2 / running for running in range(1, 100)) + (1400 - 1198) / 100
    assert shares.of[0] == pytest.approx(alone_and_with_others)
    assert 1 not in shares.of  # communication is hidden behind computation
