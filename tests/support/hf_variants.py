"""Small random configs of every known Hugging Face family: odd head sizes, flipped flags, ragged layer patterns."""

from __future__ import annotations

import random
from typing import Any

from support import hf_variants_linear, hf_variants_shapes
from support.mamba_variants import MIXER_FAMILIES, mixer_variant

# Keys whose flips decide a shape or a parameter.
_FLAG_WORDS = ("bias", "norm", "slid", "tie", "qk", "parallel", "multi_query", "affine", "task_id")
_NOT_OURS = {"norm_topk_prob", "sparse_prediction"}  # flags with such a word that decide neither
# Families whose own code refuses a head size other than hidden / heads, or has none.
_OWN_HEAD_SIZE = {"deepseek_v2", "deepseek_v3", "helium"}
# Families whose code needs a window.
_ALWAYS_SLIDES = {
    *("gemma2", "gemma3_text", "gpt_oss", "olmo3", "cohere2", "vaultgemma", "exaone4", "qwen2", "qwen3"),
    *("ministral", "cwm", "granite_swa", "granitemoe_swa", "exaone_moe", "kolibri1"),
}


def variant(model_type: str, defaults: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A small config of this type; `defaults` is what the configuration class fills in."""
    if model_type in MIXER_FAMILIES:
        tokens = [key for key, value in defaults.items() if key.endswith("token_id") and isinstance(value, int)]
        return mixer_variant(model_type, rng) | dict.fromkeys(tokens, 1)
    heads, head_dim, layers = rng.choice([2, 3, 4, 6, 8]), rng.choice([8, 16, 24]), rng.randint(1, 6)
    sizes = {
        ("hidden_size", "n_embd", "d_model", "dim"): heads * head_dim,
        ("num_attention_heads", "n_head", "n_heads", "attention_heads"): heads,
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers"): layers,
        ("num_key_value_heads",): rng.choice([d for d in range(1, heads + 1) if heads % d == 0]),
        ("vocab_size",): rng.choice([101, 256, 1000]),
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): rng.choice([4, 6, 8]),
        ("num_experts_per_tok", "moe_k"): rng.choice([1, 2, 3]),
        ("first_k_dense_replace",): rng.randint(0, layers),
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"): rng.choice([1, 2, 3]),
        ("max_window_layers",): rng.randint(0, layers),
        ("max_position_embeddings", "n_positions"): 64,
        ("n_group", "topk_group"): 1,
        ("local_attention",): 8,
        ("word_embed_proj_dim", "embedding_size"): rng.choice([heads * head_dim, 24]),
    }
    config = {key: value for keys, value in sizes.items() for key in keys if key in defaults or key == "vocab_size"}
    for key in (
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "hidden_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ):
        if key in defaults:
            config[key] = rng.choice([40, 72, 96, 130])
    if "head_dim" in defaults:
        config["head_dim"] = head_dim if model_type in _OWN_HEAD_SIZE else rng.choice([head_dim, 12, 40])
    for key, value in defaults.items():
        if isinstance(value, bool) and key not in _NOT_OURS and any(word in key for word in _FLAG_WORDS) and rng.random() < 0.5:
            config[key] = not value
        if key.endswith("token_id") and isinstance(value, int):
            config[key] = 1
    if "decoder_sparse_step" in defaults:
        config["decoder_sparse_step"] = rng.choice([1, 2, 3])
        config["mlp_only_layers"] = rng.sample(range(layers), rng.randint(0, layers // 2))
    if "moe_layer_interval" in defaults:
        config |= {"moe_layer_interval": rng.choice([1, 2, 3]), "moe_layer_start_index": rng.randint(0, layers)}
        config["moe_layer_end_index"] = rng.choice([-1, *range(layers)])
    if "mlp_layer_types" in defaults and rng.random() < 0.5:
        config["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(layers)]
    if "kv_lora_rank" in defaults:
        config |= {"kv_lora_rank": 20, "q_lora_rank": rng.choice([None, 28]), "num_key_value_heads": heads}
        config.pop("head_dim", None)
        config |= {
            "qk_nope_head_dim": rng.choice([8, 16]),
            "qk_rope_head_dim": rng.choice([4, 8]),
            "v_head_dim": rng.choice([8, 20]),
        }
    if "sliding_window" in defaults:
        config["sliding_window"] = 8 if model_type in _ALWAYS_SLIDES else rng.choice([None, 8, 16])
    slides = config.get("use_sliding_window", defaults.get("use_sliding_window", True)) and config.get("sliding_window", 8)
    if "layer_types" in defaults and slides and rng.random() < 0.5:
        config["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    config = hf_variants_linear.adapt(model_type, config | _NEEDED.get(model_type, {}), rng)
    return hf_variants_shapes.adapt(model_type, config, rng)


# What a family's code insists on, beyond sizes.
_NEEDED: dict[str, dict[str, Any]] = {
    "esm": {"pad_token_id": 1, "mask_token_id": 2, "token_dropout": False, "position_embedding_type": "rotary"},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4, "n_head": 4, "n_embd": 64},
    "phi": {"partial_rotary_factor": 0.5},
    "persimmon": {"hidden_size": 64, "num_attention_heads": 4},
}
