"""Loss gaps of the runs of `train_recipes.py`, beside the errors that `gemmscope numerics` predicts for the same model.

    python benchmarks/train_report.py FOLDER [--numerics RUN.json]
    python benchmarks/train_report.py docs/measured/h200_training --numerics docs/measured/h200_training/numerics.json.gz

A gap is a recipe's loss minus the mean loss of the BF16 runs with the same seed, which differ in last bits or in the order of a
sum. Its interval (95%, Student's t) is over seeds, and decides. The spread of the BF16 runs of a seed shows how much of a gap is
noise. Only seeds that were run in every recipe count. The tables of the documentation are made by the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gemmscope.results.numerics import NumericsResult
from gemmscope.results.read import read_result

BASELINE, EMULATED = "BF16", "emulated:"
BASELINES = (BASELINE, "BF16+bit", "BF16+bits", "BF16+order")
MAIN = ("validation_loss", "train_loss")
EARLY, EARLY_SHARES = "early_loss", (0.15, 0.25)  # of the steps
MEASURES = {
    "validation_loss": "validation loss",
    "train_loss": "training loss",
    "validation_loss_bf16": "validation loss in BF16",
}
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
    """All runs: losses by recipe and seed, the predicted error of each recipe, and what the runs have in common."""

    losses: Mapping[str, Mapping[int, Mapping[str, float]]]
    predicted: Mapping[str, float]
    facts: Mapping[str, Any]

    @property
    def recipes(self) -> list[str]:
        """Recipes other than BF16: the smallest validation gap first."""
        names = [name for name in self.losses if name not in BASELINES]
        return sorted(names, key=lambda name: self.gap(name, "validation_loss").mean)

    @property
    def seeds(self) -> list[int]:
        """The seeds with a BF16 run."""
        return sorted({seed for name in BASELINES for seed in self.losses.get(name, {})})

    def baselines(self, seed: int, measure: str) -> list[float]:
        """The losses of all BF16 runs of a seed."""
        return [self.losses[name][seed][measure] for name in BASELINES if seed in self.losses.get(name, {})]

    def paired(self, first: str, second: str, measure: str) -> list[float]:
        """Differences of two recipes, one per seed that both have."""
        runs, others = self.losses[first], self.losses[second]
        return [runs[seed][measure] - others[seed][measure] for seed in sorted(runs.keys() & others.keys())]

    def gap(self, recipe: str, measure: str) -> Gap:
        """The gap to the mean of the BF16 runs of each seed."""
        return gap_of(self.group_gaps([recipe], measure))

    def group_gaps(self, group: Sequence[str], measure: str) -> list[float]:
        """The mean gap of several recipes, for every seed that all of them have."""
        seeds = [seed for seed in self.seeds if all(seed in self.losses[name] for name in group)]
        return [
            fmean(self.losses[name][seed][measure] for name in group) - fmean(self.baselines(seed, measure)) for seed in seeds
        ]

    def noise(self, measure: str) -> float | None:
        """Standard deviation of the BF16 runs of one seed, over all seeds; None where there is one run per seed."""
        groups = [losses for seed in self.seeds if len(losses := self.baselines(seed, measure)) > 1]
        freedom = sum(len(losses) - 1 for losses in groups)
        squares = sum((loss - fmean(losses)) ** 2 for losses in groups for loss in losses)
        return (squares / freedom) ** 0.5 if freedom else None

    def error(self, recipe: str) -> float | None:
        """The predicted error to a hundredth of a percent: further digits mean nothing."""
        error = self.predicted.get(recipe.removeprefix(EMULATED))
        return None if error is None else round(error, 4)

    def rank_correlation(self, measure: str) -> float | None:
        """Spearman's correlation of predicted errors with gaps."""
        known = [(error, self.gap(name, measure).mean) for name in self.recipes if (error := self.error(name)) is not None]
        return spearman([error for error, _ in known], [gap for _, gap in known])

    def ordered_pairs(self, measure: str) -> tuple[int, int, int]:
        """Of the pairs of recipes with different errors: how many are ordered as predicted, are separated, and there are.

        A recipe and its emulation have one predicted error, so they are no pair.
        """
        right = separated = pairs = 0
        for first, second in combinations(self.recipes, 2):
            a, b = self.error(first), self.error(second)
            if a is None or b is None or a == b:
                continue
            difference = gap_of(self.paired(first, second, measure) or [0.0])
            pairs += 1
            separated += difference.separated
            right += difference.separated and (a > b) == (difference.mean > 0)
        return right, separated, pairs

    def groups(self) -> dict[str, list[str]]:
        """Recipes by their predicted error: the smallest error first."""
        groups: dict[str, list[str]] = {}
        for error, name in sorted((error, name) for name in self.recipes if (error := self.error(name)) is not None):
            groups.setdefault(percent(error), []).append(name)
        return groups

    def table_of_groups(self) -> str:
        """The mean gap of the recipes of each predicted error."""
        lines = [f"| predicted error | recipes | {_heads(MAIN)} |", "| ---: | --- |" + " ---: |" * len(MAIN)]
        for error, names in self.groups().items():
            gaps = " | ".join(_marked(gap_of(self.group_gaps(names, measure))) for measure in MAIN)
            lines.append(f"| {error} | {', '.join(map(title, names))} | {gaps} |")
        return "\n".join(lines)

    def table_of_differences(self) -> str:
        """Paired differences of each group of recipes and the one before."""
        lines = [f"| predicted errors | {_heads(MAIN)} |", "| --- |" + " ---: |" * len(MAIN)]
        for (low, others), (high, names) in pairwise(self.groups().items()):
            differences = " | ".join(_marked(gap_of(self._between(names, others, measure))) for measure in MAIN)
            lines.append(f"| {high} minus {low} | {differences} |")
        return "\n".join(lines)

    def _between(self, group: Sequence[str], other: Sequence[str], measure: str) -> list[float]:
        first, second = self.group_gaps(group, measure), self.group_gaps(other, measure)
        return [a - b for a, b in zip(first, second, strict=True)]

    def table_of_seeds(self) -> str:
        """Gaps in training loss of every seed, early and at the end: of the group with the largest error, and of all others."""
        *_, last = self.groups().values()
        others = [name for name in self.recipes if name not in last]
        lines = [f"| | {' | '.join(f'seed {seed}' for seed in self.seeds)} |", "| --- |" + " ---: |" * len(self.seeds)]
        for name, group in (("all other recipes", others), (", ".join(map(title, last)), last)):
            for measure, when in ((EARLY, f"steps {self._early_steps}"), ("train_loss", "last tenth of the steps")):
                cells = " | ".join(f"{gap:+.4f}" for gap in self.group_gaps(group, measure))
                lines.append(f"| {name}, {when} | {cells} |")
        return "\n".join(lines)

    @property
    def _early_steps(self) -> str:
        return " to ".join(str(round(share * self.facts["settings"]["steps"])) for share in EARLY_SHARES)

    def table(self) -> str:
        """Predicted errors and gaps, a row for every recipe, the smallest validation gap first."""
        lines = [f"| recipe | predicted error | {_heads(MEASURES)} |"]
        lines.append("| --- | ---: |" + " ---: |" * len(MEASURES))
        for name in self.recipes:
            gaps = " | ".join(_marked(self.gap(name, measure)) for measure in MEASURES)
            error = self.error(name)
            lines.append(f"| {title(name)} | {'' if error is None else percent(error)} | {gaps} |")
        means = (fmean(fmean(self.baselines(seed, measure)) for seed in self.seeds) for measure in MEASURES)
        lines.append(f"| BF16: mean loss | | {' | '.join(f'{mean:.4f}' for mean in means)} |")
        noise = [f"{value:.4f}" if (value := self.noise(measure)) is not None else "" for measure in MEASURES]
        lines.append(f"| BF16: standard deviation within a seed | | {' | '.join(noise)} |")
        return "\n".join(lines)

    def rank_sentences(self) -> str:
        """How the order of predicted errors compares with the order of the gaps."""
        sentences = []
        for measure, name in MEASURES.items():
            correlation, (right, separated, pairs) = self.rank_correlation(measure), self.ordered_pairs(measure)
            if correlation is not None:
                sentences.append(
                    f"- **{name[0].upper()}{name[1:]}**: of {pairs} pairs of recipes with different predicted errors, "
                    f"the runs separate {separated}, and {right} of these are ordered as predicted. "
                    f"Spearman's rank correlation is {correlation:.2f}."
                )
        return "\n".join(sentences)


