"""What Hugging Face's code builds from a config: attention, MLP, experts, and which layers have which."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from gemmscope.errors import UserError, shown
from gemmscope.model.families import FamilyConfig
from gemmscope.model.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MixerSpec, MlpSpec, MoeSpec, QkNorm
from gemmscope.model.limits import check_divides, check_size, divisors_text, head_size

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers, as `layer_types` names them."""


def layers(family: FamilyConfig, hidden: int, attends: list[bool], mixer: MixerSpec | None = None) -> list[LayerSpec]:
    """Layers of attention, or of the mixer where they do not attend, and a feed-forward block each."""
    facts, count = family.facts, len(attends)
    plain = attention(family, hidden) if any(attends) else None
    parts = zip(attends, windows(family, count), feed_forwards(family, hidden, count), strict=True)
    norms = 1 if "one_norm_if" in facts and family.flag("one_norm_if") else facts["norms"]
    if not family.flag("post_norms_if", default=True):
        norms //= 2
    built = [
        LayerSpec(replace(plain, window=window), mlp, norms)
        if plain is not None and attend
        else LayerSpec(None, mlp, norms, mixer=mixer)
        for attend, window, mlp in parts
    ]
    if "first_layer_norms" in facts:
        built[0] = replace(built[0], norms=facts["first_layer_norms"])
    return built


def attention(family: FamilyConfig, hidden: int) -> AttentionSpec:
    """The attention of every layer, without its window."""
    heads = family.size("num_attention_heads", "heads")
    if family.flag("whole_heads") and hidden % heads:
        raise UserError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}",
            f"numbers of heads that divide {hidden}: {divisors_text(hidden, most=16)}",
        )
    normed = "qk_norm_if" not in family.facts or family.flag("qk_norm_if")
    bias = family.flag("qkv_bias")
    common = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=1,
        qkv_bias=bias,
        out_bias=family.flag("out_bias"),
        causal=family.flag("causal") and not family.flag("bidirectional_if"),
        qk_norm=cast("QkNorm | None", family.facts.get("qk_norm")) if normed else None,
        qk_norm_bias=family.flag("qk_norm_bias"),
        sinks=family.flag("sinks"),
        rotary=family.flag("rotary"),
        stored_fused=family.flag("qkv_fused"),
    )
    if family.flag("latent"):
        rope_key = family.facts.get("rope_dim_by", "qk_rope_head_dim")
        rope = family.size(rope_key if family.config.get(rope_key) is not None else "qk_rope_head_dim")
        check_pairs(family, "qk_rope_head_dim", rope)
        key_dim, value_dim = family.size("qk_nope_head_dim") + rope, family.optional_size("v_head_dim")
        value_dim = head_size(hidden, heads) if value_dim is None else value_dim
        keys = family.optional_size("num_key_value_heads")
        if keys is not None and heads >= 2 * keys and key_dim != value_dim:  # with equal sizes, the number is not used
            raise UserError(
                f"num_key_value_heads = {keys}, but latent attention has a key and a value for each of its {heads} heads",
                f'write "num_key_value_heads": {heads}',
            )
        return replace(
            common,
            head_dim=key_dim,
            value_dim=value_dim,
            gate_width=heads * value_dim if family.flag("gate_proj") else 0,
            latent=LatentSpec(
                q_rank=family.optional_size("q_lora_rank"),
                kv_rank=family.size("kv_lora_rank"),
                rope_dim=rope,
                down_bias=family.flag("down_bias"),
            ),
        )
    if "kv_heads" in family.facts:
        kv_heads = 1 if family.flag("kv_heads") else None
    else:
        kv_heads = family.optional_size("num_key_value_heads")
    head_dim = None if family.flag("head_dim_ignored") else family.optional_size("head_dim")
    head_dim = hidden // heads if head_dim is None else head_dim
    if family.flag("heads_fill_hidden") and heads * head_dim != hidden:
        raise UserError(f"{heads} heads of {head_dim} do not add up to hidden_size = {hidden}", "correct head_dim")
    rotary_dim = _rotary_dim(family, head_dim) if family.flag("partial_rotary") else None
    if rotary_dim in (None, head_dim) and not family.flag("odd_heads"):
        check_pairs(family, "head_dim", head_dim)
    return replace(  # a zero is kept, which the spec then rejects
        common,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        gated=family.flag("attention_gate"),
        gate_width=heads if family.flag("gate_proj") else 0,
        value_dim=family.size(facts["value_dim"]) if "value_dim" in (facts := family.facts) else None,
    )


def check_pairs(family: FamilyConfig, name: str, size: int) -> None:
    """Reject heads of an odd size where rotary positions rotate them."""
    if size % 2 and family.flag("rotary"):
        raise UserError(f"{name} = {size} is odd, but rotary positions rotate pairs of a head", "give heads an even size")


