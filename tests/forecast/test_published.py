"""Forecasts of steps on several GPUs compared with published runs, as docs/accuracy.md states."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from published_runs import Compared, Scorer, published_runs, summary


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return Scorer(published_runs()).compared()


def test_published_runs_are_met(compared: list[Compared]) -> None:
    """Dense models within 8%, models with experts within 15%, at the median; 90% error bars hold in 16 of 20."""
    groups = summary(compared)
    dense, experts = groups["fitted, dense"], groups["fitted, with experts"]
    assert (dense[0], experts[0]) == (6, 14)
    assert dense[1] <= 0.08
    assert experts[1] <= 0.15
    assert dense[2] + experts[2] >= 16


def test_runs_that_were_not_fitted_are_met(compared: list[Compared]) -> None:
    groups = summary(compared)
    dense, experts = groups["not fitted, dense"], groups["not fitted, with experts"]
    assert dense[1] <= 0.08
    assert experts[1] <= 0.15
    assert (dense[2] + experts[2]) / (dense[0] + experts[0]) >= 0.85


def test_error_bars_are_no_excuse(compared: list[Compared]) -> None:
    """Bars of dense models stay below a fifth, also on chips that were not measured."""
    assert all(comparison.tokens_per_s.half_width < (0.6 if comparison.run.has_experts else 0.20) for comparison in compared)
