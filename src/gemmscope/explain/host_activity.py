"""What the CPU did while the GPU waited: data loading, compilation, checkpoints, memory allocation, by the names in the trace."""

import re
from bisect import bisect_right
from collections.abc import Hashable, Iterable
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import Any, Literal

from gemmscope.grouping import grouped
from gemmscope.toml import load_data

# In the order in which they are tried, the most specific first
ALLOCATION, START_UP, LOADING = "memory allocation", "start-up of the GPU context", "loading of kernels"
HOST_ACTIVITIES: list[dict[str, str]] = load_data("gemmscope.explain", "host_activity.toml")["activity"]


@lru_cache(10_000)
def activity_of(name: str, by: Literal["names", "calls"]) -> str:
    """The activity that an annotation, an operator or a Python frame belongs to, or a CUDA or HIP call; empty for all others.

    >>> names = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "aten::mm", "Torch-Compiled Region: 0/0"
    >>> [activity_of(name, "names") for name in (*names, "_compile.compile_inner (dynamo_timed)")]
    ['data loading', '', '', 'compilation']
    >>> frames = "torch/serialization.py(943): save", "torch/utils/checkpoint.py(264): backward"
    >>> [activity_of(name, "names") for name in frames]
    ['saving a checkpoint', '']
    >>> [activity_of(name, "calls") for name in ("hipFree", "cudaMalloc", "cudaMallocAsync", "cudaLaunchKernel", "cuMemFree_v2")]
    ['memory allocation', 'memory allocation', '', '', 'memory allocation']
    """
    return next((entry["name"] for entry in HOST_ACTIVITIES if by in entry and re.search(entry[by], name)), "")


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans in order, as one where they overlap.

    >>> merged([(5, 12), (0, 10), (20, 30)])
    [(0, 12), (20, 30)]
    """
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            before = result.pop()
            begin, end = before[0], max(before[1], end)
        result.append((begin, end))
    return result


class Covered:
    """Answers at once how much of an interval is covered by spans of time."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self._spans = merged(spans)
        self._before = [0.0, *accumulate(end - begin for begin, end in self._spans)]

    def _until(self, moment: float) -> float:
        at = bisect_right(self._spans, (moment, inf))
        return self._before[at] - max(self._spans[at - 1][1] - moment, 0.0) if at else 0.0

    def within(self, begin: float, end: float) -> float:
        """The time between the two moments that is covered.

        >>> covered = Covered([(0.0, 10.0), (5.0, 12.0), (20.0, 30.0)])
        >>> covered.within(0, 100), covered.within(11, 21), covered.within(13, 19), covered.within(-5, -1)
        (22.0, 2.0, 0.0, 0.0)
        """
        return self._until(end) - self._until(begin) if end > begin else 0.0


def by_key(spans: Iterable[tuple[Hashable, float, float]]) -> dict[Any, Covered]:
    """The spans of each key."""
    groups = grouped((key, (begin, end)) for key, begin, end in spans)
    return {key: Covered(group) for key, group in groups.items()}
