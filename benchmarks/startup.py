"""Measures start-up time: medians of whole processes, compared with that of Python itself in the same run.

    python benchmarks/startup.py [OTHER_CHECKOUT]    # in turn with another checkout: the last column is the ratio

Goals on a two-core machine: `gemmscope --help` under 0.3 s, `gemmscope shapes --preset …` under 0.6 s.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 15
COMMANDS = {
    "python, nothing imported": ["-c", "pass"],
    "gemmscope --help": ["-m", "gemmscope", "--help"],
    "gemmscope shapes --help": ["-m", "gemmscope", "shapes", "--help"],
    "gemmscope shapes --preset llama-3.1-8b": [
        *("-m", "gemmscope", "shapes", "--preset", "llama-3.1-8b", "--micro-batch-size", "1", "--sequence-length", "8192"),
    ],
    "gemmscope forecast --preset llama-3.1-8b": [
        *("-m", "gemmscope", "forecast", "--preset", "llama-3.1-8b", "--micro-batch-size", "1", "--sequence-length", "8192"),
        *("--gpu", "h200"),
    ],
    "gemmscope shapes --preset deepseek-v3 --json -": [
        *("-m", "gemmscope", "shapes", "--preset", "deepseek-v3", "--micro-batch-size", "1", "--sequence-length", "4096"),
        *("--json", "-"),
    ],
}


def seconds(arguments: list[str], checkout: Path) -> float:
    """One process, from start to exit."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=environment)
    return time.perf_counter() - begin


def main() -> None:
    """Interleave the commands, so that a busy moment affects all of them."""
    checkouts = [Path(__file__).parent.parent, *map(Path, sys.argv[1:2])]
    samples: dict[tuple[str, Path], list[float]] = {(name, checkout): [] for name in COMMANDS for checkout in checkouts}
    for _ in range(ROUNDS):
        for (name, checkout), times in samples.items():
            times.append(seconds(COMMANDS[name], checkout))
    medians = {key: statistics.median(times) for key, times in samples.items()}
    bare = medians["python, nothing imported", checkouts[0]]
    print(f"{'command':<50} {'median s':>9} {'worst s':>9} {'x python':>9}", "  x other" * (len(checkouts) > 1))
    for name in COMMANDS:
        median = medians[name, checkouts[0]]
        ratios = [f"{median / medians[name, checkout]:>9.2f}" for checkout in checkouts[1:]]
        print(f"{name:<50} {median:>9.3f} {max(samples[name, checkouts[0]]):>9.3f} {median / bare:>9.1f}", *ratios)


if __name__ == "__main__":
    main()
