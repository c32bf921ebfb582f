"""Fits what coefficients/cluster.toml says of steps on several GPUs to published runs, and forecasts each model without it.

python benchmarks/fit_cluster.py            prints the fit, each model left out, and each GPU left out
python benchmarks/fit_cluster.py --write    also writes the figures to docs/measured/published_fit.toml, for docs/measured/runs.md

The mean of absolute logarithmic errors is made smallest, with a weak pull to priors (their widths are below), one coefficient at
a time. Everything else in cluster.toml was measured or is a prior, and is not fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any

from gemmscope.forecast.communication import cluster
from published_runs import Compared, PublishedRun, Scorer, published_runs, summary

OUT = Path(__file__).resolve().parent.parent / "docs/measured/published_fit.toml"
# Path in the table: (prior, width of the prior as a logarithm).
COEFFICIENTS: dict[tuple[str, ...], tuple[float, float]] = {
    ("experts", "routing"): (4.0, 0.5),
    ("exposed", "tensor", "least"): (0.35, 0.5),
    ("steps", "10.0"): (1.0, 0.05),
    ("several", "factor"): (1.02, 0.02),
}
PULL = 0.01  # penalty of one prior width, relative to the mean error


def place(path: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """The table and the name of a coefficient."""
    table = cluster()
    for name in path[:-1]:
        table = table[name]
    return table, path[-1]


@contextmanager
def coefficients(values: dict[tuple[str, ...], float]) -> Any:
    """Replace these values in the table inside a `with` block."""
    before = {}
    for path, value in values.items():
        table, name = place(path)
        before[path], table[name] = table[name], value
    try:
        yield
    finally:
        for path, value in before.items():
            table, name = place(path)
            table[name] = value


def loss(compared: Sequence[Compared], values: dict[tuple[str, ...], float]) -> float:
    """The loss that the fit minimizes."""
    errors = sum(abs(log(1 + run.error)) for run in compared) / len(compared)
    pulled = sum((log(values[path] / prior) / width) ** 2 for path, (prior, width) in COEFFICIENTS.items())
    return errors + PULL * pulled / len(COEFFICIENTS)


def fitted(runs: Sequence[PublishedRun]) -> dict[tuple[str, ...], float]:
    """The coefficients for these runs: coordinates in turn, with ever smaller steps."""
    scorer = Scorer(runs)
    values = {path: prior for path, (prior, _) in COEFFICIENTS.items()}

    def lost(of: dict[tuple[str, ...], float]) -> float:
        with coefficients(of):
            return loss(scorer.compared(), of)

    best, step = lost(values), 1.0
    while step > 0.02:
        moved = False
        for path, (_, width) in COEFFICIENTS.items():
            for way in (1 + step * width, 1 / (1 + step * width)):
                candidate = {**values, path: values[path] * way}
                candidate_loss = lost(candidate)
                if candidate_loss < best - 1e-6:
                    values, best, moved = candidate, candidate_loss, True
                    break
        if not moved:
            step /= 2
    return values


def left_out(runs: Sequence[PublishedRun], group: Callable[[PublishedRun], str]) -> list[Compared]:
    """Every run, forecast with coefficients that were fitted without its group."""
    comparisons = []
    for name in dict.fromkeys(map(group, runs)):
        values = fitted([run for run in runs if group(run) != name])
        print(f"  without {name}:", ", ".join(f"{'.'.join(path)} {value:.3g}" for path, value in values.items()))
        with coefficients(values):
            comparisons += Scorer([run for run in runs if group(run) == name]).compared()
    return comparisons


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the figures for the documentation")
    asked = parser.parse_args()
    runs = [run for run in published_runs() if run.fitted]
    values = fitted(runs)
    print("fitted:", ", ".join(f"{'.'.join(path)} {value:.3g}" for path, value in values.items()))
    with coefficients(values):
        print(summary(Scorer(published_runs()).compared()))
    figures = {"shipped": summary(Scorer(runs).compared())}
    print("shipped:", figures["shipped"])
    for name, group in (("model", lambda run: run.preset), ("gpu", lambda run: run.gpu)):
        print(f"each {name} left out:")
        figures[name] = summary(left_out(runs, group))
        print(figures[name])
    if asked.write:
        lines = [
            "# Written by benchmarks/fit_cluster.py --write: runs, median error, runs inside the error bar; by what was left out."
        ]
        for name, of in figures.items():
            lines.append(f"\n[{name}]")
            lines += [
                f'"{kind.removeprefix("fitted, ")}" = {{ runs = {count}, median = {error:.3f}, inside = {inside} }}'
                for kind, (count, error, inside) in of.items()
            ]
        OUT.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
