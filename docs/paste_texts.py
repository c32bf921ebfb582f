"""The texts to paste of `how-to/frameworks.md`: what `gemmscope step --detail` prints, and the flags of every recipe."""

from __future__ import annotations

from collections.abc import Callable

from gemmscope.paste.emit import ready_to_paste
from gemmscope.recipe.recipes import recipes

LANGUAGES = {"Transformer Engine": "python", "torchao": "python", "torchtitan": "toml", "Megatron-LM": "bash"}


def text(recipe: str, framework: str) -> Callable[[], str]:
    """The text for one framework, as a block of code."""

    def block() -> str:
        return f"```{LANGUAGES[framework]}\n{ready_to_paste(recipe)[framework]}\n```"

    return block


def megatron_flags() -> str:
    """The flags of every recipe that Megatron-LM has."""
    lines = ["| recipe | Megatron-LM |", "| --- | --- |"]
    for name in recipes():
        flags = ready_to_paste(name).get("Megatron-LM")
        if flags:
            lines.append(f"| {name} | `{flags}` |")
    return "\n".join(lines)
