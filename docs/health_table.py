"""The table of health figures in `run-files.md`, generated from `gpu/health.toml`."""

from __future__ import annotations

from gemmscope.gpu.health import health_figures


def figures() -> str:
    """Every figure with its meaning."""
    lines = ["| name | meaning |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {figure['meaning']} |" for name, figure in health_figures().items())])
