"""From which batch on each precision wins: the same step on smaller batches, each measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmscope.interval import Interval

LEAST_SEQUENCE = 256


@dataclass(frozen=True)
class AtBatch:
    """The speedups of every precision on one batch."""

    micro_batch_size: int
    sequence_length: int
    speedups: Mapping[str, Interval]

    @property
    def words(self) -> str:
        return f"{self.micro_batch_size} x {self.sequence_length}"


def smaller_batches(micro_batch_size: int, sequence_length: int) -> list[tuple[int, int]]:
    """Batches to try below this one, the smallest first: half the micro-batch and so on; of one sequence, half its length.

    >>> smaller_batches(8, 4096), smaller_batches(1, 1024), smaller_batches(3, 512)
    ([(1, 4096), (2, 4096), (4, 4096)], [(1, 256), (1, 512)], [(1, 512)])
    """
    found, size = [], micro_batch_size // 2
    while size >= 1:
        found.append((size, sequence_length))
        size //= 2
    length = sequence_length // 2
    while micro_batch_size == 1 and length >= LEAST_SEQUENCE:
        found.append((1, length))
        length //= 2
    return found[::-1]


def wins_from(measured: Sequence[AtBatch], recipe: str) -> AtBatch | None:
    """The smallest batch from which on it is faster than BF16 beyond doubt; None if it is not at the largest one."""
    first = None
    for each in reversed(_of(measured, recipe)):
        if each.speedups[recipe].low <= 1:
            break
        first = each
    return first


def _of(measured: Sequence[AtBatch], recipe: str) -> list[AtBatch]:
    """The batches that it could be measured on, the smallest first."""
    return sorted(
        (each for each in measured if recipe in each.speedups), key=lambda one: one.micro_batch_size * one.sequence_length
    )


def words(measured: Sequence[AtBatch], recipe: str) -> str:
    """In a sentence."""
    first, own = wins_from(measured, recipe), _of(measured, recipe)
    if first is None and any(each.speedups[recipe].low > 1 for each in own):
        return f"{recipe} does not win at the largest batch that was measured, {own[-1].words} tokens"
    if first is None:
        return f"{recipe} does not win at any batch that was measured"
    if first == own[0]:
        return f"{recipe} wins already at the smallest batch that was measured, {first.words} tokens"
    return f"{recipe} wins from a batch of {first.words} tokens on"
