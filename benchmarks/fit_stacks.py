"""Fits the factors of software stacks (coefficients/stacks.toml) to published runs, and forecasts each family without it.

    python benchmarks/fit_stacks.py RUNS.csv

RUNS.csv has a row for each published run: source, family, software, gpu, gpus, the model (`preset:NAME` or `config:FILE` beside
the table), the layout, tokens/s of one GPU, and the confidence in all of this. Rows of low confidence are left out. The table is
not part of this project: it holds what others published.

Every run is forecast in NVIDIA's current software. The logarithms of the factors on its parts are then fitted by weighted least
squares with priors, one vote per source (at most four rows count in full), and outliers count less.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import exp, log, log2, sqrt
from pathlib import Path
from statistics import mean, median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from gemmscope.cli import main as command_line
from gemmscope.gpu.specs import gpu
from gemmscope.parts import STEP_PARTS

NOISE, OUTLIER, MOST_ROWS, SIGMAS = 0.07, 0.15, 4, 1.645
COMPILED = {"torchtitan": "torchtitan", "fms-fsdp": "pytorch-compiled"}
STACKS = {"MPT": "mosaic", "torchtitan": "pytorch", "fms-fsdp": "pytorch", "nanotron": "nanotron", "jax": "jax",
          "megatron": "nvidia-2024", "nemo": "nvidia-2024", "dgxc": "nvidia", "automodel": "automodel"}  # fmt: skip
ATTENTION = {"mosaic": "Triton", "jax": "cuDNN", "nvidia-2024": "cuDNN", "nvidia": "", "automodel": ""}  # else FlashAttention-2
NVIDIA = ("nvidia", "nvidia-2024", "jax")
# Logarithms of factors: the prior's mean and standard deviation.
PRIORS = {
    "attention Triton 8.0": (0.35, 0.2), "attention Triton 9.0": (0.9, 0.25), "attention FA2 8.0": (0.0, 0.15),
    "attention FA2 9.0": (0.45, 0.2), "attention FA2 10.0": (0.6, 0.3), "attention cuDNN 9.0": (0.3, 0.2),
    "attention cuDNN 8.0": (0.1, 0.2), "head and loss": (0.3, 0.2), "norms and activations": (0.2, 0.2),
    "exposed communication": (0.0, 0.4), "quantization": (-0.1, 0.25), "PyTorch": (0.05, 0.06), "doubling": (0.01, 0.01),
}  # fmt: skip
OF_A_STACK = (0.0, 0.1)


@dataclass
class Run:
    """A published run with its forecast: the parts of the step, and which factors apply to which part (None: to all)."""

    source: str
    family: str
    published_ms: float
    parts_ms: np.ndarray
    half_width: float
    factors: list[tuple[str, int | None, float]]

    def predicted(self, values: dict[str, float]) -> tuple[float, dict[str, float]]:
        """The logarithm of the step, and its derivatives."""
        powers, whole = np.zeros(len(STEP_PARTS)), 0.0
        for name, part, weight in self.factors:
            if part is None:
                whole += weight * values[name]
            else:
                powers[part] += values[name]
        times = self.parts_ms * np.exp(powers)
        slopes: dict[str, float] = defaultdict(float)
        for name, part, weight in self.factors:
            slopes[name] += weight if part is None else float(times[part] / times.sum())
        return log(times.sum()) + whole, slopes


def forecast(row: dict[str, str], folder: Path, recompute: str) -> dict[str, object] | None:
    """The forecast of one row by the command line; None if it is refused."""
    kind, spec = row["model_spec"].split(":", 1)
    arguments = [f"--{kind}", str(folder / spec) if kind == "config" else spec, "--recipes", row["recipe"].lower()]
    names = {"gpu": "gpu", "gpus": "gpus", "mbs": "micro-batch-size", "seq": "sequence-length", "ga": "gradient-accumulation"}
    arguments += [text for name, option in names.items() for text in (f"--{option}", row[name])]
    sizes = [name for name in ("tp", "pp", "vp", "cp", "ep") if int(row[name]) > 1]
    arguments += [text for name in sizes for text in (f"--{name}", row[name])]
    arguments += ["--etp", row["etp"]] if row["etp"] and "ep" in sizes else []
    arguments += ["--fsdp", row["shard"]] if row["shard"] else ["--zero", row["zero"]]
    arguments += [text for name in ("pp_layers", "network") if row[name] for text in (f"--{name}", row[name])]
    arguments += ["--sequence-parallel"] * bool(row["sp"]) + ["--recompute", recompute] * (recompute != "none")
    with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        out = Path(place) / "run.json"
        sys.argv = ["gemmscope", "forecast", *arguments, *row["extra"].split(), "--stack", "nvidia", "--json", str(out)]
        try:
            command_line.main()
        except SystemExit as end:
            if end.code:
                return None
        recipes = json.loads(out.read_text())["gpus"][0]["step"]["recipes"]
    return next((time for time in recipes if time["recipe"] == row["recipe"]), None)


def read_run(row: dict[str, str], folder: Path) -> Run | None:
    """One row with its forecast; a share of the layers may be recomputed."""
    share = float(row["recompute_share"] or 0)
    kinds = {"none": 1 - share, "full": share} if share else {row["recompute"]: 1.0}
    forecasts = [(weight, forecast(row, folder, kind)) for kind, weight in kinds.items()]
    if any(time is None for _, time in forecasts):
        return None
    parts = sum(weight * np.array([time["parts_ms"].get(part, 0.0) for part in STEP_PARTS]) for weight, time in forecasts)
    step = forecasts[0][1]["step_ms"]
    compiled = "compile" in row["software"].lower()
    stack = COMPILED[row["family"]] if compiled and row["family"] in COMPILED else STACKS[row["family"]]
    kernels, at = ATTENTION.get(stack, "FA2"), STEP_PARTS.index
    architecture = gpu(row["gpu"]).architecture
    factors: list[tuple[str, int | None, float]] = [(stack, None, 1.0), ("doubling", None, max(log2(int(row["gpus"]) / 8), 0.0))]
    factors += [(f"attention {kernels} {architecture}", at("attention"), 1.0)] if kernels else []
    if stack not in NVIDIA:
        named = ("head and loss", "norms and activations", "exposed communication")
        factors += [("PyTorch", None, 1.0), *((name, at(name), 1.0) for name in named)]
    if row["recipe"] in ("FP8Tensorwise", "FP8Rowwise"):
        factors.append(("quantization", at("quantization"), 1.0))
    tokens = int(row["mbs"]) * int(row["ga"]) * int(row["seq"]) / (int(row["tp"]) * int(row["pp"]) * int(row["cp"]))
    published = tokens / float(row["tokens_s_gpu"]) * 1000
    return Run(row["source"], row["family"], published, parts, log(step["high"] / step["low"]) / 2, factors)


def fit(runs: list[Run]) -> tuple[dict[str, float], dict[str, float]]:
    """The logarithms of all factors, and their standard deviations."""
    names = sorted({name for run in runs for name, *_ in run.factors} | set(PRIORS))
    mean_of, width = (np.array([PRIORS.get(name, OF_A_STACK)[which] for name in names]) for which in (0, 1))
    values, rows = mean_of.copy(), Counter(run.source for run in runs)
    for _ in range(12):
        matrix, right = np.diag(1 / width**2), (mean_of - values) / width**2
        for run in runs:
            predicted, slopes = run.predicted(dict(zip(names, values, strict=True)))
            error, slope = log(run.published_ms) - predicted, np.array([slopes.get(name, 0.0) for name in names])
            weight = min(1.0, MOST_ROWS / rows[run.source]) / NOISE**2 / max(1.0, abs(error) / OUTLIER)
            matrix += weight * np.outer(slope, slope)
            right += weight * error * slope
        values = values + np.linalg.solve(matrix, right)
    return dict(zip(names, values, strict=True)), dict(zip(names, np.sqrt(np.diag(np.linalg.inv(matrix))), strict=True))


def show(title: str, errors: dict[str, list[float]]) -> None:
    """The errors of the step time of every source, and the median of their medians."""
    print(f"\n{title}")
    medians = {source: median(abs(exp(-error) - 1) for error in of) for source, of in errors.items()}
    for source, of in errors.items():
        print(f"  {source:18} {len(of):3} runs, off by {medians[source]:5.1%} (median), {exp(-median(of)) - 1:+.1%} signed")
    print(f"  median of the medians {median(medians.values()):.1%}, mean {mean(medians.values()):.1%}")


def main() -> None:
    """Fit, and forecast each family without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    table = parser.parse_args().runs
    rows = [row for row in csv.DictReader(table.open()) if row["confidence"] != "low" and row["split"] != "reference"]
    runs = [run for run in (read_run(row, table.parent) for row in rows) if run is not None]
    values, deviations = fit(runs)
    for name, value in values.items():
        print(f"{name:28} {exp(value):.2f}, half-width {SIGMAS * deviations[name]:.2f}")
    apart: dict[str, list[float]] = defaultdict(list)
    plain: dict[str, list[float]] = defaultdict(list)
    for family in sorted({run.family for run in runs}):
        without, _ = fit([run for run in runs if run.family != family])
        for run in (run for run in runs if run.family == family):
            known = {name: without.get(name, PRIORS.get(name, OF_A_STACK)[0]) for name, *_ in run.factors}
            apart[run.source].append(log(run.published_ms) - run.predicted(known)[0])
            plain[run.source].append(log(run.published_ms) - log(run.parts_ms.sum()))
    show("NVIDIA's current software", plain)
    show("each family left out", apart)
    spread = sqrt(mean(mean(error**2 for error in of) for of in apart.values()))
    print(f"standard deviation of the errors of what was left out: {spread:.2f}")


if __name__ == "__main__":
    main()
