"""The work of `explain` grows in proportion to the trace, whatever its shape. Counted in calls of functions, not in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gemmscope.explain.diagnose import diagnose
from gemmscope.explain.trace import read_trace
from support.calls import count_calls
from support.traces import ADAM, BF16, CAST, FP8, Builder

FEWER = 150
GROWTH = 6.0  # for four times as much: 4 in proportion, 16 if it were quadratic


def overlapping(count: int) -> Builder:
    """Kernels on many streams that all run at the same time, every other one communication."""
    made = Builder()
    for number in range(count):
        name = "ncclDevKernel_AllReduce" if number % 2 else FP8
        made.kernel(name, 1000.0 + number, 2.0 * count, stream=number % 100, launched=float(number))
    made.mark("ProfilerStep#1", 0, 4 * count + 1000)
    return made


def nested(count: int) -> Builder:
    """Operators inside each other, each of which launches a kernel."""
    made = Builder()
    for number in range(count):
        arguments = {"External id": number + 1, "Input Dims": [[128, 128], [128, 128]]}
        made.mark(f"Function{number}", number, 4 * count - 2 * number, "cpu_op", args=arguments)
        made.kernel("elementwise", 1000.0 + 10 * number, 5.0, launched=number + 0.5, args={"External id": number + 1})
    made.mark("ProfilerStep#1", 0, 12 * count + 1000)
    return made


def staggered(count: int) -> Builder:
    """Operators that overlap without being nested."""
    made = Builder()
    for number in range(count):
        made.mark("Function", number, count / 2, "cpu_op")
        made.kernel("elementwise", 1000.0 + 10 * number, 5.0, launched=number + 0.5)
    made.mark("ProfilerStep#1", 0, 12 * count + 1000)
    return made


def many_steps(count: int) -> Builder:
    """Short steps, and one kernel that runs through all of them."""
    made, moment = Builder(), 1000.0
    for step in range(count):
        made.mark(f"ProfilerStep#{step}", moment - 900, 40)
        for name in (FP8, FP8, ADAM):
            made.kernel(name, moment, 10.0, launched=moment - 890)
            moment += 11
    made.kernel("through everything", 1.0, moment, stream=9, launched=0.0)
    return made


def optimizer_marks(count: int) -> Builder:
    """Annotations of optimizers that all contain the whole backward."""
    made, moment = Builder(), 1000.0
    for number in range(count):
        made.mark("Optimizer.step#Adam", 1 + number / 1000, 50 * count - number)
        made.mark("autograd::engine::evaluate_function: X", 2 + number, 1, "cpu_op")
        for _ in range(3):
            made.kernel(FP8, moment, 10.0, launched=moment - 900)
            moment += 11
    return made


def sizes(count: int) -> Builder:
    """GEMMs of as many sizes as there are GEMMs, forward in FP8 and backward in BF16."""
    made = Builder()
    for number in range(2 * count):
        forward, size = number < count, 64 + number % count
        arguments = {"External id": number + 1, "Input Dims": [[size, 128], [128, 256 + size]]}
        if not forward:
            made.mark("autograd::engine::evaluate_function: X", number * 4 - 0.1, 3, "cpu_op")
        made.mark("aten::mm", number * 4, 2, "cpu_op", args=arguments)
        made.kernel(
            FP8 if forward else BF16, 10.0 + 10 * number, 9.0, launched=number * 4 + 1.0, args={"External id": number + 1}
        )
    made.mark("ProfilerStep#1", 0, 25 * count)
    return made


def repeated_casts(count: int) -> Builder:
    """Micro-batches that cast their weights again."""
    made, moment = Builder(), 100.0
    for _ in range(4):
        for function in ("_Linear", "autograd::engine::evaluate_function: _LinearBackward"):
            for number in range(count // 8):
                arguments = {"Input Dims": [[128, 128], [64, 128]], "Sequence number": number}
                made.mark(function, moment - 50, 20, "cpu_op", args=arguments)
                for name in (CAST, CAST, CAST, FP8):
                    made.kernel(name, moment, 3.0, launched=moment - 49)
                    moment += 3.5
    made.mark("ProfilerStep#1", 0, moment)
    return made


def names_and_marks(count: int) -> Builder:
    """As many names of kernels and annotations as there are kernels, with idle time between them."""
    made = Builder()
    for number in range(count):
        made.kernel(f"mystery_{number}", 1000.0 + 2000 * number, 5.0, launched=995.0 + 2000 * number)
        made.mark(f"loading {number}", 0, 2000 * count + 1000)
    made.mark("ProfilerStep#1", 0, 2000 * count + 1000)
    return made


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
    found = overlapping(200).diagnose(tmp_path / "t.json")
    parts = found.account.parts_ms
    assert sum(parts.values()) == pytest.approx(found.account.step_ms)
    [shares] = found.view.shares
    alone_and_with_others = sum(2 / running for running in range(1, 100)) + (1400 - 1198) / 100
    assert shares.of[0] == pytest.approx(alone_and_with_others)
    assert 1 not in shares.of  # communication is hidden behind computation
