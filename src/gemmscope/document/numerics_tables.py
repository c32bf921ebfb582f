"""Tables and charts of quantization errors: recipes, mixes, linears and passes, operands, layers, depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gemmscope import units
from gemmscope.document.charts import CurveChart, HeatCell, HeatMap, Point
from gemmscope.document.common import notes, phrase
from gemmscope.document.table import BASELINE_CELL, Cell, Column, Key, Table, Value, across, error_text, grouped, table
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.numerics import (
    LinearError,
    Mix,
    NumericsResult,
    OperandError,
    PassError,
    RecipeError,
    decibels,
)
from gemmscope.workload.ops import PASSES

MOST_WORST = 5  # linears of each recipe
MOST_LABELED = 14  # columns of a heat map that have room for numbers
MOST_KEPT = 6  # parts that the name of a mix lists


def kept_names(result: NumericsResult) -> dict[str, str]:
    """Short names of linears: the last part of the name, if it is not a number and no other linear has the same:
    mlp.down_proj → down_proj."""
    names = list(dict.fromkeys(linear.linear for linear in result.linears))
    ends = [name.rpartition(".")[2] for name in names]
    return {name: end if ends.count(end) == 1 and not end.isdigit() else name for name, end in zip(names, ends, strict=True)}


def kept_parts(mix: Mix, short: Mapping[str, str] = {}) -> list[str]:
    """The parts that a mix keeps in a higher precision. `short`: short names of linears.

    >>> kept_parts(Mix(recipe="NVFP4", higher="BF16", first_layers=1, last_layers=2, linears=("mlp.down_proj",), error=0.1))
    ['the first layer', 'the last 2 layers', 'mlp.down_proj']
    """
    ends = [
        f"the {end} layer" if count == 1 else f"the {end} {count} layers"
        for count, end in ((mix.first_layers, "first"), (mix.last_layers, "last"))
        if count
    ]
    return [*ends, *(short.get(name, name) for name in mix.linears)]


def mix_name(mix: Mix, short: Mapping[str, str] = {}) -> str:
    """A mix as text.

    >>> mix_name(Mix(recipe="NVFP4", higher="MXFP8", linears=("mlp.down_proj",), error=0.1))
    'NVFP4 with mlp.down_proj in MXFP8'
    >>> mix_name(Mix(recipe="NVFP4", higher="MXFP8", last_layers=1, linears=("up",), error=0.1))
    'NVFP4 with the last layer and up in MXFP8'
    """
    if not mix.is_mixed:
        return f"{mix.recipe} in all linears"
    parts = kept_parts(mix, short)
    kept = units.listed(parts) if len(parts) <= MOST_KEPT else units.names(parts, MOST_KEPT)
    return f"{mix.recipe} with {kept} in {mix.higher}"


def kept_in_baseline(result: NumericsResult) -> dict[str, list[str]]:
    """Recipe → linears without errors in it, which count as BF16."""
    kept: dict[str, list[str]] = {}
    for finding in result.findings:
        recipes, linears = finding.facts.get("recipes"), finding.facts.get("linears")
        if finding.code == "numerics-stays-in-baseline" and isinstance(recipes, list) and isinstance(linears, list):
            kept |= dict.fromkeys(recipes, linears)
    return kept


def weighted(result: NumericsResult) -> bool:
    """Whether errors are weighted by damage."""
    return any(row.damage is not None for row in result.recipes)


def damage_shares(result: NumericsResult, recipe: str) -> dict[str, float]:
    """The share of every linear in the damage of a recipe; the recorded experts of a layer stand for all of them."""
    own = [linear for linear in result.counted if linear.recipe == recipe and linear.damage is not None]
    recorded = {key: len(names) for key, names in grouped(((one.layer, one.linear), one.name) for one in own).items()}
    damage = {one.name: (one.damage or 0.0) * one.experts / recorded[one.layer, one.linear] for one in own}
    whole = sum(damage.values())
    return {name: value / whole for name, value in damage.items()} if whole else {}


def _speed(row: RecipeError | Mix) -> Value:
    return BASELINE_CELL if row.recipe == BASELINE else row.speedup


def _error_columns(result: NumericsResult, drop: int = 0) -> list[Column[RecipeError | Mix]]:
    """The error, the signal to quantization noise, the damage, and the speedup if any is known."""

    def relative(row: RecipeError | Mix) -> float:
        return row.error if row.relative is None else row.relative

    return [
        Column("Error", lambda row: row.error, "error"),
        Column("Relative", relative, "error", when=weighted(result)),
        Column("SQNR dB", lambda row: decibels(relative(row)), ".1f", drop),
        Column("Damage", lambda row: row.damage, ".2g", when=weighted(result)),
        Column("Speedup", _speed, "x", when=result.speed_of is not None),
    ]


def summary(result: NumericsResult) -> Table:
    """The recipes, smallest error first, and the mix to use. A star marks recipes in which some linears have no errors."""
    chosen, partly = result.mixed.chosen if result.mixed is not None else None, kept_in_baseline(result)

    def name(row: RecipeError | Mix) -> Value:
        if isinstance(row, Mix):
            return f"{row.recipe} mixed"
        return Cell(f"{row.recipe} *", level="warning") if row.recipe in partly else row.recipe

    rows: list[RecipeError | Mix] = [*result.recipes, *([chosen] if chosen is not None and chosen.is_mixed else [])]
    title = f"{'SYNTHETIC: r' if result.source == 'synthetic' else 'R'}ecipes, smallest error first"
    star = phrase("numerics-star", baseline=BASELINE) if partly.keys() & {row.recipe for row in result.recipes} else ""
    return table(
        "summary",
        title,
        rows,
        Column("Recipe", name),
        *_error_columns(result, drop=2),
        Column(
            "Gradients", lambda row: row.gradient if isinstance(row, RecipeError) else None, "%", drop=2, when=weighted(result)
        ),
        Column("Worst", lambda row: row.worst_error if isinstance(row, RecipeError) and row.error else None, "error", drop=1),
        Column("Worst linear", lambda row: row.worst if isinstance(row, RecipeError) and row.error else None, drop=1),
        note=star,
    )


def _in_pass(ones: Iterable[LinearError], pass_name: str) -> list[PassError]:
    return [one for linear in ones for one in linear.passes if one.pass_name == pass_name]


def _pass_error(ones: Iterable[LinearError], pass_name: str) -> float | None:
    """The error of one pass over several linears."""
    errors = [one.relative.value for one in _in_pass(ones, pass_name)]
    return _rms(errors) if errors else None


def recipe_table(result: NumericsResult, marked: str) -> Table:
    """Every recipe in all linears, pass by pass."""
    counted = grouped((linear.recipe, linear) for linear in result.counted)
    return table(
        "recipes",
        f"{marked}Errors of every recipe",
        result.recipes,
        Column("Recipe", lambda row: row.recipe),
        *_error_columns(result),
        *across(PASSES, lambda row, one: _pass_error(counted.get(row.recipe, ()), one), "error"),
        note=notes({"numerics-mean-of-linears": not weighted(result), "numerics-damage": weighted(result)}),
        sparse=True,
    )


def mix_table(result: NumericsResult, marked: str) -> Table | None:
    """The frontier: no other mix has both a smaller error and a smaller cost."""
    mixed, short = result.mixed, kept_names(result)
    if mixed is None:
        return None
    chosen = mixed.chosen

    note = phrase("numerics-frontier", cost=phrase(f"numerics-cost-of-{mixed.cost}"))
    note += f" {phrase('numerics-best-mix')}" if chosen is not None else ""
    return table(
        "mixes",
        f"{marked}Mixes: what to keep in a higher precision",
        mixed.frontier,
        Column("Recipe", lambda mix: Cell(f"{mix.recipe} *", level="note") if mix == chosen else mix.recipe),
        Column("Higher", lambda mix: mix.higher if mix.is_mixed else None),
        Column("Kept higher", lambda mix: ", ".join(kept_parts(mix, short)) or None),
        Column("Error", lambda mix: mix.error, "error"),
        Column("Speedup", lambda mix: _speed(mix), "x", when=result.speed_of is not None),
        Column("Kept FLOPs", lambda mix: mix.kept_share, "%"),
        note=note,
    )


# --- layers and linears ---------------------------------------------------------------------------------------------------


def heat_maps(result: NumericsResult, main: str, marked: str) -> Iterator[HeatMap]:
    """Errors of every linear in every layer: the recipe that the answer is about first."""
    layers = sorted({linear.layer for linear in result.linears if linear.layer is not None})
    names, short = list(dict.fromkeys(linear.linear for linear in result.linears if linear.layer is not None)), kept_names(result)
    if len(layers) < 2 or not names:
        return
    chosen = result.mixed.chosen if result.mixed is not None else None
    recipes = [row.recipe for row in result.recipes if row.recipe != BASELINE]
    for recipe in sorted(recipes, key=lambda name: name != main):
        errors = _errors((linear for linear in result.linears if linear.recipe == recipe), lambda linear: linear.layer)
        kept = chosen if chosen is not None and chosen.recipe == recipe and chosen.is_mixed else None
        cells = [
            tuple(
                _heat_cell(errors.get((name, layer)), len(layers), kept=_is_kept(kept, name, layer, len(layers)))
                for layer in layers
            )
            for name in reversed(names)
        ]
        yield HeatMap(
            f"map {recipe}",
            f"{marked}Error of every linear in {recipe}",
            row_name="linear",
            column_name="layer",
            rows=tuple(short[name] + " *" * (kept is not None and name in kept.linears) for name in reversed(names)),
            columns=tuple(f"{layer} *" if _is_kept(kept, "", layer, len(layers)) else str(layer) for layer in layers),
            cells=tuple(cells),
            main=recipe == main,
            measure="error",
            unit="%",
            legend=(("*", f"kept in {kept.higher}"),) if kept is not None else (),
            line="outline" if kept is not None else "",
            line_meaning=f"linears and layers kept in {kept.higher}" if kept is not None else "",
            turned=True,
        )


def recipe_map(result: NumericsResult, marked: str, *, main: bool) -> HeatMap | None:
    """Every linear over all layers, in every recipe."""
    recipes = [row.recipe for row in result.recipes if row.recipe != BASELINE]
    names = list(dict.fromkeys(linear.linear for linear in result.counted if linear.error is not None))
    errors = _errors(result.counted, lambda linear: linear.recipe)
    cells = tuple(tuple(_heat_cell(errors.get((name, recipe)), len(recipes)) for recipe in recipes) for name in reversed(names))
    if not recipes or len(names) < 2:
        return None
    return HeatMap(
        "map",
        f"{marked}Error of every linear in every recipe",
        row_name="linear",
        column_name="recipe",
        rows=tuple(kept_names(result)[name] for name in reversed(names)),
        columns=tuple(recipes),
        cells=cells,
        main=main,
        measure="error",
        unit="%",
        line="",
        top_first=True,
    )


def _errors(linears: Iterable[LinearError], of: Callable[[LinearError], Key]) -> dict[tuple[str, Key], tuple[float, ...]]:
    """The errors of each linear, by what is across the map."""
    return grouped(((linear.linear, of(linear)), linear.error) for linear in linears if linear.error is not None)


def _is_kept(mix: Mix | None, name: str, layer: int, layers: int) -> bool:
    return mix is not None and (name in mix.linears or layer < mix.first_layers or layer >= layers - mix.last_layers)


def _heat_cell(errors: Sequence[float] | None, across: int, *, kept: bool = False) -> HeatCell:
    if not errors:
        return HeatCell(certain=not kept)
    error = _rms(errors)
    return HeatCell(error_text(error) if across <= MOST_LABELED else "", error, certain=not kept, text=error_text(error))


def _rms(values: Iterable[float]) -> float:
    squares = [value**2 for value in values]
    return float(sum(squares) / len(squares)) ** 0.5 if squares else 0.0


def worst_table(result: NumericsResult, marked: str) -> Table:
    """The linears with the largest errors of each recipe, with the pass and the operand that contribute the most."""
    rows = []
    shares = {row.recipe: damage_shares(result, row.recipe) for row in result.recipes if row.recipe != BASELINE}
    for recipe, known in shares.items():
        own = [linear for linear in result.counted if linear.recipe == recipe and linear.error is not None]
        rows += sorted(own, key=lambda linear: (-known.get(linear.name, 0.0), -(linear.error or 0.0)))[:MOST_WORST]

    def of_gradient(row: LinearError) -> float | None:
        return row.gradient.share if row.gradient is not None else None

    def of_worst(value: Callable[[PassError], Value]) -> Callable[[LinearError], Value]:
        return lambda row: value(max(row.passes, key=lambda one: one.relative.value)) if row.passes else None

    return table(
        "worst",
        f"{marked}The linears with the {'most damage' if weighted(result) else 'largest errors'}",
        rows,
        Column("Recipe", lambda linear: linear.recipe),
        Column("Linear", lambda linear: linear.name),
        Column("Damage", lambda linear: shares[linear.recipe].get(linear.name), "%", when=weighted(result)),
        Column("Error", lambda linear: linear.error, "error"),
        Column("Gradient", of_gradient, "%", when=weighted(result)),
        Column("Worst pass", of_worst(lambda one: one.pass_name)),
        Column("Its error", of_worst(lambda one: one.relative), "error"),
        Column("Mostly from", of_worst(lambda one: one.operands[0 if one.first_share >= 0.5 else 1].tensor)),
        Column("Share", of_worst(lambda one: max(one.first_share, 1 - one.first_share)), "%"),
        sparse=True,
    )


def linear_table(result: NumericsResult, marked: str) -> Table:
    """Every linear over all layers, pass by pass, in every recipe."""
    low = [linear for linear in result.linears if linear.error is not None and linear.recipe != BASELINE]
    groups = grouped(((linear.recipe, linear.linear), linear) for linear in low)
    counted, order = {linear.linear for linear in result.counted}, [row.recipe for row in result.recipes]
    rows = sorted(groups.values(), key=lambda own: order.index(own[0].recipe) if own[0].recipe in order else len(order))

    def cosine(own: Sequence[LinearError]) -> float | None:
        return min((one.cosine for one in _in_pass(own, "wgrad") if one.cosine is not None), default=None)

    note = {"numerics-mean-of-layers": True, "numerics-cosine": any(cosine(own) is not None for own in rows)}
    return table(
        "linears",
        f"{marked}Errors of every linear, pass by pass",
        rows,
        Column("Recipe", lambda own: own[0].recipe),
        Column("Linear", lambda own: own[0].linear + ("" if own[0].linear in counted else " (does not count)")),
        Column("Error", lambda own: _rms(linear.error or 0.0 for linear in own), "error"),
        *across(PASSES, lambda own, one: _pass_error(own, one), "error"),
        Column("Lowest cosine of wgrad", cosine, ".4f"),
        note=notes(note),
        sparse=True,
    )


def kept_table(result: NumericsResult, marked: str) -> Table:
    """What recipes leave in BF16, the output layer and routers: what it would lose."""
    outside = [one for one in result.linears if one.layer is None and one.passes and one.recipe != BASELINE]
    rows = list(grouped(((one.recipe, one.linear), one) for one in outside).values()) if result.layers else []
    return table(
        "kept",
        f"{marked}What stays in BF16, were it quantized",
        rows,
        Column("Recipe", lambda own: own[0].recipe),
        Column("Linear", lambda own: own[0].linear),
        Column("Error of fprop", lambda own: _pass_error(own, "fprop"), "error"),
        Column("Damage", lambda own: sum(one.damage or 0.0 for one in own) or None, ".2g"),
        Column("Tokens with other experts", lambda own: _mean(one.rerouted for one in own), "%"),
        note=phrase("numerics-kept-table"),
        sparse=True,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _operands(linear: LinearError) -> Iterator[tuple[str, OperandError, float | None]]:
    """Every tensor as one pass reads it, with its share of the GEMM's error; the weight itself is of no pass."""
    for one in linear.passes:
        yield from zip([one.pass_name] * 2, one.operands, (one.first_share, 1 - one.first_share), strict=True)
    if linear.weight is not None:
        yield "", linear.weight, None


