"""State-space models and their hybrids against the live classes: configs beyond those that every family is tested with."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from gemmscope.commands import shapes as command
from gemmscope.job.load import ModelRun
from gemmscope.model import hf
from gemmscope.model.spec import RunSpec
from gemmscope.workload.check import differences
from support.commands import shapes
from support.mamba_variants import MIXER_FAMILIES, mixer_variant
from support.oracle import compare, live, model_of

transformers = pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="the oracle needs torch and transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # warnings of torch and transformers

TOKENS = {"vocab_size": 101, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
ZAMBA = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "n_mamba_heads": 4}
MIXED = ["hybrid", "mamba", "hybrid", "hybrid"]


@pytest.mark.parametrize("model_type", MIXER_FAMILIES)
def test_random_configs_as_written(model_type: str) -> None:
    """What the config states and nothing else, under the names of published configs."""
    rng = random.Random(f"{model_type} as written")
    assert compare({"model_type": model_type, **mixer_variant(model_type, rng), **TOKENS}, RunSpec(2, 33)) == []


@pytest.mark.parametrize("model_type", MIXER_FAMILIES)
def test_a_bare_config(model_type: str) -> None:
    """Only a model_type: every size is the configuration class's own."""
    assert model_of({"model_type": model_type}) == model_of(transformers.AutoConfig.for_model(model_type).to_dict())


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("falcon_mamba", {"hidden_size": 64, "num_hidden_layers": 2, "expand": 16, "intermediate_size": 128}),
        (
            "bamba",
            {**SIZES, "mamba_n_heads": 8, "num_attention_heads": 5, "num_key_value_heads": 5, "attn_layer_indices": [-1, 1]},
        ),
        ("jamba", {**SIZES, "num_experts": 0, "attn_layer_period": 2, "attn_layer_offset": 0}),
        ("granitemoehybrid", {**SIZES, "mamba_n_heads": 8, "shared_intermediate_size": 0}),
        ("granitemoehybrid", {**SIZES, "mamba_n_heads": 8, "layers_block_type": ["attention"] * 3, "layer_types": ["mamba"] * 3}),
        ("zamba2", {**ZAMBA, "layers_block_type": MIXED, "tie_word_embeddings": False}),
        ("zamba2", {**ZAMBA, "layers_block_type": MIXED, "attention_head_dim": 24, "num_mem_blocks": 2}),
        ("zamba2", {**ZAMBA, "layers_block_type": ["mamba"] * 4}),
        ("nemotron_h", {**SIZES, "num_hidden_layers": None, "hybrid_override_pattern": "M*-E"}),
        ("nemotron_h", {**SIZES, "hybrid_override_pattern": "M*", "layers_block_type": ["mlp"], "layer_types": ["moe", "mamba"]}),
        ("nemotron_h", {**SIZES, "hybrid_override_pattern": "*", "tie_word_embeddings": True, "sliding_window": 8}),
    ],
)
def test_settings_that_override_others(model_type: str, settings: dict[str, Any]) -> None:
    assert compare({"model_type": model_type, **TOKENS, **settings}, RunSpec(2, 16)) == []


def test_long_sequences_are_not_looped_over() -> None:
    """The kernels of mixers only produce shapes: no GEMM of a fallback, however long the sequence."""
    trace = live({"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 32, **TOKENS}, RunSpec(1, 2**20))
    assert (len(trace.scans), trace.batched_gemms, trace.convolutions) == (1, (), ())


@pytest.mark.parametrize(("change", "what"), [({"chunk": 128}, "ssd on 1 x 16: 8 heads of 16"), ({"conv_kernel": 3}, "kernel 3")])
def test_a_wrong_mixer_is_noticed(change: dict[str, int], what: str) -> None:
    config = {"model_type": "mamba2", "hidden_size": 64, "num_heads": 8, "head_dim": 16, "num_hidden_layers": 2, **TOKENS}
    model, run = model_of(config), RunSpec(1, 16)
    layer = model.layers[0]
    assert layer.mixer is not None
    wrong = replace(model, layers=(replace(layer, mixer=replace(layer.mixer, **change)),) * 2)
    assert any(what in difference.what for difference in differences(wrong, run, live(config, run)))


@pytest.mark.parametrize(
    ("model_type", "note"), [("mamba2", "check-of-recurrences"), ("minimax", "check-without-recurrences"), ("llama", None)]
)
def test_the_check_says_what_it_compared(model_type: str, note: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **TOKENS}
    sizes |= {"num_heads": 8, "head_dim": 16, "num_local_experts": 4, "intermediate_size": 40}
    monkeypatch.setattr(
        command, "trace_huggingface", lambda config, batch, sequence: live(dict(config), RunSpec(batch, sequence))
    )
    source = hf.from_config({"model_type": model_type, **sizes}, "config.json")
    result = shapes(ModelRun(source, RunSpec(1, 16)), check=True)
    assert result.check is not None
    assert result.check.equal
    codes = [finding.code for finding in result.findings]
    assert [code for code in codes if code.endswith("recurrences")] == ([note] if note else [])
