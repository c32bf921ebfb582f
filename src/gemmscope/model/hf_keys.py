"""Keys of a config.json that nothing reads: each may mean another model, and one that is named like a size certainly does.

`class_keys.toml` has what the classes of transformers know, `key_rules.toml` what changes no shape, and which names are sizes.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from fnmatch import translate
from functools import cache
from typing import Any

from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, Notes, applicable, finding
from gemmscope.model.families import ALIASES, FamilyConfig, multimodal_types
from gemmscope.model.families import family as family_facts
from gemmscope.model.spec import ModelSource
from gemmscope.toml import load_data

MOST_NAMED = 12
_RULES = load_data("gemmscope.model", "key_rules.toml")


@cache
def _matcher(rule: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, _RULES[rule])))


@cache
def _classes() -> Mapping[str, Any]:
    return load_data("gemmscope.model", "class_keys.toml")


@cache
def known_keys(model_type: str) -> frozenset[str]:
    """The keys that the class of a model type reads, and those that its family reads or calls harmless."""
    facts, own = family_facts(model_type), _classes()["keys"].get(model_type, "").split()
    keys = {*own, *_classes()["common"].split()}
    return frozenset({key for key in keys if f"-{key}" not in keys}.union(facts.get("also_read", ()), facts.get("harmless", ())))


@cache
def keys_of_all() -> frozenset[str]:
    """The keys of every class."""
    return frozenset(key for keys in _classes()["keys"].values() for key in keys.split())


def is_harmless(key: str) -> bool:
    """Whether a key changes no shape of any class."""
    return _matcher("harmless").match(key) is not None


def is_size(key: str, value: object) -> bool:
    """Whether a key is named like a size, or contains one that is. Null is no size.

    >>> is_size("routed_expert_hidden_size", 8), is_size("latent", {"rank": 8}), is_size("use_gate", True), is_size("rank", None)
    (True, True, False, False)
    """
    if value is None:
        return False
    inside = value.items() if isinstance(value, Mapping) else ()
    return _matcher("sizes").match(key) is not None or any(is_size(str(name), own) for name, own in inside)


def unread(family: FamilyConfig) -> dict[str, bool]:
    """Keys that nothing reads and that are not known to be harmless; whether each is named like a size."""
    known, unknown = known_keys(family.model_type), dict[str, bool]()
    for key, value in family.config.items():
        # Of an object by number of the layer, what is inside is checked where the layers are built.
        inside = isinstance(value, Mapping) and any(name.startswith(f"{key}.") and not name[-1].isdigit() for name in known)
        parts = {f"{key}.{name}": own for name, own in value.items()} if inside else {key: value}
        unknown |= {
            name: is_size(name, own) for name, own in parts.items() if name not in known and not _is_idle(family, name, own)
        }
    return unknown


def _is_idle(family: FamilyConfig, key: str, value: object) -> bool:
    """Whether a key changes nothing: by its name, its value ("=key" is that of another), or as one of another class and null."""
    idle = {**_RULES["harmless_values"], **family.facts.get("harmless_values", {})}
    meant = idle.get(key)
    meant = family.optional_size(meant[1:]) if isinstance(meant, str) and meant.startswith("=") else meant
    named = is_harmless(key.rpartition(".")[2]) or (key in idle and value == meant)
    return named or (value is None and key in keys_of_all())


def findings(family: FamilyConfig) -> list[Finding]:
    """What may make the model another than the one that is named: code of its own, an unknown activation, sizes left out."""
    facts, code, model_type = family.facts, family.config.get("auto_map"), family.model_type
    classes = [str(name) for key, name in code.items() if str(key).startswith("AutoModel")] if isinstance(code, Mapping) else []
    files = sorted({name.rpartition("--")[2].partition(".")[0] for name in classes} - set(facts.get("ported_code", ())))
    activation = family.config.get(facts["activation"])
    known = {*_classes()["activations"].split(), *facts.get("activations", ())}
    names = [next(iter(_own_names(family, name)), "") for name in sorted(family.assumed)]
    left_out = [name for name in dict.fromkeys(names) if name]
    notes: Notes = {
        "code-of-its-own": (files, {"files": files, "model_type": model_type}),
        "activation-unknown": (
            isinstance(activation, str) and activation not in known,
            {"setting": facts["activation"], "value": str(activation), "model_type": model_type},
        ),
        "defaults-of-class": (left_out, {"settings": left_out, "model_type": model_type}),
    }
    return applicable(notes)


def _own_names(family: FamilyConfig, name: str) -> list[str]:
    """The names by which the class of a family knows a size, that of its default first."""
    older = [key for key, behind in family.facts.get("other_names", {}).items() if behind == name]
    names = [key for key in (*ALIASES.get(name, (name,)), *older) if key in known_keys(family.model_type)]
    return sorted(names, key=lambda key: family.default(key) is None)


def outside_findings(model_type: str) -> Iterator[Finding]:
    """A multimodal class that is not known may change its language part."""
    if model_type not in (*_classes()["multimodal"].split(), *multimodal_types()):
        yield finding("outer-class-unknown", model_type=model_type)


def accepted(source: ModelSource, ignored: Collection[str] = ()) -> ModelSource:
    """The source with a finding for keys that nothing reads. A `UserError` for those named like sizes that are not `ignored`."""
    if strangers := [key for key in ignored if key not in source.unread]:
        known = (
            f"keys that are not read: {', '.join(source.unread)}"
            if source.unread
            else f"all its keys are read: remove {option('ignore_key')}"
        )
        raise UserError(f"{option('ignore_key', strangers[0])}: {source.origin} has no key of that name that is not read", known)
    left = [key for key in source.unread if key not in ignored]
    sizes = [key for key in left if source.unread[key]]
    if sizes:
        named = f"{', '.join(sizes[:MOST_NAMED])}{' and others' if len(sizes) > MOST_NAMED else ''}"
        readers = "gemmscope does not read" if source.config is None else "neither gemmscope nor the class of transformers reads"
        raise UserError(
            f"{source.origin} has sizes that {readers}: {named}",
            f"trace a model with code of its own: {option('module', 'FILE.py:FUNCTION')}; ignore a key that changes no size: "
            f"{option('ignore_key', sizes[0])}",
        )
    notes: Notes = {"keys-not-read": (left, {"settings": left}), "keys-ignored": (ignored, {"settings": [*ignored]})}
    return replace(source, findings=(*applicable(notes), *source.findings))
