"""Families whose layers differ in their sizes: MiMo-V2, Step-3.7, MiniMax-M3, LongCat-Flash, Nemotron-NAS."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemmscope.errors import UserError, shown
from gemmscope.model import hf_blocks as blocks
from gemmscope.model.families import FamilyConfig
from gemmscope.model.hf_blocks import FULL, SLIDING
from gemmscope.model.layer_spec import AttentionSpec, IndexerSpec, LayerSpec, LinearSpec
from gemmscope.model.limits import check_size


def mimo_v2(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """MiMo-V2: layers with a window have twice the key/value heads, and sinks. The first layer and every sixth see everything."""
    pattern = [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(count)]
    kinds = blocks.per_layer(family, "layer_types", count) or pattern
    full = blocks.attention(family, hidden)
    size = family.optional_size("sliding_window_size")  # the checkpoint counts the positions before the query
    window = family.size("sliding_window", "sequence_length") if size is None else size + 1
    sliding = replace(full, kv_heads=2 * full.kv_heads, window=window, sinks=True)
    check_published(family, "hybrid_layer_pattern", [int(kind == SLIDING) for kind in kinds])
    check_published(family, "swa_num_key_value_heads", sliding.kv_heads)
    layers = _layers(family, hidden, kinds, {FULL: full, SLIDING: sliding})
    check_published(family, "moe_layer_freq", [int(layer.is_moe) for layer in layers])
    return layers


def check_published(family: FamilyConfig, key: str, value: object) -> None:
    """Reject a key of the checkpoint's own code that contradicts what transformers' class builds, which ignores it."""
    given = family.config.get(key)
    if given is not None and given != value:
        raise UserError(
            f"{key} = {shown(given)} contradicts transformers' {family.model_type}, which has {shown(value)}", "remove it"
        )


def step3(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Step-3.7: layers with a window may have another number of heads; a gate for each head."""
    kinds = blocks.per_layer(family, "layer_types", count) or [FULL] * count
    other, heads = family.value("attention_other_setting"), family.optional_size("num_sliding_attention_heads")
    if heads is None and isinstance(other, Mapping):
        own = FamilyConfig(family.model_type, other)
        heads = own.optional_size("num_attention_heads")
        check_published(own, "num_attention_groups", family.size("num_key_value_heads"))
        check_published(own, "head_dim", family.size("head_dim"))
    narrow = {"num_attention_heads": heads} if heads is not None else {}
    attentions = {FULL: blocks.attention(family, hidden)}
    if SLIDING in kinds:
        sliding = blocks.attention(replace(family, config={**family.config, **narrow}), hidden)
        attentions[SLIDING] = replace(sliding, window=family.size("sliding_window", "sequence_length"))
    listed = family.value("moe_layers_enum")
    if listed is not None and family.value("mlp_layer_types") is None:
        numbers = listed.split(",") if isinstance(listed, str) else listed if isinstance(listed, list) else []
        sparse = {str(number).strip() for number in numbers}
        types = ["sparse" if str(index) in sparse else "dense" for index in range(count)]
        family = replace(family, config={**family.config, "mlp_layer_types": types})
    return _layers(family, hidden, kinds, attentions)


