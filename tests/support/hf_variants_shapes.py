"""Random settings of families with layers of several shapes (Llama 4, Gemma 3n and 4, DeepSeek-V4, MiMo-V2, MiniMax-M3)."""

from __future__ import annotations

import random
from typing import Any

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def adapt(model_type: str, config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """`config` (of `hf_variants.variant`) with what this family has beside attention and MLP; unchanged for other families."""
    make = _FAMILIES.get(model_type)
    return config if make is None else make(config, rng)


def _llama4(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = int(config["num_hidden_layers"])
    config |= {
        "layer_types": None,
        "no_rope_layers": rng.choice([None, [], [rng.randint(0, 1) for _ in range(layers)]]),
        "no_rope_layer_interval": rng.choice([1, 2, 4]),
        "moe_layers": rng.choice([None, [], rng.sample(range(layers), rng.randint(0, layers))]),
        "interleave_moe_layer_step": rng.choice([1, 2, 3]),
        "intermediate_size_mlp": rng.choice([48, 104]),
        "attention_chunk_size": rng.choice([5, 8, 64]),
        "attn_temperature_tuning": rng.random() < 0.5,
        "num_local_experts": rng.choice([3, 4, 8]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
    }
    if rng.random() < 0.4:
        config["layer_types"] = [rng.choice([CHUNKED, FULL]) for _ in range(layers)]
    return config


def _sharing(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Kinds of layers, and how many at the end share keys and values: each of their kinds must occur before."""
    layers = int(config["num_hidden_layers"])
    kinds = [rng.choice([SLIDING, FULL]) for _ in range(layers)]
    most = layers - 1
    while most and not set(kinds[-most:]) | {FULL} <= set(kinds[:-most]):
        most -= 1
    return {"layer_types": kinds, "num_kv_shared_layers": rng.randint(0, most), "sliding_window": rng.choice([7, 8, 16])}


def _layer_inputs(rng: random.Random) -> dict[str, Any]:
    return {"hidden_size_per_layer_input": rng.choice([4, 12]), "vocab_size_per_layer_input": rng.choice([50, 77])}


def _gemma3n(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, streams = int(config["num_hidden_layers"]), rng.choice([1, 2, 3, 4])
    config |= _sharing(config, rng) | _layer_inputs(rng)
    config |= {"altup_num_inputs": streams, "altup_active_idx": rng.randrange(streams), "altup_correct_scale": rng.random() < 0.5}
    config |= {"laurel_rank": rng.choice([3, 8])}
    if rng.random() < 0.5:
        config["intermediate_size"] = [rng.choice([40, 72]) for _ in range(layers)]
    config["activation_sparsity_pattern"] = rng.choice([None, [rng.choice([0.0, 0.9]) for _ in range(layers)]])
    return config


def _gemma4(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    heads = int(config["num_attention_heads"])
    config |= _sharing(config, rng) | (_layer_inputs(rng) if rng.random() < 0.6 else {"hidden_size_per_layer_input": 0})
    config |= {
        "global_head_dim": rng.choice([16, 32, 48]),
        "num_global_key_value_heads": rng.choice([None, 1, heads]),
        "attention_k_eq_v": rng.random() < 0.5,
        "use_double_wide_mlp": rng.random() < 0.5,
        "use_bidirectional_attention": rng.choice([None, None, "vision", "all"]),
        "enable_moe_block": rng.random() < 0.5,
        "num_experts": 6,
        "top_k_experts": rng.choice([1, 2, 6]),
        "moe_intermediate_size": rng.choice([24, 56]),
    }
    if rng.random() < 0.2:
        kinds = [*config["layer_types"][:-1], FULL]
        config["per_layer_config"] = {index: {"head_dim": 56} for index, kind in enumerate(kinds) if kind == FULL}
    return config


def _deepseek_v4(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, kinds = int(config["num_hidden_layers"]), {SLIDING: 0, SPARSE: 4, HEAVY: 128}
    config |= {
        "num_key_value_heads": 1,
        "head_dim": rng.choice([16, 24]),
        "q_lora_rank": rng.choice([20, 28]),
        "o_groups": rng.choice([1, 2, 4]),
        "o_lora_rank": rng.choice([5, 12]),
        "index_n_heads": rng.choice([2, 5]),
        "index_head_dim": rng.choice([8, 16]),
        "index_topk": rng.choice([2, 4, 512]),
        "hc_mult": rng.choice([1, 2, 4]),
        "hc_sinkhorn_iters": 2,
        "sliding_window": rng.choice([5, 8]),
        "mlp_bias": rng.random() < 0.5,
        "mlp_layer_types": None,
        "layer_types": None,
        "compress_rates": None,
        "partial_rotary_factor": None,
        "qk_rope_head_dim": rng.choice([4, 8]),
    }
    chosen = [rng.choice(list(kinds)) for _ in range(layers)]
    how = rng.choice(["kinds", "ratios", "default"])
    if how == "kinds":
        config["layer_types"] = chosen
    elif how == "ratios":  # as published, with one more for the prediction layer
        config["compress_ratios"] = [kinds[kind] for kind in chosen] + [0]
    if rng.random() < 0.5:
        config["compress_rates"] = {SPARSE: rng.choice([2, 4, 5]), HEAVY: rng.choice([8, 16, 64])}
    else:
        config |= {"compress_rate_csa": rng.choice([3, 4]), "compress_rate_hca": rng.choice([6, 64])}
    if rng.random() < 0.3:  # other names of the same sizes
        config |= {"num_local_experts": config.pop("n_routed_experts"), "intermediate_size": config.pop("moe_intermediate_size")}
    config |= {"num_hash_layers": rng.randint(0, layers)} if rng.random() < 0.5 else {}
    return config


def _mimo_v2(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, heads = int(config["num_hidden_layers"]), 2 * int(config["num_key_value_heads"])
    config |= {"num_attention_heads": heads * rng.choice([1, 2, 3]), "head_dim": 24, "v_head_dim": rng.choice([8, 16, 40])}
    kinds = [rng.choice([SLIDING, FULL]) for _ in range(layers)]
    config |= {"layer_types": rng.choice([None, kinds]), "sliding_window": rng.choice([5, 9])}
    if rng.random() < 0.5:  # as the checkpoint has it
        config |= {"sliding_window_size": 4, "swa_num_key_value_heads": heads}
    return config


def _minimax_m3(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, groups = int(config["num_hidden_layers"]), int(config["num_key_value_heads"])
    sizes = {"sparse_num_index_heads": groups, "sparse_index_dim": 24, "sparse_block_size": 4, "sparse_topk_blocks": 2}
    config |= {"head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 56, "shared_intermediate_size": 24}
    config |= {"layer_types": None, "mlp_layer_types": None}
    if rng.random() < 0.5:  # as the checkpoint has it
        config["moe_layer_freq"] = [rng.randint(0, 1) for _ in range(layers)]
        config["sparse_attention_config"] = {**sizes, "sparse_attention_freq": [rng.randint(0, 1) for _ in range(layers)]}
    else:
        config["layer_types"] = [rng.choice(["minimax_m3_sparse", FULL]) for _ in range(layers)]
        config |= {"index_n_heads": groups, "index_head_dim": 16, "index_block_size": 5, "index_topk_blocks": 1}
    return config


_FAMILIES = {
    "mimo_v2_flash": _mimo_v2,
    "minimax_m3_vl_text": _minimax_m3,
    "llama4_text": _llama4,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "deepseek_v4": _deepseek_v4,
}
SHAPE_FAMILIES = tuple(_FAMILIES)
