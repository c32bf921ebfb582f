"""Reads a Hugging Face `config.json`: a file, its folder, or (through transformers) a hub ID.

The sizes come from the config, everything else from `families.toml`. A model type that is not in that file, or a config with
parts that have no closed form (linear attention, cross attention), gives a source without a model: its shapes must be traced.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from gemmscope.errors import LONGEST_SHOWN, UserError, option, shown
from gemmscope.findings import Finding, Notes, applicable, finding
from gemmscope.model import hf_blocks as blocks
from gemmscope.model import hf_keys
from gemmscope.model.families import FamilyConfig, built_like, known_model_types, language_part
from gemmscope.model.families import family as family_facts
from gemmscope.model.hybrids import ENDS, HYBRIDS
from gemmscope.model.limits import check_flag, check_size
from gemmscope.model.spec import ModelSource, ModelSpec, NormSpec
from gemmscope.reading import parse_json

DEEPEST = 100  # levels of nesting: real configs have four
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_CLOSED_FORM_LAYERS = frozenset({blocks.FULL, blocks.SLIDING})


def recognises(text: str) -> bool:
    """Whether the text is a JSON object. (Megatron and YAML files may begin with a brace too, but do not parse as JSON.)"""
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
    """Whether it is nested too deeply for a recursive walk."""
    level: list[Any] = [config]
    for _ in range(DEEPEST):
        inside = chain.from_iterable(value.values() if isinstance(value, dict) else value for value in level)
        level = [value for value in inside if isinstance(value, (dict, list))]
    return bool(level)


def from_config(config: Mapping[str, Any], origin: str) -> ModelSource:
    """The model of a config given as a mapping."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        if "gemmscope_version" in config:
            made_by = {"sweep": "bench or step with --sweep"}.get(str(config.get("kind")), str(config.get("kind")))
            what = f"this is a run file of gemmscope {made_by[:LONGEST_SHOWN]}, not a model file"
            raise UserError(what, "gemmscope report RUNFILE shows it; --config takes the file of a model, such as config.json")
        raise UserError(
            "the config has no model_type" if model_type is None else f"model_type must be a name, not {shown(model_type)}",
            f'add for example "model_type": "{built_like(config) or "llama"}"; the documentation of --config lists all types',
        )
    known, language = model_type in known_model_types(), language_part(model_type, config)
    if not known and isinstance(language, Mapping) and language.get("model_type") in known_model_types():
        source = from_config(_with_outer_ties(config, language), origin)
        outside = (finding("language-part-only", model_type=model_type), *hf_keys.outside_findings(model_type))
        others = [key for key, part in config.items() if isinstance(part, Mapping) and "vocab_size" in part]
        unread = {} if "text_config" in config else dict.fromkeys(others, True)  # the class would assume its default instead
        return replace(source, findings=(*outside, *source.findings), unread={**source.unread, **unread})
    label = f"{origin} (Hugging Face, {model_type})"
    if not known:
        return ModelSource(origin=label, model=None, config=config)
    unread = hf_keys.unread(FamilyConfig(model_type, config))
    config = _with_layer_types(model_type, config)
    if _needs_tracing(model_type, config):
        return ModelSource(origin=label, model=None, config=config, unread=unread)
    names = family_facts(model_type).get("other_names", {})
    renamed = {name: config[key] for key, name in names.items() if key in config}
    family = FamilyConfig(model_type, {**config, **renamed})
    model = _model(family, origin)
    config = {**config, "model_type": family_facts(model_type).get("built_as", model_type)}
    findings = (*hf_keys.findings(family), *_findings(config, model))
    return ModelSource(origin=label, model=model, config=config, findings=findings, unread=unread)


