"""Run files of every kind, as `--json` writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from gemmscope.results.base import Result
from support.explain_files import explanation
from support.run_files import recorded_bench
from support.step_files import recorded_step
from support.traces import DATA

SIZES = "--hidden-size 4096 --intermediate-size 16384 --num-attention-heads 32 --num-hidden-layers 24"
FIRST, AGAIN = DATA / "h200_bench_first.json.gz", DATA / "h200_bench_again.json.gz"
RunData = dict[str, Any]


@cache
def made_by(line: str) -> str:
    """The JSON that a command writes in a process of its own."""
    command = [sys.executable, "-m", "gemmscope", *line.split(), "--json", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def as_written(result: Result | str) -> RunData:
    data: RunData = json.loads(result if isinstance(result, str) else result.to_json())
    return data


def bench(name: str = "first") -> RunData:
    return as_written(recorded_bench(name))


def step(name: str = "llama8b", **more: bool) -> RunData:
    return as_written(recorded_step(name, **more))


def forecast() -> RunData:
    """The worked example on a B300."""
    return as_written(made_by(f"forecast {SIZES} --micro-batch-size 31 --sequence-length 512 --gpu b300"))


def sweep() -> RunData:
    """A forecast over batches, of two GPUs."""
    return as_written(made_by(f"forecast {SIZES} --sequence-length 512 --gpu b300,h200 --sweep micro_batch_size=1,4,16"))


EVERY_KIND: dict[str, Callable[[], RunData]] = {
    "bench": bench,
    "fallback": lambda: bench("fallback"),
    "step": lambda: step("gpt1b", verified=True, batches=True),
    "shapes": lambda: as_written(made_by(f"shapes {SIZES} --micro-batch-size 31 --sequence-length 512")),
    "forecast": forecast,
    "sweep": sweep,
    "explain": lambda: as_written(explanation()),
    "compare": lambda: as_written(made_by(f"compare {FIRST} {AGAIN}")),
}


def put(folder: Path, name: str, run: RunData) -> Path:
    """Write it to a file."""
    path = folder / name
    path.write_text(json.dumps(run), encoding="utf-8")
    return path
