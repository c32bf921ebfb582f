"""Whether the intervals of `fork_statistics.py` cover the truth: simulated trainings with known gaps and slopes.

    python benchmarks/loss_coverage.py [--trials 400]

The difference of two forks is independent noise of the batches plus an autoregressive part that lasts for `lasts` steps and has
the share `slow` of the variance. The loss curve is a power law with noise of the same kind, of which every tenth step is logged.
True tokens are solved from the power law, not from its slope. Every interval should cover the truth in 90% of the trials.
Complete trainings that were recorded on an H200 come first.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np

from fork_statistics import MEASURED, Floats, is_known, local_slope, loss_gap, luck_of, tokens_and_ratio, widened
from gemmscope.interval import Interval

NOISES = ((0.0, 1), (0.02, 40), (0.05, 20), (0.1, 20), (0.3, 5))  # (slow, lasts)
LONG = ((0.05, 150), (0.2, 150), (0.5, 300))  # as long as the window that is judged, or longer: what no fork can see
STEPS = (100, 300, 1000)
CURVES = ((0.1, 20_000), (0.3, 20_000), (0.5, 5_000), (0.3, 2_000))  # (exponent, step of the checkpoint)
GAPS = (-0.002, 0.006, 0.03)
RUNS = Path(__file__).parent.parent / "docs/measured/h200_training"
CONTROLS = ("BF16+bit", "BF16+bits", "BF16+order")
SPEEDUP, PRECISION = 1.5, 0.01  # and its standard error


def noise(rng: np.random.Generator, steps: int, slow: float, lasts: float) -> Floats:
    """Noise of unit variance."""
    keep = np.exp(-1 / lasts)
    drift, kicks = rng.standard_normal(steps), rng.standard_normal(steps) * np.sqrt(1 - keep**2)
    for step in range(1, steps):
        drift[step] = keep * drift[step - 1] + kicks[step]
    return np.sqrt(1 - slow) * rng.standard_normal(steps) + np.sqrt(slow) * drift


def covered(interval: Interval, truth: float) -> bool:
    """Whether the interval has the truth inside."""
    return interval.low is not None and interval.high is not None and interval.low <= truth <= interval.high


def gap_coverage(rng: np.random.Generator, trials: int, steps: int, slow: float, lasts: float) -> tuple[float, float, float]:
    """The coverage of the gap and of its trend, and the mean effective sample size."""
    rows = []
    for _ in range(trials):
        base = 2.5 + 0.1 * rng.standard_normal(steps)
        fork = loss_gap("", base, base + 0.004 + 0.02 * noise(rng, steps, slow, lasts))
        rows.append((covered(fork.gap, 0.004), covered(fork.trend, 0.0), fork.effective))
    gap, trend, effective = np.mean(rows, axis=0)
    return float(gap), float(trend), float(effective)


def ratio_coverage(
    rng: np.random.Generator, trials: int, curve: tuple[float, int], gap: float, slow: float, lasts: float
) -> tuple[float, float, float]:
    """The coverage of the slope and of the ratio where one is printed, and the share of the trials that print one."""
    exponent, at = curve
    steps = np.arange(10, at + 1, 10, dtype=float)
    scale = 0.8 * at**exponent
    truth = (at**-exponent - gap / scale) ** (-1 / exponent) / at
    slope_there = 0.8 * exponent / 100
    slopes, ratios = [], []
    for _ in range(trials):
        slope = local_slope(steps, 1.7 + scale * steps**-exponent + 0.04 * noise(rng, len(steps), slow, lasts), at)
        slopes.append(covered(slope, slope_there))
        base = np.zeros(300)
        fork = loss_gap("", base, base + gap + 0.02 * noise(rng, 300, slow, lasts))
        error = np.exp(PRECISION * rng.standard_normal())
        ends = [SPEEDUP * error * np.exp(sign * PRECISION * MEASURED) for sign in (-1, 1)]
        if is_known(slope):
            _, ratio = tokens_and_ratio(fork.gap, slope, Interval(SPEEDUP * error, *ends), MEASURED)
            assert ratio is not None
            ratios.append(covered(ratio, SPEEDUP / truth))
    return float(np.mean(slopes)), float(np.mean(ratios)) if ratios else float("nan"), len(ratios) / trials


def recorded_coverage() -> None:
    """Complete trainings on an H200: one pair of each recipe and seed beside the mean gap of the recipe over all seeds."""
    runs = [json.loads(path.read_text()) for path in RUNS.glob("*-seed[0-4].json")]
    curves = {(run["recipe"], run["seed"]): np.array(run["curve"]) for run in runs}
    recipes = sorted({name for name, _ in curves} - {"BF16", *CONTROLS})
    for controls in ((), CONTROLS[:1], CONTROLS[::2], CONTROLS):
        inside = []
        for name, seed in product(recipes, range(5)):
            same = [np.mean([curves[one, other] for one in ("BF16", *CONTROLS)], axis=0) for other in range(5)]
            half = len(same[0]) // 2
            truth = np.mean([(curves[name, other] - same[other])[half:].mean() for other in range(5)])
            base = curves["BF16", seed]
            luck = luck_of([loss_gap(one, base, curves[one, seed]) for one in controls])
            inside.append(covered(widened(loss_gap(name, base, curves[name, seed]).gap, luck), float(truth)))
        print(f"recorded trainings, {len(controls)} controls: {np.mean(inside):.0%} of {len(inside)} pairs", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    trials = parser.parse_args().trials
    recorded_coverage()
    rng = np.random.default_rng(41)
    print("steps  slow  lasts    gap  trend  effective")
    means = []
    for steps, (slow, lasts) in product(STEPS, (*NOISES, *LONG)):
        gap, trend, effective = gap_coverage(rng, trials, steps, slow, lasts)
        means += [(gap, trend)] if (slow, lasts) in NOISES else []
        mark = "" if (slow, lasts) in NOISES else "   not counted"
        print(f"{steps:5}  {slow:4.0%}  {lasts:5}  {gap:5.1%}  {trend:5.1%}  {effective:9.0f}{mark}", flush=True)
    print("mean: gap {:.1%}, trend {:.1%}".format(*np.mean(means, axis=0)))
    print("\nexponent      at     gap  slow  lasts  slope  ratio  printed")
    means = []
    for curve, gap, (slow, lasts) in product(CURVES, GAPS, NOISES[::2]):
        slope, ratio, printed = ratio_coverage(rng, trials, curve, gap, slow, lasts)
        means += [(slope, ratio)] if printed > 0.5 else []
        line = f"{curve[0]:8}  {curve[1]:6}  {gap:+.3f}  {slow:4.0%}  {lasts:5}  {slope:5.1%}  {ratio:5.1%}  {printed:7.0%}"
        print(line, flush=True)
    print("mean where most trials print a ratio: slope {:.1%}, ratio {:.1%}".format(*np.mean(means, axis=0)))


if __name__ == "__main__":
    main()
