"""Hybrids of attention and linear attention: Qwen3-Next, Qwen3.5, Kimi Linear, MiniMax, LFM2, OLMo Hybrid."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemmscope.errors import UserError, shown
from gemmscope.model import hf_blocks as blocks
from gemmscope.model.families import FamilyConfig
from gemmscope.model.hf_blocks import FULL, LINEAR
from gemmscope.model.layer_spec import LayerSpec, MixerSpec
from gemmscope.model.limits import check_size

CONVOLUTION = "conv"


def gated_delta_net(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Qwen3-Next and Qwen3.5: gated delta rule, and in the last of every four layers attention with an output gate."""
    kinds = blocks.per_layer(family, "layer_types", count)
    if kinds is None:
        interval = family.size("full_attention_interval", "layers")
        kinds = [LINEAR if (index + 1) % interval else FULL for index in range(count)]
    return _hybrid(family, hidden, kinds, _delta_rule(family))


def olmo_hybrid(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """OLMo Hybrid: gated delta rule whose sizes follow from the hidden size where the config leaves them out."""
    kinds = blocks.per_layer(family, "layer_types", count)
    if kinds is None:
        kinds = [FULL if index % 4 == 3 else LINEAR for index in range(count)]
        if FULL not in kinds:
            kinds[-1] = FULL
    if missing := [kind for kind in (FULL, LINEAR) if kind not in kinds]:
        raise UserError(
            f"layer_types of {family.model_type} must contain {missing[0]}", f"give it layers of {FULL} and of {LINEAR}"
        )
    heads = family.size("num_attention_heads")
    sizes = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": int(0.75 * hidden / (family.optional_size("linear_num_key_heads") or heads or 1)),
    }
    sizes = {key: family.size(key) if family.value(key) is not None else size for key, size in sizes.items()}
    if family.value("linear_value_head_dim") is None:
        sizes["linear_value_head_dim"] = 2 * sizes["linear_key_head_dim"]
    return _hybrid(family, hidden, kinds, _delta_rule(replace(family, config={**family.config, **sizes})))


def _delta_rule(family: FamilyConfig) -> MixerSpec:
    return MixerSpec(
        "gated delta rule",
        heads=family.size("linear_num_value_heads"),
        value_dim=family.size("linear_value_head_dim"),
        groups=family.size("linear_num_key_heads"),
        key_dim=family.size("linear_key_head_dim"),
        conv_kernel=family.size("linear_conv_kernel_dim", "sequence_length"),
        norm="head",
        stored=tuple(family.facts["mixer_stored"]),
    )


