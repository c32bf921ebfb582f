"""Attention to a part of the positions: by an indexer (DeepSeek-V3.2, GLM-5), in chunks (Llama 4), compressed (DeepSeek-V4)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemmscope.errors import UserError, shown
from gemmscope.model import hf_blocks as blocks
from gemmscope.model.families import FamilyConfig
from gemmscope.model.hf_blocks import FULL, SLIDING
from gemmscope.model.layer_spec import (
    AttentionSpec,
    CompressedSpec,
    IndexerSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    StreamsSpec,
)
from gemmscope.model.limits import LARGEST, check_size


def indexed_attention(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """DeepSeek-V3.2 and GLM-5: latent attention with an indexer; GLM lets layers use the choice of an earlier one again."""
    family.size("q_lora_rank")  # the indexer reads the queries' bottleneck
    attention = replace(blocks.attention(family, hidden), top_k=family.size("index_topk"))
    indexer = IndexerSpec(family.size("index_n_heads"), family.size("index_head_dim"))
    if indexer.dim < family.size("qk_rope_head_dim"):
        raise UserError(
            f"index_head_dim = {indexer.dim} is smaller than qk_rope_head_dim = {family.size('qk_rope_head_dim')}",
            "the indexer rotates as many dimensions of a head as attention does",
        )
    layers = blocks.layers(family, hidden, [True] * count)
    return [
        replace(layer, attention=replace(attention, indexer=indexer if own else None))
        for own, layer in zip(_own_indexers(family, count), layers, strict=True)
    ]


def _own_indexers(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers have an indexer: all, or by list (`indexer_types`), pattern ("FSSF") or frequency."""
    if not family.flag("indexers_shared"):
        return [True] * count
    listed = blocks.per_layer(family, "indexer_types", count)
    if listed is None and (pattern := family.value("index_topk_pattern")) is not None:
        names = {"F": "full", "S": "shared"}
        if not isinstance(pattern, (str, list)) or (isinstance(pattern, str) and not set(names).issuperset(pattern)):
            raise UserError(f"index_topk_pattern must consist of F and S, not {shown(pattern)}", "for example FSSFSS")
        listed = [names[letter] for letter in pattern] if isinstance(pattern, str) else list(pattern)
        if len(listed) < count:
            raise UserError(f"index_topk_pattern has {len(listed)} entries, but num_hidden_layers = {count}")
    if listed is not None:
        own = [kind != "shared" for kind in listed[:count]]
    else:
        every = max(family.optional_size("index_topk_freq") or 1, 1)
        offset = family.size("index_skip_topk_offset")
        own = [max(index - offset + 1, 0) % every == 0 for index in range(count)]
    if not own[0]:
        raise UserError("the first layer must have an indexer of its own", "there is no earlier choice that it could use")
    return own


CHUNKED = "chunked_attention"


