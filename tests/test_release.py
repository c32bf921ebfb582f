"""What a release needs agrees with the package: the versions of Python, the inputs of the action, the changelog."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gemmscope.toml import parse_toml

ROOT = Path(__file__).parent.parent


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / name).read_text())


def test_every_supported_python_is_tested() -> None:
    classifiers = parse_toml((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = [name.split(" :: ")[-1] for name in classifiers if re.search(r":: 3\.\d+$", name)]
    assert read("workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == supported


def test_a_release_is_tested_before_it_is_published() -> None:
    jobs = read("workflows/release.yml")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["publish"]["needs"] == "test"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


def test_the_action_runs_the_command_that_the_page_shows() -> None:
    action, page = read("actions/compare/action.yml"), (ROOT / "docs/how-to/ci.md").read_text()
    shown = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["jobs"]["speed"]["steps"]
    (step,) = (one for one in shown if "/compare@" in one.get("uses", ""))
    assert set(step["with"]) == set(action["inputs"])
    script = action["runs"]["steps"][-1]
    assert {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]} == set(script["env"].values())
    assert '--fail-if-slower "$LIMIT"' in script["run"]


def test_changes_stand_under_a_version() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", head) for head in heads[1:])
