"""Megatron-Bridge recipes in Python: a function that builds the configuration of a run.

A recipe is never run. `python_code` follows its function, and those of the same tree that it calls, and `cfg.model` is what they
leave there: a provider class whose sizes `bridge` knows, with the settings that are changed, or what AutoBridge takes from a
Hugging Face config. That model is the preset with exactly this source, the provider class with the same sizes, or a local folder.
A model that comes from anywhere else is an error that says from where: no other model ever takes its place. The result has the
same sections as a YAML file, and `bridge` reads it.

A file has many recipes. `FILE.py:FUNCTION` names one; else the pretraining functions must agree on the model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gemmscope.errors import UserError, did_you_mean, option
from gemmscope.findings import Notes, applicable, finding
from gemmscope.model import bridge, hf, presets
from gemmscope.model.bridge import provider_classes
from gemmscope.model.megatron_model import REQUIRED
from gemmscope.model.megatron_settings import FACTS, Unknown
from gemmscope.model.python_code import Follower
from gemmscope.model.python_values import Code, Function, Import, Module, Record, is_plain
from gemmscope.model.spec import ModelSource, ModelSpec
from gemmscope.reading import read_text

RECIPE = FACTS["bridge_recipe"]
FROM_HUB = "from_hf_pretrained"  # of AutoBridge: the model is that of a Hugging Face config
MODEL = "model"
PRETRAINING = "pretrain"  # in the names of the functions that are read, where none is named
PRESET_SOURCE = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/blob/.*")
LARGEST_CONFIG = 2**20
GPUS = re.compile(r"_([1-9][0-9]{0,4})gpu_")  # in the name of a function, by Megatron-Bridge's convention


@dataclass(frozen=True)
class BridgeRecipe:
    """What one function leaves: its configuration, and the model in it."""

    function: str
    sections: Mapping[str, object]
    model: Record
    not_followed: tuple[str, ...] = ()  # functions that get the configuration or the model, and are not read

    @property
    def identity(self) -> str:
        """What the model is, as far as the recipe names it."""
        sizes = {name: self.model.values.get(name) for name in (*REQUIRED, "num_moe_experts") if self.model.values.get(name)}
        changed = ", ".join(f"{name}={value}" for name, value in sizes.items() if is_plain(value))
        return f"{self.model.name}({changed})" if changed else self.model.name


def recognises(text: str) -> bool:
    """Whether the text is Python that uses Megatron-Bridge.

    >>> recognises("from megatron.bridge.models.llama import Llama3ModelProvider8B"), recognises("model: {num_layers: 2}")
    (True, False)
    """
    return re.search(r"^[ \t]*(?:from|import)[ \t]+megatron\.bridge\b", text, re.MULTILINE) is not None


def read(text: str, origin: str, path: Path | None = None, function: str = "") -> ModelSource:
    """The model and run of a recipe. `path`: where its imports are looked up; `function`: the one that is read.

    >>> read("import megatron.bridge\\nmodel = Qwen3ModelProvider8B()", "recipe.py").model.hidden_size
    4096
    """
    follower = Follower(path, _known)
    module = follower.read(text)
    recipes = [_named(follower, module, function)] if function else _recipes(follower, module)
    recipe, *others = recipes
    source = _source(recipe, origin)
    notes: Notes = {
        "recipe-calls-not-read": (recipe.not_followed, {"calls": [*recipe.not_followed]}),
        "recipe-gpus": (GPUS.search(recipe.function), {"function": recipe.function}),
        "recipe-of-several": (others, {"function": recipe.function, "count": len(recipes), "origin": origin}),
    }
    return replace(source, findings=(*source.findings, *applicable(notes)))


def _known(name: str, holder: object, arguments: Sequence[object], keywords: Mapping[str, object]) -> Record | None:
    """The models that a call makes: a provider class, or AutoBridge with the ID of a Hugging Face config."""
    if name == FROM_HUB and (arguments or keywords):
        hub_id = arguments[0] if arguments else next(iter(keywords.values()))
        if isinstance(hub_id, str):
            why = "the settings of its config"
            return Record(hub_id[:200], hidden=why, base=FROM_HUB, constructed=True, defaults=RECIPE["defaults"])
        why = hub_id.hidden if isinstance(hub_id, Record) else "it is not text"
        return Record(f"{name}({hub_id.name if isinstance(hub_id, Record) else hub_id})", hidden=why)
    if isinstance(holder, Record) and holder.base == FROM_HUB and name in RECIPE["same_model"]:
        return holder
    if not (holder is None or isinstance(holder, Import) or (isinstance(holder, Record) and holder.imported)):
        return None
    if name in RECIPE["hub_classes"] and not arguments:
        name, of_class = RECIPE["hub_classes"][name], "the defaults of its class"
        return Record(name, dict(keywords), of_class, base=FROM_HUB, constructed=True, defaults=RECIPE["defaults"])
    if name in provider_classes() or name in FACTS["bridge"]["plain_classes"]:
        if arguments or "**" in keywords:
            return Record(f"{name}()", hidden="it gets sizes whose names the file does not show")
        defaults = {**RECIPE["defaults"], **provider_classes().get(name, {})}
        return Record(name, dict(keywords), "the defaults of its class", base=name, constructed=True, defaults=defaults)
    return None


def _named(follower: Follower, module: Module, function: str) -> BridgeRecipe:
    """The recipe of the function that is named."""
    code = follower.resolve(module.names.get(function))
    if not isinstance(code, Code) or not isinstance(code.node, Function):
        known = [name for name, value in module.names.items() if isinstance(value, Code) and isinstance(value.node, Function)]
        known = known or [name for name, value in module.names.items() if isinstance(value, Import)]
        raise UserError(
            f"there is no function {function[:100]} in the file",
            did_you_mean(function, known) or f"functions: {', '.join(known[:6]) or 'none'}",
        )
    recipe = _followed(follower, code.node.name, code)
    if recipe is None:
        raise UserError(f"{function}() builds no model", "name the function that returns the configuration")
    return recipe


def _recipes(follower: Follower, module: Module) -> list[BridgeRecipe]:
    """The recipes of a file: its pretraining functions, or all of them, if they have the same model."""
    of_values = [_of_values("", None, module.names, follower)]
    codes = {name: value for name, value in module.names.items() if isinstance(value, Code) and isinstance(value.node, Function)}
    of_values += [_followed(follower, name, code) for name, code in codes.items()]
    built = [recipe for recipe in of_values if recipe is not None]
    public = [recipe for recipe in built if not recipe.function.startswith("_")] or built
    chosen = [recipe for recipe in public if PRETRAINING in recipe.function] or public
    if not chosen:
        imported = [name for name, value in module.names.items() if isinstance(value, Import) and name.endswith("_config")]
        raise UserError(
            "the file has no function that builds a model",
            f"name one that it imports: {option('config', f'FILE.py:{imported[0]}')}"
            if imported
            else "give a recipe, or the run_config.yaml that Megatron-Bridge writes beside a checkpoint",
        )
    models = {recipe.identity: recipe.function for recipe in chosen}
    if len(models) > 1:
        raise UserError(
            f"the file has recipes of several models: {', '.join(list(models)[:6])}",
            f"name one function: {option('config', 'FILE.py:' + (next(filter(None, models.values()), '') or 'FUNCTION'))}",
        )
    complete = [recipe for recipe in chosen if MODEL in recipe.sections] or chosen
    return sorted(complete, key=lambda recipe: not recipe.function)


def _followed(follower: Follower, name: str, code: Code) -> BridgeRecipe | None:
    """What a function leaves; None where it builds no model."""
    follower.depth = follower.branches = 0
    follower.not_followed.clear()
    result, variables = follower.variables(code)
    return _of_values(name, result, variables, follower)


def _of_values(name: str, result: object, variables: Mapping[str, object], follower: Follower) -> BridgeRecipe | None:
    """The recipe among the result and the variables of a function, or of a file."""
    local = [value for value in variables.values() if isinstance(value, Record) and (value.base or MODEL in value.known())]
    for one in [result] if isinstance(result, Record) else reversed(local) if result is None else ():
        is_config = MODEL in one.known() or name.endswith("_config") or PRETRAINING in name
        model = one if one.base else one.get(MODEL) if is_config else None
        if isinstance(model, Record):
            passed = [call for call, record in follower.not_followed if record is one or record is model]
            passed = [call for call in passed if call.removesuffix("()") not in RECIPE["only_read"]]
            return BridgeRecipe(name, {} if one.base else one.known(), model, tuple(dict.fromkeys(passed)))
    return None


def _source(recipe: BridgeRecipe, origin: str) -> ModelSource:
    """The model and run of a recipe."""
    model, place = recipe.model, f"{recipe.function}()" if recipe.function else "the file"
    if not model.base:
        raise UserError(
            f"the model of {place} comes from {model.name}: {model.hidden or 'it is not known here'}"
            if model.name not in model.hidden
            else f"the model of {place} comes from {model.hidden}",
            "give the file inside its tree, or set PYTHONPATH to the folder that has the package; or name the model itself with "
            f"{option('config', 'PATH')} or {option('preset')}",
        )
    specs = [(name, value) for name in RECIPE["layer_specs"] if (value := model.values.get(name)) is not None]
    own = [name for name, value in specs if getattr(_plain(value, 0), "text", "") not in RECIPE["usual_layers"]]
    if model.methods or own:
        raise UserError(
            f"the model of {place} is a {model.name}, and code decides its layers ({', '.join([*model.methods, *own][:2])})",
            f"trace the model: {option('module', 'FILE.py:FUNCTION')}, or give its config.json: {option('config', 'PATH')}",
        )
    settings = _section(model)
    sections = {name: _section(value) for name, value in recipe.sections.items() if isinstance(value, Record) and name != MODEL}
    known = _hub_model(model.name, settings) if model.base == FROM_HUB else None
    if isinstance(known, str):
        named, known = {"_target_": known}, None
    else:
        named = {"name": model.name} if known else {"_target_": model.base}
    if gpus := GPUS.search(recipe.function):
        settings["world_size"] = int(gpus[1])
    return bridge.read_document({MODEL: {**named, **settings}, **sections}, origin, known)


def _section(record: Record, deepest: int = 4) -> dict[str, object]:
    return {name: _plain(value, deepest - 1) for name, value in record.known().items()}


def _plain(value: object, deepest: int) -> object:
    """A value as a YAML file would have it; `Unknown` where the code does not show it."""
    match value:
        case list() | tuple():
            return [_plain(item, deepest - 1) if deepest else None for item in value]
        case Record():
            known = deepest > 0 and value.known()
            return _section(value, deepest) if known else Unknown(value.name[:60], value.hidden or "it is an object")
        case Code(node):
            return Unknown(node.name, "it is code")
        case Import():
            return Unknown(value.name, "it is code")
    return value


def _hub_model(hub_id: str, settings: Mapping[str, object]) -> ModelSource | str:
    """The model of a hub ID: the preset with exactly this source, or the class with its sizes. Nothing is downloaded."""
    folder = Path(hub_id) / "config.json"
    source: ModelSource | None = None
    if folder.is_file():
        source = hf.read(read_text(folder, LARGEST_CONFIG), hub_id)
    elif (preset := hub_presets().get(hub_id)) is not None:
        source = presets.load(preset)
    elif hub_id in RECIPE["hub"]:
        return str(RECIPE["hub"][hub_id])
    changed = [name for name in settings if source and name in bridge.OF_LAYERS and _changes(source.model, name, settings)]
    if changed or source is None or source.model is None:
        change = f" and changes {', '.join(f'model.{name}' for name in changed[:6])}" if changed else ""
        raise UserError(
            f"the recipe takes its model from {hub_id}{change}" + ("" if changed else ", which is not a preset"),
            f"name the model yourself: {option('config', 'PATH' if changed else hub_id)}",
        )
    findings = [item for item in source.findings if item.code != "prediction-layers-not-included"]
    if source.model.model_type.endswith("_text"):  # of a multimodal model
        findings.append(finding("language-part-only", model_type=source.model.model_type.removesuffix("_text")))
    depths = settings.get("mtp_num_layers", hf.prediction_layers(source.config or {})[1]) or 0
    if type(depths) is not int:
        return source
    shared = depths > 1 and settings.get("mtp_use_repeated_layer") is True
    model = replace(source.model, prediction_layers=depths, prediction_shared=shared)
    return replace(source, model=model, findings=tuple(findings))


@cache
def hub_presets() -> dict[str, str]:
    """The preset of each hub ID that is the source of one."""
    sources = {name: PRESET_SOURCE.fullmatch(presets.describe(name).source) for name in presets.names()}
    return {match[1]: name for name, match in sources.items() if match}


def _changes(model: ModelSpec | None, name: str, settings: Mapping[str, object]) -> bool:
    """Whether a setting changes the model that is known. Its vocabulary may change."""
    assert model is not None
    value, attentions = settings[name], list(model.attentions)
    same: dict[str, set[object]] = {
        "num_layers": {len(model.layers)},
        "hidden_size": {model.hidden_size},
        "num_attention_heads": {attention.heads for attention in attentions},
        "num_query_groups": {attention.kv_heads for attention in attentions},
        "kv_channels": {attention.head_dim if attention.latent is None else value for attention in attentions},
        "add_qkv_bias": {attention.qkv_bias for attention in attentions},
        "qk_layernorm": {attention.qk_norm is not None for attention in attentions},
        "multi_latent_attention": {attention.latent is not None for attention in attentions},
        "share_embeddings_and_output_weights": {model.tied_embeddings},
        "position_embedding_type": {"learned_absolute" if model.positions else "none" if value == "none" else "rope"},
    }
    value = "rope" if value in ("yarn", "mrope") else value
    return same[name] != {value} if name in same else value not in (None, False)
