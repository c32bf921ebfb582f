"""Steps recorded on an H200: waterfall, prediction and recommendation of real kernels and times."""

from __future__ import annotations

import pytest

from gemmscope.step.answer import PartialRecipe, block_ms, candidate, recommend
from support.recorded_steps import MODELS, RECIPES, answered, replayed


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_has_its_place(name: str) -> None:
    _, times = answered(name)
    assert len(times.recipes) == 4
    for time in times.recipes[1:]:
        assert time.named_share is not None
        assert time.named_share >= 0.98
        assert sum(time.parts_ms.values()) == pytest.approx(time.step_ms.value, rel=0.005)
        assert {level.part: level.recipe_ms for level in time.waterfall if level.recipe_ms} == time.parts_ms
        assert time.speedup is not None
        assert time.waterfall[-1].speedup == pytest.approx(time.speedup.value, rel=0.005)
        levels = {level.part: level for level in time.waterfall}
        assert levels["quantization"].baseline_ms == 0  # BF16 casts nothing
        assert levels["GEMMs"] == time.waterfall[0]
        assert 1.3 < levels["GEMMs"].speedup < 2.1
        assert not time.fell_back


def test_what_a_large_head_does_to_it() -> None:
    _, times = answered("llama8b")
    current = times.of("FP8Current")
    assert current is not None
    assert current.verdict is not None
    assert current.verdict.code == "step-diluted"
    assert "head and loss" in current.verdict.facts["parts_ms"]  # type: ignore[operator]
    assert not current.host_bound


def test_the_prediction_meets_the_real_model() -> None:
    _, times = answered("gpt1b", replayed("gpt1b", real=True))
    for time in times.recipes[1:]:
        assert time.verified is not None
        assert abs(time.verified.error) < 0.03
        assert time.verified.agrees


@pytest.mark.parametrize("name", MODELS)
def test_no_block_is_left_out_that_gains(name: str) -> None:
    measurements, times = answered(name)
    assert set(block_ms(measurements, "FP8Delayed")) == {"qkv", "attn out", "mlp"}
    assert candidate(measurements, times) is None
    recommended = recommend(measurements, [PartialRecipe(recipe) for recipe in RECIPES])
    assert recommended is not None
    assert (recommended.recipe, recommended.left_out, recommended.rivals) == ("FP8Delayed", (), ())
    assert times.winner is not None
    assert (times.winner.best, times.winner.speedup) == ("FP8Delayed", recommended.speedup)


@pytest.mark.parametrize("name", MODELS)
def test_every_recipe_is_compared_with_every_other(name: str) -> None:
    """A ratio and its inverse are one measurement, to the noise of resampling."""
    _, times = answered(name)
    assert len(times.speedups) == 4 * 3
    for speedup in times.speedups:
        inverse = times.speedup(speedup.over, speedup.recipe)
        assert inverse is not None
        assert speedup.speedup.value * inverse.value == pytest.approx(1.0)
