"""Megatron-Bridge recipes in Python: a function that builds a provider class and changes a few settings.

A recipe is never run. Its syntax tree is searched for a provider class that `bridge` knows
(`cfg.model = Nemotron3NanoProvider(seq_length=8192)`), for the configuration classes of a run
(`TrainingConfig(micro_batch_size=1)`) and for assignments (`cfg.train.micro_batch_size = 2`). Names stand for the default of the
function's parameter or for a constant. The result has the same sections as a YAML file, and `bridge` reads it. A model that
AutoBridge takes from a Hugging Face config is that of the preset with the same source.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gemmscope.errors import UserError, option
from gemmscope.findings import finding
from gemmscope.model import bridge, presets
from gemmscope.model.bridge import provider_classes
from gemmscope.model.megatron_model import REQUIRED
from gemmscope.model.megatron_settings import FACTS, Unknown, evaluate
from gemmscope.model.spec import ModelSource

RECIPE = FACTS["bridge_recipe"]
CONFIGURATIONS: dict[str, str] = RECIPE["classes"]
SECTIONS = {*CONFIGURATIONS.values(), "model"}
LONGEST_RECIPE = 200_000  # characters; real ones are far shorter
FROM_HUB = "from_hf_pretrained"  # of AutoBridge: the model is that of a Hugging Face config
PRETRAINING = "pretrain"  # in the name of the function that is read, where there are several
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class BridgeRecipe:
    """The settings and models of one function of the file, while they are being collected."""

    names: dict[str, object] = field(default_factory=dict)  # parameters with their defaults, and constants
    classes: dict[str, tuple[str, dict[str, object]]] = field(default_factory=dict)  # of the file: the known class, and changes
    models: list[tuple[str, dict[str, object]]] = field(default_factory=list)  # classes that are built, with their arguments
    sections: dict[str, dict[str, object]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # variables that hold a section: model_cfg = ...Provider()
    conditional: dict[str, None] = field(default_factory=dict)
    hub_id: str = ""


def recognises(text: str) -> bool:
    """Whether the text is Python that uses Megatron-Bridge.

    >>> recognises("from megatron.bridge.models.llama import Llama3ModelProvider8B"), recognises("model: {num_layers: 2}")
    (True, False)
    """
    return re.search(r"^[ \t]*(?:from|import)[ \t]+megatron\.bridge\b", text, re.MULTILINE) is not None


def read(text: str, origin: str) -> ModelSource:
    """The model and run of a recipe.

    >>> read("import megatron.bridge\\nmodel = Qwen3ModelProvider8B()", "recipe.py").model.hidden_size
    4096
    """
    recipes = _recipes(text)
    recipe = _one_model(recipes)
    provider, arguments = recipe.models[-1]
    sections = {name: dict(values) for name, values in recipe.sections.items()}
    model = {**arguments, **sections.pop("model", {})}
    known = _hub_model(recipe.hub_id, model) if provider == FROM_HUB else None
    named = {"name": recipe.hub_id} if known else {"_target_": provider}
    source = bridge.read_document({"model": {**named, **model}, **sections}, origin, known)
    if not recipe.conditional:
        return source
    return replace(source, findings=(*source.findings, finding("settings-in-condition", settings=[*recipe.conditional])))


def _one_model(recipes: list[tuple[str, BridgeRecipe]]) -> BridgeRecipe:
    """The recipe with a model; that of the pretraining function, where several differ."""
    with_model = [(name, recipe) for name, recipe in recipes if recipe.models]
    candidates = [(name, recipe) for name, recipe in with_model if PRETRAINING in name] or with_model
    if not candidates:
        raise UserError(
            "the recipe builds no model whose sizes are known here, such as Llama3ModelProvider8B()",
            f"name the model itself with {option('config')} or {option('preset')}, or use the run_config.yaml that "
            "Megatron-Bridge writes beside a checkpoint",
        )
    classes = {recipe.hub_id or recipe.models[-1][0]: None for _, recipe in candidates}
    if len(classes) > 1:
        raise UserError(
            f"the recipe builds several models: {', '.join(list(classes)[:6])}", "give a file that builds one of them"
        )
    return candidates[0][1]


def _hub_model(hub_id: str, settings: Mapping[str, object]) -> ModelSource:
    """The model of a hub ID: the preset with that source. Nothing is downloaded that the user did not name."""
    changed = [name for name in (*REQUIRED, *bridge.SHAPES) if name in settings]
    preset = next((name for name in presets.names() if f"/{hub_id}/" in presets.describe(name).source), None)
    if changed or preset is None:
        change = f" and changes {', '.join(f'model.{name}' for name in changed[:6])}" if changed else ""
        raise UserError(
            f"the recipe takes its model from {hub_id}{change}" + ("" if changed else ", which is not a preset"),
            f"name the model yourself: {option('config', 'PATH' if changed else hub_id)}",
        )
    source = presets.load(preset)
    assert source.model is not None
    depths = settings.get("mtp_num_layers")
    if type(depths) is not int or depths < 1:
        return source
    findings = tuple(item for item in source.findings if item.code != "prediction-layers-not-included")
    return replace(source, model=replace(source.model, prediction_layers=depths), findings=findings)


def _recipes(text: str) -> list[tuple[str, BridgeRecipe]]:
    """The settings of each function by name, and of the module itself under an empty name."""
    if len(text) > LONGEST_RECIPE:
        raise UserError("the recipe is too long", f"recipes can have up to {LONGEST_RECIPE} characters")
    try:
        tree = ast.parse(text)
        module = BridgeRecipe()
        _collect(tree.body, module, in_branch=False)
        functions = {node.name: node for node in tree.body if isinstance(node, Function)}
        return [("", module), *((name, _of_function(node, functions, module, {})) for name, node in functions.items())]
    except SyntaxError as error:
        raise UserError(f"the Python is not valid, line {error.lineno}: {error.msg}", "correct that line") from None
    except (ValueError, MemoryError, RecursionError):
        raise UserError(
            "the Python is not valid: nested too deeply, or with a character that is not text", "simplify it"
        ) from None


def _of_function(
    node: Function, functions: dict[str, Function], module: BridgeRecipe, given: Mapping[str, object], depth: int = 0
) -> BridgeRecipe:
    """The settings of a function, on top of those of the functions that it calls in the same file. `given`: its arguments."""
    recipe = BridgeRecipe(names=dict(module.names), classes=module.classes)
    recipe.names |= {**_defaults(node, recipe), **given}
    for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
        called = functions.get(_name_of(call.func))
        if called is not None and called is not node and depth < 3:
            inner = _of_function(called, functions, module, _arguments(call, recipe), depth + 1)
            recipe.models += inner.models
            recipe.sections |= {name: {**inner.sections[name], **recipe.sections.get(name, {})} for name in inner.sections}
    _collect(node.body, recipe, in_branch=False)
    return recipe


def _arguments(call: ast.Call, recipe: BridgeRecipe) -> dict[str, object]:
    """The keyword arguments of a call."""
    return {keyword.arg: _value(keyword.value, recipe) for keyword in call.keywords if keyword.arg}


def _defaults(node: Function, recipe: BridgeRecipe) -> dict[str, object]:
    """The parameters that have a default."""
    arguments = node.args
    positional = reversed([*arguments.posonlyargs, *arguments.args])
    pairs = [*zip(positional, reversed(arguments.defaults)), *zip(arguments.kwonlyargs, arguments.kw_defaults)]  # noqa: B905
    return {argument.arg: _value(default, recipe) for argument, default in pairs if default is not None}


def _known_class(name: str, recipe: BridgeRecipe) -> tuple[str, dict[str, object]] | None:
    """The known class that a name stands for, and what a class of the file's own changes in it."""
    known = name in provider_classes() or name in FACTS["bridge"]["plain_classes"]
    return (name, {}) if known else recipe.classes.get(name)


