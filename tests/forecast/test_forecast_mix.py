"""The forecast of a mix lies between its two recipes, and equals one of them if it keeps everything or nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.forecast.estimate import Estimate
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.mixed import Assigned
from gemmscope.forecast.step import StepForecast, forecast_step
from gemmscope.forecast.training import facts
from gemmscope.gpu.specs import gpu
from gemmscope.model import presets
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.kept import KeptHigher, mixed_name, split_name
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.roles import key_of
from gemmscope.workload.derive import derive

LOW = "FP8Current"
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt2")
RUNS = (RunSpec(1, 4096), RunSpec(2, 2048, gradient_accumulation=4), RunSpec(1, 4096, recompute="full"))


@cache
def model_of(name: str) -> ModelSpec:
    model = presets.load(name).model
    assert model is not None
    return model


@cache
def forecast(name: str, run: RunSpec, chip: str = "h200") -> StepForecast:
    model = model_of(name)
    return StepForecast(Forecaster(gpu(chip), "sustained"), model, run, derive(model, run))


def ops_of(step: StepForecast) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key_of(case.op) for case, _, _ in step.quantized))


def counted(assigned: list[Assigned], name: str) -> int:
    return sum(counts.get(name, 0) for counts in assigned)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[StepForecast, KeptHigher]:
    step = forecast(draw(st.sampled_from(MODELS)), draw(st.sampled_from(RUNS)))
    ends = st.integers(0, 70)
    return step, KeptHigher(
        draw(st.sampled_from([BASELINE, "FP8Block"])), draw(ends), draw(ends), tuple(draw(st.sets(st.sampled_from(ops_of(step)))))
    )


def linears_ms(step: StepForecast, name: str) -> tuple[float, float]:
    """GEMMs and casts of one step."""
    parts = step.step(name).parts
    gemms, casts = (parts.get(part, Estimate(0.0)).value for part in ("GEMMs", "quantization"))
    return gemms, casts


@cache
def bounds(step: StepForecast, kept_in: str) -> list[tuple[float, float]]:
    """What GEMMs and casts take at least and at most: some ops are faster in FP8 and others slower, so a mix of ops can be faster
    and slower than both of its recipes."""
    low = linears_ms(step, LOW)
    one_kept = [linears_ms(step, mixed_name(LOW, KeptHigher(kept_in, ops=(op,)))) for op in ops_of(step)]
    changes = [[kept[part] - low[part] for kept in one_kept] for part in (0, 1)]
    return [
        (low[part] + sum(min(ms, 0.0) for ms in changes[part]), low[part] + sum(max(ms, 0.0) for ms in changes[part]))
        for part in (0, 1)
    ]


@given(mixes())
@settings(max_examples=60, deadline=None)
def test_a_mix_is_between_the_best_and_the_worst_choice_for_every_op(drawn: tuple[StepForecast, KeptHigher]) -> None:
    step, kept = drawn
    name = mixed_name(LOW, kept)
    clock = facts()["clock"]["most"]  # the kernels between GEMMs speed these up by at most this much
    for mixed_ms, (least, most), slack in zip(linears_ms(step, name), bounds(step, kept.recipe), (clock, 1e-9), strict=True):
        assert least * (1 - slack) - 1e-9 <= mixed_ms <= most * (1 + slack) + 1e-9
    mixed, low, high = (step.step(recipe_name).launched.launch_ms for recipe_name in (name, LOW, kept.recipe))
    assert min(low, high) * (1 - 1e-9) <= mixed <= max(low, high) * (1 + 1e-9)
    assigned = step.assigned(name)
    assert [sum(counts.values()) for counts in assigned] == [count for _, count, _ in step.quantized]
    if name != LOW:
        assert split_name(name) == (LOW, kept)
        assert recipe(name).base == LOW


@given(st.sampled_from(MODELS), st.sampled_from(RUNS), st.booleans())
@settings(max_examples=12, deadline=None)
def test_all_kept_is_the_baseline_and_nothing_kept_the_recipe(name: str, run: RunSpec, by_layer: bool) -> None:
    step = forecast(name, run)
    ops = () if by_layer else ops_of(step)
    everything = mixed_name(LOW, KeptHigher(BASELINE, 100 if by_layer else 0, 0, ops))
    assert step.step(everything) == step.step(BASELINE)
    times = forecast_step(step, [BASELINE, LOW, everything])
    speedup = times.speedup(everything)
    assert speedup is not None
    assert (speedup.value, speedup.low, speedup.high) == (1.0, 1.0, 1.0)
    assert mixed_name(LOW, KeptHigher(BASELINE)) == LOW


@given(mixes())
@settings(max_examples=40, deadline=None)
def test_error_bars_of_what_is_kept_cancel(drawn: tuple[StepForecast, KeptHigher]) -> None:
    """The more of the step both sides share, the narrower the interval of their ratio."""
    step, kept = drawn
    name = mixed_name(LOW, replace(kept, recipe=BASELINE))
    times = forecast_step(step, list(dict.fromkeys([BASELINE, LOW, name])))
    mixed, low = times.speedup(name), times.speedup(LOW)
    assert mixed is not None
    assert low is not None
    assert mixed.half_width <= low.half_width * 1.02
    over_recipe = times.speedup(name, LOW)
    assert name == LOW or over_recipe is not None
    if over_recipe is not None:
        assert isclose(over_recipe.value, mixed.value / low.value, rel_tol=1e-9)


def test_layers_and_ops_are_counted_once() -> None:
    """Of 32 layers, 3 are kept; of the others, one op."""
    step = forecast("llama-3.1-8b", RUNS[0])
    name = mixed_name(LOW, KeptHigher(BASELINE, 1, 2, ("mlp-down",)))
    by_op = dict(zip(ops_of(step), step.assigned(name), strict=True))
    assert by_op["mlp-down"] == {BASELINE: 32}
    assert by_op["qkv-proj"] == {LOW: 29, BASELINE: 3}
    assert step.kept_share(name) == pytest.approx((32 + 3 * 3) / (4 * 32))


def test_kinds_of_layers() -> None:
    """The first three layers of DeepSeek-V3 are dense."""
    step = forecast("deepseek-v3", RUNS[0])
    assigned = dict(zip((case.op for case, _, _ in step.quantized), step.assigned(f"{LOW} (in BF16: first 4)"), strict=True))
    assert assigned["MLP Gate+Up"] == {LOW: 0, BASELINE: 3}
    assert assigned["Expert Gate+Up"] == {LOW: 57, BASELINE: 1}


def test_pipeline_stages_have_their_own_layers() -> None:
    """The slowest stage is the one whose layers are kept, whichever has most FLOPs otherwise."""
    model = model_of("llama-3.1-8b")
    run = RunSpec(1, 4096, pp=4, gradient_accumulation=8)
    step = StepForecast(Forecaster(gpu("h200"), "sustained"), model, run, derive(model, run))
    name = f"{LOW} (in BF16: first 8)"
    assert counted(step.assigned(name), BASELINE) == 0  # the last stage, with the head, has none of these layers
    assert step.step(LOW).time_ms < step.step(name).time_ms
    middle = replace(run, pp_stage=1)
    inner = StepForecast(Forecaster(gpu("h200"), "sustained"), model, middle, derive(model, middle))
    assert inner.step(name).time_ms == pytest.approx(inner.step(LOW).time_ms)