def _rotary_dim(family: FamilyConfig, head_dim: int) -> int | None:
    """The part of a head that is rotated, in order of precedence: rope_parameters, partial_rotary_factor, rotary_dim."""
    inner = family.value("rope_parameters")
    share = inner.get("partial_rotary_factor") if isinstance(inner, dict) else None
    share = family.value("partial_rotary_factor") if share is None else share
    if share is None and family.value("rotary_dim") is not None:
        rotated = family.size("rotary_dim", "head_dim")
        check_pairs(family, "rotary_dim", rotated)
        if rotated > head_dim:
            raise UserError(f"rotary_dim = {rotated} is larger than a head, {head_dim}", "correct one of them")
        return rotated
    return rotated_part(share, head_dim) or None if share is not None else None


def rotated_part(share: object, head_dim: int) -> int:
    """The rotated part of a head, of which `partial_rotary_factor` is the share."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise UserError(f"partial_rotary_factor must be above 0 and at most 1, not {shown(share)}", "correct it in the config")
    return int(head_dim * share)


def mlp(family: FamilyConfig, hidden: int) -> MlpSpec:
    """The feed-forward block of layers without experts."""
    key, times = family.facts.get("mlp_size", "intermediate_size"), family.facts.get("intermediate_times_hidden", 0)
    size = family.optional_size(key)
    if size is None:
        size = hidden * times or family.size(key)
    bias = family.flag("mlp_bias")
    return MlpSpec(
        size, gated=family.flag("gated"), activation=activation(family),
        up_bias=family.flag("mlp_up_bias", default=bias), down_bias=bias, stored_fused=family.flag("gate_up_fused"),
    )  # fmt: skip


def activation(family: FamilyConfig) -> str:
    """The name of the MLP's non-linearity."""
    return str(family.value(family.facts["activation"]) or ("silu" if family.flag("gated") else "gelu"))


def moe(family: FamilyConfig) -> MoeSpec:
    """The experts. Their gate and up are stored as one weight in every family."""
    facts, width, shared_width = family.facts, family.size(family.facts["expert_size"]), 0

    def expert(size: int, bias: bool, fused: bool) -> MlpSpec:
        return MlpSpec(size, gated=True, activation=activation(family), up_bias=bias, down_bias=bias, stored_fused=fused)

    if "shared_size" in facts:
        shared_width = family.size(facts["shared_size"])
    elif "shared_count" in facts:
        shared_width = width * (family.optional_size(facts["shared_count"]) or 0)
    return MoeSpec(
        experts=number_of_experts(family),
        top_k=facts["top_k"] if "top_k" in facts else family.size("num_experts_per_tok"),
        expert=expert(width, family.flag("expert_bias"), fused=True),
        shared=expert(shared_width, family.flag("mlp_bias"), family.flag("shared_fused")) if shared_width else None,
        shared_gate=family.flag("shared_gate"),
        latent=family.number("latent_size"),
        latent_norm=family.flag("latent_norm"),
        router_bias=family.flag("router_bias"),
        stored_dense=family.flag("experts_dense"),
    )


def number_of_experts(family: FamilyConfig) -> int:
    """How many experts there are. Where routing chooses groups of them first, these must be equal, with two experts or more."""
    experts, key = family.size(family.facts.get("experts", "num_experts")), family.facts.get("expert_groups", "")
    if not key or not experts:
        return experts
    given, chosen = family.value(key), family.value("topk_group")
    groups = check_size(key, 1 if given is None else given, "experts", "correct it in the config")
    check_divides(
        groups,
        experts,
        f"{experts} experts cannot be split into {key} = {groups} equal groups",
        f"numbers of groups that divide {experts}",
    )
    if experts < 2 * groups:
        raise UserError(
            f"{key} = {groups} leaves fewer than two experts in a group, but routing scores a group by two of its experts",
            f"give at most {experts // 2} groups" if experts > 1 else "give at least two experts",
        )
    if type(chosen) is int and chosen > groups:
        raise UserError(f"topk_group = {chosen} is more than {key} = {groups}", f"routing chooses at most {groups} groups")
    return experts


def feed_forwards(family: FamilyConfig, hidden: int, count: int) -> list[MlpSpec | MoeSpec]:
    """The feed-forward block of each layer: experts, or an MLP."""
    sparse = moe_layers(family, count)
    dense = mlp(family, hidden) if not all(sparse) else None
    experts = moe(family) if any(sparse) else None
    return [cast("MlpSpec | MoeSpec", experts if chosen else dense) for chosen in sparse]


