"""Which CPU cores each GPU's processes run on: those near it, divided among the GPUs that are near the same ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def allowed_cores() -> frozenset[int]:
    """The CPU cores that this process may use; empty where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def thread_siblings(core: int) -> frozenset[int]:
    """The hardware threads of the same physical core."""
    with suppress(OSError, ValueError):
        return frozenset(parse_cores(Path(TOPOLOGY.format(core)).read_text()))
    return frozenset({core})


def parse_cores(text: str) -> list[int]:
    """A list of cores as Linux writes it.

    >>> parse_cores("0-2,64")
    [0, 1, 2, 64]
    """
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)]


def divide_cores(
    near: Sequence[Collection[int]],
    allowed: Collection[int],
    siblings: Callable[[int], Collection[int]] = thread_siblings,
) -> list[tuple[int, ...]]:
    """The cores of each GPU, from those near it (none: not known) and those that this process may use.

    GPUs that are near the same cores divide them: each gets neighbors, and both threads of a physical core go to one GPU. Where
    there are fewer physical cores than GPUs, they use all of them together.

    >>> divide_cores([{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}], range(6), lambda core: {core})
    [(0, 1), (2, 3), (4, 5)]
    """
    sets = [frozenset(cores) & frozenset(allowed) or frozenset(allowed) for cores in near]
    result: list[tuple[int, ...]] = [()] * len(sets)
    for group in set(sets):
        gpus = [index for index, cores in enumerate(sets) if cores == group]
        physical = sorted({tuple(sorted(frozenset(siblings(core)) & group | {core})) for core in group})
        for position, index in enumerate(gpus):
            begin, end = position * len(physical) // len(gpus), (position + 1) * len(physical) // len(gpus)
            own = physical[begin:end] if len(physical) >= len(gpus) else physical
            result[index] = tuple(sorted({core for threads in own for core in threads}))
    return result
