"""The Hugging Face reader on realistic bad input: wrong types, wrong names, contradictions, garbage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.model import hf
from gemmscope.model.families import known_model_types
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.model.readers import read_config, read_text
from gemmscope.model.spec import ModelSource, ModelSpec, RunSpec
from gemmscope.workload.derive import derive
from support.reading import facts

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def model(config: dict[str, Any]) -> ModelSpec:
    spec = hf.from_config(config, "config.json").model
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"hidden_size": -64}, "hidden_size must not be negative"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
        ({"hidden_size": 64.0}, "hidden_size must be a whole number"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hidden_size": 10**12}, "must be at most"),
        ({"hidden_size": 10**9999}, "must be at most"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 10**8}, "must be at most"),
        ({"num_attention_heads": 7}, "is not a multiple of num_attention_heads = 7"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"n_embd": 32}, "contradictory sizes in the config: hidden_size = 64 but n_embd = 32"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers = 2"),
        ({"layer_types": 7}, "layer_types must be a list"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"tie_word_embeddings": 3}, "tie_word_embeddings must be true or false"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": None, "architectures": ["Qwen3ForCausalLM"]}, '"model_type": "qwen3"'),
        ({"model_type": None, "gemmscope_version": "0.1.0", "kind": "bench"}, "run file of gemmscope bench, not a model file"),
        ({"model_type": 3}, "model_type must be a name, not 3"),
        ({"model_type": ["llama"]}, "model_type must be a name"),
    ],
)
def test_wrong_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        hf.from_config({**LLAMA, **change}, "config.json")
    assert message in str(caught.value)


def test_a_misspelt_key_is_named() -> None:
    config = {("hiden_size" if key == "hidden_size" else key): value for key, value in LLAMA.items()}
    with pytest.raises(UserError) as caught:
        hf.from_config(config, "config.json")
    assert "has no hidden_size" in str(caught.value)
    assert "hiden_size" in str(caught.value)


def test_sizes_left_out_are_those_of_the_class() -> None:
    """Missing sizes are those of the class, unless a key looks misspelled. Keys of other families are not misspellings."""
    bare = model({"model_type": "llama"})
    assert (bare.hidden_size, len(bare.layers), bare.vocab_size) == (4096, 32, 32000)
    assert model({"model_type": "qwen3_5_text", "moe_intermediate_size": 64}).hidden_size == 4096
    with pytest.raises(UserError, match="it has 'num_hiden_layers'"):
        model({"model_type": "qwen3_next", "num_hiden_layers": 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("   \n", "is empty"),
        ("{", "is not valid JSON"),
        ("{'hidden_size': 4096}", "is not valid JSON"),
        ('{"a": ' * 100_000, "is not valid JSON"),
        ("{}", "has no model_type"),
        ("Lorem ipsum dolor sit amet.", "has an unknown format"),
    ],
)
def test_wrong_texts(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_text(text, "some.json")
    assert message in str(caught.value)


def test_names_of_experts_vary() -> None:
    base = {**LLAMA, "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        mlp = model({**base, name: 8}).layers[0].mlp
        assert isinstance(mlp, MoeSpec)
        assert mlp.experts == 8


def test_unknown_type_and_unknown_parts_must_be_traced() -> None:
    assert hf.from_config({"model_type": "martian"}, "x").model is None
    assert hf.from_config({**LLAMA, "layer_types": ["linear_attention", "full_attention"]}, "x").model is None
    assert hf.from_config({**LLAMA, "model_type": "bert", "add_cross_attention": True}, "x").model is None


def test_the_language_part_of_a_multimodal_model() -> None:
    source = hf.from_config({"model_type": "martian_vl", "text_config": LLAMA, "vision_config": {"hidden_size": 7}}, "x")
    assert source.model is not None
    assert source.model.hidden_size == 64
    assert facts(source, "language-part-only") == {"model_type": "martian_vl"}


@pytest.mark.parametrize(
    ("model_type", "outer", "inner", "tied"),
    [
        ("mistral3", {"tie_word_embeddings": True}, {}, True),
        ("mistral3", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),  # llava-onevision-qwen2-0.5b
        ("gemma3", {"tie_word_embeddings": False}, {"model_type": "gemma3_text"}, False),
        ("gemma3", {}, {"model_type": "gemma3_text"}, True),
        ("llama4", {"tie_word_embeddings": True}, {"model_type": "llama4_text"}, False),
    ],
)
def test_a_multimodal_config_may_tie_its_language_part(
    model_type: str, outer: dict[str, bool], inner: dict[str, Any], tied: bool
) -> None:
    source = hf.from_config({"model_type": model_type, **outer, "text_config": {**LLAMA, **inner}}, "x")
    assert source.model is not None
    assert source.model.tied_embeddings == tied


def test_experts_of_a_dense_model_are_ignored() -> None:
    source = hf.from_config({**LLAMA, "num_experts": 8}, "x")
    assert facts(source, "experts-ignored") == {"setting": "num_experts", "model_type": "llama"}


def test_folder_and_file(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(LLAMA), encoding="utf-8")
    assert read_config(str(tmp_path)).model == read_config(str(tmp_path / "config.json")).model


def test_not_a_file(tmp_path: Any) -> None:
    binary = tmp_path / "model.safetensors"
    binary.write_bytes(b"\x00\xff\xfe" * 100)
    for reference, message in [
        (str(tmp_path / "nothing.json"), "there is no file"),
        (str(tmp_path), "has no config.json"),
        (str(binary), "not a text file"),
        ("a\0b", ""),
        ("x" * 5000, ""),
    ]:
        with pytest.raises(UserError) as caught:
            read_config(reference)
        assert message in str(caught.value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**30),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.lists(st.integers(0, 5), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
KEYS = st.sampled_from(
    [
        *LLAMA,
        *(
            "head_dim",
            "attention_bias",
            "sliding_window",
            "layer_types",
            "num_experts",
            "num_local_experts",
            "first_k_dense_replace",
        ),
        *(
            "moe_intermediate_size",
            "num_experts_per_tok",
            "decoder_sparse_step",
            "mlp_only_layers",
            "q_lora_rank",
            "kv_lora_rank",
        ),
        *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_shared_experts", "tie_word_embeddings", "text_config"),
        *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "global_attn_every_n_layers", "n_inner"),
        *("shared_expert_intermediate_size", "embedding_size", "type_vocab_size", "max_position_embeddings", "n_routed_experts"),
    ]
)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(known_model_types()), st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_config_is_a_model_or_a_message(model_type: str, change: dict[str, Any]) -> None:
    base = {
        **LLAMA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
    }
    base |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "model_type": model_type}
    try:
        source = hf.from_config({**base, **change}, "config.json")
        if source.model is not None:
            derive(source.model, RunSpec(1, 32))
    except UserError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.recursive(VALUES, lambda inner: st.dictionaries(st.text(max_size=12), inner)).map(json.dumps)))
def test_any_text_is_a_source_or_a_message(text: str) -> None:
    try:
        assert isinstance(read_text(text, "some file"), ModelSource)
    except UserError:
        pass
