"""Sparse attention: an indexer scores the positions that a query sees, and the query attends to the best of them."""

from dataclasses import replace
from typing import cast

from gemmscope.errors import UserError, shown
from gemmscope.model import hf_blocks as blocks
from gemmscope.model.families import FamilyConfig
from gemmscope.model.spec import IndexerSpec, LayerSpec, MlpSpec, MoeSpec


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
    sparse = blocks.moe_layers(family, count)
    dense = blocks.mlp(family, hidden) if not all(sparse) else None
    moe = blocks.moe(family) if any(sparse) else None
    return [
        LayerSpec(replace(attention, indexer=indexer if own else None), cast("MlpSpec | MoeSpec", moe if experts else dense))
        for own, experts in zip(_own_indexers(family, count), sparse, strict=True)
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