def _with_layer_types(model_type: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with `layer_types`, which MiniMax's own checkpoints call `attn_type_list`: 0 is linear, 1 is full attention."""
    key = family_facts(model_type).get("attention_list", "")
    numbers = config.get(key)
    if not isinstance(numbers, list) or "layer_types" in config:
        return config
    if any(number not in (0, 1) for number in numbers):
        raise UserError(f"{key} must contain only 0 (linear attention) and 1 (full attention)", "correct it in the config")
    return {**config, "layer_types": [blocks.FULL if number else blocks.LINEAR for number in numbers]}


def _with_outer_ties(config: Mapping[str, Any], language: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part, tied to its embedding as the multimodal config around it says. (Llama 4 looks only inside.)"""
    key = "tie_word_embeddings"
    outer = config.get(key)
    if not isinstance(outer, bool) or family_facts(str(language["model_type"])).get("ties_inside"):
        return language
    return {**language, key: outer or language.get(key, False)}


def _needs_tracing(model_type: str, config: Mapping[str, Any]) -> bool:
    """Whether the model has parts without a closed form."""
    facts = family_facts(model_type)
    own = config.get("per_layer_config")
    known = set(facts.get("per_layer_keys", ()))
    if isinstance(own, Mapping) and not all(isinstance(layer, Mapping) and layer.keys() <= known for layer in own.values()):
        return True
    if "layers_by" in facts:  # its layers are read where they are built
        return False
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and not _CLOSED_FORM_LAYERS.issuperset(blocks.current_kinds(layer_types)):
        return True
    return bool(config.get("add_cross_attention")) or config.get("is_encoder_decoder") is True


def prediction_layers(config: Mapping[str, Any]) -> tuple[str, int]:
    """The key and the number of layers of multi-token prediction, which are not part of the Hugging Face model."""
    numbers = ((key, config.get(key)) for key in _PREDICTION_LAYERS)
    return next(((key, number) for key, number in numbers if type(number) is int and number > 0), ("", 0))


def _findings(config: Mapping[str, Any], model: ModelSpec) -> list[Finding]:
    setting, predicted = prediction_layers(config)
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    ignored = [] if any(layer.is_moe for layer in model.layers) else experts
    notes: Notes = {
        "prediction-layers-not-included": (predicted, {"setting": setting, "added": option("mtp_layers", predicted)}),
        "experts-ignored": (ignored, {"setting": "".join(ignored[:1]), "model_type": model.model_type}),
    }
    return applicable(notes)


def _model(family: FamilyConfig, origin: str) -> ModelSpec:
    facts = family.facts
    hidden = family.size("hidden_size", "hidden_size")
    if computed := next((key for key in facts.get("computed_lists", ()) if key in family.config), None):
        raise UserError(
            f"a config of {family.model_type} cannot have {computed}", "remove it: other keys decide the kinds of layers"
        )
    listed = facts.get("layers_listed", False)
    count = 0 if listed else family.size("num_hidden_layers", "layers")
    layers = (
        HYBRIDS[facts["layers_by"]](family, hidden, count)
        if "layers_by" in facts
        else blocks.layers(family, hidden, [True] * count)
    )
    heads = layers[0].attention.heads if layers[0].attention is not None else 0
    name = str(family.config.get("_name_or_path") or origin)
    positions = family.number("positions") if family.flag("positions_if", default=True) else None  # rows of the learned table
    if positions is not None:
        positions = check_size(facts["positions"], positions, "sequence_length") + facts.get("positions_extra", 0)
    embedding = family.number("embedding_size")
    vocab = family.size("vocab_size", "vocab_size")
    tied_by = facts["tied_by"] if facts.get("tied_by") in family.config else "tie_word_embeddings"
    tied = family.value(tied_by)
    tied = tied is not None and check_flag(tied_by, tied, f'write "{tied_by}": true') and not facts.get("never_tied")
    model = ModelSpec(
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
        unused_parameters=(family.number("relative_buckets") or 0) * heads
        + (count * heads + 1 if facts.get("contact_head") else 0)
        + (vocab if facts.get("spare_head_bias") and not tied else 0),
        model_type=family.model_type,
        source=origin,
    )
    return replace(model, **ENDS[facts["ends_by"]](family, hidden, count)) if "ends_by" in facts else model
