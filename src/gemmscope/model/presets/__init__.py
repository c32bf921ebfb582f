"""Well-known models as data: one TOML file each, with the source of its sizes; one that is `like` another has what differs."""

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from gemmscope.errors import UserError, did_you_mean, shown
from gemmscope.model import hf
from gemmscope.model.spec import ModelSource, from_hyperparameters
from gemmscope.toml import load_data


@dataclass(frozen=True)
class Preset:
    """The description in a preset's file. `parameters` is None where the file describes only the layers."""

    name: str
    description: str
    source: str
    parameters: int | None


@cache
def names() -> tuple[str, ...]:
    """The names of all presets, in alphabetical order."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in files(__name__).iterdir() if entry.name.endswith(".toml")))


def named(text: str) -> str | None:
    """The name of the preset that this text means, whatever its case and separators.

    >>> named("Llama3.1_8B"), named("llama")
    ('llama-3.1-8b', None)
    """
    return _by_letters().get(_letters(text))


def describe(name: str) -> Preset:
    """The description of a preset."""
    data = _load(name)
    return Preset(name, data["description"], data["source"], data.get("parameters"))


def load(name: str) -> ModelSource:
    """The preset's model.

    >>> load("codonfm-5b").model.hidden_size
    4096
    """
    data = _load(name)
    origin = f"preset {name}"
    if "hyperparameters" in data:
        model = from_hyperparameters(**data["hyperparameters"], name=name, source=data["source"])
        return ModelSource(origin=origin, model=model)
    nulls = dict.fromkeys(data.get("null", []))  # TOML has no null, but null has a meaning in a config.json
    source = hf.from_config({**data["config"], **nulls}, origin)
    assert source.model is not None, f"{name} needs a closed form"
    findings = tuple(entry for entry in source.findings if entry.code != "defaults-of-class")  # they were checked
    return replace(source, origin=origin, model=replace(source.model, name=name, source=data["source"]), findings=findings)


def _load(name: str) -> dict[str, Any]:
    wanted = named(name)
    if wanted is None:
        known = did_you_mean(name.strip().lower(), names())
        raise UserError(f"unknown preset {shown(name)}", f"{known}gemmscope models lists all presets")
    data = load_data(__name__, f"{wanted}.toml")
    original = _load(data["like"]) if "like" in data else {}
    return {**original, **data, "config": {**original.get("config", {}), **data.get("config", {})}}


@cache
def _by_letters() -> dict[str, str]:
    return {_letters(name): name for name in names()}


def _letters(text: str) -> str:
    return re.sub(r"[-_\s]", "", text.lower())
