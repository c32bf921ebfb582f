"""The straggler of several ranks is the one whose collectives are shortest: the others wait in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemmscope.document.explain import explain_document
from gemmscope.explain.collectives import collectives_of, matched
from gemmscope.explain.rank_comparison import RankComparison, compare_ranks
from gemmscope.explain.step_replay import StepChange, replayed_ranks_us
from support.commands import explain
from support.traces import ADAM, BF16, Builder, codes, fact, shared_trace, steady

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TRANSFER = 100.0


def job(
    compute: float, latest: float, *, idle: float = 0.0, begins: float = 0.0, kernels: int = 4, clock: float = 0.0
) -> Builder:
    """Two steps of computation and an all-reduce, which ends on all ranks `TRANSFER` after the `latest` has entered it."""
    builder = Builder()
    for step in range(2):
        zero = 10_000.0 + 10_000 * step + clock
        moment = zero + begins
        builder.mark(f"ProfilerStep#{step + 5}", moment - 50, 9_000.0)
        for number in range(kernels):
            builder.kernel(BF16, moment, compute / kernels, launched=moment - 10)
            moment += compute / kernels + (idle / kernels if number < kernels else 0.0)
        group = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "BFloat16"}
        members = {"Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]", "Group size": 3}
        end = zero + latest + TRANSFER
        builder.kernel(NCCL, moment, end - moment, stream=20, launched=moment - 10, args={**group, **members})
        builder.kernel(ADAM, end, 300.0, launched=end - 20)
    return builder


def compared(folder: Path, ranks: list[Builder]) -> RankComparison:
    diagnoses = []
    for rank, builder in enumerate(ranks):
        info = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(ranks)}}
        diagnoses.append(builder.diagnose(folder / f"{rank}.json", **info))
    return compare_ranks(diagnoses)


def test_the_one_that_enters_last_is_the_straggler(tmp_path: Path) -> None:
    """Rank 1 computes longest, but rank 2 is the straggler, because its GPU is idle before the collective."""
    ranks = [job(2000, 5000), job(3000, 5000), job(2000, 5000, idle=3000)]
    comparison = compared(tmp_path, ranks)
    assert comparison.straggler == comparison.explained.trace.rank == 2
    assert [time.rank for time in comparison.times] == [0, 1, 2]
    assert [time.waiting_ms for time in comparison.times] == pytest.approx([3.0, 2.0, 0.0])
    assert comparison.times[2].delay_ms == pytest.approx(2.5)
    assert [time.last_to_arrive for time in comparison.times] == [0, 0, 1]
    assert "straggler-idle" in codes(comparison.findings)
    assert "straggler-late-start" not in codes(comparison.findings)
    document = explain_document(explain([tmp_path / f"{rank}.json" for rank in range(3)]))
    assert document.answer.startswith("Rank 2 is the straggler")
    assert not any(message.text == document.answer for message in document.messages)


def test_more_work_is_told_from_a_slower_gpu(tmp_path: Path) -> None:
    usual = [job(2000, 4000), job(2000, 4000)]
    for kernels in (4, 8):  # with the all-reduce and the optimizer, two more
        findings = compared(tmp_path, [*usual, job(4000, 4000, kernels=kernels)]).findings
        assert fact(findings, "straggler-computes", "time_ms") == pytest.approx(2.0)
        assert (fact(findings, "straggler-computes", "kernels"), fact(findings, "straggler-computes", "others")) == (
            kernels + 2,
            6,
        )


def test_a_rank_that_begins_late(tmp_path: Path) -> None:
    ranks = [job(2000, 4000), job(2000, 4000), job(2000, 4000, begins=2000)]
    assert "straggler-idle" in codes(compared(tmp_path, ranks).findings)  # its GPU is idle before each step


def test_a_second_straggler_is_named(tmp_path: Path) -> None:
    """Two collectives per step: rank 2 is late for the first, rank 1 for the second."""
    builders = []
    for first, second in ((2000.0, 1000.0), (2000.0, 2000.0), (5000.0, 1000.0)):
        builder = Builder()
        for step in range(2):
            moment = zero = 10_000.0 + 10_000 * step
            builder.mark(f"ProfilerStep#{step + 5}", zero - 50, 9_000.0)
            for name, compute, end in (("0", first, zero + 5100), ("0", second, zero + 7200)):
                builder.kernel(BF16, moment, compute, launched=zero - 10)
                members = {"Process Group Name": name, "Process Group Ranks": "[0, 1, 2]", "Group size": 3}
                message = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "dtype": "BFloat16", **members}
                builder.kernel(NCCL, moment + compute, end - moment - compute, stream=20, launched=zero - 10, args=message)
                moment = end
            builder.kernel(ADAM, moment, 300.0, launched=zero - 10)
        builders.append(builder)
    comparison = compared(tmp_path, builders)
    assert comparison.straggler == 2
    assert fact(comparison.findings, "ranks-more-stragglers", "delays") == pytest.approx({"rank 1": 1.0})


def test_clocks_of_several_machines_may_differ(tmp_path: Path) -> None:
    ranks = [job(2000, 4000), job(2000, 4000, clock=7e6), job(4000, 4000, clock=3e9)]
    assert compared(tmp_path, ranks).straggler == 2


def test_ranks_that_keep_step(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [job(2000 + 10 * rank, 2020) for rank in range(3)])
    assert comparison.straggler is None
    assert codes(comparison.findings) == ["ranks-in-step", "rank-explained"]


def test_collectives_that_end_apart_are_not_one(tmp_path: Path) -> None:
    """The n-th collectives of the ranks belong to different groups, so nothing is concluded from them."""
    ranks = [job(2000, 2000), job(2000, 2500), job(2500, 2500)]
    next(event for event in ranks[1].events if event["name"] == NCCL)["dur"] += 3000
    assert compared(tmp_path, ranks).straggler is None


def test_without_collectives_computation_decides(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [steady(count=count) for count in (20, 20, 26, 20)])
    assert [row.rank for row in comparison.times] == [0, 1, 2, 3]
    assert comparison.explained.trace.rank == 2
    assert comparison.straggler is None
    assert fact(comparison.findings, "ranks-unmatched", "rank") == 2


def test_eight_ranks_of_dlrm() -> None:
    """Rank 7 enters the first collectives last; rank 3, which computes longest, does not hold the others up."""
    result = explain([shared_trace("dlrm_8_ranks")])
    assert (result.straggler, result.rank) == (7, 7)
    assert "straggler-late-start" in codes(result.findings)
    assert result.ranks[7].waiting_ms == min(rank.waiting_ms or 0.0 for rank in result.ranks)


def three_ranks(*compute: tuple[float, float]) -> list[Builder]:
    """Steps of computation and an all-reduce of 100 us, twice, launched far ahead: each ends together on all ranks."""
    first = max(one for one, _ in compute) + TRANSFER
    second = first + max(other for _, other in compute) + TRANSFER
    builders = []
    for one, other in compute:
        builder = Builder()
        for step in range(2):
            zero, called = 50_000.0 + step * (second + 10), 1000.0 + 200 * step
            builder.mark(f"ProfilerStep#{step + 5}", called - 10, 199.0)
            for begin, time, end in ((zero, one, zero + first), (zero + first, other, zero + second)):
                builder.kernel(BF16, begin, time, launched=called)
                called += 10
                message = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "dtype": "BFloat16", "Group size": 3}
                builder.kernel(NCCL, begin + time, end - begin - time, launched=called, args=message)
                called += 10
            builder.kernel(ADAM, zero + second, 10.0, launched=called)
        builders.append(builder)
    return builders


def replayed(folder: Path, ranks: list[Builder], changed: int, share: float, **how: Any) -> list[float]:
    """Microseconds of the first step on each rank, with the GEMMs of one rank shorter by a share."""
    comparison = [builder.diagnose(folder / f"{rank}.json") for rank, builder in enumerate(ranks)]
    matches = matched({rank: collectives_of(one.view) for rank, one in enumerate(comparison)})
    own = [{rank: one.index for rank, one in match.items()} for match in matches]
    products = [item for item in comparison[changed].evidence.items if item.mentions("nvjet")]
    graphs = {rank: one.evidence.graphs[0] for rank, one in enumerate(comparison)}
    times = replayed_ranks_us(graphs, own, {changed: StepChange.shorten(products, share)}, **how)
    return [times[rank] for rank in range(len(ranks))]


COMPUTE = (1000.0, 2000.0), (2000.0, 1000.0), (4000.0, 3000.0)


def test_three_ranks_wait_for_the_last(tmp_path: Path) -> None:
    """Rank 2 is the last at both collectives: at half of its computation, rank 1 is at the first and rank 0 at the second."""
    ranks = three_ranks(*COMPUTE)
    assert replayed(tmp_path, ranks, 2, 0.0) == pytest.approx([4100 + 3100 + 10] * 3, rel=0.01)
    assert replayed(tmp_path, ranks, 2, 0.5) == pytest.approx([2100 + 2100 + 10] * 3, rel=0.01)
    assert replayed(tmp_path, ranks, 2, 0.25) == pytest.approx([3100 + 2350 + 10] * 3, rel=0.01)
    assert replayed(tmp_path, ranks, 0, 0.5) == pytest.approx([4100 + 3100 + 10] * 3, rel=0.01)  # nobody waits for rank 0


def test_what_a_rank_on_time_would_gain(tmp_path: Path) -> None:
    ranks = three_ranks(*COMPUTE)
    assert replayed(tmp_path, ranks, 2, 0.0, on_time=(2,))[:2] == pytest.approx([2100 + 2100 + 10] * 2, rel=0.01)
    findings = compared(tmp_path, ranks).findings
    assert fact(findings, "straggler-gain", "after_ms") == pytest.approx(4.21, rel=0.01)
    assert fact(findings, "straggler-gain", "before_ms") == pytest.approx(7.21, rel=0.01)
    assert fact(findings, "ranks-more-stragglers", "delays") == pytest.approx({"rank 0": 1.0, "rank 1": 1.0})


def test_ranks_in_another_order_do_not_wait_forever(tmp_path: Path) -> None:
    comparison = [builder.diagnose(tmp_path / f"{rank}.json") for rank, builder in enumerate(three_ranks(*COMPUTE))]
    graphs = {rank: one.evidence.graphs[0] for rank, one in enumerate(comparison)}
    first, second = ([one.index for one in collectives_of(comparison[0].view)][place] for place in (0, 1))
    crossed = [{0: first, 1: second}, {0: second, 1: first}]
    assert set(replayed_ranks_us(graphs, crossed, {})) == {0, 1, 2}
