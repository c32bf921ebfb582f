"""How well measurements on an H200 repeat: the numbers of `bench.md`, from recorded runs."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))
from support.recorded_bursts import MACHINES  # noqa: E402

LENGTHS_MS = (300, 450, 600, 750)


def repeats() -> str:
    """For each pair of consecutive runs, the largest change of a speedup of all linears."""
    sittings = json.loads((DOCS / "measured" / "h200_repeats.json").read_text())["sittings"]
    rows = ["| bursts | consecutive runs | largest change of a speedup, from each run to the next |", "| --- | ---: | --- |"]
    for sitting in sittings:
        moved = [max(abs(after[name] / before[name] - 1) for name in before) for before, after in pairwise(sitting["runs"])]
        rows.append(f"| {sitting['bursts']} | {len(sitting['runs'])} | {', '.join(f'{share:.2%}' for share in moved)} |")
    return "\n".join(rows)


def lengths() -> str:
    """How much the mean of a burst varies between bursts of one task on one machine, by the length that is used."""
    rows = ["| seconds of each burst | standard deviation of its mean |", "| ---: | ---: |"]
    return "\n".join([*rows, *(f"| {length_ms / 1000:g} | {varies_by(length_ms):.2%} |" for length_ms in LENGTHS_MS)])


def varies_by(length_ms: float) -> float:
    """The relative standard deviation, over all machines and tasks."""
    squares = freedom = 0.0
    for runs in MACHINES:
        for name in runs[0]:
            means = [_mean_of_first(burst, length_ms) for run in runs for burst in run[name]]
            relative = np.asarray(means) / np.mean(means)
            squares, freedom = squares + float(((relative - 1) ** 2).sum()), freedom + len(means) - 1
    return float(np.sqrt(squares / freedom))


def _mean_of_first(cycles_ms: list[float], length_ms: float) -> float:
    count = int(np.searchsorted(np.cumsum(cycles_ms), length_ms)) + 1
    return float(np.mean(cycles_ms[:count]))
