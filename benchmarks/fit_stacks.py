"""Fits the multipliers of software (coefficients/stacks.toml) to published runs, and forecasts each family of sources without it.

    python benchmarks/fit_stacks.py RUNS.csv            prints the fit, and each family left out
    python benchmarks/fit_stacks.py RUNS.csv --write    also writes docs/measured/other_software.toml, for docs/measured/runs.md

RUNS.csv has a row for each published run: source, family, software, gpu, gpus, the model (`preset:NAME` or `config:FILE` beside
the table), the layout, tokens/s of one GPU, and the confidence in all of this. Rows of low confidence are left out. The table is
not part of this project: it holds what others published.

Every run is forecast without any software around it. The logarithms of the multipliers are then fitted by weighted least squares
with priors, one vote per source (at most four rows count in full), and outliers count less. The widths of the bars follow:
what the hardware model is unsure of, what the fit is unsure of, and how much runs differ beyond that (`runs`, `experts`: the most
likely spreads of runs whose family was left out). So does the spread of factors of whole stacks. All of this is done again in
each fold, without the family that is forecast.
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
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import product
from math import exp, log, log2, sqrt
from pathlib import Path
from statistics import mean, median, pvariance
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from gemmscope.cli import main as command_line
from gemmscope.commands import forecast as command
from gemmscope.forecast.stacks import HALF_WIDTHS, LAUNCHES, Software, reference, stacks, stacks_on
from gemmscope.forecast.stacks import _facts as table
from gemmscope.gpu.specs import gpu
from gemmscope.parts import STEP_PARTS
from gemmscope.recipe.recipes import BASELINE, recipe

OUT = Path(__file__).resolve().parent.parent / "docs/measured/other_software.toml"
NOISE, OUTLIER, MOST_ROWS = 0.07, 0.15, 4
ONCE_MS = 10.0  # the unit of what a step takes once
COMPILED = {"torchtitan": "torchtitan", "fms-fsdp": "pytorch-compiled"}
STACKS = {"MPT": "mosaic", "torchtitan": "pytorch", "fms-fsdp": "pytorch", "nanotron": "nanotron", "jax": "jax",
          "megatron": "nvidia-2024", "nemo": "nvidia-2024", "dgxc": "nvidia-2025", "automodel": "automodel"}  # fmt: skip
# Logarithms of factors: the mean and the standard deviation of the prior. Attention: published rates of FlashAttention-2 and -3.
# 500 W instead of 700: GEMMs at the power limit run at about (5/7)^(1/3) of the clock. `once`: in units of ONCE_MS.
# NVIDIA's containers run one layout of Megatron-Bridge within 2 to 8% of each other.
PRIORS = {
    "Triton attention of 2023 8.0": (0.35, 0.2), "Triton attention of 2023 9.0": (0.8, 0.25), "FlashAttention-2 8.0": (0.0, 0.15),
    "FlashAttention-2 9.0": (0.37, 0.15), "FlashAttention-2 10.0": (0.5, 0.3), "cuDNN attention of 2024 8.0": (0.1, 0.15),
    "cuDNN attention of 2024 9.0": (0.25, 0.15), "loss of PyTorch": (0.3, 0.2), "norms of PyTorch": (0.3, 0.2),
    "overlap of 2023 and 2024": (-0.2, 0.4), "torchao in training": (-0.1, 0.25), "PyTorch": (0.03, 0.05),
    "GEMMs of 2023 and 2024 8.0": (-0.02, 0.04), "GEMMs of 2023 and 2024 9.0": (0.05, 0.05),
    "GEMMs of 2023 and 2024 10.0": (0.0, 0.08), "FP8 GEMMs of 2025 10.0": (0.05, 0.08), "500 W and 2.4 TB/s h100": (0.1, 0.05),
    "doubling": (0.01, 0.01), "once": (4.0, 2.0), "step nvidia": (0.0, 0.03), "step nvidia-26.04": (0.0, 0.03),
    "step nvidia-2025": (0.0, 0.04), "step nvidia-2024": (0.0, 0.04),
}  # fmt: skip
UNUSED = (0.0, 0.0001)
RUNS_SPREAD = (0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.10, 0.12, 0.15)
EXPERTS_SPREAD = (0.05, 0.08, 0.10, 0.12, 0.15, 0.18, 0.22, 0.27)
STACKS_SPREAD = (0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.10)  # of the factors of whole stacks
# Weak priors of runs, experts and stacks: about, within a factor, and how many votes that counts.
LIKELY = ((0.06, 0.5, 0.3), (0.15, 0.4, 0.5), (0.06, 0.5, 0.3))
BUBBLE, COMPUTED = "pipeline bubble", ("GEMMs", "quantization", "norms and activations", "attention")
AT = {part: index for index, part in enumerate(STEP_PARTS)}
WHOLE, ONCE = "step", "once"
Factors = list[tuple[str, str, float]]  # name, what it multiplies (a part, the whole step, or what is added once), its power


@dataclass
class Run:
    """A published run with its forecast without software."""

    row: dict[str, str]
    published_ms: float
    parts_ms: np.ndarray
    step_ms: float
    half_width: float  # of the hardware model
    named: str = ""
    factors: dict[str, Factors] = field(default_factory=dict)  # of every stack that runs on this GPU

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def has_experts(self) -> bool:
        return bool(self.parts_ms[AT["routing"]])

    def predicted(self, factors: Factors, values: dict[str, float]) -> tuple[float, dict[str, float]]:
        """The logarithm of the step, and its derivatives."""
        powers, whole, once_ms = np.zeros(len(STEP_PARTS)), 0.0, 0.0
        for name, what, power in factors:
            if what == WHOLE:
                whole += power * values[name]
            elif what == ONCE:
                once_ms += power * values[name]
            else:
                powers[AT[what]] += power * values[name]
        times, compute = self.parts_ms * np.exp(powers), [AT[part] for part in COMPUTED]
        times[AT[BUBBLE]] *= times[compute].sum() / self.parts_ms[compute].sum()
        total = times.sum() * exp(whole) + once_ms
        share, filling = 1 - once_ms / total, times[AT[BUBBLE]] / (times.sum() - times[AT[BUBBLE]])
        slopes: dict[str, float] = defaultdict(float)
        for name, what, power in factors:
            if what == ONCE:
                slopes[name] += power / total
            else:
                part = 1.0 if what == WHOLE else times[AT[what]] / times.sum() * (1 + filling * (what in COMPUTED))
                slopes[name] += power * part * share
        return log(total), slopes


def factors_of(stack: str, row: dict[str, str]) -> Factors:
    """Which multipliers a stack has in a run, as stacks.toml says."""
    known, architecture, chosen = stacks()[stack], gpu(row["gpu"]).architecture, recipe(row["recipe"])
    factors: Factors = [(f"step {stack}", WHOLE, 1.0)]
    if known.per_doubling:
        factors.append(("doubling", WHOLE, max(log2(int(row["gpus"]) / 8), 0.0)))
    if known.once_ms[0]:
        factors.append((ONCE, ONCE, ONCE_MS))
    for name in known.uses:
        facts = table()["multipliers"][name]
        part, _, condition = facts["part"].partition(" by ")
        part = part.removesuffix(" in low precision")
        low = " in low precision" in facts["part"]
        if (
            (low and chosen.name == BASELINE)
            or (condition and "transformer_engine" in chosen.backends)
            or (part not in AT and part != WHOLE)
        ):
            continue
        place = row["gpu"] if row["gpu"] in facts["at"] else architecture
        known_here = f"{name} {place}" if set(facts["at"]) > {"other"} else name
        factors.append((known_here, part, 1.0))
    return factors


def forecast(row: dict[str, str], folder: Path, recompute: str) -> dict[str, object] | None:
    """The forecast of one row by the command line, without software around it; None if it is refused."""
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
        sys.argv = ["gemmscope", "forecast", *arguments, *row["extra"].split(), "--json", str(out)]
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
    named = COMPILED[row["family"]] if compiled and row["family"] in COMPILED else STACKS[row["family"]]
    tokens = int(row["mbs"]) * int(row["ga"]) * int(row["seq"]) / (int(row["tp"]) * int(row["pp"]) * int(row["cp"]))
    published = tokens / float(row["tokens_s_gpu"]) * 1000
    run = Run(row, published, parts, float(parts.sum()), log(step["high"] / step["low"]) / 2, named)
    run.factors = {stack.name: factors_of(stack.name, row) for stack in stacks_on(gpu(row["gpu"]))}
    return run


class Fit(NamedTuple):
    """Logarithms of all multipliers, with their covariance."""

    names: list[str]
    values: dict[str, float]
    covariance: np.ndarray

    def predicted(self, run: Run, *, named: bool) -> tuple[float, float]:
        """The logarithm of the step and the variance that the multipliers leave; of any of the stacks if none is named."""
        results = []
        for factors in [run.factors[run.named]] if named else run.factors.values():
            value, slopes = run.predicted(factors, self.values)
            slope = np.array([slopes.get(name, 0.0) for name in self.names])
            results.append((value, slope @ self.covariance @ slope))
        values = [value for value, _ in results]
        return mean(values), mean(variance for _, variance in results) + pvariance(values)


def prior(name: str, stacks_spread: float) -> tuple[float, float]:
    """What is assumed of a multiplier before the fit."""
    return PRIORS.get(name, (0.0, stacks_spread) if name.startswith("step ") else UNUSED)


def fit(runs: Sequence[Run], names: list[str], stacks_spread: float) -> Fit:
    """The multipliers that these runs want."""
    mean_of, width = (np.array([prior(name, stacks_spread)[which] for name in names]) for which in (0, 1))
    values, rows = mean_of.copy(), Counter(run.source for run in runs)
    for _ in range(12):
        matrix, right = np.diag(1 / width**2), (mean_of - values) / width**2
        for run in runs:
            predicted, slopes = run.predicted(run.factors[run.named], dict(zip(names, values, strict=True)))
            error, slope = log(run.published_ms) - predicted, np.array([slopes.get(name, 0.0) for name in names])
            weight = min(1.0, MOST_ROWS / rows[run.source]) / NOISE**2 / max(1.0, abs(error) / OUTLIER)
            matrix += weight * np.outer(slope, slope)
            right += weight * error * slope
        values = values + np.linalg.solve(matrix, right)
    return Fit(names, dict(zip(names, values.tolist(), strict=True)), np.linalg.inv(matrix))


class LeftOut(NamedTuple):
    """A run that was forecast without its family: the error of the logarithm, and the variance without `runs` and `experts`."""

    run: Run
    error: float
    variance: float

    def half_width(self, spreads: tuple[float, float]) -> float:
        """Of the bar, given the spreads of runs and of runs with experts."""
        further = spreads[0] ** 2 + spreads[1] ** 2 * self.run.has_experts
        return HALF_WIDTHS * sqrt(self.variance + further)


def left_out(
    runs: Sequence[Run], names: list[str], stacks_spread: float, *, named: bool
) -> Iterable[tuple[Sequence[Run], list[LeftOut]]]:
    """For each family: the other runs, and its own as they are forecast from these."""
    for family in sorted({run.row["family"] for run in runs}):
        others, known = [run for run in runs if run.row["family"] != family], []
        fitted = fit(others, names, stacks_spread)
        for run in (run for run in runs if run.row["family"] == family):
            value, variance = fitted.predicted(run, named=named)
            known.append(LeftOut(run, log(run.published_ms) - value, variance + (run.half_width / HALF_WIDTHS) ** 2))
        yield others, known


def spreads_of(runs: Sequence[Run], names: list[str], *, named: bool) -> tuple[float, float, float]:
    """The most likely spreads of runs, further of runs with experts, and of whole stacks; one vote per source."""
    rows = Counter(run.source for run in runs)
    known = {spread: [one for _, of in left_out(runs, names, spread, named=named) for one in of] for spread in STACKS_SPREAD}

    def unlikely(spreads: tuple[float, float, float]) -> float:
        lost = sum(
            ((log(value / about)) / within) ** 2 / 2 * votes
            for value, (about, within, votes) in zip(spreads, LIKELY, strict=True)
        )
        for one in known[spreads[2]]:
            variance = (one.half_width(spreads[:2]) / HALF_WIDTHS) ** 2
            lost += (log(variance) + one.error**2 / variance) / 2 / rows[one.run.source]
        return lost

    return min(product(RUNS_SPREAD, EXPERTS_SPREAD, STACKS_SPREAD), key=unlikely)


class Score(NamedTuple):
    """How runs of a source were forecast: errors of tokens/s, and how well the error bars hold."""

    runs: int
    median: float
    signed: float
    inside: float
    half_width: float
    interval: float  # the interval score: the width of the bar, and 20 times what lies outside


def scores(errors: dict[str, list[tuple[float, float]]]) -> dict[str, Score]:
    """The score of each source, and `all`: one vote per source. Pairs: error of the logarithm, half-width of the bar."""
    known_scores = {}
    for source, known in sorted(errors.items()):
        off, widths = [exp(error) - 1 for error, _ in known], [width for _, width in known]
        inside = mean(abs(error) <= width for error, width in known)
        interval = mean(2 * width + 20 * max(abs(error) - width, 0.0) for error, width in known)
        known_scores[source] = Score(len(known), median(map(abs, off)), median(off), inside, median(widths), interval)
    votes = list(zip(*known_scores.values(), strict=True))
    widths = [width for known in errors.values() for _, width in known]
    return {
        **known_scores,
        "all": Score(sum(votes[0]), median(votes[1]), median(votes[2]), mean(votes[3]), median(widths), mean(votes[5])),
    }


def show(title: str, known_scores: dict[str, Score]) -> None:
    """Print a table of scores."""
    print(f"\n{title}")
    for source, of in known_scores.items():
        print(
            f"  {source:18} {of.runs:3} runs, off by {of.median:5.1%} (median), {of.signed:+6.1%} signed, {of.inside:4.0%} "
            f"inside the bar, half-width {of.half_width:.2f}, interval score {of.interval:.2f}"
        )


def written(tables: dict[str, dict[str, Score]]) -> str:
    """The scores as TOML."""
    lines = ["# Written by benchmarks/fit_stacks.py --write: tokens/s of runs whose family was left out of the fit."]
    for title, known_scores in tables.items():
        lines.append(f"\n[{title}]")
        lines += [
            f'"{source}" = {{ runs = {of.runs}, median = {of.median:.3f}, signed = {of.signed:.3f}, inside = {of.inside:.2f}, '
            f"half_width = {of.half_width:.2f}, interval = {of.interval:.2f} }}"
            for source, of in known_scores.items()
        ]
    return "\n".join(lines) + "\n"


def by_source(known: Iterable[tuple[LeftOut, float]]) -> dict[str, list[tuple[float, float]]]:
    """Errors and half-widths by source."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one, width in known:
        errors[one.run.source].append((one.error, width))
    return errors