def operand_table(result: NumericsResult, marked: str) -> Table:
    """X, W and dY as one pass reads them: error, underflow, saturation, range, and the share of the GEMM's error."""
    groups = grouped(
        ((linear.recipe, pass_name, operand.tensor), (operand, share))
        for linear in result.counted
        if linear.recipe != BASELINE
        for pass_name, operand, share in _operands(linear)
    )
    rows = [
        (*key, [operand for operand, _ in of_key], [share for _, share in of_key if share is not None])
        for key, of_key in groups.items()
    ]
    return table(
        "operands",
        f"{marked}Operands of every pass",
        rows,
        Column("Recipe", lambda row: row[0]),
        Column("Pass", lambda row: row[1] or None),
        Column("Operand", lambda row: row[2]),
        Column("Format", lambda row: row[3][0].format),
        Column("Error", lambda row: _rms(operand.relative for operand in row[3]), "error"),
        Column("Share of error", lambda row: sum(row[4]) / len(row[4]) if row[4] else None, "%"),
        Column("Underflow", lambda row: max(operand.underflow for operand in row[3]), "%"),
        Column("Saturated", lambda row: max(operand.saturated for operand in row[3]), "%"),
        Column("Octaves", lambda row: max((one.octaves for one in row[3] if one.octaves is not None), default=None), ".0f"),
        note=phrase("numerics-operands"),
        sparse=True,
    )


