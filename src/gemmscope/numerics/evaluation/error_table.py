"""The errors of a model as a table of cells: one for each linear of each layer.

A cell is what counts once in the error of a recipe. Experts of one layer that share a name are one cell. Linears outside of the
layers (the head) stay in BF16 and do not count, unless the model has no layers at all. A cell without numbers in some recipe
stays in BF16 there; one that has none in any recipe is left out. A pass that ran but could not be computed, because of NaN in
dY, counts as the mean of that pass over the other linears: without it, the error of the linear would seem smaller.

Where the damage of linears is known, a cell counts in proportion to it, and not by its relative error: the same error does 10,000
times as much in one linear as in another. Forward damage does not see dgrad and wgrad, so that every cell has a second term: an
error of its weight's gradient as large as the gradient's own noise counts as much as the forward damage of an average cell.
Both are scaled so that the recipe with the most damage keeps its relative error: "an error of 5%" is as bad as 5% in every
linear.

Gradients: what low precision does to them has a part from wgrad, and one from the dgrads of later layers. The error of a dgrad
has a part from W, which is the same for all tokens and for many steps, and a part from dY, which differs from token to token.
Both travel to all earlier layers. On the way they are diluted: the gradient of the residual stream is that of later layers plus
what a block adds, and only what is added has passed through quantized GEMMs. How much that is follows from the norms of dY at
the linears that end a block, which read the residual stream's gradient (those of experts read what the router leaves of it). The
share is that of the norms, between what independent gradients (squared norms) and gradients of one direction would have.

Bias stays when many micro-batches are averaged, noise averages out with the gradient's own noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmscope.grouping import grouped
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.numerics import GradientError, LinearError, RecipeError, counted_linears
from gemmscope.roles import role_named

Values = npt.NDArray[np.float64]
LEAST_SIGNAL = 0.02  # share of a gradient's squared norm that is no noise, where the measured one is smaller
# the gradients of these linears pass through the softmax, which removes most of the error of the dgrad before it
SOFTMAX = {"q_proj", "k_proj", "wq", "wk", "query", "key", "q", "k"}


@dataclass(frozen=True)
class ErrorTable:
    """`squares[recipe]`: the squared error of every layer (rows) and linear (columns), weighted by its damage where that is
    known, as its share of the mean over all cells: they add up to the square of the recipe's error. Zero where a layer does not
    have a linear. `relative`: the same of relative errors, all cells alike."""

    layers: tuple[int, ...]
    linears: tuple[str, ...]
    squares: Mapping[str, Values]
    flops: Values
    """Each cell's share of the FLOPs; they add up to 1."""
    ops: tuple[str, ...]
    """Of every linear, as `shapes` calls it; empty where that is not known."""
    relative: Mapping[str, Values] = field(default_factory=dict)
    damage: Mapping[str, Values] = field(default_factory=dict)
    """Recipe → the predicted damage of every cell, in nats per token; empty where it is not known."""
    skipped: Mapping[str, Values] = field(default_factory=dict)
    """Recipe → 1 for the cells that stay in BF16, because it has no numbers for them, else 0; recipes with none are not here."""

    @property
    def recipes(self) -> list[str]:
        """The recipes, the smallest error first."""
        return sorted(self.squares, key=lambda name: (self.error(name), name != BASELINE))

    @property
    def contiguous(self) -> bool:
        """Whether all layers are there from the first one on, so that first and last layers can be named."""
        return self.layers == tuple(range(len(self.layers)))

    def missing(self, recipe: str) -> tuple[str, ...]:
        """The linears that a recipe has no numbers for, somewhere."""
        places = np.argwhere(self.skipped[recipe]) if recipe in self.skipped else ()
        return tuple(dict.fromkeys(self.linears[column] for _, column in places))

    def error(self, recipe: str) -> float:
        """Root mean square of the cells' errors, with this recipe in all of them."""
        return sqrt(self.squares[recipe].sum())

    def figures(self, parts: Mapping[str, Values]) -> dict[str, Any]:
        """Error, relative error and damage of a mix. `parts`: recipe → 1 for the cells that run in it, else 0."""

        def total(values: Mapping[str, Values]) -> float:
            return float(sum((values[name] * cells).sum() for name, cells in parts.items()))

        weighted = {"relative": sqrt(total(self.relative)), "damage": total(self.damage)} if self.damage else {}
        return {"error": sqrt(total(self.squares)), **weighted}


