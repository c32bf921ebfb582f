"""Traces and kernel names of other projects: in a folder beside the repository, where it exists."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data"
NEEDS_SHARED = pytest.mark.skipif(not (SHARED / "traces").is_dir(), reason="the folder of shared traces is not here")


def shared_trace(name: str) -> Path:
    return SHARED / "traces" / f"{name}.json.gz"
