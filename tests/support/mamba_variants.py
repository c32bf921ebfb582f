"""Small random configs of state-space models and their hybrids: layer patterns, groups, state sizes, kernels, biases, experts."""

from __future__ import annotations

import random
from typing import Any

MIXER_FAMILIES = ("mamba", "mamba2", "falcon_mamba", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "zamba2", "nemotron_h")


def mixer_variant(model_type: str, rng: random.Random) -> dict[str, Any]:
    """A small config of one of these types."""
    heads, head_dim, layers = rng.choice([2, 3, 4, 6]), rng.choice([8, 16, 24]), rng.randint(1, 6)
    kv_heads = rng.choice([size for size in range(1, heads + 1) if heads % size == 0])
    config: dict[str, Any] = {
        "hidden_size": heads * head_dim,
        "num_hidden_layers": layers,
        "vocab_size": rng.choice([101, 256]),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if "mamba" not in model_type or model_type == "zamba2":
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": rng.choice([40, 72])}
    return config | _BUILDERS[model_type](config, rng)


def _flags(rng: random.Random, *names: str) -> dict[str, bool]:
    return {name: rng.random() < 0.5 for name in names}


def _mamba1(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return {
        "state_size": rng.choice([4, 16]),
        "expand": rng.choice([1, 2, 3]),
        "conv_kernel": rng.choice([2, 3, 4]),
        "time_step_rank": rng.choice(["auto", 5]),
        **rng.choice([{}, {"intermediate_size": 40}]),
        **_flags(rng, "use_bias", "use_conv_bias", "residual_in_fp32"),
    }


def _mamba2(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    expand, groups = rng.choice([1, 2]), rng.choice([1, 2])
    width = expand * config["hidden_size"]
    head_dim = rng.choice([size for size in (4, 8, 12) if width % size == 0 and width // size % groups == 0])
    return {
        "expand": expand,
        "num_heads": width // head_dim,
        "head_dim": head_dim,
        "n_groups": groups,
        "state_size": rng.choice([4, 16]),
        "conv_kernel": rng.choice([2, 3, 4]),
        "chunk_size": rng.choice([8, 256]),
        **_flags(rng, "use_bias", "use_conv_bias"),
    }


def _hybrid(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The names of Bamba, Falcon-H1 and Granite."""
    sizes = _mamba2(config, rng)
    return {
        "mamba_expand": sizes["expand"],
        "mamba_n_heads": sizes["num_heads"],
        "mamba_d_head": rng.choice(["auto", sizes["head_dim"]]),
        "mamba_n_groups": sizes["n_groups"],
        "mamba_d_state": sizes["state_size"],
        "mamba_d_conv": sizes["conv_kernel"],
        "mamba_chunk_size": sizes["chunk_size"],
        **({"head_dim": 12} if rng.random() < 0.3 else {}),
        **_flags(rng, "mamba_conv_bias", "mamba_proj_bias", "attention_bias"),
    }


def _bamba(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    chosen = rng.choice([None, [], sorted(rng.sample(layers, rng.randint(0, len(layers))))])
    return {**_hybrid(config, rng), "attn_layer_indices": chosen, **_flags(rng, "mlp_bias")}


def _falcon_h1(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    sizes = _hybrid(config, rng)
    if rng.random() < 0.5:  # a width of its own
        sizes |= {"mamba_d_ssm": 12 * sizes["mamba_n_heads"], "mamba_d_head": rng.choice(["auto", 12])}
    else:
        sizes["mamba_d_ssm"] = None
    return {**sizes, **_flags(rng, "projectors_bias", "mamba_rms_norm", "mamba_norm_before_gate", "mlp_bias")}


def _granite(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    experts, layers = rng.choice([0, 4, 6]), config["num_hidden_layers"]
    kinds = rng.choice([("linear_attention", "full_attention"), ("mamba", "attention")])
    listed = [rng.choice(kinds) for _ in range(layers)]
    return {
        **_hybrid(config, rng),
        "num_local_experts": experts,
        "num_experts_per_tok": rng.choice([1, 2]),
        "shared_intermediate_size": rng.choice([24, 56]),
        "position_embedding_type": rng.choice([None, "rope"]),
        **rng.choice([{}, {"layer_types": listed}, {"layers_block_type": listed}]),
    }


def _jamba(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    attention, experts = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    return {
        "attn_layer_period": attention,
        "attn_layer_offset": rng.randrange(attention),
        "expert_layer_period": experts,
        "expert_layer_offset": rng.randrange(experts),
        rng.choice(["num_experts", "num_local_experts"]): rng.choice([1, 4, 6]),
        "num_experts_per_tok": rng.choice([1, 2]),
        "mamba_d_state": rng.choice([4, 16]),
        "mamba_d_conv": rng.choice([2, 4]),
        "mamba_expand": rng.choice([1, 2]),
        "mamba_dt_rank": rng.choice(["auto", 5]),
        **_flags(rng, "mamba_conv_bias", "mamba_proj_bias"),
    }


def _zamba2(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    sizes, layers = _mamba2(config, rng), config["num_hidden_layers"]
    names = rng.choice([("linear_attention", "hybrid"), ("mamba", "hybrid")])
    adapters = rng.random() < 0.5
    return {
        "layers_block_type": [rng.choice(names) for _ in range(layers)],
        "mamba_expand": sizes["expand"],
        "n_mamba_heads": sizes["num_heads"],
        "mamba_ngroups": sizes["n_groups"],
        "mamba_d_state": sizes["state_size"],
        "mamba_d_conv": sizes["conv_kernel"],
        "chunk_size": sizes["chunk_size"],
        "num_mem_blocks": rng.choice([1, 2, 3]),
        "adapter_rank": rng.choice([4, 12]),
        "use_shared_attention_adapter": adapters,
        **({"num_key_value_heads": None} if adapters else {}),
        "intermediate_size": rng.choice([None, 40]),
        **_flags(rng, "add_bias_linear", "use_mem_rope", "use_conv_bias"),
    }


def _nemotron_h(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    groups, layers = rng.choice([1, 2]), range(config["num_hidden_layers"])
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    pattern = "".join(rng.choice("ME*-M") for _ in layers)
    old = {"M": "mamba", "*": "attention"}
    listed = [rng.choice([kinds[letter], old.get(letter, kinds[letter])]) for letter in pattern]
    return {
        **rng.choice([{"hybrid_override_pattern": pattern}, {"layers_block_type": listed}, {"layer_types": listed}]),
        "head_dim": rng.choice([8, 12]),
        "mamba_num_heads": groups * rng.choice([1, 3]),
        "mamba_head_dim": rng.choice([4, 12]),
        rng.choice(["n_groups", "mamba_n_groups"]): groups,
        "ssm_state_size": rng.choice([4, 16]),
        rng.choice(["conv_kernel", "mamba_d_conv"]): rng.choice([2, 4]),
        rng.choice(["chunk_size", "mamba_chunk_size"]): rng.choice([8, 128]),
        "n_routed_experts": rng.choice([4, 6]),
        "num_experts_per_tok": rng.choice([1, 2]),
        "moe_intermediate_size": rng.choice([24, 40]),
        "moe_shared_expert_intermediate_size": rng.choice([0, 56]),
        "moe_latent_size": rng.choice([None, 20]),
        "sliding_window": rng.choice([None, 8]),
        **_flags(rng, "use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"),
        **_flags(rng, rng.choice(["use_conv_bias", "mamba_conv_bias"])),
    }


_BUILDERS = {
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "zamba2": _zamba2,
    "nemotron_h": _nemotron_h,
}
