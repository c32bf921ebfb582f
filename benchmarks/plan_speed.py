"""Measures the speed of plans: how many layouts a second, for models with and without experts.

Goal on a two-core machine: 20,000 layouts, those that do not fit included, in under 15 s.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gemmscope.results.plan import PlanResult
from gemmscope.results.read import read_result

PLANS = {
    "Llama-3.1 70B on 64 H100": "--preset llama-3.1-70b --gpu h100 --gpus 64 --global-batch 256 --sequence-length 8k",
    "Qwen3-30B-A3B on 8 GB200": "--preset qwen3-30b-a3b --gpu gb200 --gpus 8 --global-batch 512 --sequence-length 4k",
    "DeepSeek-V3 on 256 GB200": "--preset deepseek-v3 --gpu gb200 --gpus 256 --global-batch 2048 --sequence-length 4k",
    "Llama-3.1 405B on 16,384 H100": "--preset llama-3.1-405b --gpu h100 --gpus 16384 --global-batch 2048 --sequence-length 8k",
}


def seconds(options: str, path: Path) -> float:
    """Wall time of one command, which also writes its run file."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "gemmscope", "plan", *options.split(), "--json", str(path)]
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Time every plan."""
    with tempfile.TemporaryDirectory() as folder:
        for name, options in PLANS.items():
            path = Path(folder) / f"{len(name)}.json"
            wall = seconds(options, path)
            result = read_result(path)
            assert isinstance(result, PlanResult)
            [point] = result.points
            considered = point.fitting + sum(entry.count for entry in point.pruned if entry.unit == "layouts")
            rate = considered / wall
            print(f"{name}: {considered:,} layouts, {point.fitting:,} of them fit, in {wall:.1f} s: {rate:,.0f} layouts/s")


if __name__ == "__main__":
    main()
