"""Adding a measuring backend, as CONTRIBUTING.md says, in a temporary copy of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.package_copy import package_copy

pytest.importorskip("torch", reason="measuring needs torch")

BACKEND = '''"""The CPU, with GEMMs by einsum."""

import torch

from gemmscope.bench.backends.base import Backend, Operands
from gemmscope.engine.timer import Prepared
from gemmscope.recipe.recipes import Recipe
from gemmscope.workload.cases import Task


class EinsumBackend(Backend):
    """BF16 alone."""

    name = "einsum"

    def why_not(self, recipe: Recipe) -> str:
        return "" if self.name in recipe.backends else "einsum multiplies only BF16"

    def why_not_task(self, task: Task) -> str:
        return "einsum has no layers" if task.mode == "autocast" else ""

    def prepare_set(self, task: Task, recipe: Recipe, operands: Operands) -> Prepared:
        left, right = (factor.values for factor in operands.factors(task.pass_name))
        multiply = lambda: torch.einsum("ik,jk->ij", left, right)
        return Prepared(multiply, 1, operands.error({task.pass_name: multiply()}))
'''
FRAMEWORK = """
[einsum]
title = "einsum"
device = "cpu"
packages = ["torch"]
bench = "gemmscope.bench.backends.einsum:EinsumBackend"
gemms_only = true
"""


def test_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    copy = package_copy(tmp_path)
    copy.add("bench/backends/einsum.py", BACKEND)
    copy.add("recipe/frameworks.toml", FRAMEWORK)
    given = 'backends = ["transformer_engine", "torchao", "torch", "cpu"]'
    copy.change("recipe/recipes.toml", given, given.replace("]", ', "einsum"]'))
    file = tmp_path / "run.json"
    counts = "--num-iters 2 --num-warmup 0"
    copy.run(f"bench --shapes 32 --device cpu --backend einsum {counts} --json {file}")
    result = json.loads(file.read_text())
    assert result["settings"]["backend"] == "einsum"
    assert [task["task"]["recipe"] for task in result["tasks"] if task["rounds_ms"]] == ["BF16"]
    assert "einsum" in copy.run("doctor")
    refused = copy.run(f"bench --shapes 32 --device cpu --backend einsum --recipes fp32 {counts}", code=2)
    assert "FP32" in refused