def kimi_linear(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Kimi Linear: KDA, and latent attention without positions in every fourth layer; experts after the first layers.

    Published configs keep the sizes of KDA, and which layers have it (counted from 1), in `linear_attn_config`.
    """
    inner = family.value("linear_attn_config") or {}
    if not isinstance(inner, Mapping):
        raise UserError(f"linear_attn_config must be an object, not {shown(inner)}", 'for example {"num_heads": 32}')
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
    moved = {name: inner[key] for key, name in names.items() if key in inner}
    family = replace(family, config={**family.config, **moved})
    head_dim = family.size("linear_head_dim")
    heads = family.size("linear_num_heads")
    mixer = MixerSpec(
        "kda",
        heads=heads,
        value_dim=head_dim,
        groups=heads,
        key_dim=head_dim,
        conv_kernel=family.size("linear_conv_kernel_dim", "sequence_length"),
        rank=head_dim,
        norm="head",
        full_rank_gate=inner.get("use_full_rank_gate") is True,
        stored=(*family.facts["mixer_stored"], *("z" if inner.get("use_full_rank_gate") is True else "")),
    )
    layers = _hybrid(family, hidden, blocks.per_layer(family, "layer_types", count) or _kimi_kinds(inner, count), mixer)
    if "state_every" not in family.facts:
        return layers
    every = check_size(
        family.facts["state_every"], family.number("state_every"), "layers"
    )  # a state is kept before every so many
    states = sum(index // every + 1 for index in range(count)) / count  # on average, so that equal layers stay equal
    return [replace(layer, earlier_states=states) for layer in layers]


def earlier_states_ends(_family: FamilyConfig, hidden: int, _count: int) -> dict[str, Any]:
    """After the last layer, the states are averaged once more: a norm and a vector of the hidden size."""
    return {"unused_parameters": 2 * hidden}


def _kimi_kinds(inner: Mapping[str, object], count: int) -> list[str]:
    listed = {kind: inner.get(key) for key, kind in (("full_attn_layers", FULL), ("kda_layers", LINEAR))}
    if any(numbers is None for numbers in listed.values()):
        return [FULL if index and index % 4 == 0 else LINEAR for index in range(count)]
    kinds: dict[int, str] = {}
    for kind, numbers in listed.items():
        if not isinstance(numbers, list) or not all(type(number) is int and 1 <= number <= count for number in numbers):
            raise UserError(f"full_attn_layers and kda_layers must list layers from 1 to {count}, not {shown(numbers)}")
        kinds |= dict.fromkeys(numbers, kind)
    if missing := [number for number in range(1, count + 1) if number not in kinds]:
        raise UserError(f"layer {missing[0]} is neither in full_attn_layers nor in kda_layers", "add it to one of them")
    return [kinds[number] for number in range(1, count + 1)]


def minimax(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """MiniMax-Text-01: lightning attention, and attention in some layers; experts in all."""
    attention = blocks.attention(family, hidden)
    family.size("block_size", "sequence_length")  # of transformers' loop; kernels have their own
    mixer = MixerSpec(
        "lightning attention",
        heads=attention.heads,
        value_dim=attention.head_dim,
        groups=attention.heads,
        key_dim=attention.head_dim,
        stored=tuple(family.facts["mixer_stored"]),
    )
    kinds = blocks.per_layer(family, "layer_types", count) or [LINEAR if index % 2 else FULL for index in range(count)]
    return _hybrid(family, hidden, kinds, mixer)


def lfm2(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """LFM2: gated short convolutions, and attention in some layers."""
    kinds = blocks.per_layer(family, "layer_types", count)
    if kinds is None and family.facts.get("moe_layers"):
        raise UserError("this config has no layer_types", 'add "layer_types": a list of "conv" and "full_attention"')
    if kinds is None:
        chosen = blocks.layer_numbers(family, "full_attn_idxs")
        kinds = [FULL if chosen is None or index in chosen else CONVOLUTION for index in range(count)]
    bias = family.flag("conv_bias")
    mixer = MixerSpec(
        "short convolution",
        heads=hidden,
        value_dim=1,
        groups=hidden,
        conv_kernel=family.size("conv_L_cache", "sequence_length"),
        conv_bias=bias,
        in_bias=bias,
        out_bias=bias,
        norm="",
    )
    if not family.facts.get("moe_layers"):
        size = _adjusted(family, family.optional_size("block_ff_dim") or family.size("intermediate_size"))
        family = replace(family, config={**family.config, "intermediate_size": size})
    return _hybrid(family, hidden, kinds, mixer, CONVOLUTION)


def _adjusted(family: FamilyConfig, size: int) -> int:
    """LFM2's intermediate size: two thirds of the config's, times a factor, rounded up to a multiple."""
    if not family.flag("intermediate_adjusted"):
        return size
    size, factor = int(2 * size / 3), family.value("block_ffn_dim_multiplier")
    if factor is None:
        return size
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 2**20:
        raise UserError(f"block_ffn_dim_multiplier must be a positive number, not {shown(factor)}", "correct it in the config")
    multiple = family.size("block_multiple_of", "intermediate_size")
    return -(-int(factor * size) // multiple) * multiple


def _hybrid(family: FamilyConfig, hidden: int, kinds: list[str], mixer: MixerSpec, other: str = LINEAR) -> list[LayerSpec]:
    """Layers of attention where the kind is full attention, else of the mixer; each with its feed-forward block."""
    blocks.check_kinds(family, kinds, (FULL, other))
    return blocks.layers(family, hidden, [kind == FULL for kind in kinds], mixer)
