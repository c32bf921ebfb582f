"""The rules of ARCHITECTURE.md: data flows one way, only workers import torch, imports are at the top, names are unique."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "gemmscope"
HEAVY = {"torch", "transformers", "transformer_engine", "torchao"}
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTS_AT_THE_TOP = ("cli", "app", "document", "results", "compare", "writers")
LAZY = {"app/progress.py": {"rich"}}  # only where progress is shown
MOST_LINES = 450


def rules() -> dict[str, set[str]]:
    """The table of ARCHITECTURE.md: folder or module → what it may import."""
    rows = re.findall(r"^\| `(\w+)/?` \|[^|]*\| ([^|]*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.MULTILINE)
    found: dict[str, set[str]] = {}
    for folder, text in rows:
        named = set(re.findall(r"`(\w+)/?`", text))
        found[folder] = set(found) - named if text.startswith("every folder above") else named
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a piece of code imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def stage(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


every_file = pytest.mark.parametrize("path", TREES, ids=name_of)


@every_file
def test_imports_only_from_stages_above(path: Path) -> None:
    own = stage(path)
    if own in ("__init__", "__main__"):
        return
    used = {name.split(".")[1] for name in imports(TREES[path]) if name.startswith("gemmscope.")} - {own, "__version__"}
    assert used <= rules()[own], f"{name_of(path)} imports {used - rules()[own]}"


def test_every_folder_has_a_rule() -> None:
    assert {stage(path) for path in TREES} - {"__init__", "__main__"} == set(rules())


@every_file
def test_only_workers_import_torch(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(TREES[path])} & HEAVY
    if heavy:
        in_worker = (
            path.name in ("trace_worker.py", "recorder.py", "hub.py", "worker.py", "timer.py", "heat.py", "device.py")
            or path.name in ("marks.py", "blocks.py", "stack.py", "huggingface.py", "fused.py", "mixer_kernels.py")
            or path.name in ("factory.py", "operators.py", "recording.py", "conversion.py", "module.py", "module_notes.py")
            or name_of(path) in ("step/attention.py", "step/mixers.py", "step/graphs.py", "step/shards.py")
            or path == PACKAGE / "explain" / "record.py"  # runs in the user's own training process
            or path.parent.name in ("backends", "kits")
        )
        assert in_worker, f"{name_of(path)} imports {heavy}"


@every_file
def test_imports_are_at_the_top(path: Path) -> None:
    """Command modules are loaded lazily in one place, `app/__init__.py` and `writers/__init__.py`, not import by import."""
    if stage(path) not in IMPORTS_AT_THE_TOP:
        return
    functions = [node for node in ast.walk(TREES[path]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {name.split(".")[0] for function in functions for name in imports(function)}
    assert inside <= LAZY.get(name_of(path), set())


def test_no_class_is_defined_twice() -> None:
    names = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_files_are_of_readable_length() -> None:
    long = [f"{name_of(path)}: {count}" for path in TREES if (count := len(path.read_text().splitlines())) > MOST_LINES]
    assert long == []
