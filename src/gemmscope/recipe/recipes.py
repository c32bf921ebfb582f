"""The recipes of `recipes.toml` as objects. A recipe is data; every backend runs all of them through one code path."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from gemmscope.errors import UserError, closest, shown
from gemmscope.recipe.kept import KeptHigher, mixed_name, split_name
from gemmscope.recipe.precisions import Precision, precision_with
from gemmscope.toml import FactTable, complete, load_data

BASELINE = "BF16"
OF_QUANTIZATION = ("multiple_of", "experts_multiple_of", "bytes_read", "bytes_written", "weight_copy_bytes", "kept_bytes")


@dataclass(frozen=True)
class Recipe:
    """One precision. `operands[pass]` are the formats of the two operands; `scales` is how their values are scaled."""

    name: str
    title: str
    backends: tuple[str, ...]
    operands: Mapping[str, tuple[str, str]]
    scales: str
    also_scaled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by pass: other scales that a kernel may show
    delayed: bool = False  # scales come from the maxima of earlier steps
    multiple_of: int = 1  # tokens, input and output features must be multiples of it
    experts_multiple_of: int = 1  # to which frameworks pad the tokens of each expert
    bytes_read: float = 0  # per element quantized
    bytes_written: float = 0
    weight_copy_bytes: float = 0  # per weight element: the quantized copies, both directions together
    kept_bytes: float = 2  # per element of X, from forward to backward
    same_kernels_as: str | None = None  # the recipe with the same GEMM kernels and another quantization
    one_copy_on: tuple[str, ...] = ()  # architectures where one quantized copy serves both directions
    letter: str = ""  # in the maps of a sweep
    seen: str = ""  # the GPU on which these facts were observed
    settings: Mapping[str, Any] = field(default_factory=dict)  # per backend: how it names the recipe
    kept: KeptHigher | None = None  # what a mix leaves in a higher precision; the rest is as in its `base`
    base: str = ""  # the recipe of a mix; empty for every other

    @property
    def quantizes(self) -> bool:
        return self.scales != "none"

    def scales_of(self, pass_name: str) -> tuple[str, ...]:
        """How the operands of a pass may be scaled, the recipe's own way first. A BF16 GEMM has no scales in any recipe.

        >>> recipe("FP8Rowwise").scales_of("dgrad"), recipe("FP8RowwiseGWHP").scales_of("wgrad")
        (('row', 'tensor'), ('none',))
        """
        if set(self.operands[pass_name]) == {"bf16"}:
            return ("none",)
        return (self.scales, *self.also_scaled.get(pass_name, ()))

    def precision(self, pass_name: str) -> Precision:
        """The precision of a pass's GEMMs.

        >>> recipe("FP8Block").precision("dgrad").title, recipe("FP8RowwiseGWHP").precision("wgrad").title
        ('FP8 blocks', 'BF16')
        """
        return precision_with(frozenset(self.operands[pass_name]), self.scales_of(pass_name)[0])

    def one_copy(self, architecture: str) -> bool:
        """Whether one quantized copy of a tensor serves forward and backward there.

        >>> recipe("FP8Current").one_copy("9.0"), recipe("FP8Current").one_copy("10.0")
        (False, True)
        """
        return architecture in self.one_copy_on

    def multiple_in(self, backend: str) -> int:
        """The number that sizes must be a multiple of with this backend, which may need more than the hardware.

        >>> recipe("MXFP8").multiple_in("transformer_engine"), recipe("FP8Current").multiple_in("")
        (32, 16)
        """
        return int(self.settings.get(backend, {}).get("multiple_of", self.multiple_of))

    def misaligned(self, sizes: Mapping[str, int]) -> str:
        """Why GEMMs of these sizes do not run in this recipe; empty if they do.

        >>> recipe("FP8Block").misaligned({"output features": 16380})
        'output features = 16380 is not a multiple of 16, which FP8Block GEMMs need: pad it to 16384'
        """
        misalignment = self.misalignment(sizes)
        if misalignment is None:
            return ""
        name, size = misalignment
        padded = -(-size // self.multiple_of) * self.multiple_of
        return f"{name} = {size} is not a multiple of {self.multiple_of}, which {self.name} GEMMs need: pad it to {padded}"

    def misalignment(self, sizes: Mapping[str, int]) -> tuple[str, int] | None:
        """The first of these sizes that is not a multiple of what the recipe needs, with its name; None if there is none."""
        return next(((name, size) for name, size in sizes.items() if size % self.multiple_of), None)


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes by name, the baseline first."""
    adapter, known, result = TypeAdapter(Recipe), {item.name for item in fields(Recipe)}, dict[str, Recipe]()
    for name, facts in load_data("gemmscope.recipe", "recipes.toml").items():
        values = complete(Recipe, facts, name=name)
        if facts["scales"] != "none":
            values |= {key: facts[key] for key in OF_QUANTIZATION}
        own = {key: value for key, value in facts.items() if key not in known and isinstance(value, dict)}
        read = adapter.validate_python(values)
        result[name] = replace(read, settings=FactTable(own, "recipe/recipes.toml", name))
    return result


NOT_TRAINED = {
    "mxfp4": "no framework here trains in it; the 4-bit format is NVFP4",
    "mxfp6": "no framework here trains in it",
    "int": "integers are for inference; training uses floating point",
    "fp4": "the 4-bit format is NVFP4",
    "fp16": "training in 16 bits is compared in BF16",
}
"""Beginnings of names of formats that are not recipes, and why."""


def recipe(name: str) -> Recipe:
    """The recipe of that name, or the mix (`kept.py`); case does not matter.

    >>> recipe("fp8current").operands["dgrad"]
    ('e4m3', 'e5m2')
    >>> recipe("FP8Current (in BF16: first 1)").kept
    KeptHigher(recipe='BF16', first_layers=1, last_layers=0, ops=())
    """
    if name in recipes():
        return recipes()[name]
    if (mixed := split_name(name)) is not None:
        return _mixed(*mixed)
    by_lower = {known.lower(): known for known in recipes()}
    if name.lower() not in by_lower:
        similar = [by_lower[match] for match in closest(name.lower(), by_lower)]
        if len(family := [known for lower, known in by_lower.items() if name.lower() in lower]) > 1:
            raise UserError(f"{shown(name)} is a family of recipes", f"name one, or several with commas: {', '.join(family)}")
        hint = f"did you mean {' or '.join(similar)}? " if similar else ""
        why = next((f": {why}" for start, why in NOT_TRAINED.items() if name.lower().startswith(start)), "")
        raise UserError(f"unknown recipe {shown(name)}{why}", f"{hint}recipes: {', '.join(recipes())}")
    return recipes()[by_lower[name.lower()]]


@cache
def _mixed(name: str, kept: KeptHigher) -> Recipe:
    """The mix of a recipe and what is kept in higher precision."""
    base, higher = recipe(name), recipe(kept.recipe)
    kept = replace(kept, recipe=higher.name)
    title = f"{base.name}, with some layers or linears in {higher.name}"
    return replace(base, name=mixed_name(base.name, kept), title=title, kept=kept, base=base.name)
