"""Reads a Hugging Face `config.json`: a file, its folder, or (through transformers) a hub id.

The sizes come from the config, everything else from `families.toml`. A model type that is not in that file, or a config with
parts that have no closed form (linear attention, cross attention), gives a source without a model: its shapes must be traced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, cast

from gemmscope.errors import UserError, shown
from gemmscope.findings import Finding, finding
from gemmscope.model.families import FamilyConfig, known_model_types
from gemmscope.model.flags import head_size
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import (
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    QkNorm,
    check_flag,
    check_size,
)
from gemmscope.reading import parse_json

DEEPEST = 100  # levels of nesting: real configs have four
_CLOSED_FORM_LAYERS = frozenset({"full_attention", "sliding_attention"})


def recognises(text: str) -> bool:
    """A JSON object. (Megatron and YAML files may begin with a brace too, but do not parse as JSON.)"""
    return text.lstrip("\ufeff \t\r\n").startswith("{")


def read(text: str, origin: str) -> ModelSource:
    """The model of a config.json's text."""
    config = parse_json(text.lstrip("\ufeff"), "it", "correct it: a config.json is an object {…}")
    if not isinstance(config, dict):
        raise UserError(f"the JSON is a {type(config).__name__}, not an object", "a config.json is an object {…}")
    if text.count("{") + text.count("[") > DEEPEST and _is_deep(config):
        raise UserError(f"the JSON is nested more than {DEEPEST} deep", "remove what is not part of the config")
    return from_config(config, origin)


def _is_deep(config: Mapping[str, Any]) -> bool:
    """Whether it is nested so deeply that walking through it could end at Python's limit of recursion."""
    level: list[Any] = [config]
    for _ in range(DEEPEST):
        inside = chain.from_iterable(value.values() if isinstance(value, dict) else value for value in level)
        level = [value for value in inside if isinstance(value, (dict, list))]
    return bool(level)


