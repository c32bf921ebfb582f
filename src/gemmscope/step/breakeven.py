"""The batch from which each recipe is faster than BF16: the same step on smaller batches, each measured."""

from collections.abc import Sequence
from itertools import takewhile

from gemmscope.findings import Finding, finding
from gemmscope.results.step import AtBatch

LEAST_SEQUENCE = 256


def smaller_batches(micro_batch_size: int, sequence_length: int) -> list[tuple[int, int]]:
    """Batches to try below this one, the smallest first: half the micro-batch and so on; of one sequence, half its length.

    >>> smaller_batches(8, 4096), smaller_batches(1, 1024), smaller_batches(3, 512)
    ([(1, 4096), (2, 4096), (4, 4096)], [(1, 256), (1, 512)], [(1, 512)])
    """
    if micro_batch_size > 1:
        return [(size, sequence_length) for size in _halves(micro_batch_size)]
    return [(1, length) for length in _halves(sequence_length) if length >= LEAST_SEQUENCE]


def _halves(number: int) -> list[int]:
    """A half, a quarter and so on down to 1, the smallest first."""
    return [number >> shift for shift in range(number.bit_length() - 1, 0, -1)]


def break_even_finding(measured: Sequence[AtBatch], recipe: str) -> Finding:
    """The batch from which this recipe wins: it is faster than BF16 beyond its interval, on this batch and every larger one."""
    own = [batch for batch in measured if recipe in batch.speedups]
    own.sort(key=lambda batch: -batch.micro_batch_size * batch.sequence_length)
    wins = list(takewhile(lambda batch: batch.speedups[recipe].above_one, own))
    if wins:
        code = "break-even-at-smallest" if len(wins) == len(own) else "break-even-from"
        return finding(code, recipe=recipe, batch=wins[-1].name)
    if any(batch.speedups[recipe].above_one for batch in own):
        return finding("break-even-not-at-largest", recipe=recipe, batch=own[0].name)
    return finding("break-even-never", recipe=recipe)
