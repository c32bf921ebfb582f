"""Configs as they are published, against the live classes: keys left out, keys that the class does not read, odd sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.model import hf
from gemmscope.model.families import ALIASES, family, known_model_types
from gemmscope.model.spec import RunSpec
from gemmscope.toml import load_data
from gemmscope.workload.check import differences
from gemmscope.workload.derive import derive
from gemmscope.workload.trace import as_workload
from support.oracle import live, model_of
from support.reading import codes

transformers = pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="the oracle needs torch and transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # warnings of torch and transformers

SIZES = {
    key for name, keys in ALIASES.items() if name not in ("num_key_value_heads", "head_dim", "n_positions") for key in keys
} | {
    *("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"),
}
SMALL = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 64}
SMALL |= {"pad_token_id": 0}  # inside of the vocabulary
ADAPTERS = {"layer_types": ["hybrid"] * 2, "use_shared_attention_adapter": True}
BOTH_SIDES = {"use_bidirectional_attention": True, "num_key_value_heads": 2}


def test_class_sizes_are_those_of_the_classes() -> None:
    """`class_sizes.toml` beside the defaults of `families.toml`: every size that a class assumes, and no other."""
    listed = load_data("gemmscope.model", "class_sizes.toml")
    for model_type in known_model_types():
        if model_type in transformers.CONFIG_MAPPING:
            defaults = family(model_type).get("defaults", {})
            fields = dataclasses.fields(transformers.CONFIG_MAPPING[model_type])
            assumed = {field.name: field.default for field in fields if field.name in SIZES and type(field.default) is int}
            left = {key: value for key, value in assumed.items() if key not in defaults}
            assert listed.get(model_type, {}) == left, model_type


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_hidden_layers": 2},
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 96},
        {"model_type": "gpt2", "n_layer": 2, "max_position_embeddings": 64},
        {"model_type": "gemma3", "text_config": {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 3}},
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064, "num_hidden_layers": 1}},
        {"model_type": "deepseek_v2", "num_hidden_layers": 2, "num_experts_per_tok": 2, "num_key_value_heads": 32},
        {"model_type": "mixtral", "num_hidden_layers": 1, "output_router_logits": True},
        {"model_type": "glm4_moe_lite", **SMALL, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"model_type": "glm4_moe_lite", **SMALL, "num_key_value_heads": 6, "head_dim": 8},
        {"model_type": "gptj", "n_embd": 90, "n_head": 6, "n_layer": 1, "rotary_dim": 4},
        {"model_type": "smollm3", **SMALL, "num_key_value_heads": 2, "no_rope_layers": [1, 0, 1]},
        {
            "model_type": "smollm3",
            **SMALL,
            "num_key_value_heads": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 2,
        },
        {"model_type": "modernbert", **SMALL, "sliding_window": 4},
        {"model_type": "hy_v3", **SMALL, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8},
        {"model_type": "deepseek_v4", **SMALL, "num_experts_per_tok": 2, "o_groups": 2, "mlp_layer_types": ["moe"] * 3},
        {"model_type": "biogpt", **SMALL, "layerdrop": 1.0},
        {"model_type": "bert", **SMALL, "head_dim": 8},
        {"model_type": "gpt_neox", **SMALL, "head_dim": 8},
        {"model_type": "glm", **SMALL, "head_dim": 15, "num_key_value_heads": 2},
        {"model_type": "gemma", **SMALL, "num_key_value_heads": 2, "use_bidirectional_attention": True},
        {
            "model_type": "gemma3_text",
            **SMALL,
            "num_key_value_heads": 2,
            "use_bidirectional_attention": True,
            "sliding_window": 9,
        },
    ],
    ids=lambda config: " ".join([config["model_type"], *list(config)[-1:]]),
)
def test_configs_as_published(config: dict[str, Any]) -> None:
    source, run = hf.from_config(config, "config.json"), RunSpec(1, 16)
    assert source.model is not None
    assert differences(source.model, run, live(dict(source.config or {}), run)) == []


def test_attention_to_both_sides() -> None:
    attention = model_of({"model_type": "gemma3_text", **SMALL, **BOTH_SIDES, "sliding_window": 513}).layers[0].attention
    assert attention is not None
    assert (attention.causal, attention.window) == (False, 512)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "head_dim": 15}, "head_dim = 15 is odd"),
        ({"model_type": "qwen2", "hidden_size": 90, "num_key_value_heads": 2}, "head_dim = 15 is odd"),
        (
            {"model_type": "deepseek_v32", "qk_rope_head_dim": 5, "n_routed_experts": 8, "n_group": 1},
            "qk_rope_head_dim = 5 is odd",
        ),
        ({"model_type": "llama", "hidden_size": 100, "head_dim": 16}, "not a multiple of num_attention_heads"),
        ({"model_type": "gemma2", "hidden_size": 100, "num_key_value_heads": 2}, "not a multiple of num_attention_heads"),
        ({"model_type": "llama4_text", "attention_chunk_size": None, "num_key_value_heads": 2}, "no attention_chunk_size"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 1, 1], "num_key_value_heads": 2}, "one entry per layer"),
        (
            {
                "model_type": "zamba2",
                "layer_types": ["hybrid"] * 2,
                "num_key_value_heads": 3,
                "use_shared_attention_adapter": True,
            },
            "twice the hidden size wide",
        ),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2, "mamba_n_heads": 7}, "do not add up"),
        ({"model_type": "zamba2", "layer_types": ["mamba"] * 2, "mamba_headdim": 32}, "do not add up"),
        ({"model_type": "glm4_moe", "num_key_value_heads": 2, "n_group": 3}, "cannot be split into n_group = 3"),
        (
            {"model_type": "deepseek_v3", "first_k_dense_replace": 0, "n_group": 2, "topk_group": 4},
            "topk_group = 4 is more than n_group = 2",
        ),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 0, "n_group": 1}, "topk_group = 4 is more than n_group = 1"),
        (
            {"model_type": "deepseek_v32", "num_key_value_heads": 6, "n_routed_experts": 12, "first_k_dense_replace": 0},
            "n_group = 8",
        ),
        ({"model_type": "glm4_moe", "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 4}, "fewer than two experts"),
        ({"model_type": "glm4_moe", "num_key_value_heads": 2, "n_group": 0}, "n_group must be at least 1"),
        ({"model_type": "kimi_linear", "n_group": 2, "topk_group": 3}, "topk_group = 3 is more than"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 3}, "a key and a value for each of its 6 heads"),
        ({"model_type": "jamba", "num_key_value_heads": 2, "num_experts": 1, "expert_layer_offset": 2}, "is not less than"),
        ({"model_type": "granitemoehybrid", "layer_types": [], "mamba_n_heads": 6}, "kinds of 0 layers"),
        (
            {
                "model_type": "zamba2",
                "layer_types": ["hybrid"] * 2,
                "hidden_size": 90,
                "n_mamba_heads": 6,
                "use_mem_rope": True,
                "num_attention_heads": 12,
            },
            "is odd",
        ),
        ({"model_type": "bamba", "num_key_value_heads": 2, "mamba_n_heads": 6, "layer_types": ["attention"] * 2}, "cannot have"),
        ({"model_type": "gptj"}, "rotary_dim = 64 is larger than a head, 16"),
        ({"model_type": "helium", "num_key_value_heads": 2}, "6 heads of 128 do not add up to hidden_size = 96"),
        (
            {"model_type": "gpt_oss", "num_key_value_heads": 2, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "has no sliding_window",
        ),
        ({"model_type": "olmo_hybrid", "layer_types": ["full_attention"] * 2}, "must contain linear_attention"),
        ({"model_type": "deepseek_v4", "index_head_dim": 16, "layer_types": ["compressed_sparse_attention"] * 2}, "is smaller"),
        ({"model_type": "deepseek_v4", "mlp_layer_types": ["moe", "sparse"]}, "cannot contain 'sparse'"),
        ({"model_type": "gemma4_text", "num_key_value_heads": 2, "per_layer_config": {"2": {"head_dim": 64}}}, "from 0 to 1"),
    ],
)
def test_what_the_class_refuses_is_refused(config: dict[str, Any], message: str) -> None:
    config = {**SMALL, **config}
    with pytest.raises(UserError, match=message):
        model_of(config)
    with pytest.raises(Exception, match=r"^(?!.*Padding_idx)"):  # each class with a message of its own
        trace_worker.answer({"config": config, "micro_batch": 1, "sequence": 16})


MINIMAX = {**SMALL, "model_type": "minimax_text_01", "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}


def test_the_names_of_minimax_checkpoints() -> None:
    """MiniMax-Text-01 and M1 name their model type and their layers in another way than transformers."""
    source, run = hf.from_config({**MINIMAX, "attn_type_list": [0, 1], "auto_map": {}}, "config.json"), RunSpec(1, 16)
    assert source.model is not None
    assert [layer.mixer is not None for layer in source.model.layers] == [True, False]
    assert differences(source.model, run, live(dict(source.config or {}), run)) == []
    with pytest.raises(UserError, match="only 0"):
        hf.from_config({**MINIMAX, "attn_type_list": [0, "1"]}, "config.json")


def test_infinity_as_transformers_writes_it() -> None:
    """A saved config has {"__float__": "Infinity"} where a number is infinite."""
    config = {**SMALL, "model_type": "mamba2", "num_heads": 12, "head_dim": 16, "n_groups": 2}
    config |= {"time_step_limit": [0.0, {"__float__": "Infinity"}], "bos_token_id": 0, "eos_token_id": 0}
    run = RunSpec(1, 16)
    assert differences(model_of(config), run, live(config, run)) == []


def test_long_positions_of_phi_moe() -> None:
    """As Phi-3.5-MoE is published: its class reads the largest position, which has no value on the meta device."""
    factors = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "long_mscale": 1.24, "short_mscale": 1.24}
    config = {**SMALL, "model_type": "phimoe", "num_key_value_heads": 2, "num_local_experts": 4, "lm_head_bias": True}
    config |= {"rope_scaling": {**factors, "original_max_position_embeddings": 4096, "type": "longrope"}}
    run = RunSpec(1, 16)
    assert differences(model_of(config), run, live(config, run)) == []


VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 96}
VISION |= {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
LANGUAGE = {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
QWEN = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
GLM = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen2_vl", QWEN),
        ("qwen2_5_vl", QWEN),
        ("qwen3_vl", {**QWEN, "attention_bias": True}),
        ("qwen3_vl_moe", {**QWEN, **EXPERTS, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
        ("glm4v", GLM),
        ("glm4v", {**GLM, "num_attention_heads": 4, "attention_bias": False}),  # neither head_dim nor attention_bias is read
        ("glm4v_moe", {**GLM, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "attention_bias": True}),
    ],
)
def test_the_language_part_equals_a_known_type(model_type: str, settings: dict[str, Any]) -> None:
    """Its class differs only in rotary positions: the whole model, run on text, has the GEMMs of the known type."""
    text = {**LANGUAGE, **settings, "model_type": f"{model_type}_text"}
    config = {"model_type": model_type, "text_config": text, "vision_config": VISION, "tie_word_embeddings": False}
    source, run = hf.from_config(config, "config.json"), RunSpec(2, 16)
    assert source.model is not None
    assert [difference.what for difference in differences(source.model, run, live(config, run))] == ["parameters"]
    assert differences(source.model, run, live(dict(source.config or {}), run)) == []
    module, _ = trace_worker.build_huggingface(config, 1, 16)
    others = sum(parameter.numel() for name, parameter in module.named_parameters() if "visual." in name)
    assert derive(source.model, run).parameters + others == sum(parameter.numel() for parameter in module.parameters())


def test_a_multimodal_config_with_all_sizes_on_one_level() -> None:
    """As Qwen2.5-VL is published. Where sizes are missing, the class has other defaults, so the model is traced."""
    source = hf.from_config({"model_type": "qwen2_5_vl", **LANGUAGE, "vision_config": VISION}, "config.json")
    assert source.model is not None
    assert (source.model.hidden_size, source.model.model_type) == (96, "qwen2")
    assert hf.from_config({"model_type": "qwen2_5_vl", "vision_config": VISION}, "config.json").model is None
    assert hf.from_config({"model_type": "qwen3_vl", **LANGUAGE}, "config.json").model is None  # its class reads only text_config


def test_paligemma_attends_to_both_sides() -> None:
    config = {"model_type": "paligemma", "text_config": {**LANGUAGE, "model_type": "gemma"}}
    source, run = hf.from_config(config, "config.json"), RunSpec(1, 16)
    assert source.model is not None
    assert [difference.what for difference in differences(source.model, run, live(config, run))] == ["parameters"]


def test_a_multimodal_model_is_traced_with_its_head() -> None:
    """The class that is trained, not the bare model. Without images, its vision part does not run, and a warning says so."""
    text = {key: value for key, value in LANGUAGE.items() if key != "intermediate_size"}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": VISION}
    trace = trace_worker.answer({"config": config, "micro_batch": 2, "sequence": 16, "as_trained": True})
    assert (trace.class_name, trace.heads, trace.has_loss) == ("Qwen3VLForConditionalGeneration", ("lm_head",), True)
    assert trace.unreached == ("model.visual",)
    assert 0.01 < trace.unreached_share < 0.5
    assert "parts-without-gradient" in codes(as_workload(trace))
