"""Find processes by their number, or by a marker in the environment that they inherit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

MARKER = "GEMMSCOPE_TEST_MARKER"


def running(marker: str) -> list[int]:
    """The processes whose environment has this marker, zombies apart."""
    wanted, pids = f"{MARKER}={marker}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids


PATIENCE_S = 120.0  # long enough for a busy machine; only a hang takes longer


def left_running(marker: str, apart_from: Collection[int] = ()) -> list[int]:
    """The processes that are still there after a while; returns as soon as there are none."""
    until = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in running(marker) if pid not in apart_from]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def state(pid: int) -> str:
    """As Linux calls it: R and S run, T is stopped, Z has ended and was not yet waited for; empty if there is no such process."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether this process runs; one that has ended and was not yet waited for does not."""
    return state(pid) not in ("", "Z")


def wait_until(condition: Callable[[], object]) -> bool:
    """Whether the condition becomes true within minutes."""
    end = time.monotonic() + PATIENCE_S
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true)
