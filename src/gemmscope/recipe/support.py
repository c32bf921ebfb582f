"""Which GPU runs which recipe, from a table. This needs no framework; where one is installed, its own answer counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import cast

from gemmscope.recipe.recipes import recipe
from gemmscope.toml import load_data

_table = cache(partial(load_data, "gemmscope.recipe", "support.toml"))


@dataclass(frozen=True)
class Support:
    """Whether a recipe runs, and a note: why not, or how."""

    runs: bool
    note: str = ""
    emulated_by: str = ""  # the recipe whose kernels run instead
    complete: bool = False  # the note already names the GPU's compute capability

    def why_not(self, who: str, capability: tuple[int, int]) -> str:
        """The reason why it does not run, with the GPU's own compute capability; empty if it runs.

        >>> support("MXFP8", (9, 0)).why_not("h200", (9, 0))
        'MXFP8 GEMMs need compute capability 10.0, and h200 has 9.0'
        >>> support("MXFP8", (12, 0)).why_not("rtx-5090", (12, 0))
        'Transformer Engine has no kernels for compute capability 12.0'
        """
        own = f"{capability[0]}.{capability[1]}"
        return "" if self.runs else self.note if self.complete else f"{self.note}, and {who} has {own}"


def support(name: str, capability: tuple[int, int]) -> Support:
    """Whether a GPU of this compute capability runs a recipe.

    >>> support("MXFP8", (9, 0))
    Support(runs=False, note='MXFP8 GEMMs need compute capability 10.0', emulated_by='', complete=False)
    >>> support("FP8Block", (10, 0)).note
    'emulated with MXFP8 kernels on Blackwell'
    """
    if not recipe(name).quantizes:
        return Support(runs=True) if capability >= (8, 0) else Support(runs=False, note="BF16 GEMMs need compute capability 8.0")
    facts = _table()[name]
    architecture = f"{capability[0]}.{capability[1]}"
    if architecture in facts["yes"]:
        return Support(runs=True)
    if architecture in facts.get("limited", {}):
        return Support(runs=True, note=facts["limited"][architecture])
    if architecture in facts.get("emulated", ()):
        return Support(runs=True, note=facts["emulated_as"], emulated_by=facts["emulated_by"])
    if architecture in facts.get("not_yet", {}):
        return Support(runs=False, note=facts["not_yet"][architecture], complete=True)
    return Support(runs=False, note=facts["otherwise"])


def run_together(one: str, other: str) -> bool:
    """Whether an architecture runs both recipes, neither of them emulated.

    >>> run_together("NVFP4", "MXFP8"), run_together("NVFP4", "FP8Block"), run_together("FP8Block", "BF16")
    (True, False, True)
    """
    listed = [set(_table()[name]["yes"]) for name in (one, other) if name in _table()]
    return len(listed) < 2 or bool(listed[0] & listed[1])


def architectures() -> Mapping[str, str]:
    """Every architecture of the table: compute capability → name. One that it lacks is a missing fact.

    >>> architectures()["9.0"]
    'Hopper (H100, H200)'
    """
    return cast("Mapping[str, str]", _table()["architectures"])


def architecture_name(capability: tuple[int, int]) -> str:
    """The name of a compute capability.

    >>> architecture_name((9, 0))
    'Hopper (H100, H200)'
    """
    own = f"{capability[0]}.{capability[1]}"
    return architectures().get(own, f"compute capability {own}")
