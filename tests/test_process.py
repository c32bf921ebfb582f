"""Worker processes: where they keep compiled modules, and what they do without."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from gemmscope.process import without_jax, worker_environment


@pytest.fixture
def torch_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that is installed but has no bytecode beside its source."""
    source = tmp_path / "site" / "torch" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    spec = ModuleSpec("torch", None, origin=str(source))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


def test_workers_keep_bytecode_where_it_may_not_stand_beside_its_source(
    torch_at: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = worker_environment()
    assert environment["PYTHONPYCACHEPREFIX"] == str(tmp_path / "cache" / "gemmscope" / "bytecode")
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_nothing_changes_where_bytecode_is_kept(torch_at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert "PYTHONPYCACHEPREFIX" not in worker_environment()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    cached = torch_at.parent / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"")
    assert "PYTHONPYCACHEPREFIX" not in worker_environment()


def test_jax_is_not_there_while_it_is_hidden() -> None:
    with without_jax(), pytest.raises(ImportError):
        importlib.import_module("jax")
    assert sys.modules.get("jax", "") is not None


def test_a_jax_that_is_loaded_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType("jax")
    monkeypatch.setitem(sys.modules, "jax", loaded)
    with without_jax():
        assert sys.modules["jax"] is loaded
    assert sys.modules["jax"] is loaded
