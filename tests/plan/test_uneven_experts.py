"""Experts that receive uneven numbers of tokens run in low precision, because frameworks pad them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmscope
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import gpu
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import BASELINE, recipes
from gemmscope.results.plan import PlanResult
from gemmscope.workload.derive import derive

IMBALANCES = (1.0, 1.0001, 1.001, 1.01, 1.3, 2.0, 3.3, 4.0, 6.0, 7.9, 8.0)
QUANTIZED = ("FP8Current", "FP8Block", "MXFP8", "NVFP4")


def step(tokens: int, imbalance: float = 1.0, micro_batch_size: int = 1) -> StepForecast:
    model = gemmscope.load("mixtral-8x7b").spec
    run = RunSpec(micro_batch_size, tokens, ep=8, imbalance=imbalance)
    return StepForecast(Forecaster(gpu("b200"), "sustained"), model, run, derive(model, run))


@pytest.mark.parametrize("name", [BASELINE, *QUANTIZED])
def test_a_step_grows_with_the_imbalance_without_jumps(name: str) -> None:
    times = [step(4096, imbalance).step(name).time_ms for imbalance in IMBALANCES]
    assert all(one < 1.001 * other for one, other in pairwise(times))  # the tiles of a GEMM make its time a staircase
    assert times[2] < 1.02 * times[0]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 400), st.floats(1, 8), st.sampled_from([1, 2, 3, 5]))
def test_every_recipe_runs_where_the_tokens_of_a_rank_are_a_multiple(sixteens: int, imbalance: float, batch: int) -> None:
    forecast = step(16 * sixteens, imbalance, batch)
    tokens = 16 * sixteens * batch
    assert {name: bool(forecast.why_not(name)) for name in QUANTIZED} == {
        name: bool(tokens % recipes()[name].multiple_of) for name in QUANTIZED
    }


def plan(imbalance: float = 1.0, sequence_length: int = 4096) -> PlanResult:
    space: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "ep": 8, "etp": 1, "micro_batch_size": 1, "recompute": "none"}
    return gemmscope.load("mixtral-8x7b").plan("h200", 64, 64, sequence_length, imbalance=imbalance, **space)


def test_a_plan_keeps_low_precision_and_says_that_experts_are_padded() -> None:
    results = [plan(imbalance) for imbalance in (1.0, 1.001, 1.5, 2.5)]
    bests = [result.best for result in results]
    assert {best.recipe for best in bests if best is not None} == {"FP8Delayed"}
    rates = [best.tokens_per_s.value for best in bests if best is not None]
    assert all(one * 1.001 > other for one, other in pairwise(rates))
    assert results[1].has("experts-padded")
    assert not results[1].has("plan-recipes-excluded")


def test_a_plan_says_which_recipes_no_layout_runs_in() -> None:
    result = plan(sequence_length=4100)
    assert result.has("plan-recipes-excluded")
    assert result.best is not None
    assert result.best.recipe == BASELINE