def generation_only(runs: Sequence[Run]) -> dict[str, list[tuple[float, float]]]:
    """One factor per GPU generation, and the spread that it leaves: what every other model has to beat."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for family in sorted({run.row["family"] for run in runs}):
        ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in (run for run in runs if run.row["family"] != family):
            ratios[gpu(run.row["gpu"]).architecture][run.source].append(log(run.published_ms / run.step_ms))
        factors = {at: mean(map(mean, sources.values())) for at, sources in ratios.items()}
        squares = [mean((ratio - factors[at]) ** 2 for ratio in of) for at, sources in ratios.items() for of in sources.values()]
        for run in (run for run in runs if run.row["family"] == family):
            factor = factors.get(
                gpu(run.row["gpu"]).architecture, mean(factors.values())
            )  # of a generation that no other family has
            error = log(run.published_ms / run.step_ms) - factor
            errors[run.source].append((error, HALF_WIDTHS * sqrt(mean(squares))))
    return errors


def main() -> None:
    """Fit, and forecast each family without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--write", action="store_true", help="write the figures for the documentation")
    asked = parser.parse_args()
    place = asked.runs
    hosts = {LAUNCHES: reference(gpu("h200")).of(LAUNCHES)}
    command.software_on = lambda *_, **__: Software("none", "no software", hosts)
    rows = [row for row in csv.DictReader(place.open()) if row["confidence"] != "low" and row["split"] != "reference"]
    runs = [run for run in (read_run(row, place.parent) for row in rows) if run is not None]
    names = sorted({name for run in runs for factors in run.factors.values() for name, *_ in factors})
    whole = spreads_of(runs, names, named=True)
    fitted = fit(runs, names, whole[2])
    print(f"spreads from all families: runs {whole[0]}, experts {whole[1]}, stacks {whole[2]}")
    print(f"{len(runs)} runs of {len({run.source for run in runs})} sources")
    for name, deviation in zip(names, np.sqrt(np.diag(fitted.covariance)), strict=True):
        value = fitted.values[name]
        print(f"{name:36} {value * ONCE_MS if name == ONCE else exp(value):7.3f}, spread {deviation:.3f}")
    tables = {"generation": scores(generation_only(runs))}
    show("one factor per GPU generation, each family left out", tables["generation"])
    for named in (True, False):
        known, widths = [], []
        for family in sorted({run.row["family"] for run in runs}):
            spreads = spreads_of([run for run in runs if run.row["family"] != family], names, named=named)
            widths.append(spreads)
            of_family = next(of for _, of in left_out(runs, names, spreads[2], named=named) if of[0].run.row["family"] == family)
            known += [(one, one.half_width(spreads[:2])) for one in of_family]
        title = "named" if named else "unnamed"
        tables[title] = scores(by_source(known))
        show(f"each family left out, its stack {title}", tables[title])
        print("  spreads in each fold (runs, experts, stacks):", ", ".join(map(str, widths)))
    if asked.write:
        OUT.write_text(written(tables), "utf-8")


if __name__ == "__main__":
    main()
