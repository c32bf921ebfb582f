"""At which depths a Hugging Face model is run that does not fit into memory, and how its whole step follows from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gemmscope.engine.messages import Sampled
from gemmscope.errors import UserError
from gemmscope.results.step import Variant
from gemmscope.step.module_plan import ModulePlan, depth_of, extrapolation, kinds_of, truncated
from gemmscope.step.step_measurements import StepMeasurements

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 32,
         "vocab_size": 64}  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(st.text("MA*-E", min_size=12, max_size=60), st.integers(6, 40))
def test_kinds_of_layers_add_up_to_the_whole_model(pattern: str, most: int) -> None:
    """For every pattern, the result is exact, or a message says that there are too few layers."""
    try:
        weights = extrapolation(lambda depth: Counter(pattern[:depth]), len(pattern), min(most, len(pattern)))
    except UserError as error:
        assert "too few to tell" in error.message
        return
    total: Counter[str] = Counter()
    for depth, weight in weights.items():
        assert depth <= most
        for kind, count in Counter(pattern[:depth]).items():
            total[kind] += weight * count  # type: ignore[assignment]
    assert sum(weights.values()) == pytest.approx(1)
    assert {kind: total[kind] for kind in set(pattern)} == pytest.approx(dict(Counter(pattern)))


@pytest.mark.parametrize(
    ("config", "most", "depths"),
    [
        (LLAMA, 4, [4, 2]),
        (LLAMA, 12, [12, 2]),
        ({**LLAMA, "layer_types": ["linear_attention"] * 3 * 8 + ["full_attention"] * 8}, 31, [31, 24]),
        ({**LLAMA, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}, 11, [8, 4]),
        ({**LLAMA, "model_type": "qwen3_moe", "mlp_only_layers": [0, 1, 2], "num_experts": 8,
          "num_experts_per_tok": 2, "moe_intermediate_size": 32}, 6, [6, 3]),
    ],
    ids=["alike", "alike, more memory", "in a row", "periods", "dense first"],
)  # fmt: skip
def test_depths(config: dict[str, Any], most: int, depths: list[int]) -> None:
    plan = ModulePlan(None, config, 32, 1, 16)
    assert list(plan.weights(most)) == depths
    assert plan.weights(32) == {32: 1.0}
    assert TypeAdapter(ModulePlan).validate_python(asdict(plan)) == plan


def test_a_module_runs_as_it_is() -> None:
    assert ModulePlan("file.py:build", None, 0, 0, 0).weights(0) == {0: 1.0}


def test_too_few_layers_for_the_kinds() -> None:
    with pytest.raises(UserError, match="5 of its 12 layers are too few"):
        extrapolation(lambda depth: Counter(("M" * 10 + "AA")[:depth]), 12, 5)


def test_configs_inside_of_configs_and_lists_of_layer_numbers() -> None:
    inner = {"num_hidden_layers": 4, "mlp_only_layers": [1, 3], "eos_token_id": [1, 2, 3, 0]}
    assert depth_of({"text_config": inner}) == 4
    assert truncated({"text_config": inner}, 2)["text_config"]["mlp_only_layers"] == [1]
    from_one = {"num_hidden_layers": 4, "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2}}
    cut = {"kda_layers": [1, 2], "full_attn_layers": [], "num_heads": 2}
    assert truncated(from_one, 2) == {"num_hidden_layers": 2, "linear_attn_config": cut}
    assert depth_of({"is_encoder_decoder": True, "num_layers": 4}) == 0
    assert kinds_of({"model_type": "unheard_of", "num_layers": 4, "layers_block_type": ["a", "b", "a", "b"]}, 3) == {
        ("a",): 2,
        ("b",): 1,
    }


def test_the_step_of_the_whole_model_is_the_weighted_sum() -> None:
    """Three depths, of which none alone is on a line with the whole model."""
    pattern, cost = "MMAM-M-AMM-A", {"M": 3.0, "A": 7.0, "-": 2.0}
    weights = extrapolation(lambda depth: Counter(pattern[:depth]), len(pattern), 9)
    measurements = StepMeasurements([Variant("BF16", depth) for depth in weights], len(pattern), weights)
    for _ in range(5):
        for result in list(measurements.tasks.values()):
            time = 20.0 + sum(cost[kind] for kind in pattern[: result.variant.depth])
            measurements.take(Sampled({result.variant.name: [time] * 4}, {}))
    step = measurements.step("BF16")
    assert step is not None
    assert step.value == pytest.approx(20.0 + sum(cost[kind] for kind in pattern))
    assert measurements.extrapolated("BF16", lambda result: float(result.variant.depth)) == pytest.approx(len(pattern))
