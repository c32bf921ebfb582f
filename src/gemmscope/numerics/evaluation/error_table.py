"""The errors of a model as a table of cells: one for each linear of each layer.

A cell is what counts once in the error of a recipe. Experts of one layer that share a name are one cell. Linears outside of the
layers (the head) stay in BF16 and do not count, unless the model has no layers at all. A cell without numbers in some recipe
stays in BF16 there; one that has none in any recipe is left out. A pass that ran but could not be computed, because of NaN in
dY, counts as the mean of that pass over the other linears: without it, the error of the linear would seem smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import numpy.typing as npt

from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.numerics import LinearError, RecipeError, counted_linears

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """`squares[recipe]`: the squared relative error of every layer (rows) and linear (columns), as its share of the mean over all
    cells: they add up to the square of the recipe's error. Zero where a layer does not have a linear."""

    layers: tuple[int, ...]
    linears: tuple[str, ...]
    squares: Mapping[str, Values]
    flops: Values
    """Each cell's share of the FLOPs; they add up to 1."""
    ops: tuple[str, ...]
    """Of every linear, as `shapes` calls it; empty where that is not known."""
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Recipe → linears that it has no numbers for, somewhere."""
    skipped: Mapping[str, Values] = field(default_factory=dict)
    """Recipe → 1 for the cells that stay in BF16 because of that, else 0; those with none are not here."""

    @property
    def recipes(self) -> list[str]:
        """The recipes, the smallest error first."""
        return sorted(self.squares, key=lambda name: (self.error(name), name != BASELINE))

    @property
    def contiguous(self) -> bool:
        """Whether all layers are there from the first one on, so that first and last layers can be named."""
        return self.layers == tuple(range(len(self.layers)))

    def error(self, recipe: str) -> float:
        """Root mean square of the cells' errors, with this recipe in all of them."""
        return sqrt(self.squares[recipe].sum())


def cells_of(linears: Sequence[LinearError]) -> Cells | None:
    """The table of all linears; None if it would have no numbers."""
    known: dict[tuple[int, str], dict[str, list[float]]] = {}
    ops: dict[str, str] = {}
    recipes = dict.fromkeys([BASELINE, *(linear.recipe for linear in linears)])
    counted = [linear for linear in counted_linears(linears) if linear.error is not None]
    means, sizes = _mean_squares(counted), _sizes(counted)
    for linear in counted:
        cell = linear.layer or 0, linear.linear
        squares = known.setdefault(cell, {}).setdefault(linear.recipe, [])
        squares.append(_square(linear, means))
        ops.setdefault(linear.linear, linear.op)
    if not known:
        return None
    layers, names = sorted({layer for layer, _ in known}), list(dict.fromkeys(name for _, name in known))
    shape, count = (len(layers), len(names)), len(known)
    tables = {name: np.zeros(shape) for name in recipes}
    flops, missing, skipped = np.zeros(shape), dict[str, list[str]](), dict[str, Values]()
    for (layer, name), by_recipe in known.items():
        place = layers.index(layer), names.index(name)
        flops[place] = sizes[layer, name]
        baseline = by_recipe.get(BASELINE, [0.0])  # tensors that were recorded in BF16 lose nothing in it
        for recipe in recipes:
            squares = by_recipe.get(recipe, baseline)
            tables[recipe][place] = sum(squares) / len(squares) / count
            if recipe not in by_recipe and recipe != BASELINE:
                missing.setdefault(recipe, []).append(name)
                skipped.setdefault(recipe, np.zeros(shape))[place] = 1.0
    if not flops.all() and any(not sizes[cell] for cell in known):  # a size is not known: all alike
        flops = np.where([[(layer, name) in known for name in names] for layer in layers], 1.0, 0.0)
    absent = {name: tuple(dict.fromkeys(linears)) for name, linears in missing.items()}
    whole = {name: table for name, table in tables.items() if name == BASELINE or len(missing.get(name, ())) < count}
    own_ops = tuple(ops[name] for name in names)
    return Cells(tuple(layers), tuple(names), whole, flops / flops.sum(), own_ops, absent, skipped)


def _sizes(linears: Sequence[LinearError]) -> dict[tuple[int, str], float]:
    """The relative FLOPs of every cell. For experts: the mean of the recorded experts, times the number of experts.

    Without tokens, as in a checkpoint, it is not known how many tokens an expert gets: there, the recorded experts count.
    """
    cells: dict[tuple[int, str], dict[str, LinearError]] = {}
    for linear in linears:
        cells.setdefault((linear.layer or 0, linear.linear), {})[linear.name] = linear
    routed = all(linear.tokens for linear in linears)
    sizes = {}
    for cell, own in cells.items():
        flops = [
            linear.inputs * linear.outputs * linear.gemms * ((linear.tokens or 1.0) if routed else 1.0) for linear in own.values()
        ]
        count = max(len(own), *(linear.experts for linear in own.values())) if routed else len(own)
        sizes[cell] = sum(flops) / len(flops) * count
    return sizes


Means = Mapping[tuple[str, str], float]


def _mean_squares(linears: Sequence[LinearError]) -> Means:
    """Recipe and pass → the mean of the squared errors over all linears."""
    squares: dict[tuple[str, str], list[float]] = {}
    for linear in linears:
        for one in linear.passes:
            squares.setdefault((linear.recipe, one.pass_name), []).append(one.relative.value**2)
    return {key: sum(values) / len(values) for key, values in squares.items()}


def _square(linear: LinearError, means: Means) -> float:
    """The squared error of a linear. Passes that ran but have no errors count as the mean of the others, where there is one."""
    known = {one.pass_name: one.relative.value**2 for one in linear.passes}
    filled = {one.pass_name: means[key] for one in linear.dropped if (key := (linear.recipe, one.pass_name)) in means}
    squares = (filled | known).values()
    return sum(squares) / len(squares) if squares else (linear.error or 0.0) ** 2


def recipe_errors(linears: Sequence[LinearError], cells: Cells) -> list[RecipeError]:
    """Every recipe in all linears, the smallest error first; BF16 only where it has an error."""
    rows = []
    for name in cells.recipes:
        own = [linear for linear in counted_linears(linears) if linear.recipe == name and linear.error is not None]
        worst = max(own, key=lambda linear: linear.error or 0.0, default=None)
        if worst is not None:
            rows.append(RecipeError(recipe=name, error=cells.error(name), worst=worst.name, worst_error=worst.error or 0.0))
    return rows
