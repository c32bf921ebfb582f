"""What people read may be renamed: no number follows from the words for precisions, recipes, GPUs, frameworks, causes, classes of
kernels, and what the CPU does."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from support.package_copy import PackageCopy, package_copy

TRACES = Path(__file__).parent / "data" / "traces"
MODEL = "--preset llama-3.2-1b --micro-batch-size 1 --sequence-length 1k"
COMMANDS = {
    "low.json": f"explain {TRACES}/healthy_te_block.json.gz --baseline {TRACES}/healthy_te_bf16.json.gz",
    "high.json": f"explain {TRACES}/backward_in_bf16.json.gz",
    "long.json": f"explain {TRACES}/long_sequence.json.gz --baseline {TRACES}/long_sequence_bf16.json.gz",
    "idle.json": f"explain {TRACES}/idle_loader.json.gz",
    "head.json": f"explain {TRACES}/large_head.json.gz",
    "forecast.json": f"forecast {MODEL} --gpu b200,h200 --keep-higher first=1,mlp.down_proj",
    "plan.json": f"plan {MODEL} --gpu b200 --gpus 2 --global-batch 8 --tp 1 --recompute none",
}
TITLES = (
    *("recipe/precisions.toml", "recipe/recipes.toml", "recipe/frameworks.toml", "gpu/specs.toml"),
    *("explain/causes.toml", "explain/classes.toml", "explain/host_activity.toml"),
)


def numbers(value: Any) -> Any:
    """A result without its texts, and without what differs from run to run."""
    if isinstance(value, dict):
        return [numbers(one) for key, one in value.items() if key not in ("created", "command")]
    if isinstance(value, list):
        return [numbers(one) for one in value]
    return "text" if isinstance(value, str) else value


def results(copy: PackageCopy) -> dict[str, Any]:
    for outcome in copy.outcomes(*(f"{command} --json {name}" for name, command in COMMANDS.items())):
        assert outcome.code == 0, outcome.err
    return {name: json.loads((copy.folder / name).read_text()) for name in COMMANDS}


def test_no_number_follows_from_a_title(tmp_path: Path) -> None:
    """`tests/workload/test_roles.py` does the same for the names of ops."""
    renamed = package_copy(tmp_path / "renamed")
    for file in TITLES:
        path, titles = renamed.package / file, itertools.count()
        parts = re.split(r'(?m)^((?:title|in_traces|name) = )"[^"]*"', path.read_text())
        path.write_text("".join(f'{part}"Renamed {next(titles)}"' if place % 2 else part for place, part in enumerate(parts)))
    before, after = results(package_copy(tmp_path / "usual")), results(renamed)
    assert "Renamed" in json.dumps(after)
    for name in COMMANDS:
        assert numbers(before[name]) == numbers(after[name]), name