# --- delayed scaling, depth -------------------------------------------------------------------------------------------------


def stale_table(result: NumericsResult, marked: str) -> Table:
    """How far tensors grew above the maxima of earlier steps, which delayed scaling takes its scales from."""
    return table(
        "delayed",
        f"{marked}Delayed scaling on recorded steps",
        sorted(result.stale, key=lambda stale: -stale.growth),
        Column("Linear", lambda stale: stale.name),
        Column("Tensor", lambda stale: stale.tensor),
        Column("Maximum over history", lambda stale: Cell(f"{stale.growth:.2f}x", stale.growth), "x"),
        note=phrase("numerics-delayed"),
    )


def probed_table(result: NumericsResult, marked: str) -> Table:
    """What a probe measured, beside what is predicted."""
    return table(
        "damage",
        f"{marked}Damage, predicted and measured",
        result.probed,
        Column("Recipe", lambda one: one.recipe),
        Column("Layers", lambda one: "all" if one.layer is None else str(one.layer)),
        Column("Predicted", lambda one: one.predicted, ".2g"),
        Column("Measured", lambda one: one.measured, ".2g"),
        note=phrase("numerics-probed"),
    )


def moments_table(result: NumericsResult, marked: str) -> Table:
    """Every recipe in the first recording and in later ones."""
    rows = [(moment, row) for moment in result.moments for row in moment.recipes if row.recipe != BASELINE]
    return table(
        "moments",
        f"{marked}Recordings of one training",
        sorted(rows, key=lambda pair: pair[1].recipe),
        Column("Recipe", lambda pair: pair[1].recipe),
        Column("Recording", lambda pair: pair[0].origin),
        Column("Steps", lambda pair: units.steps(pair[0].steps)),
        Column("Error", lambda pair: pair[1].error, "error"),
        Column("Damage", lambda pair: pair[1].damage, ".2g"),
        Column("Gradients", lambda pair: pair[1].gradient, "%"),
        Column("Worst linear", lambda pair: pair[1].worst),
        Column("Octaves of X", lambda pair: pair[0].octaves.get("X"), ".1f"),
        Column("Octaves of dY", lambda pair: pair[0].octaves.get("dY"), ".1f"),
        note=phrase("numerics-moments"),
        sparse=True,
    )


