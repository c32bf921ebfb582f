"""What a chain of operators moves, launched one by one and fused."""

from __future__ import annotations

from gemmscope.workload.ops import Direction
from gemmscope.workload.traced_ops import Moved
from gemmscope.workload.traffic import Region, Traffic, WorkGroup

SIZE = 100


def region(storage: int) -> Region:
    return Region(storage, (0, SIZE), SIZE)


class Steps:
    """Operators and barriers on numbered tensors of 100 bytes."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def op(self, reads: list[int], writes: list[int], direction: Direction = "forward", fusible: bool = True) -> Steps:
        group = WorkGroup("layer", "elementwise", direction)
        self.traffic.operator(group, map(region, reads), map(region, writes), SIZE, fusible=fusible)
        return self

    def gemm(self, reads: list[int], writes: list[int], backward: bool = False) -> Steps:
        self.traffic.barrier(reads, writes, backward=backward)
        return self

    def sums(self) -> Moved:
        """All groups together."""
        return sum(self.traffic.sums().values(), Moved())


def test_a_chain_is_one_kernel() -> None:
    sums = Steps().op([1], [2]).op([2], [3]).op([3], [4]).gemm([4], [5]).sums()
    assert (sums.bytes_moved, sums.launches) == (6 * SIZE, 3)
    assert (sums.fused_bytes, sums.kernels) == (2 * SIZE, 1)


def test_a_gemm_ends_a_chain_whatever_else_connects_it() -> None:
    """A residual connection: what is before the GEMM and what is after it both read the same sum."""
    sums = Steps().op([1, 2], [3]).op([3], [4]).gemm([4], [5]).op([3, 5], [6]).gemm([6], [7]).sums()
    assert sums.kernels == 2
    assert sums.fused_bytes == (2 + 2) * SIZE + (2 + 1) * SIZE


def test_operators_with_a_kernel_of_their_own() -> None:
    sums = Steps().op([1], [2]).op([2], [3], fusible=False).op([3], [4]).gemm([4], [5]).sums()
    assert (sums.fused_bytes, sums.kernels) == (6 * SIZE, 3)


def test_a_result_that_nothing_reads_is_written() -> None:
    assert Steps().op([1], [2]).sums().fused_bytes == 2 * SIZE


def test_backward_computes_again_what_would_cost_more_to_keep() -> None:
    """Backward needs tensors 2 and 3: both follow from 1, which is in memory."""
    steps = Steps().op([1], [2]).op([2], [3]).op([3], [4]).gemm([4], [5])
    sums = steps.gemm([5], [6], backward=True).op([6, 2, 3], [7], "backward").gemm([7], [8], backward=True).sums()
    assert sums.fused_bytes == 2 * SIZE + 3 * SIZE  # reads 1, writes 4; reads 6 and 1 again, writes 7
    assert sums.bytes_moved == (2 + 2 + 2 + 4) * SIZE


def test_backward_operators_of_kept_tensors_run_with_what_reads_them() -> None:
    """Tensor 6 follows from what forward kept, 7 also from a gradient: one kernel."""
    steps = Steps().op([1], [2]).gemm([2], [3]).gemm([3], [5], backward=True)
    sums = steps.op([1], [6], "backward").op([5, 6], [7], "backward").gemm([7], [8], backward=True).sums()
    assert sums.kernels == 2
    assert sums.fused_bytes == 2 * SIZE + 3 * SIZE


def test_no_kernel_moves_more_than_its_operators_would() -> None:
    steps = Steps()
    for number in range(1, 40):
        steps.op([number, number // 2], [number + 1], "forward" if number < 25 else "backward", number % 7 != 0)
        if number % 5 == 0:
            steps.gemm([number], [number + 1], backward=number >= 25)
    sums = steps.sums()
    assert 0 < sums.fused_bytes <= sums.bytes_moved
    assert 0 < sums.kernels <= sums.launches
