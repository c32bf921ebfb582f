"""Writes docs/measured/forecasts.md, from the coefficients, the held-out sample and the measured steps alone.

python benchmarks/forecast_accuracy.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import leave_out
from gemmscope.forecast.calibration import Calibration, shipped
from gemmscope.forecast.coefficients import Coefficients
from gemmscope.forecast.gemm import GemmModel, model
from gemmscope.forecast.linears import Forecaster, in_common
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.step_estimate import gpu_speedup
from gemmscope.gpu.specs import gpu
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.workload.derive import derive

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/measured/forecasts.md"
HEAD = """# Forecasts compared with measurements

Written by `python benchmarks/forecast_accuracy.py`; [`forecast`](../forecast.md) explains how forecasts are made.

## GEMMs of sizes that were not fitted

A fifth of all (n, k) sites was held out of fitting; these are the errors on them, with the code that ships. Goals: a median of at
most 4%, a 90th percentile of at most 12%, and 85 to 95% of measured times inside the 90% error bar, for every GPU and format. The
plain roofline is the larger of FLOPs over the published rate and bytes over the bandwidth. Measured times come from
ai-dynamo/aiconfigurator.

"""
STEPS = """Nothing was fitted to these speedups; the increase of the clock inside a step was chosen knowing the BF16 times.

From public measurements alone:

"""
CALIBRATED = """
With the calibration that `gemmscope calibrate` measured on another H200 (eight linears, two short steps; it ships with the
package, and forecasts of models for an H200 use it):

"""
AS_IF = """Each series is forecast as if it, and in some rows related series, had not been measured; other series are used
instead. The shared weights of the networks were fitted with the series; fits without GB200, without H200 and without vllm gave
the same shares within 0.3 percentage points. The goal is at least 85% inside the 90% error bar for each kind. *Bar* is how far
the error bar reaches above the forecast, as a median. Series without a substitute are not counted, so nothing here checks a GPU
for which only a distantly related GPU was measured (L40S).

"""
SPEEDUPS = """
Speedups over BF16 by the same library on the same GPU, with both sides left out. Errors that both sides share cancel in part, so
the error bar is narrower than that of two independent forecasts:

"""
FEW_ROWS = """
GEMMs with few rows, and a library that was not fitted: PyTorch 2.11 on an H200 in bursts, with inputs quantized beforehand
(`benchmarks/small_m_on_gpu.py`; 24 weights, m from 1 to 384 and from 512 to 16384). In bf16, trtllm runs cuBLAS as PyTorch
does, in another version. Rowwise FP8 is forecast as FP8 with one scale for each tensor; with few rows PyTorch's kernel takes
twice as long as that, which the error bar does not cover.

"""
SERIES = """
Each GPU left out, with its library named:

