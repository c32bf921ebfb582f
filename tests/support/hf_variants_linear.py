"""Random settings of hybrids with linear attention, and of sparse attention: everything that their code reads."""

from __future__ import annotations

import random
from typing import Any


def adapt(model_type: str, config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """`config` (of `hf_variants.variant`) with what this family has beside attention and MLP; unchanged for other families."""
    make = _FAMILIES.get(model_type)
    return config if make is None else make(config, rng)


def _layers(config: dict[str, Any]) -> int:
    return int(config["num_hidden_layers"])


def _pattern(config: dict[str, Any], rng: random.Random, other: str = "linear_attention") -> dict[str, Any]:
    """A list of kinds, or nothing: the pattern of the configuration class."""
    kinds = [rng.choice(["full_attention", other]) for _ in range(_layers(config))]
    return {"layer_types": kinds if rng.random() < 0.6 else None}


def _delta_rule(rng: random.Random) -> dict[str, Any]:
    keys = rng.choice([1, 2, 3, 4])
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([8, 12, 24]),
        "linear_value_head_dim": rng.choice([8, 16, 20]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4, 7]),
    }


def _rotary(rng: random.Random) -> dict[str, Any]:
    return {} if rng.random() < 0.5 else {"partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}


def _qwen(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    config = config | _pattern(config, rng) | _delta_rule(rng) | _rotary(rng)
    return config if config["layer_types"] else config | {"full_attention_interval": rng.choice([1, 2, 3, 5])}


def _olmo(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = max(_layers(config), 2)
    config = config | {"num_hidden_layers": layers} | _pattern(config | {"num_hidden_layers": layers}, rng)
    if config["layer_types"]:  # the class insists on one of each
        config["layer_types"][:2] = ["linear_attention", "full_attention"]
    given = _delta_rule(rng)
    del config["num_key_value_heads"]
    return config | {key: value for key, value in given.items() if "heads" in key or rng.random() < 0.5}


def _kimi(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers, sizes = _layers(config), {"head_dim": rng.choice([8, 12]), "num_heads": rng.choice([1, 3, 4])}
    config |= {"num_experts": config.pop("num_local_experts", 8), "num_experts_per_token": config.pop("num_experts_per_tok", 2)}
    config |= {"num_shared_experts": config.pop("n_shared_experts", 1)}
    config.pop("mlp_layer_types", None)
    if rng.random() < 0.5:
        config["first_k_dense_replace"] = rng.randint(0, layers)
    else:
        config["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(layers)]
    if rng.random() < 0.5:  # as the class names them
        kernel = {"linear_conv_kernel_dim": rng.choice([2, 4])}
        return config | _pattern(config, rng) | {f"linear_{key}": value for key, value in sizes.items()} | kernel
    full = sorted(rng.sample(range(1, layers + 1), rng.randint(0, layers)))  # as published
    kda = [number for number in range(1, layers + 1) if number not in full]
    inner = sizes | {"short_conv_kernel_size": rng.choice([2, 4]), "full_attn_layers": full, "kda_layers": kda}
    return config | {"layer_types": None, "linear_attn_config": inner}


def _minimax(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return config | _pattern(config, rng) | {"block_size": rng.choice([8, 16, 256]), "head_dim": rng.choice([None, 16, 40])}


def _lfm2(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = _layers(config)
    config = config | _pattern(config, rng, "conv") | {"conv_bias": rng.random() < 0.5, "conv_L_cache": rng.choice([2, 3, 5])}
    if not config["layer_types"] and rng.random() < 0.7:
        config["full_attn_idxs"] = rng.sample(range(layers), rng.randint(0, layers))
    config |= {"block_auto_adjust_ff_dim": rng.random() < 0.7, "block_multiple_of": rng.choice([8, 48])}
    config |= {"block_ffn_dim_multiplier": rng.choice([1, 1.0, 1.3])} if config["block_auto_adjust_ff_dim"] else {}
    config |= {"block_ff_dim": 200} if rng.random() < 0.3 else {}
    return config | ({"tie_embedding": rng.random() < 0.5} if rng.random() < 0.5 else {})


def _lfm2_moe(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = _layers(config)
    config = config | {"conv_bias": rng.random() < 0.5, "conv_L_cache": rng.choice([2, 4])}
    config |= {"layer_types": [rng.choice(["conv", "full_attention"]) for _ in range(layers)]}
    return config | {"num_dense_layers": rng.randint(0, layers), "use_expert_bias": rng.random() < 0.5}


def _sparse(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = _layers(config)
    config = config | {"q_lora_rank": rng.choice([20, 28]), "index_topk": rng.choice([4, 16, 2048]), "layer_types": None}
    config |= {"index_n_heads": rng.choice([2, 5]), "index_head_dim": rng.choice([8, 24])}
    config.pop("mlp_layer_types", None)
    if rng.random() < 0.5:
        config["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(layers)]
    return config


def _shared_indexers(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    config, layers = _sparse(config, rng), _layers(config)
    config.pop("indexer_types", None)
    chosen = rng.choice(["list", "pattern", "frequency", "none"])
    if chosen == "list":
        config["indexer_types"] = ["full", *(rng.choice(["full", "shared"]) for _ in range(layers - 1))]
    elif chosen == "pattern":
        config["index_topk_pattern"] = "F" + "".join(rng.choice("FS") for _ in range(layers - 1))
    elif chosen == "frequency":
        config |= {"index_topk_freq": rng.choice([1, 2, 3]), "index_skip_topk_offset": rng.choice([1, 2, 3])}
    return config


_FAMILIES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _qwen),
    "olmo_hybrid": _olmo,
    "kimi_linear": _kimi,
    "minimax": _minimax,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "deepseek_v32": _sparse,
    "glm_moe_dsa": _shared_indexers,
}
LINEAR_FAMILIES = tuple(_FAMILIES)
