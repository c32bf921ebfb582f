"""Which GPU runs which recipe, from the table: what can be said without asking a framework."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.recipe.recipes import recipe
from gemmscope.toml import load_data


@dataclass(frozen=True)
class Support:
    """Whether a recipe runs, and the reason or the reservation."""

    runs: bool
    words: str = ""
    complete: bool = False  # the reason names the GPU's compute capability itself

    def why_not(self, who: str, capability: tuple[int, int]) -> str:
        """The reason with the GPU that it is about; empty if the recipe runs.

        >>> support("MXFP8", (9, 0)).why_not("h200", (9, 0))
        'MXFP8 GEMMs need compute capability 10.0, and h200 is 9.0'
        >>> support("MXFP8", (12, 0)).why_not("rtx-5090", (12, 0))
        'Transformer Engine has none for compute capability 12.0'
        """
        own = f"{capability[0]}.{capability[1]}"
        return "" if self.runs else self.words if self.complete else f"{self.words}, and {who} is {own}"


@cache
def _table() -> dict[str, Any]:
    return load_data("gemmscope.recipe", "support.toml")


def support(name: str, capability: tuple[int, int]) -> Support:
    """What a GPU of this compute capability does with a recipe.

    >>> support("MXFP8", (9, 0))
    Support(runs=False, words='MXFP8 GEMMs need compute capability 10.0', complete=False)
    >>> support("FP8Block", (10, 0)).words
    'emulated with MXFP8 kernels on Blackwell'
    """
    if not recipe(name).quantizes:
        return (
            Support(runs=True) if capability >= (8, 0) else Support(runs=False, words="BF16 GEMMs need compute capability 8.0")
        )
    facts = _table()[name]
    architecture = f"{capability[0]}.{capability[1]}"
    if architecture in facts["yes"]:
        return Support(runs=True)
    if architecture in facts.get("emulated", ()):
        return Support(runs=True, words=facts["emulated_as"])
    if architecture in facts.get("not_yet", {}):
        return Support(runs=False, words=facts["not_yet"][architecture], complete=True)
    return Support(runs=False, words=facts["otherwise"])


def architectures() -> dict[str, str]:
    """Every architecture of the table: compute capability → its name.

    >>> architectures()["9.0"]
    'Hopper (H100, H200)'
    """
    return dict(_table()["architectures"])


def architecture_name(capability: tuple[int, int]) -> str:
    """A capability in words.

    >>> architecture_name((9, 0))
    'Hopper (H100, H200)'
    """
    found = architectures().get(f"{capability[0]}.{capability[1]}")
    return found if found else f"compute capability {capability[0]}.{capability[1]}"
