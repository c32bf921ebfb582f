"""Well-known models as data: one TOML file each, with the source of its sizes."""

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
    wanted = name.strip().lower()
    if wanted not in names():
        known = did_you_mean(wanted, names())
        raise UserError(f"unknown preset {shown(name)}", f"{known}gemmscope models lists all presets")
    return load_data(__name__, f"{wanted}.toml")
