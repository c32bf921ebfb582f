"""How long the units and places of a schedule may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How long things may take."""

    silence_s: float = 60.0
    """A place that measures and gives no sign of life for this long is ended."""
    return_s: float = 120.0
    """How long the return of a lost place is waited for."""
    start_s: float = 600.0
    """How long the first place is waited for."""
    copy_after: tuple[float, float] = (3.0, 60.0)
    """A copy of a unit is started after this many times the median time, and at least this many seconds."""
    leave_after: tuple[float, float] = (4.0, 120.0)
    """A unit that only one place may run fails after this many times the median time, and at least this many seconds."""
    longest: tuple[float, float] = (20.0, 6 * 3600.0)
    """No unit takes longer than this: its place is ended, and it counts as lost."""


def too_slow(seconds: float, typical: float | None, limit: tuple[float, float]) -> bool:
    """Whether `seconds` exceeds both a multiple of the typical time and a minimum.

    >>> too_slow(70, 20, (3.0, 60.0)), too_slow(50, 1, (3.0, 60.0)), too_slow(70, None, (3.0, 60.0))
    (True, False, False)
    """
    return typical is not None and seconds > max(limit[0] * typical, limit[1])