def moe_layers(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers have experts."""
    first, end, step, dense = 0, count, 1, list[Any]()
    match family.facts.get("moe_layers"):
        case "period":
            chosen = periodic(family, "expert_layer", count)
            return chosen if family.size("num_experts") > 1 else [False] * count
        case "mlp_layer_types" if (kinds := per_layer(family, "mlp_layer_types", count)) is not None:
            return [kind == "sparse" for kind in kinds]
        case "numbered" if (numbers := layer_numbers(family, "moe_layers")) is not None:
            return [index in numbers for index in range(count)]
        case "numbered":
            step = family.size("interleave_moe_layer_step", "layers")
        case "sparse_step":
            step = family.size("decoder_sparse_step", "layers")
            dense = layer_numbers(family, "mlp_only_layers") or [] if family.value("mlp_only_layers") else []
            end = 0 if family.optional_size("num_experts") == 0 else count
        case "interval":
            step, first = family.size("moe_layer_interval", "layers"), family.size("moe_layer_start_index")
            end = count if family.value("moe_layer_end_index") == -1 else family.size("moe_layer_end_index") + 1
        case "after_first" | "mlp_layer_types":
            first = family.number("dense_first") or 0
        case "if_any":
            end = count if family.size("num_experts") else 0
        case None:
            end = 0
    return [first <= index < end and (index + 1) % step == 0 and index not in dense for index in range(count)]


def periodic(family: FamilyConfig, name: str, count: int) -> list[bool]:
    """The layers at `name`_offset in every `name`_period layers."""
    period = check_size(f"{name}_period", family.size(f"{name}_period"), "layers")
    offset = family.size(f"{name}_offset")
    if offset >= period:
        raise UserError(f"{name}_offset = {offset} is not less than {name}_period = {period}", "layers are counted from 0")
    return [index % period == offset for index in range(count)]


def per_layer(family: FamilyConfig, key: str, count: int) -> list[Any] | None:
    """A list of the config with one entry for each layer; None where it is left out."""
    given = listed(family, key)
    if given is None:
        return None
    given = given[:count] if key in family.facts.get("longer_lists", ()) else given
    if len(given) != count:
        raise UserError(f"{key} has {len(given)} entries, but num_hidden_layers = {count}", f"give it {count} entries")
    return current_kinds(given) if key == "layer_types" else given


def listed(
    family: FamilyConfig, key: str, what: str = "with one entry per layer", hint: str = "correct it, or remove it"
) -> list[Any] | None:
    """A list of the config; None where it is left out."""
    given = family.value(key)
    if given is not None and not isinstance(given, list):
        raise UserError(f"{key} must be a list {what}, not {shown(given)}", hint)
    return given


def layer_numbers(family: FamilyConfig, key: str) -> list[Any] | None:
    """A list of the config with the numbers of some layers, which may be empty; None where it is left out."""
    return listed(family, key, "of layer numbers", "for example [1, 3, 5]")


def check_kinds(family: FamilyConfig, kinds: list[Any], possible: Collection[str]) -> None:
    """Reject kinds of layers that the family does not have."""
    if unknown := [kind for kind in kinds if kind not in possible]:
        known = ", ".join(possible)
        raise UserError(f"a layer of {family.model_type} cannot be {shown(unknown[0])}", f"kinds of layers: {known}")


# Older names of kinds of layers, which transformers translates.
_OLD_KINDS = {
    "mamba": LINEAR,
    "attention": FULL,
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


def current_kinds(layer_types: list[Any]) -> list[str]:
    """The kinds of layers by their current names."""
    return [_OLD_KINDS.get(str(kind), str(kind)) for kind in layer_types]


def windows(family: FamilyConfig, count: int) -> list[int | None]:
    """The sliding window of each layer; None where a layer sees the whole sequence."""
    facts = family.facts
    rule = facts.get("window")
    own_list = rule is None and "layers_by" in facts  # which that function has read
    layer_types = None if own_list else per_layer(family, "layer_types", count)
    on = "window_if" not in facts or family.flag("window_if") or (layer_types is not None and family.flag("window_by_list"))
    window = family.optional_size(facts.get("window_key", "sliding_window")) if rule and on else None
    if "half_window_key" in facts and (half := family.optional_size(facts["half_window_key"])) is not None:
        window = 2 * half
    if rule == "layer_types" and on and window is None and SLIDING in (layer_types or ()):
        raise UserError("layer_types has sliding_attention, but the config has no sliding_window", 'add "sliding_window": N')
    if not window:
        return [None] * count
    if family.flag("bidirectional_if"):
        window = window // 2 * 2  # as many positions on either side
    listed_kinds = [kind == SLIDING for kind in layer_types or []]
    slides = [True] * count if rule == "all" else listed_kinds or _sliding_pattern(family, count)
    return [window if slide else None for slide in slides]


def _sliding_pattern(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers have a window where the config has no layer_types: the pattern of the configuration class."""
    facts = family.facts
    if "slides_every" in facts:
        listed = per_layer(family, facts["slides_where_zero"], count)
        step = family.number("slides_every") or count + 1
        return [not kind for kind in listed] if listed else [(index + 1) % step == 0 for index in range(count)]
    last, first = family.number("full_every"), family.number("full_first_of")
    start = family.number("slides_from") or 0
    end = family.number("slides_before")
    return [
        start <= index < (count if end is None else end)
        and not (last and (index + 1) % last == 0)
        and not (first and index % first == 0)
        for index in range(count)
    ]
