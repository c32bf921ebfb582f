"""State-space models (Mamba, Mamba-2) and their hybrids with attention and experts.

The config keys with the sizes of a mixer differ from family to family: `mixer_heads` and so on in families.toml name them.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from gemmscope.errors import UserError, shown
from gemmscope.model import hf_blocks as blocks
from gemmscope.model.families import FamilyConfig
from gemmscope.model.hf_blocks import FULL, LINEAR
from gemmscope.model.hybrids.by_layer import check_published
from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, LinearSpec, MixerKind, MixerSpec, MlpSpec, MoeSpec
from gemmscope.model.limits import check_size


def mamba(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Mamba, Falcon Mamba and Mamba-2: the mixer alone in every layer."""
    return [LayerSpec(None, None, family.facts["norms"], mixer=_mixer(family, hidden))] * count


def mamba_or_attention(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Bamba, Granite 4.0 and Jamba: in each layer the mixer or attention, then an MLP or experts."""
    attends = _attention_layers(family, count)
    mixer = _mixer(family, hidden) if not all(attends) else None
    if family.facts["mixer"] == "ssd":
        _heads(family, hidden)  # the class compares them, also where no layer has them
    return blocks.layers(family, hidden, attends, mixer)


def falcon_h1(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Falcon-H1: attention and the mixer side by side, then an MLP."""
    attention, mixer = blocks.attention(family, hidden), _mixer(family, hidden)
    return [LayerSpec(attention, blocks.mlp(family, hidden), family.facts["norms"], mixer=mixer)] * count


def zamba2(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Zamba2: the mixer in every layer; before some of them attention and an MLP with shared weights.

    There are `num_mem_blocks` sets of these weights, used in turn. Each use has low-rank adapters of its own, and a linear to the
    hidden size. Attention sees the hidden state beside the embedding. Without tied embeddings transformers ties no weights: then
    each use has its own, and adapters for all other uses of its set.
    """
    kinds = _listed(family, "layer_types", "layers_block_type")
    if kinds is None:
        kinds = [LINEAR, *[*[LINEAR] * 5, "hybrid"] * 7, *[LINEAR] * 4, "hybrid", *[LINEAR] * 3, "hybrid", *[LINEAR] * 2]
    blocks.check_kinds(family, _counted(kinds, count), (LINEAR, "hybrid"))
    check_published(family, "hybrid_layer_ids", [place for place, kind in enumerate(kinds) if kind == "hybrid"])
    mixer, norms = _mixer(family, hidden), family.facts["norms"]
    if "hybrid" not in kinds:
        return [LayerSpec(None, None, norms, mixer=mixer)] * count
    heads = family.size("num_attention_heads", "heads")
    kv_heads = family.optional_size("num_key_value_heads")
    wide, mlp, rank = 2 * hidden, _zamba_mlp(family, hidden), family.size("adapter_rank")
    sizes = [family.optional_size(key) for key in ("head_dim", "attention_head_dim") if family.value(key) is not None]
    attention = AttentionSpec(
        heads, heads if kv_heads is None else kv_heads, next(iter(sizes), None) or wide // heads,
        input_size=wide, rotary=family.flag("rotary"),
    )  # fmt: skip
    blocks.check_pairs(family, "attention_head_dim", attention.head_dim)
    extra = [LinearSpec("mlp-adapter-down", hidden, rank), LinearSpec("mlp-adapter-up", rank, 2 * mlp.intermediate_size)]
    if family.value("use_shared_attention_adapter"):
        if attention.k_width != wide or attention.q_width != wide:
            raise UserError(
                f"with use_shared_attention_adapter, queries and keys must be twice the hidden size wide, {wide}; they are "
                f"{attention.q_width} and {attention.k_width}",
                f"give it as many key/value heads as heads ({heads}), of {wide // heads} each",
            )
        extra += [LinearSpec("qkv-adapter-down", wide, rank, count=3), LinearSpec("qkv-adapter-up", rank, wide, count=3)]
    adapters = sum(one.inputs * one.outputs * one.count for one in extra)
    extra.append(LinearSpec("shared-block-out", hidden, hidden))
    uses, sets = kinds.count("hybrid"), family.size("num_mem_blocks", "layers")
    tied = bool(family.value("tie_word_embeddings"))
    hybrids = [
        LayerSpec(
            attention, mlp, norms, mixer=mixer, extra=tuple(extra), shared_block=use % sets if tied else use,
            extra_parameters=0 if tied else adapters * (len(range(use % sets, uses, sets)) - 1),
        )
        for use in range(uses)
    ]  # fmt: skip
    plain, in_order = LayerSpec(None, None, norms, mixer=mixer), iter(hybrids)
    return [next(in_order) if kind == "hybrid" else plain for kind in kinds]


def _zamba_mlp(family: FamilyConfig, hidden: int) -> MlpSpec:
    """Its size is four times the hidden size where the config has none, or 0."""
    config = {key: value for key, value in family.config.items() if key != "intermediate_size" or value}
    return blocks.mlp(FamilyConfig(family.model_type, config), hidden)


_PATTERN = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def nemotron_h(family: FamilyConfig, hidden: int, _: int) -> list[LayerSpec]:
    """Nemotron-H and Nemotron-3: each layer is one block: the mixer, attention, an MLP or experts."""
    kinds = _listed(family, "layer_types", "layers_block_type")
    if kinds is None:
        pattern = family.value("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_PATTERN):
            raise UserError(
                f"hybrid_override_pattern must be letters for layers, not {shown(pattern)}",
                "M is Mamba-2, * attention, - an MLP, E experts: for example M-M*-",
            )
        kinds = [_PATTERN[letter] for letter in pattern]
    check_size("the number of layers", len(kinds), "layers")
    blocks.check_kinds(family, kinds, tuple(_PATTERN.values()))
    return _nemotron_layers(family, hidden, kinds)


def _nemotron_layers(family: FamilyConfig, hidden: int, kinds: list[str]) -> list[LayerSpec]:
    norms = family.facts["norms"]
    builders: dict[str, Callable[[], LayerSpec]] = {
        LINEAR: lambda: LayerSpec(None, None, norms, mixer=_mixer(family, hidden)),
        FULL: lambda: LayerSpec(blocks.attention(family, hidden), None, norms),
        "mlp": lambda: LayerSpec(None, blocks.mlp(family, hidden), norms),
        "moe": lambda: LayerSpec(None, _nemotron_experts(family, hidden), norms),
    }
    layers = {kind: build() for kind, build in builders.items() if kind in kinds}
    return [layers[kind] for kind in kinds]


def nemotron_ends(family: FamilyConfig, hidden: int, _: int) -> dict[str, LayerSpec]:
    """A layer of multi-token prediction, where the checkpoint says which blocks it has: attention or a mixer, then experts."""
    pattern = family.config.get("mtp_hybrid_override_pattern")
    if not isinstance(pattern, str) or not re.fullmatch("[M*][E-]", pattern):
        return {}
    first, last = _nemotron_layers(family, hidden, [_PATTERN[letter] for letter in pattern])
    return {"prediction_layer": replace(first, mlp=last.mlp, norms=2)}


def _nemotron_experts(family: FamilyConfig, hidden: int) -> MoeSpec:
    """Plain experts, which may work on a narrower latent vector, and a shared one on the hidden state."""
    activation, bias = blocks.activation(family), family.flag("mlp_bias")
    shared = family.optional_size("moe_shared_expert_intermediate_size") or blocks.mlp(family, hidden).intermediate_size
    return MoeSpec(
        experts=blocks.number_of_experts(family),
        top_k=family.size("num_experts_per_tok"),
        expert=MlpSpec(family.size("moe_intermediate_size"), gated=False, activation=activation),
        shared=MlpSpec(shared, gated=False, activation=activation, up_bias=bias, down_bias=bias),
        latent=family.optional_size("moe_latent_size"),
        latent_bias=bias,
    )


def _mixer(family: FamilyConfig, hidden: int) -> MixerSpec:
    """The mixer of a layer. `expand` times the hidden size is its width, or what the config says itself."""
    facts = family.facts
    normed = "mixer_norm_if" not in facts or family.flag("mixer_norm_if")
    ssd = facts["mixer"] == "ssd"
    heads, head_dim = _heads(family, hidden) if ssd else (_width(family, hidden), 1)
    return MixerSpec(
        cast(MixerKind, facts["mixer"]),
        heads=heads,
        value_dim=head_dim,
        groups=family.size(facts["mixer_groups"]) if ssd else 1,
        key_dim=family.size(facts["mixer_state"]),
        conv_kernel=family.size(facts["mixer_conv"], "sequence_length"),
        conv_bias=family.flag("mixer_conv_bias"),
        in_bias=family.flag("mixer_in_bias"),
        out_bias=family.flag("mixer_out_bias"),
        chunk=family.size(facts["mixer_chunk"]) if ssd else 64,
        rank=0 if ssd else _rank(family, hidden),
        norm=facts["mixer_norm"] if ssd and normed else "",
        state_norm=facts.get("mixer_state_norm", ""),
    )


def _width(family: FamilyConfig, hidden: int) -> int:
    """Channels of the mixer."""
    given = family.optional_size(family.facts["mixer_width"]) if "mixer_width" in family.facts else None
    return given if given is not None else hidden * family.size(family.facts["mixer_expand"])


def _heads(family: FamilyConfig, hidden: int) -> tuple[int, int]:
    """Heads of Mamba-2 and their size, which must add up to its width."""
    facts = family.facts
    key, size_key = facts["mixer_heads"], facts.get("mixer_head_dim")
    heads = family.size(key, "intermediate_size")
    if "mixer_expand" not in facts:
        return heads, family.size(facts["mixer_head_dim"])
    width = _width(family, hidden)
    head_dim = width // heads if size_key is None or family.value(size_key) == "auto" else family.size(size_key)
    if heads * head_dim != width:
        own = f", or {facts['mixer_width']}" if "mixer_width" in facts else ""
        raise UserError(
            f"{key} = {heads} heads of {head_dim} do not add up to the mixer's width, {width}",
            f"the width is {facts['mixer_expand']} x hidden_size{own}",
        )
    return heads, head_dim


def _rank(family: FamilyConfig, hidden: int) -> int:
    """Width of the time step's projection: a sixteenth of the hidden size, or as given."""
    key = family.facts["mixer_rank"]
    return -(-hidden // 16) if family.value(key) == "auto" else family.size(key, "intermediate_size")


def _attention_layers(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers have attention."""
    rule = family.facts["attention_layers"]
    if rule == "layer_types":
        listed = _listed(family, "layers_block_type", "layer_types")
        kinds = [LINEAR] * count if listed is None else listed
        blocks.check_kinds(family, _counted(kinds, count), (LINEAR, FULL))
        return [kind == FULL for kind in kinds]
    if rule == "attn_layer_indices":
        chosen = (blocks.layer_numbers(family, rule) or []) if family.value(rule) else []
        return [index in chosen for index in range(count)]
    return blocks.periodic(family, rule, count)


def _listed(family: FamilyConfig, *keys: str) -> list[str] | None:
    """The kinds of layers under the first of these keys that the config has, by their current names."""
    key = next((key for key in keys if family.value(key) is not None), None)
    return blocks.current_kinds(blocks.listed(family, key) or []) if key is not None else None


def _counted(kinds: list[str], count: int) -> list[str]:
    """The kinds of layers, if there are as many as the config says."""
    if len(kinds) != count:
        given = f"the config lists the kinds of {len(kinds)} layers, but num_hidden_layers = {count}"
        raise UserError(given, f"give it {count} entries")
    return kinds
