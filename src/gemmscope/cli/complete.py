"""Shell completion of values: presets, GPUs, recipes, and the choices of an option. Nothing heavy is imported for it."""

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files

from gemmscope.options.declare import Declared
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


def stacks() -> list[str]:
    """The software stacks of forecasts."""
    return list(load_data("gemmscope.forecast", "coefficients/stacks.toml")["stacks"])


LISTS: Mapping[str, Callable[[], Sequence[str]]] = {
    "presets": presets, "gpus": gpus, "recipes": recipes, "networks": networks, "stacks": stacks,
}  # fmt: skip


def completion(declared: Declared) -> Callable[[str], list[str]] | None:
    """The function that completes the values of an option; None if the shell completes file names."""
    if not declared.option.names and not declared.choices:
        return None

    def complete(incomplete: str) -> list[str]:
        known = LISTS[declared.option.names]() if declared.option.names else declared.choices
        return matching(known, incomplete, several="," in declared.option.metavar)

    return complete


def matching(known: Sequence[str], typed: str, *, several: bool) -> list[str]:
    """The names that begin as typed, in any case; after a comma, those that are not yet in the list.

    >>> matching(["h100", "h200", "b200"], "b200,h", several=True), matching(["FP8Block", "MXFP8"], "m", several=True)
    (['b200,h100', 'b200,h200'], ['mxfp8'])
    """
    before, comma, start = typed.rpartition(",") if several else ("", "", typed)
    used = {name.strip().lower() for name in before.split(",")}
    fitting = [name for name in known if name.lower().startswith(start.lower()) and name.lower() not in used]
    spelled = [name.lower() if start.islower() else start + name[len(start) :] for name in fitting]
    return [before + comma + name for name in spelled]