def _remember_class(node: ast.ClassDef, recipe: BridgeRecipe) -> None:
    """Remember a provider class of the file's own: a known class with other sizes (`class Tiny(Llama3ModelProvider8B)`)."""
    known = _known_class(_name_of(node.bases[0]), recipe) if node.bases else None
    if known is None:
        return
    changes = dict(known[1])
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else line.target if isinstance(line, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(line, (ast.Assign, ast.AnnAssign)) and line.value is not None:
            changes[target.id] = _value(line.value, recipe)
    recipe.classes[node.name] = (known[0], changes)


def _collect(body: list[ast.stmt], recipe: BridgeRecipe, *, in_branch: bool) -> None:
    """Walk through the statements in their order."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            _remember_class(node, recipe)
        if isinstance(node, (Function, ast.ClassDef)):
            continue
        for inner in ("body", "orelse", "finalbody"):
            conditional = in_branch or isinstance(node, (ast.If, ast.For, ast.While))
            _collect(getattr(node, inner, []), recipe, in_branch=conditional)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                _assign(target, node.value, recipe, in_branch=in_branch)
        elif isinstance(node, (ast.Return, ast.Expr)) and node.value is not None:
            _built(node.value, recipe)


def _assign(target: ast.expr, value: ast.expr, recipe: BridgeRecipe, *, in_branch: bool) -> None:
    section = _built(value, recipe)
    path = _path(target)
    if section and len(path) == 1:
        recipe.aliases[path[0]] = section
    elif len(path) == 1:
        recipe.names[path[0]] = _value(value, recipe)
    elif len(path) >= 2 and not section:
        holder = recipe.aliases.get(path[-2], path[-2]) if len(path) == 2 else path[-2]
        if holder in SECTIONS and path[-1] not in SECTIONS:
            recipe.sections.setdefault(holder, {})[path[-1]] = _value(value, recipe)
            if in_branch and path[-1] in RECIPE["noted"]:
                recipe.conditional[f"{holder}.{path[-1]}"] = None


def _built(value: ast.expr, recipe: BridgeRecipe) -> str:
    """Remember the models and configurations that an expression builds. Returns its own section, or an empty string."""
    section = ""
    for call in (part for part in ast.walk(value) if isinstance(part, ast.Call)):
        name, arguments = _name_of(call.func), _arguments(call, recipe)
        known, from_hub = _known_class(name, recipe), name == FROM_HUB
        if known is not None:
            recipe.models.append((known[0], {**known[1], **arguments}))
        elif name in CONFIGURATIONS:
            recipe.sections.setdefault(CONFIGURATIONS[name], {}).update(arguments)
        elif from_hub and call.args:
            hub_id = _value(call.args[0], recipe)
            recipe.hub_id = hub_id[:200] if isinstance(hub_id, str) else "?"
            recipe.models.append((FROM_HUB, {}))
        if from_hub or (call is value and known is not None):
            section = "model"
        elif call is value:
            section = CONFIGURATIONS.get(name, "")
    return section


def _name_of(function: ast.expr) -> str:
    """`Llama3ModelProvider8B`, also of `models.Llama3ModelProvider8B`."""
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _path(target: ast.expr) -> list[str]:
    """`["cfg", "train", "micro_batch_size"]`; empty for what is not a name or an attribute."""
    text = ast.unparse(target)
    return text.split(".") if re.fullmatch(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*", text) else []


def _value(node: ast.expr, recipe: BridgeRecipe) -> object:
    """The value of an expression, as far as the file shows it."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, recipe) for item in node.elts]
    if isinstance(node, ast.Name) and node.id in recipe.names:
        return recipe.names[node.id]
    text = ast.unparse(node)
    unknown = Unknown(text[:60], "the recipe computes it")
    if isinstance(node, ast.Attribute):
        return ".".join(_path(node)) or unknown
    try:
        return evaluate(re.sub(r"[A-Za-z_]\w*", lambda name: str(recipe.names.get(name[0], name[0])), text))
    except ValueError:
        return unknown
