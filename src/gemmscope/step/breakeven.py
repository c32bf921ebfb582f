"""From which batch on each recipe wins: the same step on smaller batches, each measured."""

from __future__ import annotations

from collections.abc import Sequence

from gemmscope.findings import Finding, finding
from gemmscope.results.step import AtBatch

LEAST_SEQUENCE = 256


def smaller_batches(micro_batch_size: int, sequence_length: int) -> list[tuple[int, int]]:
    """Batches to try below this one, the smallest first: half the micro-batch and so on; of one sequence, half its length.

    >>> smaller_batches(8, 4096), smaller_batches(1, 1024), smaller_batches(3, 512)
    ([(1, 4096), (2, 4096), (4, 4096)], [(1, 256), (1, 512)], [(1, 512)])
    """
    batches, size = [], micro_batch_size // 2
    while size >= 1:
        batches.append((size, sequence_length))
        size //= 2
    length = sequence_length // 2
    while micro_batch_size == 1 and length >= LEAST_SEQUENCE:
        batches.append((1, length))
        length //= 2
    return batches[::-1]


def wins_from(measured: Sequence[AtBatch], recipe: str) -> AtBatch | None:
    """The smallest batch from which on it is faster than BF16 beyond its interval; None if it is not at the largest one."""
    first = None
    for batch in reversed(_of(measured, recipe)):
        if not batch.speedups[recipe].above_one:
            break
        first = batch
    return first


def _of(measured: Sequence[AtBatch], recipe: str) -> list[AtBatch]:
    """The batches that it could be measured on, the smallest first."""
    own = [batch for batch in measured if recipe in batch.speedups]
    return sorted(own, key=lambda batch: batch.micro_batch_size * batch.sequence_length)


def break_even_finding(measured: Sequence[AtBatch], recipe: str) -> Finding:
    """From which batch on this recipe wins."""
    first, own = wins_from(measured, recipe), _of(measured, recipe)
    if first is None and any(batch.speedups[recipe].above_one for batch in own):
        return finding("break-even-not-at-largest", recipe=recipe, batch=own[-1].name)
    if first is None:
        return finding("break-even-never", recipe=recipe)
    code = "break-even-at-smallest" if first == own[0] else "break-even-from"
    return finding(code, recipe=recipe, batch=first.name)