def error_table(linears: Sequence[LinearError]) -> ErrorTable | None:
    """The table of all linears; None if it would have no numbers."""
    counted = [linear for linear in counted_linears(linears) if linear.error is not None]
    if not counted:
        return None
    known: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ops: dict[str, str] = {}
    means, sizes = _mean_squares(counted), _sizes(counted)
    for linear in counted:
        known[linear.layer or 0, linear.linear][linear.recipe].append(_square(linear, means))
        ops.setdefault(linear.linear, linear.op)
    layers, names = sorted({layer for layer, _ in known}), list(ops)
    places = {(layer, name): (layers.index(layer), names.index(name)) for layer, name in known}
    all_squares, skipped = dict[str, Values](), dict[str, Values]()
    for recipe in dict.fromkeys([BASELINE, *(linear.recipe for linear in linears)]):
        squares, absent = np.zeros((len(layers), len(names))), np.zeros((len(layers), len(names)))
        for cell, place in places.items():
            own = known[cell].get(recipe) or known[cell].get(BASELINE, [0.0])  # tensors recorded in BF16 lose nothing in it
            squares[place] = sum(own) / len(own) / len(known)
            absent[place] = recipe != BASELINE and recipe not in known[cell]
        if absent.sum() < len(known):  # else it has no numbers at all
            all_squares[recipe] = squares
            skipped |= {recipe: absent} if absent.any() else {}
    flops = np.zeros((len(layers), len(names)))
    for cell, place in places.items():
        flops[place] = sizes[cell] if all(sizes.values()) else 1.0  # a size is not known: all alike
    damage = {name: _damage(counted, name, places, squares) for name, squares in all_squares.items()}
    gradients = {name: _gradient_shares(counted, name, places, squares) for name, squares in all_squares.items()}
    weighted = _weighted(all_squares, damage, gradients) if any(one.any() for one in damage.values()) else {}
    return ErrorTable(
        tuple(layers), tuple(names), weighted or all_squares, flops / flops.sum(), tuple(ops.values()),
        all_squares, damage if weighted else {}, skipped,
    )  # fmt: skip


Places = Mapping[tuple[int, str], tuple[int, int]]


def _damage(linears: Sequence[LinearError], recipe: str, places: Places, squares: Values) -> Values:
    """The damage of every cell. One that could not be measured counts as an average linear with its relative error."""
    cells = grouped(
        (places[one.layer or 0, one.linear], one) for one in linears if one.recipe == recipe and one.damage is not None
    )
    damage = np.zeros(squares.shape)
    for place, own in cells.items():
        damage[place] = sum(one.damage or 0.0 for one in own) / len(own) * max(one.experts for one in own)
    known = np.array([[(row, column) in cells for column in range(squares.shape[1])] for row in range(squares.shape[0])])
    below = squares[known].sum()
    return damage if not below else np.where(known, damage, squares * damage.sum() / below)


def _gradient_shares(linears: Sequence[LinearError], recipe: str, places: Places, squares: Values) -> Values:
    """Of every cell: the error of its weight's gradient over the gradient's own noise, both squared."""
    known = ((places[one.layer or 0, one.linear], one.gradient) for one in linears if one.recipe == recipe)
    shares = np.zeros(squares.shape)
    for place, own in grouped((place, one) for place, one in known if one is not None).items():
        noise = sum(one.own_noise for one in own)
        shares[place] = sum(one.bias + one.noise for one in own) / noise if noise else 0.0
    return shares


def _weighted(squares: Mapping[str, Values], damage: Mapping[str, Values], gradients: Mapping[str, Values]) -> dict[str, Values]:
    """Squared errors in proportion to the damage, in units that leave the error of the recipe with the most damage as it is."""
    worst = max(damage, key=lambda name: float(damage[name].sum()))
    average = damage[worst].sum() / np.count_nonzero(squares[worst])
    both = {name: own + average * gradients[name] for name, own in damage.items()}
    unit = squares[worst].sum() / both[worst].sum()
    return {name: own * unit for name, own in both.items()}


def _sizes(linears: Sequence[LinearError]) -> dict[tuple[int, str], float]:
    """The relative FLOPs of every cell. For experts: the mean of the recorded experts, times the number of experts.

    Without tokens, as in a checkpoint, it is not known how many tokens an expert gets: there, the recorded experts count.
    """
    cells: dict[tuple[int, str], dict[str, LinearError]] = defaultdict(dict)
    for linear in linears:
        cells[linear.layer or 0, linear.linear][linear.name] = linear
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
    squares = grouped(((linear.recipe, one.pass_name), one.relative.value**2) for linear in linears for one in linear.passes)
    return {key: sum(values) / len(values) for key, values in squares.items()}


def _square(linear: LinearError, means: Means) -> float:
    """The squared error of a linear. Passes that ran but have no errors count as the mean of the others, where there is one."""
    known = {one.pass_name: one.relative.value**2 for one in linear.passes}
    filled = {one.pass_name: means[key] for one in linear.dropped if (key := (linear.recipe, one.pass_name)) in means}
    squares = (filled | known).values()
    return sum(squares) / len(squares) if squares else (linear.error or 0.0) ** 2


