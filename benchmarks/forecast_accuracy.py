"""Writes the part of docs/accuracy.md about forecasts, from the coefficients, the held-out sample and the measured steps alone.

python benchmarks/forecast_accuracy.py
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from gemmscope.errors import UserError
from gemmscope.forecast.calibration import shipped
from gemmscope.forecast.coefficients import Coefficients
from gemmscope.forecast.gemm import GemmModel, model
from gemmscope.forecast.linears import Adjustment, Forecaster, in_common
from gemmscope.forecast.physics import Shapes
from gemmscope.forecast.step import StepForecast, speedup
from gemmscope.gpu.specs import gpu
from gemmscope.model.flags import from_hyperparameters
from gemmscope.model.spec import RunSpec
from gemmscope.workload.derive import derive
from step_on_gpu import FORECASTS

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs/accuracy.md"
HEAD = """## Accuracy of forecasts

Written by `python benchmarks/forecast_accuracy.py`; [`forecast`](forecast.md) explains how forecasts are made.

### GEMMs of sizes that were not fitted

A fifth of all (n, k) sites was held out of fitting; these are the errors on them, with the code that ships. Goals: a median of at
most 4%, a 90th percentile of at most 12%, and 85 to 95% of measured times inside the 90% error bar, for every GPU and format. The
plain roofline is the larger of FLOPs over the published rate and bytes over the bandwidth. Measured times come from
ai-dynamo/aiconfigurator.

"""
STEPS = """Nothing was fitted to these speedups; the increase of the clock inside a step was chosen with the BF16 times in view.

From public measurements alone:

"""
CALIBRATED = """
With the calibration that `gemmscope calibrate` measured on another H200 (eight linears, two short steps; it ships with the
package, and forecasts of models for an H200 use it):

"""
AS_IF = """The series of the GPU are left out, and those of related GPUs are used instead (the shared weights of the networks were
fitted with it). Where the library or its version differs from that of the related GPU, this is part of the error.

"""


def table(columns: str, rows: list[str]) -> str:
    """Markdown; the first two columns are text."""
    names = columns.split(" | ")
    rule = " | ".join("---" if number < 2 else "---:" for number in range(len(names)))
    return "\n".join([f"| {columns} |", f"| {rule} |", *(f"| {row} |" for row in rows)]) + "\n"


def held_out(coefficients: Coefficients) -> Iterator[str]:
    """Every series, then each GPU and format."""
    series = [
        " | ".join(
            [each.gpu, each.fmt, each.state, each.library, f"{each.held_out['rows']:.0f}", f"{each.held_out['median']:.1%}",
             f"{each.held_out['p90']:.1%}", f"{each.held_out['covered']:.0%}", f"{each.held_out['roofline_median']:.0%}"]
        )
        for each in coefficients.series
    ]  # fmt: skip
    yield table(
        "GPU | format | state | library | rows | median | 90th percentile | inside the bar | plain roofline, median", series
    )
    yield "\nAll libraries and states of a GPU and format together, from the sample of these rows in `tests/data/`:\n\n"
    pairs: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for key, rows in sample().items():
        pairs[key[:2]].append(errors(GemmModel(coefficients), key, rows, key[3]))
    lines = []
    for (name, fmt), found in sorted(pairs.items()):
        error, inside = (np.concatenate(each) for each in zip(*found, strict=True))
        spread = f"{np.median(np.abs(error)):.1%} | {np.quantile(np.abs(error), 0.9):.1%}"
        lines.append(f"{name} | {fmt} | {len(error)} | {spread} | {inside.mean():.0%}")
    yield table("GPU | format | rows | median | 90th percentile | inside the bar", lines)


def sample() -> dict[tuple[str, str, str, str], np.ndarray]:
    """The held-out rows (m, k, n, ms) of every series."""
    rows: dict[tuple[str, str, str, str], list[list[float]]] = defaultdict(list)
    for row in csv.DictReader(gzip.decompress((ROOT / "tests/data/held_out_gemms.csv.gz").read_bytes()).decode().splitlines()):
        rows[row["gpu"], row["fmt"], row["state"], row["library"]].append(
            [float(row[each]) for each in ("m", "k", "n", "latency_ms")]
        )
    return {key: np.array(values) for key, values in rows.items()}


def errors(gemms: GemmModel, key: tuple[str, ...], rows: np.ndarray, library: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors, and whether each lies inside its error bar."""
    m, k, n, measured = rows.T
    found = gemms.time(gpu(key[0]), key[1], Shapes.of(m, k, n), "sustained" if key[2] == "sustained" else "burst", library)
    return found.total_ms / measured - 1, (measured >= found.low_ms) & (measured <= found.high_ms)


