"""Layers of multi-token prediction: their operations, where they are, and what they need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from gemmscope import api
from gemmscope.errors import UserError
from gemmscope.forecast.memory import rank_memory
from gemmscope.gpu.specs import gpu
from gemmscope.job.load import load_model, with_prediction_layers
from gemmscope.model import hf, presets
from gemmscope.model.spec import ModelSpec, RunSpec, from_hyperparameters
from gemmscope.workload.check import as_live
from gemmscope.workload.derive import PREDICTION, derive
from gemmscope.workload.ops import Linear, Loss
from gemmscope.workload.summary import count_parameters


@pytest.fixture(scope="module")
def deepseek() -> ModelSpec:
    model = presets.load("deepseek-v3").model
    assert model is not None
    return model


def small(**more: int) -> ModelSpec:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 100}
    return replace(from_hyperparameters(**{**sizes, **more}), prediction_layers=1)


def test_parameters_of_deepseek_v3(deepseek: ModelSpec) -> None:
    """The weights' README counts 11.5B parameters that are not shared: the layer, the projection, three norms."""
    before, after = (count_parameters(replace(deepseek, prediction_layers=count)) for count in (0, 1))
    layer = sum(op.all_parameters for op in derive(deepseek, RunSpec(1, 64)).ops if op.section == "MoE layer") // 58
    assert after[0] - before[0] == layer + 2 * 7168 * 7168 + 3 * 7168
    assert round((after[0] - before[0]) / 1e9, 1) == 11.6
    assert round((after[1] - before[1]) / 1e9, 2) == 0.69


def test_operations() -> None:
    """The projection of two hidden states, one more layer, and the vocabulary with a loss of its own."""
    model, run = replace(small(), prediction_layers=2), RunSpec(2, 32)
    plain, more = (derive(replace(model, prediction_layers=count), run) for count in (0, 2))
    counts: Counter[str] = Counter()
    for op in more.ops:
        counts[op.name] += op.count if op.section == PREDICTION else 0
    assert +counts == {
        "Embedding": 2, "Prediction Norm": 6, "Prediction Proj": 2, "Norm": 4, "QKV Proj": 2, "Attention": 2, "Attn Out": 2,
        "Residual Add": 4, "MLP Up": 2, "MLP Activation": 2, "MLP Down": 2,
    }  # fmt: skip
    projection = next(op for op in more.ops if op.name == "Prediction Proj")
    assert isinstance(projection, Linear)
    assert (projection.inputs, projection.outputs) == (128, 64)
    assert sum(op.count for op in more.ops if isinstance(op, Loss)) == 3
    assert sum(gemm.count for gemm in more.gemms() if gemm.op == "LM Head") == 9
    assert more.layers == {**plain.layers, PREDICTION: 2}


def test_only_the_last_stage_has_them() -> None:
    model = small(num_hidden_layers=4)
    stages = [derive(model, RunSpec(1, 32, pp=4, pp_stage=stage)) for stage in range(4)]
    assert [any(op.section == PREDICTION for op in stage.ops) for stage in stages] == [False, False, False, True]
    # It embeds the next tokens again, so that it needs the table too, unless the vocabulary is that table.
    without = derive(replace(model, prediction_layers=0), RunSpec(1, 32, pp=4, pp_stage=3)).parameters
    whole = count_parameters(model)[0] - count_parameters(replace(model, prediction_layers=0))[0]
    assert stages[3].parameters - without == whole + 100 * 64
    tied = replace(model, tied_embeddings=True)
    tied_stages = [derive(replace(tied, prediction_layers=n), RunSpec(1, 32, pp=4, pp_stage=3)).parameters for n in (0, 1)]
    assert tied_stages[1] - tied_stages[0] == whole


def test_tensor_parallelism_splits_the_projection() -> None:
    run = RunSpec(1, 32, tp=4)
    projection = next(op for op in derive(small(), run).ops if op.name == "Prediction Proj")
    assert isinstance(projection, Linear)
    assert projection.outputs == 16
    with pytest.raises(UserError, match="hidden_size = 66"):
        derive(small(hidden_size=66, head_dim=16, intermediate_size=96), run)


def test_without_a_vocabulary() -> None:
    model = replace(small(), vocab_size=None)
    names = [op.name for op in derive(model, RunSpec(1, 32)).ops if op.section == PREDICTION]
    assert "Prediction Proj" in names
    assert "Embedding" not in names


def test_memory_grows_on_the_last_stage(deepseek: ModelSpec) -> None:
    run = RunSpec(1, 4096, ep=64, pp=2, pp_layers=(31, 30))
    one, two = (rank_memory(replace(deepseek, prediction_layers=n), run, "FP8Current", gpu("h200")) for n in (1, 2))
    assert two.weights_bytes > one.weights_bytes
    assert two.workspace_bytes > one.workspace_bytes  # logits of every loss wait for backward


def test_hugging_face_has_none(deepseek: ModelSpec) -> None:
    """--check compares without them, and the finding names the option that adds them."""
    assert as_live(replace(deepseek, prediction_layers=2)) == deepseek
    source = hf.from_config({**(presets.load("deepseek-v3").config or {}), "num_nextn_predict_layers": 1}, "config.json")
    assert source.model is not None
    assert source.model.prediction_layers == 0
    assert "--mtp-layers 1" in next(
        finding.text for finding in source.findings if finding.code == "prediction-layers-not-included"
    )
    added = with_prediction_layers(source, 1)
    assert added.model is not None
    assert added.model.prediction_layers == 1
    assert not [finding for finding in added.findings if finding.code == "prediction-layers-not-included"]


def test_deepseek_v4_predicts_with_a_window() -> None:
    """Its compress_ratios go on with the kind of the prediction layer."""
    source = load_model(preset="deepseek-v4-flash", mtp_layers=1)
    assert source.model is not None
    attention = source.model.predicting.attention
    assert attention is not None
    assert attention.compressed is not None
    assert (attention.compressed.rate, attention.window) == (0, 128)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, 20_000])
def test_wrong_numbers(wrong: int) -> None:
    with pytest.raises(UserError, match="mtp_layers"):
        load_model(preset="llama-3.2-1b", mtp_layers=wrong)


def test_in_python() -> None:
    model = api.load("llama-3.2-1b", mtp_layers=1)
    assert model.spec is not None
    assert model.spec.prediction_layers == 1
    assert "mtp_layers=1" in repr(model)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
              "intermediate_size": 128}  # fmt: skip
    spec = api.load(config, mtp_layers=2).spec
    assert spec is not None
    assert spec.prediction_layers == 2
    with pytest.raises(UserError, match="traced"):
        api.load({"model_type": "nothing-known"}, mtp_layers=1)
