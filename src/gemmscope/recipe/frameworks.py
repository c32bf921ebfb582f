"""The frameworks of `frameworks.toml`: what measures, what trains, and what is written for it to paste."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from pydantic import TypeAdapter

from gemmscope.toml import FactTable, complete, load_data


@dataclass(frozen=True)
class Framework:
    """One framework. `frameworks.toml` explains each fact."""

    name: str
    title: str
    device: str = ""
    packages: tuple[str, ...] = ()
    bench: str = ""
    step: str = ""
    quantizes: bool = False
    caches_weights: bool = False
    gemms_only: bool = False
    casts_again: bool = False
    trains_with: str = ""
    paste: Mapping[str, str] = field(default_factory=dict)
    one_command: bool = False


@cache
def frameworks() -> Mapping[str, Framework]:
    """All frameworks by name.

    >>> frameworks()["megatron"].title
    'Megatron-LM'
    """
    table, read = load_data("gemmscope.recipe", "frameworks.toml"), TypeAdapter(Framework).validate_python
    return FactTable({name: read(complete(Framework, facts, name=name)) for name, facts in table.items()}, table.file)


@cache
def backends(device: str = "") -> tuple[str, ...]:
    """The frameworks that measure, on this device or on any, the preferred one first.

    >>> backends("cuda"), backends("cpu")
    (('transformer_engine', 'torchao', 'torch'), ('cpu',))
    """
    return tuple(name for name, known in frameworks().items() if known.device and device in ("", known.device))


def other_backend(framework: str) -> str:
    """What a framework trains with, where that is not the preferred backend; empty otherwise.

    >>> other_backend("torchtitan"), other_backend("megatron")
    ('torchao', '')
    """
    trains_with = frameworks()[framework].trains_with if framework in frameworks() else ""
    return trains_with if trains_with != backends()[0] else ""


def measuring_classes(command: str) -> dict[str, tuple[str, str]]:
    """The module and class of every backend that has this command: bench or step.

    >>> measuring_classes("step")["cpu"]
    ('gemmscope.step.kits.plain', 'Kit')
    """
    paths = {name: getattr(frameworks()[name], command) for name in backends()}
    return {name: tuple(path.split(":")) for name, path in paths.items() if path}
