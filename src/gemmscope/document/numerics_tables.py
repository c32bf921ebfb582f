"""Tables and charts of quantization errors: recipes, mixes, linears and passes, operands, layers, depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gemmscope import units
from gemmscope.document.charts import CurveChart, HeatCell, HeatMap, Point
from gemmscope.document.table import NOTHING, Cell, Table, columns, number, share_cell, speedup_cell, without_empty
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.numerics import LinearError, Mix, NumericsResult, OperandError, decibels
from gemmscope.workload.ops import PASSES

MOST_WORST = 5  # linears of each recipe
MOST_LABELED = 14  # columns of a heat map that have room for numbers
MOST_KEPT = 6  # parts that the name of a mix lists


def error_text(error: float) -> str:
    """A relative error.

    >>> error_text(0.0373), error_text(0.00168), error_text(0.0)
    ('3.7%', '0.17%', '0%')
    """
    return "0%" if error == 0 else f"{100 * error:.1f}%" if error >= 0.00995 else f"{100 * error:.2g}%"


def error_cell(error: float | None) -> Cell:
    """A relative error; its number is the share itself."""
    return NOTHING if error is None else Cell(error_text(error), error)


def decibel_cell(error: float | None) -> Cell:
    """Signal to quantization noise."""
    ratio_db = decibels(error) if error is not None else None
    return NOTHING if ratio_db is None else Cell(f"{ratio_db:.1f}", ratio_db)


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


def summary(result: NumericsResult) -> Table:
    """The recipes, smallest error first, and the mix to use. A star marks recipes in which some linears have no errors."""
    chosen = result.mixed.chosen if result.mixed is not None else None
    partial = kept_in_baseline(result)
    rows = []
    for row in result.recipes:
        name = Cell(f"{row.recipe} *", level="warning") if row.recipe in partial else Cell(row.recipe)
        worst = (error_cell(row.worst_error), Cell(row.worst)) if row.error else (NOTHING, NOTHING)
        speed = _speed_cells(result, row.speedup, row.recipe)
        rows.append((name, error_cell(row.error), decibel_cell(row.error), *speed, *worst))
    if chosen is not None and chosen.is_mixed:
        speed = _speed_cells(result, chosen.speedup, chosen.recipe)
        rows.append(
            (Cell(f"{chosen.recipe} mixed"), error_cell(chosen.error), decibel_cell(chosen.error), *speed, NOTHING, NOTHING)
        )
    heads = columns(("Recipe",), ("Error", "SQNR dB", *(["Speedup"] if result.speed_of else []), "Worst"), {"SQNR dB": 2})
    last = columns(("Worst linear",), (), {"Worst linear": 1})
    title = f"{'SYNTHETIC: r' if result.source == 'synthetic' else 'R'}ecipes, smallest error first"
    note = (
        f"* Some of its linears have no errors and count as {BASELINE}."
        if partial.keys() & {row.recipe for row in result.recipes}
        else ""
    )
    return Table(title, (*heads, *last), tuple(rows), note)


def recipe_table(result: NumericsResult, marked: str) -> Table | None:
    """Every recipe in all linears, pass by pass."""
    rows = []
    for row in result.recipes:
        own = [one for linear in result.counted if linear.recipe == row.recipe for one in linear.passes]
        errors = [[one.relative.value for one in own if one.pass_name == name] for name in PASSES]
        passes = [error_cell(_rms(values) if values else None) for values in errors]
        speed = _speed_cells(result, row.speedup, row.recipe)
        rows.append((Cell(row.recipe), error_cell(row.error), decibel_cell(row.error), *speed, *passes))
    heads = columns(("Recipe",), ("Error", "SQNR dB", *(["Speedup"] if result.speed_of else []), *PASSES))
    note = "Root mean square over all linears that count."
    return without_empty(Table(f"{marked}Errors of every recipe", heads, tuple(rows), note)) if rows else None


def _speed_cells(result: NumericsResult, speedup: Interval | None, recipe: str) -> list[Cell]:
    if result.speed_of is None:
        return []
    return [Cell("1x", 1.0) if recipe == BASELINE else speedup_cell(speedup)]


def mix_table(result: NumericsResult, marked: str) -> Table | None:
    """The frontier: no other mix has both a smaller error and a smaller cost."""
    mixed, short = result.mixed, kept_names(result)
    if mixed is None or not mixed.frontier:
        return None
    rows = tuple(
        (
            Cell(f"{mix.recipe} *" if mix == mixed.chosen else mix.recipe, level="note" if mix == mixed.chosen else ""),
            Cell(mix.higher if mix.is_mixed else "-"),
            Cell(", ".join(kept_parts(mix, short)) or "-"),
            error_cell(mix.error),
            *_speed_cells(result, mix.speedup, mix.recipe),
            share_cell(mix.kept_share),
        )
        for mix in mixed.frontier
    )
    least = "time" if mixed.cost == "time" else "FLOPs times bits, because no speeds are known"
    star = " The star marks the best mix below the bound." if mixed.chosen is not None else ""
    numbers = ("Error", *(["Speedup"] if result.speed_of else []), "Kept FLOPs")
    heads = columns(("Recipe", "Higher", "Kept higher"), numbers)
    note = f"No other mix has both a smaller error and a smaller cost. Cost: {least}, plus 0.5% for each part to configure.{star}"
    return Table(f"{marked}Mixes: what to keep in a higher precision", heads, rows, note)


# --- layers and linears ---------------------------------------------------------------------------------------------------


def heat_maps(result: NumericsResult, main: str, marked: str) -> Iterator[HeatMap]:
    """Errors of every linear in every layer: the recipe that the answer is about first."""
    layers = sorted({linear.layer for linear in result.linears if linear.layer is not None})
    names = list(dict.fromkeys(linear.linear for linear in result.linears if linear.layer is not None))
    if len(layers) < 2 or not names:
        return
    chosen = result.mixed.chosen if result.mixed is not None else None
    recipes = [row.recipe for row in result.recipes if row.recipe != BASELINE]
    for recipe in sorted(recipes, key=lambda name: name != main):
        errors: dict[tuple[str, int], list[float]] = {}
        for linear in result.linears:
            if linear.recipe == recipe and linear.layer is not None and linear.error is not None:
                errors.setdefault((linear.linear, linear.layer), []).append(linear.error)
        kept = chosen if chosen is not None and chosen.recipe == recipe and chosen.is_mixed else None
        cells = [
            tuple(
                _heat_cell(errors.get((name, layer)), len(layers), kept=_is_kept(kept, name, layer, len(layers)))
                for layer in layers
            )
            for name in reversed(names)
        ]
        yield HeatMap(
            f"{marked}Error of every linear in {recipe}",
            row_name="linear",
            column_name="layer",
            rows=tuple(f"{name} *" if kept is not None and name in kept.linears else name for name in reversed(names)),
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
    errors: dict[tuple[str, str], list[float]] = {}
    for linear in result.counted:
        if linear.error is not None:
            errors.setdefault((linear.linear, linear.recipe), []).append(linear.error)
    cells = tuple(tuple(_heat_cell(errors.get((name, recipe)), len(recipes)) for recipe in recipes) for name in reversed(names))
    if not recipes or len(names) < 2:
        return None
    title = f"{marked}Error of every linear in every recipe"
    return HeatMap(
        title,
        row_name="linear",
        column_name="recipe",
        rows=tuple(reversed(names)),
        columns=tuple(recipes),
        cells=cells,
        main=main,
        measure="error",
        unit="%",
        line="",
        top_first=True,
    )


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


def worst_table(result: NumericsResult, marked: str) -> Table | None:
    """The linears with the largest errors of each recipe, with the pass and the operand that contribute the most."""
    rows = []
    for recipe in (row.recipe for row in result.recipes if row.recipe != BASELINE):
        own = [linear for linear in result.counted if linear.recipe == recipe and linear.error is not None]
        largest = sorted(own, key=lambda linear: -(linear.error or 0.0))[:MOST_WORST]
        rows += [(Cell(recipe), Cell(linear.name), error_cell(linear.error), *_worst_pass(linear)) for linear in largest]
    heads = (
        *columns(("Recipe", "Linear"), ("Error",)),
        *columns(("Worst pass",), ("Its error",)),
        *columns(("Mostly from",), ("Share",)),
    )
    return without_empty(Table(f"{marked}The linears with the largest errors", heads, tuple(rows))) if rows else None


def _worst_pass(linear: LinearError) -> tuple[Cell, ...]:
    if not linear.passes:
        return (NOTHING,) * 4
    worst = max(linear.passes, key=lambda one: one.relative.value)
    first = worst.first_share >= 0.5
    operand = worst.operands[0 if first else 1]
    error = worst.relative
    cell = Cell(error_text(error.value), error.value, error.low, error.high)
    return Cell(worst.pass_name), cell, Cell(operand.tensor), share_cell(worst.first_share if first else 1 - worst.first_share)


def linear_table(result: NumericsResult, marked: str) -> Table | None:
    """Every linear over all layers, pass by pass, in every recipe."""
    groups: dict[tuple[str, str], list[LinearError]] = {}
    for linear in result.linears:
        if linear.error is not None and linear.recipe != BASELINE:
            groups.setdefault((linear.recipe, linear.linear), []).append(linear)
    rows, counted = [], {linear.linear for linear in result.counted}
    order = [row.recipe for row in result.recipes]
    for (recipe, name), own in sorted(
        groups.items(), key=lambda pair: order.index(pair[0][0]) if pair[0][0] in order else len(order)
    ):
        passes = {
            pass_name: [one for linear in own for one in linear.passes if one.pass_name == pass_name] for pass_name in PASSES
        }
        cosines = [one.cosine for one in passes["wgrad"] if one.cosine is not None]
        rows.append(
            (
                Cell(recipe),
                Cell(name if name in counted else f"{name} (does not count)"),
                error_cell(_rms(linear.error or 0.0 for linear in own)),
                *(error_cell(_rms(one.relative.value for one in ones) if ones else None) for ones in passes.values()),
                number(min(cosines), f"{min(cosines):.4f}") if cosines else NOTHING,
            )
        )
    heads = columns(("Recipe", "Linear"), ("Error", *PASSES, "Lowest cosine of wgrad"))
    cosine = " Cosine: between the weight gradient and the exact one, lowest of all layers."
    note = f"Root mean square over all layers.{cosine if any(row[-1] is not NOTHING for row in rows) else ''}"
    return without_empty(Table(f"{marked}Errors of every linear, pass by pass", heads, tuple(rows), note)) if rows else None


def operand_table(result: NumericsResult, marked: str) -> Table | None:
    """X, W and dY as one pass reads them: error, underflow, saturation, range, and the share of the GEMM's error."""
    groups: dict[tuple[str, str, str], list[tuple[OperandError, float | None]]] = {}
    for linear in result.counted:
        if linear.recipe == BASELINE:
            continue
        for one in linear.passes:
            for operand, share in zip(one.operands, (one.first_share, 1 - one.first_share), strict=True):
                groups.setdefault((linear.recipe, one.pass_name, operand.tensor), []).append((operand, share))
        if linear.weight is not None:
            groups.setdefault((linear.recipe, "", "W"), []).append((linear.weight, None))
    rows = tuple(
        (Cell(recipe), Cell(pass_name or "-"), Cell(tensor), *_operand_cells(own))
        for (recipe, pass_name, tensor), own in groups.items()
    )
    heads = (*columns(("Recipe", "Pass", "Operand", "Format"), ("Error", "Share of error", "Underflow", "Saturated", "Octaves")),)
    note = (
        "Over all linears: root mean square of errors; mean share of the GEMM's squared error; the largest shares of values that "
        "become zero, or are larger than the format can hold, in any linear; the widest range of any linear in powers of two."
    )
    return without_empty(Table(f"{marked}Operands of every pass", heads, rows, note)) if rows else None