def transfers(coefficients: Coefficients) -> Iterator[str]:
    """Errors if a GPU had not been measured, and related GPUs were used instead."""
    lines = []
    for key, rows in sample().items():
        others = tuple(each for each in coefficients.series if each.gpu != key[0])
        gemms = GemmModel(replace(coefficients, series=others))
        try:
            basis = gemms.basis(gpu(key[0]), key[1], "sustained" if key[2] == "sustained" else "burst")
        except UserError:
            continue
        error, inside = errors(gemms, key, rows, None)
        what = " | ".join(key)
        source = f"{basis.series.gpu}, {basis.series.state}, {basis.series.library}"
        spread = f"{np.median(error):+.1%} | {np.median(np.abs(error)):.1%} | {np.quantile(np.abs(error), 0.9):.1%}"
        lines.append(f"{what} | {source} | {spread} | {inside.mean():.0%}")
    yield table("GPU | format | state | library | based on | bias | median | 90th percentile | inside the bar", lines)


def steps(measured: Adjustment | None) -> Iterator[str]:
    """Training steps measured on an H200."""
    lines, off, times_off, held = [], [], [], 0
    for name, facts in json.loads((ROOT / "tests/data/h200_training_steps.json").read_text())["models"].items():
        sizes, real = dict(facts["config"]), facts["median_ms"]
        run = RunSpec(sizes.pop("micro_batch_size"), sizes.pop("sequence_length"))
        described = from_hyperparameters(gated=sizes.pop("gated_mlp"), **sizes)
        forecast = StepForecast(Forecaster(gpu("h200"), "sustained", measured=measured), described, run, derive(described, run))
        slow, baseline = (real["BF16"] + real["BF16_again"]) / 2, forecast.step("BF16")
        times_off.append(abs(baseline.total.value / slow - 1))
        lines.append(f"{name} | BF16 | {slow:.1f} | {baseline.total.value:.1f} | {baseline.total.value / slow - 1:+.1%} | | |")
        for recipe in ("FP8Current", "FP8Delayed", "FP8Block"):
            found = forecast.step(recipe)
            gain, truth = speedup(baseline, found, in_common()).interval(), slow / real[recipe]
            off.append(abs(gain.value / truth - 1))
            times_off.append(abs(found.total.value / real[recipe] - 1))
            held += gain.low <= truth <= gain.high
            times = f"{real[recipe]:.1f} | {found.total.value:.1f} | {found.total.value / real[recipe] - 1:+.1%}"
            forecast_gain = f"{gain.value:.3f} [{gain.low:.3f}, {gain.high:.3f}]"
            lines.append(f"{name} | {recipe} | {times} | {truth:.3f} | {forecast_gain} | {gain.value / truth - 1:+.1%}")
    yield table("model | recipe | step ms | forecast ms | error | speedup | forecast [90%] | error", lines)
    yield f"\nSpeedups: {np.mean(off):.1%} off on average, {max(off):.1%} at worst; {held} of {len(off)} inside the bar. "
    yield f"Times: {np.mean(times_off):.1%} and {max(times_off):.1%}.\n"


def training_steps() -> str:
    """These steps from public measurements alone, and with the calibration of another H200."""
    found = shipped("h200")
    assert found is not None
    return "".join([STEPS, *steps(None), CALIBRATED, *steps(found.adjustment(other_chip=True))])


def text(coefficients: Coefficients) -> str:
    """The whole page."""
    parts = [HEAD, *held_out(coefficients)]
    parts += ["\n### GPUs and libraries treated as not measured\n\n", AS_IF, *transfers(coefficients)]
    parts += ["\n### Training steps measured on an H200\n\n", training_steps()]
    return "".join(parts)


def main() -> None:
    """Write the page."""
    before = OUT.read_text(encoding="utf-8").partition(FORECASTS)[0] if OUT.exists() else ""
    OUT.write_text(before + FORECASTS + "\n" + text(model().coefficients), encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
