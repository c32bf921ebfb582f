"""The table of health figures in `run-files.md`, generated from `gpu/health.py`."""

from __future__ import annotations

from gemmscope.gpu.health import FACTS


def figures() -> str:
    """Every figure with its meaning."""
    lines = ["| name | meaning |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {meaning} |" for name, meaning in FACTS.items())])
