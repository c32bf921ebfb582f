"""Steps recorded on an H200: what the waterfall, the prediction and the recommendation make of real kernels and times."""

from __future__ import annotations

import pytest

from gemmscope.step.recommend import Plan, candidate, part_gains, recommend
from support.recorded_steps import MODELS, RECIPES, answered, replayed


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_has_its_place(name: str) -> None:
    _, found = answered(name)
    assert len(found.recipes) == 4
    for each in found.recipes[1:]:
        assert each.waterfall is not None
        assert each.waterfall.named >= 0.98
        assert sum(level.fast_ms for level in each.waterfall.levels) == pytest.approx(each.step.value, rel=0.005)
        assert each.speedup is not None
        assert each.waterfall.step == pytest.approx(each.speedup.value, rel=0.005)
        rows = {level.row: level for level in each.waterfall.levels}
        assert "quantization" not in rows or rows["quantization"].slow_ms == 0  # BF16 casts nothing
        assert 1.3 < each.waterfall.products < 2.1
        assert "not running" not in each.words


def test_what_a_large_head_does_to_it() -> None:
    _, found = answered("llama8b")
    current = found.of("FP8Current")
    assert current is not None
    assert "head and loss" in current.words
    assert not current.host_bound


def test_the_prediction_meets_the_real_model() -> None:
    _, found = answered("gpt1b", replayed("gpt1b", real=True))
    for each in found.recipes[1:]:
        assert each.verified is not None
        assert abs(each.verified.error) < 0.03
        assert each.verified.predicted.low <= each.verified.actual.high
        assert each.verified.actual.low <= each.verified.predicted.high


@pytest.mark.parametrize("name", MODELS)
def test_no_part_is_left_out_that_gains(name: str) -> None:
    results, found = answered(name)
    gains = {gain.part: gain for gain in part_gains(results, "FP8Delayed")}
    assert set(gains) == {"qkv", "attn out", "mlp"}
    assert candidate(results, found) is None
    assert recommend(results, [Plan(recipe) for recipe in RECIPES]).plan == Plan("FP8Delayed")