def title(recipe: str) -> str:
    """A recipe's name in a table."""
    return recipe.removeprefix(EMULATED) + (" (emulated)" if recipe.startswith(EMULATED) else "")


def percent(error: float) -> str:
    """An error as tables show it."""
    return f"{100 * error:.2f}%"


def _heads(measures: Iterable[str]) -> str:
    return " | ".join(f"gap in {MEASURES[measure]}" for measure in measures)


def _marked(gap: Gap) -> str:
    return f"**{gap}**" if gap.separated else str(gap)


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


def comparison_of(folder: Path, predicted: Mapping[str, float]) -> Comparison:
    """The finished runs of all seeds in a folder that were run in every recipe, with the predicted errors."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-seed*.json"))]
    if not any(run["recipe"] == BASELINE for run in runs):
        raise SystemExit(f"{folder} has no BF16 run")
    facts = {name: runs[0][name] for name in ("settings", "parameters", "tokens", "text", "device", "versions")}
    recipes = {run["recipe"] for run in runs}
    losses: dict[str, dict[int, dict[str, float]]] = {}
    for seed in sorted({run["seed"] for run in runs}):
        of_seed = [run for run in runs if run["seed"] == seed]
        if missing := recipes - {run["recipe"] for run in of_seed}:
            print(f"seed {seed} is left out: no run of {', '.join(sorted(missing))}", file=sys.stderr)
            continue
        for run in of_seed:
            what = f"{run['recipe']}, seed {seed}"
            if run["settings"] != facts["settings"]:
                raise SystemExit(f"{what}: other settings than in the other runs")
            if run["finished"]:
                begin, end = (round(share * len(run["curve"])) for share in EARLY_SHARES)
                measured = {name: run[name] for name in MEASURES} | {EARLY: fmean(run["curve"][begin:end])}
                losses.setdefault(run["recipe"], {})[seed] = measured
            else:
                print(f"{what}: the loss is not finite, left out", file=sys.stderr)
    return Comparison(losses, predicted, facts)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numerics", type=Path, action="append", default=[], help="run file of gemmscope numerics")
    given = parser.parse_args()
    comparison = comparison_of(given.folder, predicted_errors(given.numerics))
    for seed, run in comparison.losses[BASELINE].items():
        print(f"BF16, seed {seed}: " + ", ".join(f"{name} {run[measure]:.4f}" for measure, name in MEASURES.items()))
    tables = (comparison.table, comparison.table_of_groups, comparison.table_of_differences, comparison.table_of_seeds)
    for part in (*tables, comparison.rank_sentences):
        print(f"\n{part()}")


if __name__ == "__main__":
    main()
