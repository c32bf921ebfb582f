"""Looking at processes: by number, or by a marker in the environment that they inherit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARKER = "GEMMSCOPE_TEST_MARKER"


def running(marker: str) -> list[int]:
    """The processes whose environment has this marker, zombies apart."""
    wanted, found = f"{MARKER}={marker}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def left_running(marker: str, patience_s: float = 10.0) -> list[int]:
    """The processes that are still there after a while; returns as soon as there are none."""
    until = time.monotonic() + patience_s
    while (left := running(marker)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def alive(pid: int) -> bool:
    """Whether this process runs; one that has ended and was not yet waited for does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return bool(condition())
