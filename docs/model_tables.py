"""The tables of `model-types.md`: model types that have a closed form, and presets."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from gemmscope.model import presets
from gemmscope.model.families import known_model_types


def types() -> str:
    """The values of `model_type` that need no torch."""
    names = ", ".join(f"`{name}`" for name in known_model_types())
    return textwrap.fill(names, 125, break_on_hyphens=False)


def every_preset() -> str:
    """Each preset with its description, its parameters and its source."""
    lines = ["| preset | what it is | parameters |", "| --- | --- | ---: |"]
    for name in presets.names():
        preset = presets.describe(name)
        size = f"{preset.parameters / 1e9:,.2f}B" if preset.parameters else ""
        text = f"[{preset.description}]({preset.source})" if preset.source.startswith("https:") else preset.description
        lines.append(f"| `{name}` | {text} | {size} |")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {"model types": types, "presets": every_preset}
