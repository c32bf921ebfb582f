"""Measures start-up time: medians of whole processes, compared with that of Python itself in the same run.

Goals on a two-core machine: `gemmscope --help` under 0.3 s, `gemmscope shapes --preset …` under 0.6 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 15
COMMANDS = {
    "python, nothing imported": ["-c", "pass"],
    "gemmscope --help": ["-m", "gemmscope", "--help"],
    "gemmscope shapes --help": ["-m", "gemmscope", "shapes", "--help"],
    "gemmscope shapes --preset llama-3.1-8b": [
        *("-m", "gemmscope", "shapes", "--preset", "llama-3.1-8b", "--micro-batch-size", "1", "--sequence-length", "8192"),
    ],
    "gemmscope shapes --preset deepseek-v3 --json -": [
        *("-m", "gemmscope", "shapes", "--preset", "deepseek-v3", "--micro-batch-size", "1", "--sequence-length", "4096"),
        *("--json", "-"),
    ],
}


def seconds(arguments: list[str]) -> float:
    """One process, from start to exit."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Interleave the commands, so that a busy moment affects all of them."""
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            samples[name].append(seconds(arguments))
    bare = statistics.median(samples["python, nothing imported"])
    print(f"{'command':<50} {'median s':>9} {'worst s':>9} {'x python':>9}")
    for name, times in samples.items():
        median = statistics.median(times)
        print(f"{name:<50} {median:>9.3f} {max(times):>9.3f} {median / bare:>9.1f}")


if __name__ == "__main__":
    main()