def longcat(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """LongCat-Flash: two layers form one, whose experts run beside the first MLP; some experts compute nothing."""
    attention, mlp = blocks.attention(family, hidden), blocks.mlp(family, hidden)
    moe = replace(blocks.moe(family), shared=mlp, zero_experts=family.optional_size("zero_expert_num") or 0)
    return [LayerSpec(attention, feed_forward) for feed_forward in (moe, mlp)] * count


BLOCK_SPARSE = "minimax_m3_sparse"


def minimax_m3(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """MiniMax-M3: some layers choose whole blocks of positions by an indexer, each of its heads for a group of query heads."""
    sparse = family.value("sparse_attention_config") or {}
    if not isinstance(sparse, Mapping):
        raise UserError(f"sparse_attention_config must be an object, not {shown(sparse)}", "correct it in the config")
    own = {key: sparse[older] for older, key in family.facts["sparse_names"].items() if older in sparse}
    if "moe_layer_freq" in family.config and family.value("mlp_layer_types") is None:
        own["mlp_layer_types"] = ["sparse" if sign else "dense" for sign in blocks.listed(family, "moe_layer_freq") or []]
    if "sparse_attention_freq" in sparse and family.value("layer_types") is None:
        own["layer_types"] = [BLOCK_SPARSE if sign else FULL for sign in sparse["sparse_attention_freq"]]
    family = replace(family, config={**family.config, **own})
    attention = blocks.attention(family, hidden)
    block = family.size("index_block_size", "sequence_length")
    indexer = IndexerSpec(family.size("index_n_heads"), family.size("index_head_dim"), block)
    chosen = replace(attention, indexer=indexer, top_k=block * family.size("index_topk_blocks", "sequence_length"))
    kinds = blocks.per_layer(family, "layer_types", count) or [FULL] * count
    return _layers(family, hidden, kinds, {FULL: attention, BLOCK_SPARSE: chosen})


def _layers(family: FamilyConfig, hidden: int, kinds: list[Any], attentions: Mapping[str, AttentionSpec]) -> list[LayerSpec]:
    blocks.check_kinds(family, kinds, attentions)
    feed_forwards = blocks.feed_forwards(family, hidden, len(kinds))
    return [LayerSpec(attentions[kind], mlp, family.facts["norms"]) for kind, mlp in zip(kinds, feed_forwards, strict=True)]


def nemotron_nas(family: FamilyConfig, hidden: int, _: int) -> list[LayerSpec]:
    """Nemotron-NAS: `block_configs` says of each layer what its attention and its MLP are, or that it has none."""
    listed = blocks.listed(family, "block_configs", "of layers", 'for example [{"attention": {…}, "ffn": {…}}, …]') or []
    check_size("the number of layers", len(listed), "layers")
    return [_nas_layer(family, hidden, block) for block in listed]


def _nas_layer(family: FamilyConfig, hidden: int, block: Any) -> LayerSpec:
    named = [block.get(name) for name in ("attention", "ffn")] if isinstance(block, Mapping) else []
    parts: list[Mapping[str, Any]] = [part for part in named if isinstance(part, Mapping)]
    if len(parts) < 2:
        raise UserError(f"each of block_configs must have attention and ffn, not {shown(block)}", "correct it in the config")
    known = family.facts["block_keys"]
    if strangers := [key for part in parts for key, value in part.items() if key not in known and value not in (None, False)]:
        raise UserError(f"block_configs has {shown(strangers[0])}, which is not known", f"known keys: {', '.join(known)}")
    own, ffn = (FamilyConfig(family.model_type, part) for part in parts)
    attention = mlp = None
    extra = [LinearSpec("block-linear", hidden, hidden) for part in parts if part.get("replace_with_linear")]
    if not (parts[0].get("no_op") or parts[0].get("replace_with_linear")):
        heads, group = (
            family.size("num_attention_heads", "heads"),
            check_size("n_heads_in_group", own.size("n_heads_in_group"), "heads"),
        )
        if heads % group:
            raise UserError(f"num_attention_heads = {heads} is not a multiple of n_heads_in_group = {group}", "correct it")
        attention = blocks.attention(replace(family, config={**family.config, "num_key_value_heads": heads // group}), hidden)
    if not (parts[1].get("no_op") or parts[1].get("replace_with_linear")):
        width = ffn.optional_size("intermediate_size")
        if width is None:
            times = ffn.value("ffn_mult")
            if isinstance(times, bool) or not isinstance(times, (int, float)) or not 0 < times < 1e6:
                raise UserError(f"ffn_mult must be a number above 0, not {shown(times)}", "correct it in block_configs")
            width = -(-int(2 * times * hidden / 3) // 256) * 256
        mlp = blocks.mlp(replace(family, config={**family.config, "intermediate_size": width}), hidden)
    norms = sum(not part.get("no_op") for part in parts)
    return LayerSpec(attention, mlp, norms, extra=tuple(extra))