def from_config(config: Mapping[str, Any], origin: str) -> ModelSource:
    """The model of a config given as a mapping."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(
            "the config has no model_type" if model_type is None else f"model_type must be a name, not {shown(model_type)}",
            'add for example "model_type": "llama"; types known without torch: ' + ", ".join(known_model_types()),
        )
    known, language = model_type in known_model_types(), config.get("text_config")
    if not known and isinstance(language, Mapping) and language.get("model_type") in known_model_types():
        source = from_config(language, origin)
        return replace(source, findings=(finding("language-part-only", model_type=model_type), *source.findings))
    label = f"{origin} (Hugging Face, {model_type})"
    if not known or _needs_tracing(config):
        return ModelSource(origin=label, model=None, config=config)
    model = _model(FamilyConfig(model_type, config), origin)
    return ModelSource(origin=label, model=model, config=config, findings=tuple(_findings(config, model)))


def _needs_tracing(config: Mapping[str, Any]) -> bool:
    """Whether the model has parts without a closed form."""
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and not _CLOSED_FORM_LAYERS.issuperset(map(str, layer_types)):
        return True
    return bool(config.get("add_cross_attention")) or config.get("is_encoder_decoder") is True


def _findings(config: Mapping[str, Any], model: ModelSpec) -> Iterator[Finding]:
    if config.get("num_nextn_predict_layers"):  # not part of the Hugging Face model
        yield finding("prediction-layers-not-included", setting="num_nextn_predict_layers")
    if not any(layer.is_moe for layer in model.layers):
        ignored = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
        if ignored:
            yield finding("experts-ignored", setting=ignored[0], model_type=model.model_type)


def _model(family: FamilyConfig, origin: str) -> ModelSpec:
    facts = family.facts
    hidden = check_size("hidden_size", family.size("hidden_size"), "hidden_size")
    count = check_size("num_hidden_layers", family.size("num_hidden_layers"), "layers")
    attention = _attention(family, hidden)
    windows = _windows(family, count)
    moe_layers = _moe_layers(family, count)
    dense = _mlp(family, hidden) if not all(moe_layers) else None
    moe = _moe(family) if any(moe_layers) else None
    norms = 1 if "one_norm_if" in facts and family.flag("one_norm_if") else facts["norms"]
    if not family.flag("post_norms_if", default=True):
        norms //= 2
    layers = [
        LayerSpec(
            replace(attention, window=windows[index]), cast("MlpSpec | MoeSpec", moe if moe_layers[index] else dense), norms
        )
        for index in range(count)
    ]
    if "first_layer_norms" in facts:
        layers[0] = replace(layers[0], norms=facts["first_layer_norms"])
    name = str(family.config.get("_name_or_path") or origin)
    positions = family.number("positions") if family.flag("positions_if", default=True) else 0  # rows of the learned table
    if positions:
        positions = check_size(facts["positions"], positions, "sequence_length") + facts.get("positions_extra", 0)
    embedding = family.number("embedding_size")
    vocab = check_size("vocab_size", family.size("vocab_size"), "vocab_size")
    tied = family.value("tie_word_embeddings")
    tied = tied is not None and check_flag("tie_word_embeddings", tied, 'write "tie_word_embeddings": true')
    return ModelSpec(
        name="".join(letter if letter.isprintable() else "?" for letter in name[:120]),
        hidden_size=hidden,
        layers=tuple(layers),
        vocab_size=vocab,
        norm=NormSpec(facts["norm"], weight=family.flag("norm_weight", default=True), bias=family.flag("norm_bias")),
        tied_embeddings=tied,
        embedding_size=embedding if embedding != hidden else None,
        embedding_projection_bias=family.flag("embedding_projection_bias"),
        positions=positions or 0,
        positions_on_hidden=family.flag("positions_on_hidden"),
        token_types=(family.number("token_types") or 0) + (family.number("task_types") or 0) * family.flag("task_types_if"),
        embedding_norm=family.flag("embedding_norm"),
        final_norm=family.flag("final_norm", default=True) and not family.flag("final_norm_unless"),
        head_bias=family.flag("head_bias"),
        head_transform=family.flag("head_transform"),
        head_transform_bias=family.flag("head_transform_bias", default=True),
        unused_parameters=(family.number("relative_buckets") or 0) * attention.heads
        + (count * attention.heads + 1 if facts.get("contact_head") else 0)
        + (vocab if facts.get("spare_head_bias") and not tied else 0),
        model_type=family.model_type,
        source=origin,
    )


def _attention(family: FamilyConfig, hidden: int) -> AttentionSpec:
    heads = check_size("num_attention_heads", family.size("num_attention_heads"), "heads")
    normed = "qk_norm_if" not in family.facts or family.flag("qk_norm_if")
    bias = family.flag("qkv_bias")
    common = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=1,
        q_bias=bias,
        k_bias=bias,
        v_bias=bias,
        out_bias=family.flag("out_bias"),
        causal=family.flag("causal"),
        qk_norm=cast("QkNorm | None", family.facts.get("qk_norm")) if normed else None,
        qk_norm_bias=family.flag("qk_norm_bias"),
        sinks=family.flag("sinks"),
        rotary=family.flag("rotary"),
        stored_fused=family.flag("qkv_fused"),
    )
    if family.flag("latent"):
        rope, value_dim = family.size("qk_rope_head_dim"), family.optional_size("v_head_dim")
        return replace(
            common,
            head_dim=family.size("qk_nope_head_dim") + rope,
            value_dim=head_size(hidden, heads) if value_dim is None else value_dim,
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
    head_dim = family.optional_size("head_dim")
    return replace(  # a zero is kept, which the spec then rejects
        common,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_size(hidden, heads) if head_dim is None else head_dim,
    )


def _mlp(family: FamilyConfig, hidden: int) -> MlpSpec:
    size = family.optional_size("intermediate_size")
    if size is None:
        times = family.facts.get("intermediate_times_hidden")
        size = hidden * times if times else family.size("intermediate_size")
    bias = family.flag("mlp_bias")
    return MlpSpec(
        size, gated=family.flag("gated"), activation=_activation(family),
        up_bias=family.flag("mlp_up_bias", default=bias), down_bias=bias, stored_fused=family.flag("gate_up_fused"),
    )  # fmt: skip


def _activation(family: FamilyConfig) -> str:
    return str(family.value(family.facts["activation"]) or ("silu" if family.flag("gated") else "gelu"))


def _moe(family: FamilyConfig) -> MoeSpec:
    """The experts. Their gate and up are stored as one weight in every family."""
    facts, width, shared_width = family.facts, family.size(family.facts["expert_size"]), 0

    def expert(size: int, bias: bool, fused: bool) -> MlpSpec:
        return MlpSpec(size, gated=True, activation=_activation(family), up_bias=bias, down_bias=bias, stored_fused=fused)

    if "shared_size" in facts:
        shared_width = family.size(facts["shared_size"])
    elif "shared_count" in facts:
        shared_width = width * (family.optional_size(facts["shared_count"]) or 0)
    return MoeSpec(
        experts=family.size("num_experts"),
        top_k=facts["top_k"] if "top_k" in facts else family.size("num_experts_per_tok"),
        expert=expert(width, family.flag("expert_bias"), fused=True),
        shared=expert(shared_width, family.flag("mlp_bias"), family.flag("shared_fused")) if shared_width else None,
        shared_gate=family.flag("shared_gate") and shared_width > 0,
        router_bias=family.flag("router_bias"),
    )


def _moe_layers(family: FamilyConfig, count: int) -> list[bool]:
    rule = family.facts.get("moe_layers")
    if rule is None:
        return [False] * count
    if rule == "after_first":
        first = family.optional_size("first_k_dense_replace") or 0
        return [index >= first for index in range(count)]
    if rule == "sparse_step":
        step = check_size("decoder_sparse_step", family.size("decoder_sparse_step"), "layers")
        dense = family.value("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise UserError(f"mlp_only_layers must be a list of layer numbers, not {shown(dense)}", "for example [0, 1]")
        has_experts, dense = family.optional_size("num_experts") != 0, {index for index in dense if isinstance(index, int)}
        return [has_experts and index not in dense and (index + 1) % step == 0 for index in range(count)]
    if rule == "interval":
        step = check_size("moe_layer_interval", family.size("moe_layer_interval"), "layers")
        first = family.size("moe_layer_start_index")
        end = count if family.value("moe_layer_end_index") == -1 else family.size("moe_layer_end_index") + 1
        return [first <= index < end and (index + 1) % step == 0 for index in range(count)]
    if rule == "mlp_layer_types":
        kinds = _per_layer(family, "mlp_layer_types", count)
        first = family.number("dense_first") or 0
        return [kind == "sparse" for kind in kinds] if kinds is not None else [index >= first for index in range(count)]
    return [True] * count


def _per_layer(family: FamilyConfig, key: str, count: int) -> list[Any] | None:
    """A list of the config with one entry for each layer; None where it is left out."""
    given = family.value(key)
    if given is not None and not isinstance(given, list):
        raise UserError(f"{key} must be a list with one entry per layer, not {shown(given)}", "correct it, or remove it")
    if given is not None and len(given) != count:
        raise UserError(f"{key} has {len(given)} entries, but num_hidden_layers = {count}", f"give it {count} entries")
    return given


def _windows(family: FamilyConfig, count: int) -> list[int | None]:
    """The sliding window of each layer; None where a layer sees the whole sequence."""
    facts = family.facts
    rule = facts.get("window")
    on = "window_if" not in facts or family.flag("window_if")
    window = family.optional_size(facts.get("window_key", "sliding_window")) if rule and on else None
    layer_types = _per_layer(family, "layer_types", count)
    if not window:
        return [None] * count
    if rule == "all":
        return [window] * count
    slides = [kind == "sliding_attention" for kind in layer_types or []] or _sliding_pattern(family, count)
    return [window if slide else None for slide in slides]


def _sliding_pattern(family: FamilyConfig, count: int) -> list[bool]:
    """Which layers have a window where the config has no layer_types: the pattern of the configuration class."""
    facts = family.facts
    if "slides_every" in facts:
        listed = _per_layer(family, facts["slides_where_zero"], count)
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
