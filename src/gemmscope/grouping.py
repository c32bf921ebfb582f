"""Values by what they have in common."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key.

    >>> grouped([("norms", 1), ("loss", 2), ("norms", 3)])
    {'norms': [1, 3], 'loss': [2]}
    """
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def add_up(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """The sum of the values of each key.

    >>> add_up([("norms", 1.0), ("loss", 2.0), ("norms", 3.0)])
    {'norms': 4.0, 'loss': 2.0}
    """
    sums: dict[Key, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0.0) + value
    return sums


def largest_sums(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """The same, the largest sum first.

    >>> largest_sums([("norms", 1.0), ("loss", 5.0), ("norms", 3.0)])
    {'loss': 5.0, 'norms': 4.0}
    """
    return dict(sorted(add_up(pairs).items(), key=lambda pair: -pair[1]))
