"""How often the intervals of chip-to-chip spread and of another GPU contain the truth, on simulated fleets.

    python benchmarks/fleet_spread.py [--fleets 4000]

Prints a Markdown table. The chips have a standard deviation of 1%: normal, with heavier tails (Student's t with 5 degrees of
freedom) or skewed (lognormal towards slow, skewness 1); the noise is 0.3%, or 1%.
"""

from __future__ import annotations

import argparse
from math import sqrt

import numpy as np

from fleet_outliers import CHIPS as DISTRIBUTIONS
from gemmscope.fleet.spread import another_gpu, chip_spread

SPREAD = 0.01
COUNTS = (4, 8, 16, 32, 64, 256, 1000)
CHIPS = dict(zip(("normal", "t5", "skewed"), DISTRIBUTIONS.values(), strict=True))


def share(hits: int, of: int) -> str:
    """A rate with its 95% interval (Wilson)."""
    center = (hits + 1.92) / (of + 3.84)
    reach = 1.96 / (of + 3.84) * sqrt(hits * (of - hits) / of + 0.9604)
    return f"{hits / of:.1%} ({max(center - reach, 0):.1%}-{min(center + reach, 1):.1%})"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=4000)
    fleets = parser.parse_args().fleets
    print("| GPUs | chips | noise | spread in its 95% interval | another GPU in its 90% interval | true speed of another GPU |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for count in COUNTS:
        for name, draw in CHIPS.items():
            for noise in (0.003, 0.01):
                rng = np.random.default_rng([count, len(name), int(noise * 1e4)])
                of = max(fleets * min(100 // count + 1, 10) // 10, fleets // 4)
                spread = measured = true = 0
                for _ in range(of):
                    chips = SPREAD * draw(rng, count + 1)
                    seen = chips + noise * rng.standard_normal(count + 1)
                    interval = chip_spread(seen[:-1], noise)
                    spread += interval is not None and interval.low <= SPREAD <= interval.high  # type: ignore[operator]
                    low, high = another_gpu(seen[:-1], np.zeros(count, dtype=bool)) or (0.0, 0.0)
                    measured += low <= seen[-1] <= high
                    true += low <= chips[-1] <= high
                print(
                    f"| {count} | {name} | {noise:.1%} | {share(spread, of)} | {share(measured, of)} | {share(true, of)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