def llama4(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Layers with rotary positions see chunks and norm queries and keys; the others see all and scale queries by position."""
    rotary = _rotary(family, count)
    kinds = blocks.per_layer(family, "layer_types", count) or [CHUNKED if rotated else FULL for rotated in rotary]
    blocks.check_kinds(family, kinds, (CHUNKED, FULL))
    chunk = family.size("attention_chunk_size", "sequence_length") if CHUNKED in kinds else None
    plain = blocks.attention(family, hidden)
    tuned = family.flag("temperature")
    attentions = {
        (rotated, kind): replace(
            plain,
            rotary=rotated,
            qk_norm=plain.qk_norm if rotated else None,
            qk_norm_weight=False,
            temperature=tuned and not rotated,
            chunk=chunk if kind == CHUNKED else None,
        )
        for rotated in (False, True)
        for kind in (CHUNKED, FULL)
    }
    mlps = blocks.feed_forwards(family, hidden, count)
    return [LayerSpec(attentions[rotated, kind], mlp) for rotated, kind, mlp in zip(rotary, kinds, mlps, strict=True)]


def _rotary(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers rotate queries and keys: where `no_rope_layers` is not 0; without it all but the last of every n."""
    listed = family.value("no_rope_layers")
    if not listed:
        step = family.size("no_rope_layer_interval", "layers")
        return [(index + 1) % step != 0 for index in range(count)]
    longest = count if family.value("layer_types") is None else LARGEST["layers"]  # without that list, its length is compared
    if not isinstance(listed, list) or not count <= len(listed) <= longest:
        raise UserError(
            f"no_rope_layers must be a list with one entry per layer, not {shown(listed)}",
            f"give it {count} entries: 1 for layers with rotary positions, 0 for layers without",
        )
    return [bool(rotates) for rotates in listed[:count]]


SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""By the entries of `compress_ratios`, which published configs have instead of layer_types."""
ROUTERS = ("hash_moe", "moe")
RATES = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}


def deepseek_v4(family: FamilyConfig, _: int, count: int) -> list[LayerSpec]:
    """Hash routers choose the experts of the first layers by token; they compute what the others do."""
    kinds = _kinds(family, count)
    routers = blocks.per_layer(family, "mlp_layer_types", count) or []
    if unknown := [kind for kind in routers if kind not in ROUTERS]:
        raise UserError(f"mlp_layer_types cannot contain {shown(unknown[0])}", f"write {' or '.join(ROUTERS)} for each layer")
    layers = {kind: _layer(family, kind) for kind in dict.fromkeys(kinds)}
    return [layers[kind] for kind in kinds]


def deepseek_v4_ends(family: FamilyConfig, hidden: int, count: int) -> dict[str, Any]:
    """After the last layer the streams are collapsed into one. `compress_ratios` goes on with the prediction layers."""
    streams, ratios = family.size("hc_mult"), family.value("compress_ratios")
    collapse = LinearSpec("stream-weights", streams * hidden, streams, bias=True)
    after = ratios[count] if isinstance(ratios, list) and len(ratios) > count else None
    predicting = _layer(family, KINDS[after]) if isinstance(after, int) and after in KINDS else None
    return {"last_linears": (collapse,), "prediction_layer": predicting, "unused_parameters": 1}  # the scale of the weights


def _layer(family: FamilyConfig, kind: str) -> LayerSpec:
    width = family.optional_size("intermediate_size") or family.size("moe_intermediate_size")
    bias, act = family.flag("mlp_bias"), blocks.activation(family)
    moe = MoeSpec(
        experts=family.optional_size("num_local_experts") or family.size("n_routed_experts"),
        top_k=family.size("num_experts_per_tok"),
        expert=MlpSpec(width, gated=True, activation=act, stored_fused=True),
        shared=MlpSpec(width, gated=True, activation=act, up_bias=bias, down_bias=bias),
    )
    return LayerSpec(_attention(family, kind), moe, streams=StreamsSpec("hyper-connections", family.size("hc_mult")))


def _kinds(family: FamilyConfig, count: int) -> list[str]:
    listed, ratios = family.value("layer_types"), family.value("compress_ratios")
    if listed is None and ratios is not None:
        if not isinstance(ratios, list) or not set(KINDS).issuperset(ratio for ratio in ratios if isinstance(ratio, int)):
            raise UserError(f"compress_ratios must be a list of {', '.join(map(str, KINDS))}, not {shown(ratios)}")
        listed = [KINDS.get(ratio, shown(ratio)) for ratio in ratios]
    if listed is None:
        listed = [HEAVY if index < 2 or index % 2 == 0 else SPARSE for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count:
        raise UserError(f"layer_types must be a list with {count} entries, not {shown(listed)}", "one for each layer")
    blocks.check_kinds(family, listed[:count], KINDS.values())
    return [str(kind) for kind in listed[:count]]


def _attention(family: FamilyConfig, kind: str) -> AttentionSpec:
    heads = family.size("num_attention_heads", "heads")
    head_dim = family.size("head_dim")
    indexer = IndexerSpec(family.size("index_n_heads"), family.size("index_head_dim")) if kind == SPARSE else None
    rope = _rope_dim(family, head_dim)
    for name, size in (("head_dim", head_dim), ("index_head_dim", indexer.dim if indexer else head_dim)):
        if size < rope:
            raise UserError(f"{name} = {size} is smaller than the part that is rotated, {rope}", "correct one of them")
    return AttentionSpec(
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        window=family.size("sliding_window", "sequence_length"),
        sinks=True,
        compressed=CompressedSpec(
            q_rank=family.size("q_lora_rank"),
            rope_dim=rope,
            out_groups=family.size("o_groups"),
            out_rank=family.size("o_lora_rank"),
            rate=_rate(family, kind) if kind != SLIDING else 0,
            overlaps=kind == SPARSE,
        ),
        indexer=indexer,
        top_k=family.size("index_topk") if indexer is not None else None,
    )


def _rope_dim(family: FamilyConfig, head_dim: int) -> int:
    share = family.value("partial_rotary_factor")
    if share is None:
        given = family.optional_size("qk_rope_head_dim")
        return given if given is not None else head_dim // 8
    return blocks.rotated_part(share, head_dim)


def _rate(family: FamilyConfig, kind: str) -> int:
    """How many positions an entry stands for."""
    given, listed = family.optional_size(RATES[kind]), family.value("compress_rates")
    if given is None and listed is not None:
        if not isinstance(listed, Mapping) or kind not in listed:
            raise UserError(f"compress_rates must have a number for {kind}, not {shown(listed)}", f'for example {{"{kind}": 4}}')
        given = listed[kind]
    usual = next(rate for rate, name in KINDS.items() if name == kind)
    return check_size(f"compress_rates of {kind}", usual if given is None else given, "sequence_length")
