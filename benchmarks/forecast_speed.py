"""How fast forecasts are: 10,000 different models in every precision, and one from the prompt.

Goals on a two-core machine: 10,000 configurations in under 10 s, one command in under 1 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.sweep import forecast_points
from gemmscope.gpu.specs import gpu
from gemmscope.model.flags import from_hyperparameters
from gemmscope.model.spec import RunSpec

CONFIGURATIONS, ROUNDS = 10_000, 7
RECIPES = ["BF16", "FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4"]
COMMAND = ["-m", "gemmscope", "forecast", "--preset", "llama-3.1-8b", "--micro-batch-size", "1", "--sequence-length", "8192"]


def main() -> None:
    """No two configurations have a product in common."""
    wanted = []
    begin = time.perf_counter()
    for number in range(CONFIGURATIONS):
        hidden, ratio, batch = 1024 + 128 * (number % 100), 2 + 0.5 * (number // 100 % 10), 1 + number // 1000
        model = from_hyperparameters(
            hidden_size=hidden, intermediate_size=int(hidden * ratio), num_attention_heads=hidden // 128, num_hidden_layers=24
        )
        wanted.append(((number,), model, RunSpec(batch, 4096)))
    points = forecast_points(Forecaster(gpu("b300"), "sustained"), wanted, RECIPES)
    print(f"{len(points)} configurations x {len(RECIPES)} precisions: {time.perf_counter() - begin:.2f} s")
    for chips in ("h200", "b300,b200,h200"):
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *COMMAND, "--gpu", chips], capture_output=True, check=True)
            times.append(time.perf_counter() - begin)
        print(f"gemmscope forecast --gpu {chips}: median {statistics.median(times):.2f} s, worst {max(times):.2f} s")


if __name__ == "__main__":
    main()
