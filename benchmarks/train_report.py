"""Loss gaps of the runs of `train_recipes.py`, beside the errors that `gemmscope numerics` predicts for the same model.

    python benchmarks/train_report.py FOLDER [--numerics RUN.json] [--summary docs/measured/h200_training.json]

A gap is a recipe's loss minus the mean loss of the BF16 runs with the same seed, which differ in last bits or in the order of a
sum. Its interval (95%, Student's t) is over seeds, and decides. The spread of the BF16 runs of a seed shows how much of a gap is
noise. The summary holds every run's losses and the predicted errors; the table of the documentation is made from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gemmscope.results.numerics import NumericsResult
from gemmscope.results.read import read_result

BASELINE, EMULATED = "BF16", "emulated:"
BASELINES = (BASELINE, "BF16+bit", "BF16+bits", "BF16+order")
MEASURES = {"train_loss": "training", "validation_loss": "validation", "validation_loss_bf16": "validation in BF16"}
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # two-sided 95%, 1 to 10 degrees of freedom


@dataclass(frozen=True)
class Gap:
    """The mean difference of two losses over seeds, with half of its 95% interval (None: one seed only)."""

    mean: float
    half_width: float | None
    seeds: int

    @property
    def separated(self) -> bool:
        """Whether the interval excludes 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + ("" if self.half_width is None else f" ± {self.half_width:.4f}")


def gap_of(differences: Sequence[float]) -> Gap:
    """Mean and interval of paired differences.

    >>> str(gap_of([0.01, 0.02, 0.03]))
    '+0.0200 ± 0.0248'
    """
    count = len(differences)
    if count < 2:
        return Gap(fmean(differences), None, count)
    student = STUDENT[min(count - 1, len(STUDENT)) - 1]
    return Gap(fmean(differences), student * stdev(differences) / count**0.5, count)


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values with their mean rank.

    >>> ranks([3.0, 1.0, 3.0])
    [2.5, 1.0, 2.5]
    """
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None with fewer than three values, or where all are equal.

    >>> spearman([1, 2, 3], [10, 20, 15]), spearman([1, 2], [1, 2])
    (0.5, None)
    """
    if len(first) < 3:
        return None
    pairs = [(a - (len(first) + 1) / 2, b - (len(first) + 1) / 2) for a, b in zip(ranks(first), ranks(second), strict=True)]
    scale = (sum(a * a for a, _ in pairs) * sum(b * b for _, b in pairs)) ** 0.5
    return sum(a * b for a, b in pairs) / scale if scale else None