def _operand_cells(own: Sequence[tuple[OperandError, float | None]]) -> tuple[Cell, ...]:
    operands, shares = [operand for operand, _ in own], [share for _, share in own if share is not None]
    octaves = [operand.octaves for operand in operands if operand.octaves is not None]
    return (
        Cell(operands[0].format),
        error_cell(_rms(operand.relative for operand in operands)),
        share_cell(sum(shares) / len(shares) if shares else None),
        share_cell(max(operand.underflow for operand in operands)),
        share_cell(max(operand.saturated for operand in operands)),
        number(max(octaves), f"{max(octaves):.0f}") if octaves else NOTHING,
    )


# --- delayed scaling, depth -------------------------------------------------------------------------------------------------


def stale_table(result: NumericsResult, marked: str) -> Table | None:
    """The errors of delayed scaling, which uses scales of earlier steps, and those with the scale of the step itself."""
    rows = tuple(
        (
            Cell(stale.name),
            Cell(stale.tensor),
            number(stale.growth, f"{stale.growth:.2f}x"),
            share_cell(stale.saturated),
            error_cell(stale.relative),
            error_cell(stale.fresh_relative),
        )
        for stale in sorted(result.stale, key=lambda stale: stale.fresh_relative - stale.relative)
    )
    heads = columns(("Linear", "Tensor"), ("Maximum over history", "Saturated", "Error", "With its own scale"))
    note = "Scales from the maxima of earlier steps: where a tensor grows above them, its largest values saturate."
    return Table(f"{marked}Delayed scaling on recorded steps", heads, rows, note) if rows else None


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
            yield CurveChart(f"{marked}Error of {title}", "layers passed", series, unit="% error", figure=True)


def loss_table(result: NumericsResult, marked: str) -> Table | None:
    """How much each recipe changes the loss of one batch."""
    rows = tuple(
        (Cell(row.recipe), error_cell(row.forward[-1] if row.forward else None), number(row.loss, f"{row.loss:+.2g}"))
        for row in result.depth
        if row.loss is not None
    )
    note = "For one batch, without updating the weights. It ranks recipes, but does not predict later steps."
    heads = columns(("Recipe",), ("Error of the last layer", "Loss with the recipe minus without"))
    return Table(f"{marked}At the end of the model", heads, rows, note) if rows else None
