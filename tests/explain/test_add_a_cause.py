"""Follows "Add a cause" of CONTRIBUTING.md in a copy of the package: it works, and says what is missing before it does."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gemmscope.toml import load_data
from support.sources import PACKAGE, TREES
from support.traces import recorded

CAUSE = """
[copying]
title = "Copies take time"
do = ["copy less"]
"""
EVIDENCE = """
[cause-copying]
level = "note"
text = "Copies run {copies:.1f} times per step."
"""
SEARCH = '''

def _copying(step: StepEvidence) -> Iterator[Cause]:
    """Copies of any kind."""
    if items := step.of_class("copies"):
        yield step.cause("copying", 0.5 * step.step_ms, [finding("cause-copying", copies=step.per_step(items))], items)
'''


def copy_of_the_package(folder: Path) -> Path:
    """A package of links, but for the folder `explain` and the sentences."""
    copy = folder / "gemmscope"
    copy.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in ("explain", "findings.toml", "__pycache__"):
            (copy / path.name).symlink_to(path)
    shutil.copytree(PACKAGE / "explain", copy / "explain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE / "findings.toml", copy)
    return copy


def explain(copy: Path) -> subprocess.CompletedProcess[str]:
    """The command of the copy."""
    command = [sys.executable, "-m", "gemmscope", "explain", str(recorded("syncs")), "--json", str(copy / "run.json")]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_a_cause_is_added_as_contributing_says(tmp_path: Path) -> None:
    copy = copy_of_the_package(tmp_path)
    searches = copy / "explain" / "step_causes.py"
    before = searches.read_text()
    searches.write_text(before.replace("(_idle, _recompute", "(_idle, _copying, _recompute"))
    assert searches.read_text() != before
    append(searches, SEARCH)
    without_sentence = explain(copy)
    assert without_sentence.returncode == 2
    assert "findings.toml has no cause-copying" in without_sentence.stderr
    append(copy / "findings.toml", EVIDENCE)
    without_title = explain(copy)
    assert without_title.returncode == 2
    assert "explain/causes.toml has no copying" in without_title.stderr
    append(copy / "explain" / "causes.toml", CAUSE)
    result = explain(copy)
    assert result.returncode == 0, result.stderr
    run = json.loads((copy / "run.json").read_text())
    cause = next(cause for cause in run["causes"] if cause["code"] == "copying")
    assert (cause["title"], cause["advice"]) == ("Copies take time", ["copy less"])
    assert cause["evidence"][0]["code"] == "cause-copying"
    assert "Copies take time" in result.stdout


def test_every_cause_has_a_search() -> None:
    trees = [tree for path, tree in TREES.items() if path.parent.name == "explain"]
    used = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    used |= {activity["cause"] for activity in load_data("gemmscope.explain", "host_activity.toml")["activity"]}
    assert set(load_data("gemmscope.explain", "causes.toml")) - used == set()