def depth_charts(result: NumericsResult, marked: str) -> Iterator[CurveChart]:
    """The error of the output of every layer, and of its gradient, with a recipe in all linears at once."""
    for title, values in (
        ("the output of a layer, forward", {row.recipe: row.forward for row in result.depth}),
        ("the gradient that leaves a layer, backward", {row.recipe: row.backward[::-1] for row in result.depth}),
    ):
        series = {
            name: tuple(
                Point(str(place), Interval(100 * error), (("error", error_text(error)),)) for place, error in enumerate(errors, 1)
            )
            for name, errors in values.items()
            if errors
        }
        if series:
            yield CurveChart(
                f"depth {title.rpartition(' ')[2]}",
                f"{marked}Error of {title}",
                "layers passed",
                series,
                unit="% error",
                figure=True,
            )


def loss_table(result: NumericsResult, marked: str) -> Table:
    """How much each recipe changes the loss of one batch."""
    return table(
        "loss",
        f"{marked}At the end of the model",
        [row for row in result.depth if row.loss is not None],
        Column("Recipe", lambda row: row.recipe),
        Column("Error of the last layer", lambda row: row.forward[-1] if row.forward else None, "error"),
        Column("Loss with the recipe minus without", lambda row: row.loss, "+.2g"),
        note=phrase("numerics-one-batch"),
    )
