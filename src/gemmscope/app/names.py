"""The names that options take, for shell completion: read from the tables of facts without what computes with them."""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from gemmscope.toml import load_data


def presets() -> Sequence[str]:
    """Well-known models."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in files("gemmscope.model").joinpath("presets").iterdir()
        if entry.name.endswith(".toml")
    )


def gpus() -> Sequence[str]:
    """GPUs that can be forecast."""
    return list(load_data("gemmscope.gpu", "specs.toml"))


def recipes() -> Sequence[str]:
    """Recipes of any backend."""
    return list(load_data("gemmscope.recipe", "recipes.toml"))


def networks() -> Sequence[str]:
    """Networks between NVLink domains."""
    return list(load_data("gemmscope.forecast", "coefficients/network.toml")["networks"])


LISTS: Mapping[str, Callable[[], Sequence[str]]] = {"presets": presets, "gpus": gpus, "recipes": recipes, "networks": networks}