@dataclass(frozen=True)
class Comparison:
    """All runs: losses by recipe and seed, and the predicted error of each recipe."""

    settings: Mapping[str, Any]
    losses: Mapping[str, Mapping[int, Mapping[str, float]]]
    predicted: Mapping[str, float]

    @classmethod
    def read(cls, summary: Mapping[str, Any]) -> Comparison:
        """From a summary, whose seeds are texts, as in any JSON."""
        losses = {recipe: {int(seed): values for seed, values in runs.items()} for recipe, runs in summary["losses"].items()}
        return cls(summary["settings"], losses, summary["predicted"])

    @property
    def recipes(self) -> list[str]:
        """Recipes that were run with at least one seed of the baseline: the smallest validation gap first."""
        names = [name for name in self.losses if name not in BASELINES and self.losses[name].keys() & self.seeds]
        return sorted(names, key=lambda name: self.gap(name, "validation_loss").mean)

    @property
    def seeds(self) -> set[int]:
        """The seeds with a BF16 run."""
        return {seed for name in BASELINES for seed in self.losses.get(name, {})}

    def baselines(self, seed: int, measure: str) -> list[float]:
        """The losses of all BF16 runs of a seed."""
        return [self.losses[name][seed][measure] for name in BASELINES if seed in self.losses.get(name, {})]

    def paired(self, first: str, second: str, measure: str) -> list[float]:
        """Differences of two recipes, one per seed that both have."""
        runs, others = self.losses[first], self.losses[second]
        return [runs[seed][measure] - others[seed][measure] for seed in sorted(runs.keys() & others.keys())]

    def gap(self, recipe: str, measure: str) -> Gap:
        """The gap to the mean of the BF16 runs of each seed."""
        runs = self.losses[recipe]
        seeds = sorted(runs.keys() & self.seeds)
        return gap_of([runs[seed][measure] - fmean(self.baselines(seed, measure)) for seed in seeds])

    def noise(self, measure: str) -> float | None:
        """Standard deviation of the BF16 runs of one seed, over all seeds; None where there is one run per seed."""
        groups = [losses for seed in self.seeds if len(losses := self.baselines(seed, measure)) > 1]
        freedom = sum(len(losses) - 1 for losses in groups)
        squares = sum((loss - fmean(losses)) ** 2 for losses in groups for loss in losses)
        return (squares / freedom) ** 0.5 if freedom else None

    def error(self, recipe: str) -> float | None:
        return self.predicted.get(recipe.removeprefix(EMULATED))

    def rank_correlation(self, measure: str) -> float | None:
        """Spearman's correlation of predicted errors with gaps."""
        known = [(error, self.gap(name, measure).mean) for name in self.recipes if (error := self.error(name)) is not None]
        return spearman([error for error, _ in known], [gap for _, gap in known])

    def ordered_pairs(self, measure: str) -> tuple[int, int]:
        """Of the pairs of recipes that training separates and that have different errors: how many are ordered as predicted.

        A recipe and its emulation have one predicted error, so they are no pair.
        """
        right = pairs = 0
        for first, second in combinations(self.recipes, 2):
            a, b = self.error(first), self.error(second)
            difference = gap_of(self.paired(first, second, measure) or [0.0])
            if a is not None and b is not None and a != b and difference.separated:
                pairs += 1
                right += (a > b) == (difference.mean > 0)
        return right, pairs

    def table(self) -> str:
        """Predicted errors and gaps, a row for every recipe, the smallest validation gap first."""
        lines = ["| recipe | predicted error | " + " | ".join(f"{name} gap" for name in MEASURES.values()) + " | seeds |"]
        lines.append("| --- | ---: |" + " ---: |" * len(MEASURES) + " ---: |")
        for name in self.recipes:
            gaps = [self.gap(name, measure) for measure in MEASURES]
            marked = [f"**{gap}**" if gap.separated else str(gap) for gap in gaps]
            error = self.error(name)
            title = name.replace(EMULATED, "") + (" (emulated)" if name.startswith(EMULATED) else "")
            shown = "" if error is None else f"{100 * error:.2f}%"
            lines.append(f"| {title} | {shown} | {' | '.join(marked)} | {gaps[0].seeds} |")
        noise = [f"{value:.4f}" if (value := self.noise(measure)) is not None else "" for measure in MEASURES]
        lines.append(f"| BF16, spread of the runs of a seed | | {' | '.join(noise)} | {len(self.seeds)} |")
        return "\n".join(lines)

    def rank_sentences(self) -> str:
        """How the order of predicted errors compares with the order of the gaps."""
        sentences = []
        for measure, name in MEASURES.items():
            correlation, (right, pairs) = self.rank_correlation(measure), self.ordered_pairs(measure)
            if correlation is not None:
                separated = f"{right} of {pairs} separated pairs are ordered as predicted" if pairs else "no pair is separated"
                sentences.append(f"- {name} loss: Spearman's rank correlation {correlation:.2f}; {separated}.")
        return "\n".join(sentences)


def predicted_errors(numerics: Sequence[Path]) -> dict[str, float]:
    """The error of every recipe, as the mean over run files of `gemmscope numerics`."""
    errors: dict[str, list[float]] = {}
    for path in numerics:
        result = read_result(path)
        if not isinstance(result, NumericsResult):
            raise SystemExit(f"{path} is not a run file of gemmscope numerics")
        for recipe in result.recipes:
            errors.setdefault(recipe.recipe, []).append(recipe.error)
    return {name: fmean(values) for name, values in errors.items()}


def summary_of(folder: Path, predicted: Mapping[str, float]) -> dict[str, Any]:
    """What is kept of all finished runs in a folder, with the predicted errors."""
    losses: dict[str, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        run = json.loads(path.read_text())
        facts = facts or {name: run[name] for name in ("settings", "parameters", "tokens", "text", "device", "versions")}
        if run["settings"] != facts["settings"]:
            raise SystemExit(f"{path} has other settings than the runs before it")
        if not run["finished"]:
            print(f"{path}: the loss is not finite, left out")
            continue
        kept = {name: round(run[name], 6) for name in (*MEASURES, "ms_per_step")}
        losses.setdefault(run["recipe"], {})[str(run["seed"])] = kept
    return {**facts, "predicted": dict(predicted), "losses": losses}


def main() -> None:
    """Print the table, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numerics", type=Path, action="append", default=[], help="run file of gemmscope numerics")
    parser.add_argument("--summary", type=Path, help="where to write the summary")
    given = parser.parse_args()
    summary = summary_of(given.folder, predicted_errors(given.numerics))
    if not summary["losses"].get(BASELINE):
        parser.error(f"{given.folder} has no finished BF16 run")
    comparison = Comparison.read(summary)
    for seed, run in comparison.losses[BASELINE].items():
        print(f"BF16, seed {seed}: " + ", ".join(f"{name} {run[measure]:.4f}" for measure, name in MEASURES.items()))
    print(comparison.table())
    print(comparison.rank_sentences())
    if given.summary:
        given.summary.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
