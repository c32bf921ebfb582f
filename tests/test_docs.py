"""What the documentation says is so: commands run, lists and numbers are current, the picture is of today's output."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gemmscope.model import presets
from gemmscope.model.families import known_model_types

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_families_listed() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    listed = text.split("<!-- families -->")[1].split("<!-- /families -->")[0]
    assert tuple(re.findall(r"`([\w-]+)`", listed)) == known_model_types()


def test_counts_in_the_texts() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"each of the {len(known_model_types())} model types" in README
    assert f"({len(known_model_types())} model types in closed form" in changes
    assert f"# {len(presets.names())} well-known models" in README
    assert f"{len(presets.names())} presets" in changes


@pytest.mark.parametrize("line", re.findall(r"^(?:\$ )?(gemmscope [^…#\n]+)$", README, flags=re.MULTILINE))
def test_readme_commands_run(line: str) -> None:
    arguments = shlex.split(line)[1:]
    if "--check" in arguments:
        pytest.skip("test_readme_shows_real_output runs it")
    child = subprocess.run([sys.executable, "-m", "gemmscope", *arguments], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_readme_shows_real_output() -> None:
    pytest.importorskip("transformers", reason="the check needs transformers")
    shown = re.search(r"^\$ (gemmscope shapes .*--check)\n…\n(check: .*)$", README, flags=re.MULTILINE)
    assert shown is not None
    command = [sys.executable, "-m", "gemmscope", *shlex.split(shown[1])[1:]]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == shown[2]


def test_picture_is_current() -> None:
    """The picture's text is what the command prints now."""
    svg = (ROOT / "docs" / "images" / "shapes.svg").read_text()
    command = re.search(r"\$</text>.*", svg)
    assert command is not None
    words = re.sub(r"<[^>]+>|&#160;|\s+", " ", svg)
    preset = "shapes --preset qwen3-30b-a3b --micro-batch-size 4 --sequence-length 4096 --tp 2 --sequence-parallel --ep 8"
    child = subprocess.run([sys.executable, "-m", "gemmscope", *preset.split()], capture_output=True, text=True, check=True)
    for line in child.stdout.splitlines():
        for shape in re.findall(r"\d+x\d+x\d+", line):
            assert shape in words, "run: make pictures"
    assert child.stdout.splitlines()[0].split(":")[1].strip()[:40] in words, "run: make pictures"


def test_accuracy_is_made_from_what_was_measured() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from step_on_gpu import FORECASTS, markdown
    finally:
        sys.path.pop(0)
    kept = json.loads((ROOT / "docs" / "measured" / "h200_steps.json").read_text())
    assert (ROOT / "docs" / "accuracy.md").read_text().partition(FORECASTS)[0] == markdown(kept)


def test_forecasts_accuracy_is_current() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from forecast_accuracy import steps
    finally:
        sys.path.pop(0)
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert "".join(steps()) in page, "run: python benchmarks/forecast_accuracy.py"


def test_output_blocks_are_current() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from outputs import renewed
    finally:
        sys.path.pop(0)
    for path in (ROOT / "docs").glob("*.md"):
        assert renewed(path.read_text()) == path.read_text(), f"{path.name} is stale: make pictures"


def test_python_examples_run() -> None:
    """Those of the API's page, what needs a GPU left out."""
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "needs a GPU" not in line]
    child = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert "b300 NVFP4" in child.stdout
