"""Reads a job of torchtitan's Python registries: `config_registry.py:llama3_8b`.

The file is not run: `python_code` follows its functions, and those of the model beside it, to the configuration of every layer,
whose sizes have the names of `torchtitan_flavors.toml` (`torchtitan_registry.toml` says where). A layer with a class that is not
listed there is refused, because its structure is not known.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gemmscope.errors import UserError, did_you_mean, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.model import torchtitan
from gemmscope.model.python_code import Follower
from gemmscope.model.python_values import Code, Function, Record
from gemmscope.model.spec import ModelSource, ModelSpec
from gemmscope.model.torchtitan_model import Flavor, families, family_names, model_spec
from gemmscope.toml import FactTable, load_data

SECTIONS = ("training", "parallelism", "compile")
CLASS = re.compile(r"_?[A-Z]\w*(?:Config|Spec)|Config")


@cache
def facts() -> FactTable:
    """How registries are read."""
    return load_data("gemmscope.model", "torchtitan_registry.toml")


def recognises(text: str) -> bool:
    """Whether the text is a Python file with torchtitan's configurations.

    >>> recognises("from torchtitan.trainer import Trainer"), recognises("import torch")
    (True, False)
    """
    return re.search(r"^from torchtitan[.\w]* import ", text, re.MULTILINE) is not None


def read(text: str, origin: str, path: Path | None = None, function: str = "") -> ModelSource:
    """The model and run of the job that a function makes. `path`: where its imports are looked up."""
    job = _job(text, origin, path, function)
    spec, of_model = _model(job.get("model_spec"))
    tables, of_run = _tables(job)
    return torchtitan.read_tables(tables, origin, [*of_model, *of_run], spec, registries=True)


def _job(text: str, origin: str, path: Path | None, function: str) -> Record:
    """The configuration that a function makes."""
    follower = Follower(path, _known)
    module = follower.read(text)
    jobs = [name for name, value in module.names.items() if isinstance(value, Code) and isinstance(value.node, Function)]
    jobs = [name for name in jobs if not name.startswith("_")]
    code = follower.resolve(module.names.get(function or (jobs[0] if len(jobs) == 1 else "")))
    if not isinstance(code, Code) or not isinstance(code.node, Function) or not jobs:
        wrong = f"there is no function {function[:100]} in the file" if function else f"the file has {len(jobs)} jobs"
        known = did_you_mean(function, jobs) or f"one of: {', '.join(jobs)[:2000]}"
        raise UserError(wrong, f"name the job: {option('config', f'{origin}:NAME')}; {known}")
    job, _ = follower.variables(code)
    if not isinstance(job, Record) or not ("training" in job.values or job.name == "Trainer"):
        kind = f"a {job.name}" if isinstance(job, Record) else "nothing"
        raise UserError(f"{code.node.name}() makes {kind}, not a training job", "name a function that returns a Trainer.Config")
    return job


def _known(name: str, holder: object, arguments: Sequence[object], keywords: Mapping[str, object]) -> Record | None:
    """What a call of torchtitan makes: configurations keep their arguments, and converters change only precisions."""
    owner = holder.node.name if isinstance(holder, Code) else holder.name if isinstance(holder, Record) else ""
    if CLASS.fullmatch(name):
        return Record(owner if name == "Config" else name, dict(keywords), constructed=True)
    if name == "partial":
        return Record(name, constructed=True)
    same = {"build": [holder], "convert": arguments, "cast": arguments[1:], "to_graph_trainer_config": arguments}.get(name, ())
    kept = next(iter(same), None)
    if name == "convert" and isinstance(kept, Record):
        kept.values["converters"] = [*_list(kept.values.get("converters")), owner]
        return Record(owner, hidden="adapters are not modelled") if "LoRA" in owner else kept
    if name == "to_graph_trainer_config" and isinstance(kept, Record) and kept.values.get("activation_checkpoint") is not None:
        kept.values["activation_checkpoint"] = Record("SelectiveAC", constructed=True)
    return kept if isinstance(kept, Record) else None


def _tables(job: Record) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """The settings of a job by section, and which of them are not known."""
    sections = {name: value for name in SECTIONS if isinstance(value := job.get(name), Record)}
    findings = [
        finding("setting-without-value", setting=setting, value=value.name[:60], reason=value.hidden)
        for name, section in sections.items()
        for setting, value in ((name, section), *((f"{name}.{key}", one) for key, one in section.values.items()))
        if isinstance(value, Record) and value.hidden and (setting != name or name in job.values)
    ]
    tables = {name: {key: one for key, one in of.values.items() if not isinstance(one, Record)} for name, of in sections.items()}
    policy = job.values.get("activation_checkpoint", Record("SelectiveAC"))
    name = policy.name if isinstance(policy, Record) else "none"
    return {**tables, "activation_checkpoint": checkpointing(name)}, findings


def checkpointing(name: str) -> dict[str, Any]:
    """The table of activation checkpointing for its class, or for its name in a command."""
    table: dict[str, Any] = facts()["activation_checkpoint"].get(name) or {"mode": name[:100]}
    return table


def _model(value: object) -> tuple[ModelSpec, list[Finding]]:
    """The model of a ModelSpec of torchtitan, and what is not included of it."""
    spec = value if isinstance(value, Record) else Record("no model")
    model = spec.values.get("model")
    layers = model.values.get("layers") if isinstance(model, Record) else None
    if not isinstance(model, Record) or not isinstance(layers, list) or not layers:
        raise _not_known("the model", next(one for one in (layers, model, spec) if isinstance(one, Record)))
    sizes = {key: _at(model, [key]) for key in ("dim", "vocab_size", "enable_weight_tying")}
    name, defaults = str(_at(spec, ["name"])).rpartition("/")[2], families()["llama3"]["defaults"]
    family = family_names().get(name, name)
    flavor = {**defaults, **{key: value for key, value in sizes.items() if value is not None}}
    parts = [_layer(layer, flavor) for layer in layers]
    result = model_spec(family, str(_at(spec, ["flavor"])), flavor, parts, len(_list(model.values.get("mtp_layers"))))
    vision = [finding("language-part-only", model_type=family)] if isinstance(model.values.get("vision_encoder"), Record) else []
    converters = _list(model.values.get("converters"))
    changed = [finding("converters-ignored", value=shown(converters))] if converters else []
    return result, [*vision, *changed, finding("document-mask-not-modelled")]


def _layer(layer: object, sizes: Mapping[str, Any]) -> Flavor:
    """The facts of one layer, under the names of the table of flavors."""
    for what, part in _parts("a layer", layer):
        if part.name not in facts()["known"]["classes"]:
            raise _not_known(what, part)
    result = {name: value for name, places in facts()["layer"].items() if (value := _at(layer, places)) is not None}
    result["norms"] = sum(name.endswith("_norm") for name in layer.values) if isinstance(layer, Record) else 0
    if "kv_lora_rank" not in result and result.get("q_width") == 2 * result.get("n_heads", 0) * result.get("head_dim", 0):
        result["gated_attention"] = True
    if "key_width" in result:
        result |= {"full_attention_interval": 2, "n_key_heads": result["key_width"] // result["key_head_dim"]}
    return {**sizes, **result}


def _parts(what: str, part: object) -> Iterator[tuple[str, Record]]:
    """A configuration and all configurations inside of it, each with what it is."""
    if isinstance(part, Record):
        yield what, part
        for name, inside in part.values.items():
            if name not in facts()["known"]["without_shapes"]:
                yield from _parts(name, inside)


def _at(part: object, places: Sequence[str]) -> Any:
    """The value at the first place that has one; True for a configuration; None where nothing is written."""
    for place in places:
        value = part
        for name in place.split("."):
            value = value.values.get(name) if isinstance(value, Record) else value.get(name) if isinstance(value, dict) else None
        if isinstance(value, Record) and not value.constructed:
            raise _not_known(place, value)
        if value is not None:
            return True if isinstance(value, Record) else value
    return None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _not_known(what: str, record: Record) -> UserError:
    why = record.hidden or f"{record.name}, whose structure is not known"
    return UserError(
        f"{what} comes from {why if record.name in why else f'{record.name}: {why}'}",
        "give the file inside of torchtitan's folder, or set PYTHONPATH to it; or trace the model: "
        f"{option('module', 'FILE.py:FUNCTION')}",
    )
