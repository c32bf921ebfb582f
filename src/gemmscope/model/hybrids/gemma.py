"""Gemma 3n and 4: layers of several shapes that share keys and values, with inputs of their own; AltUp and Laurel in Gemma 3n."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemmscope.errors import UserError, shown
from gemmscope.model import hf_blocks as blocks
from gemmscope.model.families import FamilyConfig
from gemmscope.model.hf_blocks import FULL, SLIDING
from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, MoeSpec, StreamsSpec
from gemmscope.model.spec import LayerInputsSpec


def gemma4(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Layers that see everything have larger heads, and may use keys as values; experts may run beside every MLP."""
    kinds = _kinds(family, count)
    kinds[-1] = FULL  # as the configuration class has it
    shared = _shared(family, kinds)
    _check_numbers(family, count)
    inputs, norms = family.number("input_width") or 0, family.facts["norms"]
    mlp, wide = blocks.mlp(family, hidden), family.flag("double_wide")
    moe = _experts_beside(family) if family.flag("experts_if") else None
    layers = []
    for index, (kind, shares) in enumerate(zip(kinds, shared, strict=True)):
        attention = replace(_gemma4_attention(family, hidden, kind, index), shares_kv=shares)
        own = replace(mlp, intermediate_size=mlp.intermediate_size * (2 if wide and shares else 1))
        layers.append(
            LayerSpec(
                attention,
                replace(moe, shared=own) if moe is not None else own,
                # Also a norm after the layer's own input; with experts, three around them and one of the router.
                norms=norms + (1 if inputs else 0) + (4 if moe is not None else 0),
                extra_parameters=moe.experts if moe is not None else 0,  # the router's scale of each
                input_width=inputs,
            )
        )
    return layers


def _check_numbers(family: FamilyConfig, count: int) -> None:
    """`per_layer_config` numbers layers that the model has."""
    listed = family.value("per_layer_config")
    numbers = [str(key) for key in listed] if isinstance(listed, Mapping) else []
    if unknown := [number for number in numbers if not number.isdecimal() or int(number[:9]) >= count]:
        raise UserError(f"per_layer_config must number layers from 0 to {count - 1}, not {shown(unknown[0])}", "correct it")


def _gemma4_attention(family: FamilyConfig, hidden: int, kind: str, index: int) -> AttentionSpec:
    full = kind == FULL
    as_values = full and family.flag("keys_as_values")
    sizes: dict[str, Any] = {}
    listed = family.value("per_layer_config")
    if isinstance(listed, Mapping):
        sizes = next((own for key, own in listed.items() if str(key).lstrip("0") == str(index or "")), {})
        if not isinstance(sizes, Mapping):
            message = f"per_layer_config must have an object for each layer, not {shown(sizes)}"
            raise UserError(message, 'for example {"head_dim": 512}')
    elif full and "per_layer_config" not in family.config:  # null means that no layer differs
        sizes = {"head_dim": family.size("global_head_dim")}
        if family.flag("global_heads_if") and family.value("num_global_key_value_heads") is not None:
            sizes["num_key_value_heads"] = family.size("num_global_key_value_heads")
    attention = blocks.attention(replace(family, config={**family.config, **sizes}), hidden)
    causal = family.value("use_bidirectional_attention") != "all"
    window = None if full else family.size("sliding_window")
    if window is not None and not causal:
        window = window // 2 * 2  # as many positions on either side
    return replace(attention, causal=causal, window=window, values_are_keys=as_values, v_norm=True)


def _experts_beside(family: FamilyConfig) -> MoeSpec:
    """Experts that run beside the MLP, which then is what others call a shared expert."""
    expert = MlpSpec(family.size("moe_intermediate_size"), gated=True, activation=blocks.activation(family), stored_fused=True)
    return MoeSpec(experts=family.size("num_experts"), top_k=family.size("top_k_experts"), expert=expert)


def gemma3n(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Every layer works on one of several streams, and has a low-rank residual (Laurel) beside its attention."""
    kinds = _kinds(family, count)
    shared = _shared(family, kinds)
    plain = blocks.attention(family, hidden)
    several_widths = isinstance(family.value("intermediate_size"), list)
    widths = blocks.per_layer(family, "intermediate_size", count) if several_widths else None
    pattern = blocks.per_layer(family, "activation_sparsity_pattern", count)
    rank = family.size("laurel_rank")
    laurel = (
        LinearSpec("laurel-left", hidden, rank),
        LinearSpec("laurel-right", rank, hidden),
    )
    streams = StreamsSpec("alternating updates", family.number("streams") or 0)
    layers = []
    for index, (kind, shares) in enumerate(zip(kinds, shared, strict=True)):
        window = family.size("sliding_window") if kind == SLIDING else None
        size = {"intermediate_size": widths[index]} if widths is not None else {}
        mlp = blocks.mlp(replace(family, config={**family.config, **size}), hidden)
        sparse = bool(pattern[index]) if pattern is not None else count > 10 and index < 10
        layers.append(
            LayerSpec(
                replace(plain, window=window, shares_kv=shares, v_norm=True),
                replace(mlp, sparse=sparse),
                norms=family.facts["norms"],
                extra=laurel,
                streams=streams,
                input_width=family.number("input_width") or 0,
            )
        )
    return layers


def ends(family: FamilyConfig, hidden: int, count: int) -> dict[str, Any]:
    """What the embedding makes for the layers: their inputs, and in Gemma 3n the streams."""
    width, streams = family.number("input_width"), family.number("streams") or 1
    parts: dict[str, Any] = {}
    linears = []
    if width:
        parts["layer_inputs"] = LayerInputsSpec(family.size("vocab_size_per_layer_input"), width)
        linears.append(LinearSpec("layer-input-model", hidden, count * width))
    if streams > 1:
        linears.append(LinearSpec("stream-in", hidden, hidden, count=streams - 1))
        parts["last_linears"] = (LinearSpec("stream-out", hidden, hidden, count=streams - 1),)
    return {**parts, "first_linears": tuple(linears)}


def _kinds(family: FamilyConfig, count: int) -> list[str]:
    """Which layers slide: by list, else all but the last of every n."""
    kinds = blocks.per_layer(family, "layer_types", count)
    every = family.facts["full_every"]
    kinds = [SLIDING if (index + 1) % every else FULL for index in range(count)] if kinds is None else list(kinds)
    blocks.check_kinds(family, kinds, (SLIDING, FULL))
    return kinds


def _shared(family: FamilyConfig, kinds: list[str]) -> list[bool]:
    """Which layers use the keys and values of the last layer of their kind among those that have their own."""
    number = family.optional_size("num_kv_shared_layers") or 0
    first = len(kinds) - number
    if number == 0:
        return [False] * len(kinds)
    sharing = kinds[first:] if first > 0 else kinds  # with a number beyond all layers, the code looks for all of them
    without = [kind for kind in dict.fromkeys(sharing) if kind not in kinds[:first]]
    if without:
        raise UserError(
            f"num_kv_shared_layers = {number} leaves no layer of {without[0]} with keys and values of its own",
            f"at most {kinds_left(kinds)} of the {len(kinds)} layers can share theirs",
        )
    return [index >= first > 0 for index in range(len(kinds))]


def kinds_left(kinds: list[str]) -> int:
    """How many layers at the end can share keys and values: each kind needs one before them.

    >>> kinds_left([SLIDING, SLIDING, FULL, SLIDING])
    1
    """
    return len(kinds) - max(kinds.index(kind) for kind in set(kinds)) - 1
