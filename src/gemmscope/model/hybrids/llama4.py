"""Llama 4: attention in chunks, layers without rotary positions, and experts in every layer or in every n-th."""

from dataclasses import replace

from gemmscope.errors import UserError, shown
from gemmscope.model import hf_blocks as blocks
from gemmscope.model.families import FamilyConfig
from gemmscope.model.limits import LARGEST, check_size
from gemmscope.model.spec import LayerSpec, MlpSpec, MoeSpec

CHUNKED, FULL = "chunked_attention", "full_attention"


def llama4(family: FamilyConfig, hidden: int, count: int) -> list[LayerSpec]:
    """Layers with rotary positions see chunks and norm queries and keys; the others see all and scale queries by position."""
    rotary = _rotary(family, count)
    kinds = blocks.per_layer(family, "layer_types", count) or [CHUNKED if rotated else FULL for rotated in rotary]
    if unknown := [kind for kind in kinds if kind not in (CHUNKED, FULL)]:
        known = f"layer_types may contain {CHUNKED} and {FULL}"
        raise UserError(f"a layer of {family.model_type} cannot be {shown(unknown[0])}", known)
    chunk = (
        check_size("attention_chunk_size", family.size("attention_chunk_size"), "sequence_length") if CHUNKED in kinds else None
    )
    plain = blocks.attention(family, hidden)
    tuned = family.flag("temperature")
    sparse = _moe_layers(family, count)
    act = blocks.activation(family)
    dense = MlpSpec(family.size("intermediate_size_mlp"), gated=True, activation=act) if not all(sparse) else None
    moe = None
    if any(sparse):
        expert = MlpSpec(family.size("intermediate_size"), gated=True, activation=act)
        moe = MoeSpec(
            experts=family.size("num_local_experts"),
            top_k=family.size("num_experts_per_tok"),
            expert=replace(expert, stored_fused=True),
            shared=expert,
            stored_dense=True,
        )
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
    return [
        LayerSpec(attentions[rotated, kind], moe if experts else dense)
        for rotated, kind, experts in zip(rotary, kinds, sparse, strict=True)
    ]


def _rotary(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers rotate queries and keys: where `no_rope_layers` is not 0; without it all but the last of every n."""
    listed = family.value("no_rope_layers")
    if not listed:
        step = check_size("no_rope_layer_interval", family.size("no_rope_layer_interval"), "layers")
        return [(index + 1) % step != 0 for index in range(count)]
    longest = count if family.value("layer_types") is None else LARGEST["layers"]  # without that list, its length is compared
    if not isinstance(listed, list) or not count <= len(listed) <= longest:
        raise UserError(
            f"no_rope_layers must be a list with one entry per layer, not {shown(listed)}",
            f"give it {count} entries: 1 for layers with rotary positions, 0 for layers without",
        )
    return [bool(rotates) for rotates in listed[:count]]


def _moe_layers(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers have experts: those that `moe_layers` numbers; without it the last of every n."""
    listed = family.value("moe_layers")
    if listed is None:
        step = check_size("interleave_moe_layer_step", family.size("interleave_moe_layer_step"), "layers")
        return [(index + 1) % step == 0 for index in range(count)]
    if not isinstance(listed, list):
        raise UserError(f"moe_layers must be a list of layer numbers, not {shown(listed)}", "for example [1, 3, 5]")
    return [index in listed for index in range(count)]
