"""The table of `findings.md`, generated from `src/gemmscope/findings.toml`."""

from __future__ import annotations

from gemmscope.errors import in_shell
from gemmscope.findings import catalog


def findings() -> str:
    """Every code with its level and its sentence; facts are in braces."""
    lines = ["| code | level | sentence |", "| --- | --- | --- |"]
    for code, entry in sorted(catalog().items()):
        sentence = in_shell(entry["text"]).replace("|", "\\|")
        lines.append(f"| `{code}` | {entry['level']} | {sentence} |")
    return "\n".join(lines)