"""


def table(columns: str, rows: list[str]) -> str:
    """Markdown; the first two columns are text."""
    names = columns.split(" | ")
    rule = " | ".join("---" if number < 2 else "---:" for number in range(len(names)))
    return "\n".join([f"| {columns} |", f"| {rule} |", *(f"| {row} |" for row in rows)]) + "\n"


def held_out(coefficients: Coefficients) -> Iterator[str]:
    """Every series, then each GPU and format."""
    of_series = [
        " | ".join(
            [series.gpu, series.fmt, series.state, series.library,
             f"{series.held_out['rows']:.0f}", f"{series.held_out['median']:.1%}", f"{series.held_out['p90']:.1%}",
             f"{series.held_out['covered']:.0%}", f"{series.held_out['roofline_median']:.0%}"]
        )
        for series in coefficients.series
    ]  # fmt: skip
    yield table(
        "GPU | format | state | library | rows | median | 90th percentile | inside the bar | plain roofline, median", of_series
    )
    yield "\nAll libraries and states of a GPU and format together, from the sample of these rows in `tests/data/`:\n\n"
    pairs: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for key, rows in leave_out.sample().items():
        group = leave_out.forecast(GemmModel(coefficients), key, rows, key[3])
        pairs[key[:2]].append((np.exp(-group.errors) - 1, group.inside))
    lines = []
    for (name, fmt), arrays in sorted(pairs.items()):
        error, inside = (np.concatenate(parts) for parts in zip(*arrays, strict=True))
        spread = f"{np.median(np.abs(error)):.1%} | {np.quantile(np.abs(error), 0.9):.1%}"
        lines.append(f"{name} | {fmt} | {len(error)} | {spread} | {inside.mean():.0%}")
    yield table("GPU | format | rows | median | 90th percentile | inside the bar", lines)


def transfers(coefficients: Coefficients) -> Iterator[str]:
    """Error bars of what was left out, by kind; speedups; few rows; and each GPU that was left out."""
    lines = []
    for kind, (rule, named) in leave_out.KINDS.items():
        groups = list(leave_out.left_out(coefficients, rule, named=named))
        width = np.median(np.concatenate([group.high for group in groups]))
        lines.append(
            f"{kind} | {len(groups)} | {leave_out.share_inside(groups):.0%} | {np.exp(width) - 1:+.0%} | {_short(groups)}"
        )
    yield table("left out | series | inside the bar | bar | below 85%", lines)
    yield SPEEDUPS
    lines = []
    for kind in ("its library, on every GPU", "its GPU", "its state on that GPU"):
        pairs = list(leave_out.speedups(coefficients, leave_out.KINDS[kind][0]))
        errors, width, independent = (
            np.concatenate([getattr(pair, name) for pair in pairs]) for name in ("errors", "width", "independent")
        )
        inside = f"{(np.abs(errors) <= width).mean():.0%} | {np.exp(np.median(width)) - 1:+.0%}"
        lines.append(f"{kind} | {len(errors)} | {inside} | {np.exp(np.median(independent)) - 1:+.0%}")
    yield table("left out | GEMMs | inside the bar | bar | bar if independent", lines)
    yield FEW_ROWS
    lines = []
    for fmt, library in leave_out.CUBLAS:
        for few in (True, False):
            group = leave_out.on_h200(coefficients, fmt, library, few=few)
            share = f"{group.inside.mean():.0%} | {np.exp(np.median(group.high)) - 1:+.0%}"
            errors = f"{np.exp(np.median(group.errors)) - 1:+.0%} | {share}"
            lines.append(f"{fmt} | {library or 'not named'} | {'1 to 384' if few else '512 to 16384'} | {errors}")
    yield table("format | library | m | measured over forecast, median | inside the bar | bar", lines)
    yield SERIES
    lines = []
    for group in leave_out.left_out(coefficients, leave_out.KINDS["its GPU"][0], named=True):
        error = np.exp(-group.errors) - 1
        spread = f"{np.median(error):+.1%} | {np.median(np.abs(error)):.1%} | {np.quantile(np.abs(error), 0.9):.1%}"
        lines.append(f"{' | '.join(group.key)} | {group.based_on} | {spread} | {group.inside.mean():.0%}")
    yield table("GPU | format | state | library | based on | bias | median | 90th percentile | inside the bar", lines)


def _short(groups: list[leave_out.Group]) -> str:
    low = [f"{' '.join(group.key)} ({group.inside.mean():.0%})" for group in groups if group.inside.mean() < leave_out.GOAL]
    return ", ".join(low) or "none"


def steps(measured: Calibration | None) -> Iterator[str]:
    """Training steps measured on an H200."""
    lines, off, times_off, inside = [], [], [], 0
    for name, facts in json.loads((ROOT / "tests/data/h200_training_steps.json").read_text())["models"].items():
        sizes, real = dict(facts["config"]), facts["median_ms"]
        run = RunSpec(sizes.pop("micro_batch_size"), sizes.pop("sequence_length"))
        described = from_hyperparameters(gated=sizes.pop("gated_mlp"), **sizes)
        forecast = StepForecast(Forecaster(gpu("h200"), "sustained", measured=measured), described, run, derive(described, run))
        slow, baseline = (real["BF16"] + real["BF16_again"]) / 2, forecast.step("BF16")
        times_off.append(abs(baseline.time_ms / slow - 1))
        lines.append(f"{name} | BF16 | {slow:.1f} | {baseline.time_ms:.1f} | {baseline.time_ms / slow - 1:+.1%} | | |")
        for recipe in ("FP8Current", "FP8Delayed", "FP8Block"):
            forecasted = forecast.step(recipe)
            gain, truth = gpu_speedup(baseline, forecasted, in_common()).interval(), slow / real[recipe]
            off.append(abs(gain.value / truth - 1))
            times_off.append(abs(forecasted.time_ms / real[recipe] - 1))
            inside += gain.low <= truth <= gain.high
            times = f"{real[recipe]:.1f} | {forecasted.time_ms:.1f} | {forecasted.time_ms / real[recipe] - 1:+.1%}"
            forecast_gain = f"{gain.value:.3f} [{gain.low:.3f}, {gain.high:.3f}]"
            lines.append(f"{name} | {recipe} | {times} | {truth:.3f} | {forecast_gain} | {gain.value / truth - 1:+.1%}")
    yield table("model | recipe | step ms | forecast ms | error | speedup | forecast [90%] | error", lines)
    yield f"\nSpeedups: {np.mean(off):.1%} off on average, {max(off):.1%} at worst; {inside} of {len(off)} inside the bar. "
    yield f"Times: {np.mean(times_off):.1%} and {max(times_off):.1%}.\n"


def training_steps() -> str:
    """These steps from public measurements alone, and with the calibration of another H200."""
    calibration = shipped("h200")
    assert calibration is not None
    return "".join([STEPS, *steps(None), CALIBRATED, *steps(calibration)])


def text(coefficients: Coefficients) -> str:
    """The whole page."""
    parts = [HEAD, *held_out(coefficients)]
    parts += ["\n## GPUs and libraries treated as not measured\n\n", AS_IF, *transfers(coefficients)]
    parts += ["\n## Training steps measured on an H200\n\n", training_steps()]
    return "".join(parts)


def main() -> None:
    """Write the page."""
    OUT.write_text(text(model().coefficients), encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