def recipe_errors(linears: Sequence[LinearError], table: ErrorTable) -> list[RecipeError]:
    """Every recipe in all linears, the smallest error first; BF16 only where it has an error."""
    rows = []
    for name in table.recipes:
        own = [linear for linear in counted_linears(linears) if linear.recipe == name and linear.error is not None]
        worst = max(own, key=lambda linear: (linear.damage or 0.0, linear.error or 0.0), default=None)
        if worst is not None:
            figures = table.figures({name: np.ones(table.flops.shape)})
            share = gradient_share(own)
            rows.append(RecipeError(recipe=name, worst=worst.name, worst_error=worst.error or 0.0, gradient=share, **figures))
    return rows


def gradient_share(linears: Sequence[LinearError]) -> float | None:
    """The errors of all weight gradients over their own noise, both squared; None if none is known."""
    known = [linear.gradient for linear in linears if linear.gradient is not None]
    noise = sum(one.own_noise for one in known)
    return sum(one.bias + one.noise for one in known) / noise if noise else None


# --- gradients ---


@dataclass(frozen=True)
class Arriving:
    """The squared relative error of a gradient."""

    bias: float = 0.0
    noise: float = 0.0

    def plus(self, other: Arriving, share: float = 1.0) -> Arriving:
        """With another error added, of which a share counts."""
        return Arriving(self.bias + share * other.bias, self.noise + share * other.noise)


def completed(linears: Sequence[LinearError]) -> list[LinearError]:
    """The linears with their damage in nats per token, for a loss that is the mean over the tokens of a micro-batch, and with the
    errors that arrive at their gradients."""
    tokens = max((linear.tokens or 0.0 for linear in linears), default=0.0)
    scaled = [one if one.damage is None else one.model_copy(update={"damage": one.damage * tokens}) for one in linears]
    return with_arriving_errors(scaled)


def with_arriving_errors(linears: Sequence[LinearError]) -> list[LinearError]:
    """The linears with the errors that arrive at their dY included in their gradients' errors."""
    updated: dict[tuple[str, str], GradientError] = {}
    for recipe, own in grouped((linear.recipe, linear) for linear in linears if linear.layer is not None).items():
        signal = _signal(own)
        for name, arriving in _arriving(own).items():
            gradient = next(one.gradient for one in own if one.name == name)
            if gradient is not None:
                bias = gradient.bias + arriving.bias * signal * gradient.squared
                noise = gradient.noise + arriving.noise * gradient.energy + arriving.bias * gradient.own_noise
                updated[recipe, name] = gradient.model_copy(update={"bias": bias, "noise": noise})
    return [
        linear.model_copy(update={"gradient": updated.get((linear.recipe, linear.name), linear.gradient)}) for linear in linears
    ]


def _signal(linears: Iterable[LinearError]) -> float:
    """The share of the gradients' squared norms that is no noise: one for all, because that of a single micro-batch is
    uncertain."""
    known = [one.gradient for one in linears if one.gradient is not None and one.gradient.squared > 0]
    shares = [1 - one.own_noise / one.squared for one in known]
    return min(max(fmean(shares), LEAST_SIGNAL), 1.0) if shares else 1.0


def _arriving(linears: Sequence[LinearError]) -> Mapping[str, Arriving]:
    """The error of dY of every linear, from the last layer to the first one."""
    errors: dict[str, Arriving] = {}
    stream, added, before = Arriving(), list[Arriving](), 0.0
    for block, end in _blocks(linears):
        read = [one.gradient.arriving for one in end if one.gradient is not None and one.experts == 1]
        if norm := fmean(read or [0.0]):
            share = max(1 - sqrt(before / norm), 0.0) / len(added) if before and added else 0.0
            for part in added:
                stream = stream.plus(part, share)
            added, before = [], norm
        inside = stream.plus(_dgrad(end))
        rest = [one for one in block if one not in end]
        for one in block:
            errors[one.name] = stream if one in end or one.linear.rpartition(".")[2] in SOFTMAX else inside
        added.append(_dgrad(end).plus(_dgrad(rest)))
    return errors


def _blocks(linears: Sequence[LinearError]) -> list[tuple[list[LinearError], list[LinearError]]]:
    """The linears of every block, the last block first, and those that end it."""
    blocks = grouped(((one.layer or 0, "attn" in one.linear or "attention" in one.linear), one) for one in linears)
    ordered = [list(blocks[key]) for key in sorted(blocks, key=lambda key: (-key[0], key[1]))]
    return [(block, [one for one in block if (role := role_named(one.op)) is not None and role.ends_block]) for block in ordered]


def _dgrad(linears: Sequence[LinearError]) -> Arriving:
    """The mean error that the dgrads of some linears add."""
    passes = [one for linear in linears for one in linear.passes if one.pass_name == "dgrad"]
    if not passes:
        return Arriving()
    of_weights = [one.relative.value**2 * one.first_share for one in passes]
    return Arriving(fmean(of_weights), fmean(one.relative.value**2 for one in passes) - fmean(of_weights))
