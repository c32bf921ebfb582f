"""Other sizes of a model."""

from __future__ import annotations

import pytest

from gemmscope.errors import UserError
from gemmscope.job.load import load_model
from gemmscope.model import presets
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.model.vary import varied
from gemmscope.workload.derive import derive
from support.commands import plan
from support.plan_files import varied_plan
from support.preset_names import ORIGINALS


def model(preset: str) -> ModelSpec:
    spec = presets.load(preset).model
    assert spec is not None
    return spec


def test_mlp_and_heads_follow_the_hidden_size() -> None:
    wide = varied(model("llama-3.1-70b"), {"hidden": 6144})
    attention, mlp = wide.layers[0].attention, wide.layers[0].mlp
    assert (wide.hidden_size, attention.heads, attention.kv_heads, attention.head_dim) == (6144, 48, 8, 128)
    assert mlp.intermediate_size == 21504  # type: ignore[union-attr]
    assert all(layer is wide.layers[0] for layer in wide.layers)


def test_a_size_that_is_given_is_not_scaled() -> None:
    wide = varied(model("llama-3.1-8b"), {"hidden": 5120, "intermediate": 16384, "heads": 64})
    assert (wide.layers[0].attention.heads, wide.layers[0].mlp.intermediate_size) == (64, 16384)  # type: ignore[union-attr]


def test_experts_keep_what_a_token_uses() -> None:
    fewer = varied(model("qwen3-30b-a3b"), {"experts": 4, "hidden": 4096})
    mlp = fewer.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    assert (mlp.experts, mlp.top_k, mlp.expert.intermediate_size) == (4, 4, 1536)


@pytest.mark.parametrize("preset", ORIGINALS)
def test_every_preset_can_be_scaled(preset: str) -> None:
    original = model(preset)
    same = varied(original, {"hidden": original.hidden_size, "layers": len(original.layers)})
    assert same == original
    for hidden in (original.hidden_size * 3 // 2 // 128 * 128, original.hidden_size * 2):
        assert derive(varied(original, {"hidden": hidden, "layers": 7}), RunSpec(1, 512)).parameters > 0


def test_a_plan_of_several_models() -> None:
    result = varied_plan()
    assert result.varied == ("hidden", "layers")
    assert [tuple(point.values.values()) for point in result.points] == [
        (hidden, layers) for hidden in (2048, 4096, 8192) for layers in (16, 32)
    ]
    assert all(point.best is not None for point in result.points)
    rates = {point.parameters: point.best.tokens_per_s.value for point in result.points if point.best is not None}
    assert [rates[count] for count in sorted(rates)] == sorted(rates.values(), reverse=True)


def test_the_sequence_length_varies() -> None:
    result = plan(
        load_model(preset="llama-3.2-1b"), "h200", 8, global_batch=16, sequence_length=4096, vary={"sequence": [4096, 32768]},
        restrict={"recompute": "none", "tp": [1, 2]},
    )  # fmt: skip
    assert [point.sequence_length for point in result.points] == [4096, 32768]
    first, second = (point.best for point in result.points)
    assert first is not None
    assert second is not None
    assert second.tokens_per_s.value < first.tokens_per_s.value


@pytest.mark.parametrize(
    ("vary", "message", "hint"),
    [
        ({"hiden": [1]}, "'hiden' is not a size that a plan can vary", "did you mean hidden?"),
        ({"experts": [8]}, "experts cannot vary: llama-3.2-1b has none", "vary hidden"),
        ({"hidden": []}, "gives hidden no values", "hidden=5120,6144"),
        ({"hidden": list(range(128, 128 * 200, 128))}, "makes 199 models, more than 100", "fewer"),
        ({"layers": [0]}, "must be at least 1", ""),
    ],
)
def test_sizes_that_cannot_vary(vary: dict[str, list[int]], message: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        plan(load_model(preset="llama-3.2-1b"), "h200", 8, global_batch=16, sequence_length=4096, vary=vary)
    assert message in error.value.message
    assert hint in error.value.hint
