"""Shell completion: the suggestions that bash gets for a line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gemmscope.cli import build
from gemmscope.gpu.specs import gpus
from gemmscope.model import presets
from gemmscope.options.declare import options_of
from gemmscope.options.measuring import BenchOptions
from gemmscope.recipe.frameworks import backends
from gemmscope.recipe.recipes import recipes
from support.command import Run, run

__all__ = ["run"]  # the fixture


def bash(line: str) -> dict[str, str]:
    """The environment variables that bash sets for completion, with the cursor at the end of the line."""
    typed = line.split()
    at = len(typed) - (not line.endswith(" "))
    return {"_GEMMSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(at)}


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("gemmscope fore", ["forecast"]),
        ("gemmscope forecast --gpu b", ["b200", "b300"]),
        ("gemmscope forecast --gpu b200,b", ["b200,b300"]),
        ("gemmscope shapes --preset llama-3.1-8", ["llama-3.1-8b"]),
        ("gemmscope bench --recipes FP8B", ["FP8Block"]),
        ("gemmscope bench --recipes fp8current,mx", ["fp8current,mxfp8"]),
        ("gemmscope step --backend ", [*backends()]),
        ("gemmscope step --device c", ["cuda", "cpu"]),
        ("gemmscope trace-me --kind ", ["loop", "trainer", "plain"]),
        ("gemmscope forecast --state ", ["sustained", "burst"]),
        ("gemmscope shapes --config ", []),  # the shell offers files
    ],
)
def test_offers(run: Run, monkeypatch: pytest.MonkeyPatch, line: str, offers: list[str]) -> None:
    for name, value in bash(line).items():
        monkeypatch.setenv(name, value)
    assert run("").out.split() == offers


def test_the_names_are_those_that_are_accepted() -> None:
    assert list(build.listed("gpu/specs.toml")) == list(gpus())
    assert list(build.listed("recipe/recipes.toml")) == list(recipes())
    assert tuple(build.listed("model/presets/")) == presets.names()
    assert list(options_of(BenchOptions)["backend"].choices) == list(backends())


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['gemmscope']\n"
        "from gemmscope.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'yaml', 'gemmscope.results.base', 'gemmscope.model'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, **bash("gemmscope forecast --gpu h2")}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["h20", "h200", "h200-nvl"]
