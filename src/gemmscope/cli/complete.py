"""Shell completion of values: presets, GPUs, recipes, and the choices of an option. Nothing heavy is imported for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemmscope import app


def completion(settings: dict[str, Any]) -> Callable[[str], list[str]] | None:
    """The function that completes the values of an option with these settings; None if the shell completes file names."""
    if "names" not in settings and "choices" not in settings:
        return None

    def complete(incomplete: str) -> list[str]:
        known = app.names.LISTS[settings["names"]]() if "names" in settings else settings["choices"]
        return matching(known, incomplete, several="," in settings.get("metavar", ""))

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
