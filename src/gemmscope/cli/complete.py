"""Shell completion of values: presets, GPUs, recipes and others, and choices. Nothing heavy is imported for it."""

from collections.abc import Callable, Sequence
from importlib.resources import files

from gemmscope.options.declare import Declared
from gemmscope.toml import load_data


def listed(names: str) -> list[str]:
    """The names in a file of facts, in a table of it, or of the files of a folder.

    >>> listed("gpu/specs.toml")[:2], listed("forecast/coefficients/network.toml networks")[0], listed("model/presets/")[0]
    (['a100', 'h100'], 'infiniband-hdr', 'bamba-9b')
    """
    if names.endswith("/"):
        folder = files("gemmscope").joinpath(names)
        return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    file, _, table = names.partition(" ")
    facts = load_data("gemmscope", file)
    return list(facts[table] if table else facts)


def completion(declared: Declared) -> Callable[[str], list[str]] | None:
    """The function that completes the values of an option; None if the shell completes file names."""
    if not declared.option.names and not declared.choices:
        return None

    def complete(incomplete: str) -> list[str]:
        known = listed(declared.option.names) if declared.option.names else declared.choices
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
