"""Run files as `--json` writes them, to be changed by tests and written to disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.results import RESULTS

RunData = dict[str, Any]


def run_data(name: str) -> RunData:
    """The content of the run file of one of `RESULTS`."""
    data: RunData = json.loads(RESULTS[name]().to_json())
    return data


def put(folder: Path, name: str, run: RunData | str) -> Path:
    """Write it to a file; the name of a result stands for its content."""
    path = folder / name
    path.write_text(json.dumps(run_data(run) if isinstance(run, str) else run), encoding="utf-8")
    return path
