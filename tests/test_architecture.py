"""The import rules that ARCHITECTURE.md states, held: data flows one way, and only workers import torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "gemmscope"
HEAVY = {"torch", "transformers", "transformer_engine", "torchao"}


def rules() -> dict[str, set[str]]:
    """The table of ARCHITECTURE.md: folder → what it may import."""
    rows = re.findall(r"^\| `(\w+)/?` \|[^|]*\| ([^|]*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.MULTILINE)
    return {folder: set(re.findall(r"`(\w+)`", allowed)) for folder, allowed in rows}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def stage(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_stages_above(path: Path) -> None:
    own = stage(path)
    if own in ("__init__", "__main__"):
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("gemmscope.")} - {own, "__version__"}
    assert used <= rules()[own], f"{path.name} of {own} imports {used - rules()[own]}"


def test_every_folder_has_a_rule() -> None:
    assert {stage(path) for path in FILES} - {"__init__", "__main__"} == set(rules())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_workers_import_torch(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(path)} & HEAVY
    if heavy:
        in_worker = (
            path.name in ("trace_worker.py", "recorder.py", "hub.py", "worker.py", "timer.py", "heat.py", "device.py")
            or path.name in ("marks.py", "blocks.py", "stack.py", "huggingface.py")
            or path == PACKAGE / "explain" / "record.py"  # runs in the user's own training process, and only when it is entered
            or path.parent.name in ("backends", "kits")
        )
        assert in_worker, f"{path.name} imports {heavy}"


def test_files_are_of_readable_length() -> None:
    long = [f"{path.name}: {count}" for path in FILES if (count := len(path.read_text().splitlines())) > 450]
    assert long == []
