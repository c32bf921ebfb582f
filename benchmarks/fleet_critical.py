"""The critical values of the outlier rule: the table of src/gemmscope/fleet/rule.toml.

    python benchmarks/fleet_critical.py            # prints the table (10 minutes)
    python benchmarks/fleet_critical.py --check    # simulates whole fleets of normal chips, and counts false alarms

A GPU is an outlier if it is more than c robust standard deviations (Qn) from the median of its fleet. c(n, alpha) is such that
among n normal chips the expected number of outliers is alpha, which bounds the probability of one or more. The expectation is n
times the probability for one chip; that one is the probability that a normal value exceeds median + c Qn of a fleet in which it
is far away, averaged over simulated fleets. So c is known well even where alpha is less than one over the number of fleets. The
table holds c over the normal quantile, which would be right if the center and the scale were known.
"""

from __future__ import annotations

import argparse
import sys
from math import comb, erfc, sqrt
from statistics import NormalDist

import numpy as np

from gemmscope.fleet.spread import Floats, unbiased_qn

ALARMS = (1e-2, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 3e-5, 1e-5)
COUNTS = (*range(5, 21), 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024)
PAIRS = 4_000_000  # distances in memory at once
FAR = 1e6


def scales(fleets: Floats) -> Floats:
    """Qn of every row."""
    count = fleets.shape[1]
    rank = comb(count // 2 + 1, 2) - 1
    left, right = np.triu_indices(count, 1)
    rows = max(PAIRS // len(left), 1)
    pieces = [fleets[start : start + rows] for start in range(0, len(fleets), rows)]
    scale_parts = [np.partition(np.abs(piece[:, left] - piece[:, right]), rank, axis=1)[:, rank] for piece in pieces]
    return unbiased_qn(count) * np.concatenate(scale_parts)


class Tail:
    """The upper tail of the normal distribution, from a table: its logarithm is smooth."""

    def __init__(self) -> None:
        self._at = np.linspace(-8.0, 37.0, 9001)
        self._log = np.log([erfc(x / sqrt(2)) / 2 for x in self._at])

    def __call__(self, values: Floats) -> Floats:
        return np.exp(np.interp(values, self._at, self._log, right=-1e3))


def critical(count: int, fleets: int, tail: Tail, rng: np.random.Generator) -> list[float]:
    """c for every alpha, over the normal quantile."""
    values = rng.standard_normal((fleets, count))
    values[:, 0] = FAR
    center, scale = np.median(values, axis=1), scales(values)
    ratios = []
    for alarms in ALARMS:
        low, high = 1.0, 1e4
        for _ in range(25):
            middle = sqrt(low * high)
            expected = 2 * count * float(tail(center + middle * scale).mean())
            low, high = (middle, high) if expected > alarms else (low, middle)
        ratios.append(high / NormalDist().inv_cdf(1 - alarms / 2 / count))
    return ratios


def table() -> None:
    """Print the table."""
    rng, tail = np.random.default_rng(20), Tail()
    print(f"alarms = [{', '.join(f'{alarms:g}' for alarms in ALARMS)}]")
    for count in COUNTS:
        fleets = int(min(400_000, 3e8 / comb(count, 2)))  # with many GPUs, the scale hardly varies
        ratios = critical(count, fleets, tail, rng)
        print(f"{count} = [{', '.join(f'{ratio:.3f}' for ratio in ratios)}]", flush=True)


def check() -> None:
    """Whole fleets of normal chips: how many have a false alarm."""
    from gemmscope.fleet.rule import critical_value

    rng = np.random.default_rng(21)
    print("| GPUs | allowed | fleets with a false alarm |\n| ---: | ---: | ---: |")
    for count in (6, 7, 8, 10, 16, 33, 64, 256):
        fleets = int(min(1_000_000, 5e8 / comb(count, 2)))
        values = rng.standard_normal((fleets, count))
        worst = np.abs(values - np.median(values, axis=1, keepdims=True)).max(axis=1) / scales(values)
        for alarms in (0.01, 0.001):
            rate = float((worst > critical_value(count, alarms)).mean())
            print(f"| {count} | {alarms:.2%} | {rate:.3%} ± {1.96 * sqrt(rate * (1 - rate) / fleets):.3%} |", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="count false alarms of the table in use")
    sys.exit(check() if arguments.parse_args().check else table())
