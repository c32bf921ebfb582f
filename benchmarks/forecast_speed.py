"""Measures the speed of forecasts: 10,000 different models in every precision, and single commands.

Goals on a two-core machine: 10,000 configurations in under 10 s, one command in under 1 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 7
FORECAST = [sys.executable, "-m", "gemmscope", "forecast"]
SWEEP = "--micro-batch-size 1 --intermediate-size 16384 --num-attention-heads 8 --num-hidden-layers 24 --gpu b300"
PLANE = "--sweep sequence_length=512:51200:512 --sweep hidden_size=1024:13696:128"
MODEL = "--preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192"


def seconds(options: str) -> float:
    """Wall time of one command."""
    begin = time.perf_counter()
    subprocess.run([*FORECAST, *options.split()], capture_output=True, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Time a sweep whose GEMMs all differ, in six precisions, and single forecasts."""
    print(f"a sweep of 100 x 100: {seconds(f'{SWEEP} {PLANE}'):.2f} s")
    for chips in ("h200", "b300,b200,h200"):
        times = [seconds(f"{MODEL} --gpu {chips}") for _ in range(ROUNDS)]
        print(f"gemmscope forecast --gpu {chips}: median {statistics.median(times):.2f} s, worst {max(times):.2f} s")


if __name__ == "__main__":
    main()
