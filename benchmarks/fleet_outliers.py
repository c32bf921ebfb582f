"""How many slow GPUs the outlier rule finds, and how often it calls a healthy one: simulated fleets of 8 to 10,000 GPUs.

    python benchmarks/fleet_outliers.py [--effort 1.0] > docs/fleet_tables.md

Prints the Markdown tables of the documentation (about twenty minutes on one core). Every GPU has three times (BF16 and two
recipes) and two speedups, with 8 GPUs in a node. A chip's own deviation is in all its times; the noise of 0.3% is drawn for each
time. Slow GPUs are planted in all times: one GPU, or 5% of them. The rule is that of the package with its default tolerance of
2%, all figures and nodes together. Rates are given with their 95% intervals (Wilson), for which the slow GPUs of one fleet count
as fewer if they are found together more often than chance would have it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np

from gemmscope.fleet.rule import Sample, call_group, rule_data
from gemmscope.fleet.spread import Floats

COUNTS = (8, 16, 64, 256, 1000, 10_000)
SPREADS = (0.005, 0.01, 0.02)
SLOWDOWNS = (0.03, 0.05, 0.10)
NOISE = 0.003
GPUS_OF_NODE = 8
NODES = [f"node{gpu // GPUS_OF_NODE}" for gpu in range(max(COUNTS))]
Draw = Callable[[np.random.Generator, int], Floats]


def skewed(rng: np.random.Generator, count: int) -> Floats:
    """Lognormal with skewness 1, slow chips in the tail; mean 0 and standard deviation 1."""
    shape = 0.3142
    values = np.exp(shape * rng.standard_normal(count))
    mean, deviation = np.exp(shape**2 / 2), sqrt((np.exp(shape**2) - 1) * np.exp(shape**2))
    return -(values - mean) / deviation


CHIPS: dict[str, Draw] = {
    "normal": lambda rng, count: rng.standard_normal(count),
    "heavier tails (t5)": lambda rng, count: rng.standard_t(5, count) / sqrt(5 / 3),
    "skewed towards slow (skewness 1)": skewed,
}


def called(rng: np.random.Generator, chips: Floats) -> tuple[set[int], set[str]]:
    """The GPUs and the nodes that the rule calls. `chips`: logarithms of their speeds."""
    times = [chips + NOISE * rng.standard_normal(len(chips)) for _ in range(3)]
    figures = {"BF16 linears": times[0], "FP8Current linears": times[1], "FP8Block linears": times[2]}
    figures |= {"FP8Current speedup": times[1] - times[0], "FP8Block speedup": times[2] - times[0]}
    errors = {name: np.full(len(chips), NOISE * (sqrt(2) if "speedup" in name else 1)) for name in figures}
    samples = [Sample(name, values, errors[name]) for name, values in figures.items()]
    nodes = NODES[: len(chips)]
    rule = rule_data()
    group = call_group(
        samples, "BF16 linears", nodes, alarms=rule["false_alarms"], tolerance=rule["tolerance"], least=rule["least_gpus"]
    )
    return {call.gpu for call in group.calls if call.gpu >= 0}, {call.node for call in group.calls if call.gpu < 0}


def share(hits: Sequence[int], of: int = 1) -> str:
    """A rate with its 95% interval (Wilson). `hits`: the hits among `of` in each fleet.

    The members of one fleet share its limits: the effective number of them is such that the variance of the rate is the one that
    the fleets show.

    >>> share([0] * 1000), share([1] * 990 + [0] * 10)
    ('0.0% (0-0.4%)', '99.0% (98.2-99.5%)')
    >>> share([5, 5, 5, 5], 10), share([10, 0, 10, 0], 10)
    ('50.0% (35.2-64.8%)', '50.0% (15-85%)')
    """
    rate, trials = float(np.mean(hits)) / of, float(len(hits) * of)
    variance = float(np.var(hits)) / of**2 / len(hits)
    if variance > 0:
        trials = min(trials, max(rate * (1 - rate) / variance, len(hits)))
    center = (rate * trials + 1.92) / (trials + 3.84)
    reach = 1.96 / (trials + 3.84) * sqrt(rate * (1 - rate) * trials + 0.9604)
    low, high = (f"{100 * end:.1f}".removesuffix(".0") for end in (max(center - reach, 0.0), min(center + reach, 1.0)))
    return f"{100 * rate:.1f}% ({low}-{high}%)"


def fleets_of(count: int, effort: float, most: int) -> int:
    """How many fleets to simulate."""
    return max(int(effort * min(most, 1_000_000 // count)), 20)


def found_table(planted: str, effort: float, counts: Sequence[int]) -> None:
    """Print the rates of slow GPUs that are called, and below each the fleets in which a healthy GPU or node is called, too."""
    slowdowns = " | ".join(f"{slowdown:.0%} slow" for slowdown in SLOWDOWNS)
    print(f"| GPUs | chip spread | fleets per cell | {slowdowns} | fleets with a false alarm |\n|{' ---: |' * 7}")
    for count in counts:
        slow = 1 if planted == "one" else max(round(0.05 * count), 1)
        if planted != "one" and slow == 1:
            continue
        for spread in SPREADS:
            cells, alarms, fleets = [], list[int](), fleets_of(count, effort, 1000)
            for slowdown in SLOWDOWNS:
                rng = np.random.default_rng([count, slow, int(1e4 * spread), int(100 * slowdown)])
                hits = list[int]()
                for _ in range(fleets):
                    chips = spread * rng.standard_normal(count)
                    which = rng.choice(count, slow, replace=False)
                    chips[which] += np.log(1 - slowdown)
                    gpus, nodes = called(rng, chips)
                    hits.append(len(gpus & set(which.tolist())))
                    alarms.append(bool(gpus - set(which.tolist()) or nodes))
                cells.append(share(hits, slow))
            row = " | ".join((f"{count:,}", f"{spread:.1%}", f"{fleets:,}", *cells, share(alarms)))
            print(f"| {row} |", flush=True)


def alarm_table(effort: float, counts: Sequence[int]) -> None:
    """Print the rates of fleets without a slow GPU in which one is called."""
    columns = [(name, spread) for name in CHIPS for spread in (0.01, 0.02)]
    titles = " | ".join(f"{name}, spread {spread:.0%}" for name, spread in columns)
    print(f"| GPUs | fleets per cell | {titles} |\n| ---: | ---: |{' ---: |' * len(columns)}")
    for count in counts:
        cells, fleets = [], fleets_of(count, effort, 4000)
        for name, spread in columns:
            rng = np.random.default_rng([count, len(name), int(1e4 * spread)])
            cells.append(share([any(called(rng, spread * CHIPS[name](rng, count))) for _ in range(fleets)]))
        print(f"| {count:,} | {fleets:,} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", type=float, default=1.0, help="a factor on the number of simulated fleets")
    parser.add_argument("--table", choices=["all", "one", "some", "none"], default="all", help="only one of the tables")
    parser.add_argument("--gpus", type=int, nargs="+", default=COUNTS, choices=COUNTS, help="only fleets of these sizes")
    arguments = parser.parse_args()
    if arguments.table in ("all", "one"):
        print("## One slow GPU: how often it is found\n")
        found_table("one", arguments.effort, arguments.gpus)
    if arguments.table in ("all", "some"):
        print("\n## 5% of the GPUs are slow: the share of them that is found\n")
        found_table("some", arguments.effort, arguments.gpus)
    if arguments.table in ("all", "none"):
        print("\n## No slow GPU: fleets in which one is called\n")
        alarm_table(arguments.effort, arguments.gpus)


if __name__ == "__main__":
    main()
