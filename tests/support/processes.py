"""Processes that are left running, recognized by a marker in the environment that they inherit."""

from __future__ import annotations

import time
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
