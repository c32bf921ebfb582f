"""The Document of a `NumericsResult`: which recipe or mix, what it loses and gains, where the error is, what it does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from gemmscope import units
from gemmscope.document.charts import Dot, ScatterChart
from gemmscope.document.common import command_facts
from gemmscope.document.model import Advice, Block, Document, KeyFigure, Message, Section, Subject
from gemmscope.document.numerics_tables import (
    depth_charts,
    error_text,
    heat_maps,
    kept_in_baseline,
    kept_names,
    linear_table,
    loss_table,
    mix_name,
    mix_table,
    operand_table,
    recipe_map,
    recipe_table,
    stale_table,
    summary,
    worst_table,
)
from gemmscope.document.table import Facts
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.numerics import Mix, NumericsResult, RecipeError

SYNTHETIC = "SYNTHETIC"
KINDS = {"recording": "recorded tensors", "checkpoint": "the weights of a checkpoint", "synthetic": "SYNTHETIC tensors"}
JUDGE = "Errors rank recipes on the same tensors. Only a loss curve shows whether training converges as in BF16."
WEIGHTS_ONLY = (
    "These are errors of weights only. Activations and gradients, which are harder to quantize, are not in a checkpoint."
)
NOT_REAL = "SYNTHETIC tensors show how outliers affect a format, not what your model contains. Record your training to see that."


def numerics_document(result: NumericsResult, name: str = "") -> Document:
    """Build the Document of the result."""
    answer, because = _answer(result)
    because = [*because, *_along_depth(result)]
    marked = f"{SYNTHETIC}: " if result.source == "synthetic" else ""
    chosen = result.mixed.chosen if result.mixed is not None else None
    return Document(
        kind="numerics",
        title=_title(result),
        subject=Subject(
            f"{result.name}: quantization error of {KINDS[result.source]}", model={"number of layers": result.layers or None}
        ),
        where=_where(result),
        answer=f"{marked}{answer}",
        because=(*because, *_limits(result)),
        key_figures=_figures(result),
        summary=summary(result) if result.recipes else None,
        context=tuple(_context(result)),
        sections=tuple(_sections(result, marked)),
        messages=tuple(map(Message.of, result.findings)),
        advice=Advice(f"{_mix_text(result, chosen)}.", result.mixed.settings)
        if result.mixed and chosen and result.mixed.settings and not _too_close(chosen)
        else None,
        facts={"Method": _method(result)},
        tag=_tag(result),
        next_purpose=_next(result),
        name=name,
    )


def _title(result: NumericsResult) -> str:
    what = f"Quantization error of {result.name}"
    if result.source == "synthetic":
        what = f"{SYNTHETIC} tensors, not recorded: quantization error with the sizes of {result.name}"
    elif result.source == "checkpoint":
        what = f"Quantization error of the weights of {result.name}"
    speeds = f", with speeds on {result.speed_gpu}" if result.speed_of else ""
    return what + speeds + (" (FORECAST)" if result.speed_origin == "forecast" else "")


def _where(result: NumericsResult) -> str:
    if not result.speed_of:
        return f"{SYNTHETIC} tensors" if result.source == "synthetic" else "errors only"
    return result.speed_gpu + (", FORECAST" if result.speed_origin == "forecast" else "")


def _tag(result: NumericsResult) -> str:
    parts = ["SYNTHETIC tensors"] if result.source == "synthetic" else []
    return "; ".join([*parts, *(["speeds are a FORECAST"] if result.speed_origin == "forecast" else [])])


def _context(result: NumericsResult) -> Iterator[str]:
    linears = {linear.name for linear in result.counted}
    layers = f" in {units.counted(result.layers, 'layer')}" if result.layers else ""
    source = {
        "recording": f"recorded {units.steps(result.steps)}",
        "checkpoint": f"weights of {result.origin}",
        "synthetic": f"{SYNTHETIC} tensors: {result.origin.removeprefix(f'{SYNTHETIC}: ')}",
    }[result.source]
    batch = "" if result.source == "synthetic" else " of one micro-batch"
    tokens = f"; {units.counted(result.tokens, 'token')}{batch}" if result.tokens else ""
    sample = f"; a sample of {units.si(result.sampled_bytes, 'B')}" if result.sampled_bytes else ""
    yield f"{source}{tokens}{sample}"
    yield f"{units.counted(len(linears), 'linear')}{layers}; error: root mean square of their relative errors against float32"
    if result.speed_of is not None:
        what = "the training step" if result.speed_of == "step" else "all linears"
        how = "FORECAST, 90% error bars" if result.speed_origin == "forecast" else "measured"
        yield f"speedups: {what} on {result.speed_gpu}, {how}{f'; {result.speed_file}' if result.speed_file else ''}"


# --- the answer -----------------------------------------------------------------------------------------------------------


def _low(result: NumericsResult) -> list[RecipeError]:
    return [row for row in result.recipes if row.recipe != BASELINE]


def _answer(result: NumericsResult) -> tuple[str, list[str]]:
    low, mixed = _low(result), result.mixed
    if not low:
        computed = f"only {BASELINE} was computed" if result.recipes else "nothing could be computed"
        return f"There is no error to show: {computed}.", []
    if mixed is not None and mixed.bound is not None:
        used = [mixed.chosen.recipe, mixed.chosen.higher] if mixed.chosen is not None else []
        because = [*_assumed(result, used), *_alternatives(result, mixed.chosen), _worst(result)]
        return _below_bound(result, mixed.chosen, mixed.bound), because
    smallest, largest, fastest = _same_error(low, low[0]), _same_error(low, low[-1]), _fastest(low)
    least = f"{error_text(low[0].error)}{_speeds(result, smallest)}"
    answer = f"{_have(smallest)} the smallest error of the low-precision recipes, {least}."
    if fastest is not None and fastest not in smallest:
        reason = f"{_called_fastest(fastest)}: error {error_text(fastest.error)}{_speed(result, fastest.speedup)}."
    elif len(low) > len(smallest):
        reason = f"{_have(largest)} the largest error, {error_text(low[-1].error)}."
    else:
        reason = ""
    return answer, [*_assumed(result, [row.recipe for row in smallest]), *filter(None, [reason]), _worst(result)]


def _assumed(result: NumericsResult, recipes: list[str]) -> Iterator[str]:
    """The linears without errors in these recipes, which make their errors smaller."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for recipe, linears in kept_in_baseline(result).items():
        if recipe in recipes:
            groups.setdefault(tuple(linears), []).append(recipe)
    for kept, names in groups.items():
        errors = "The errors of" if len(names) > 1 else "The error of"
        assume = "assume" if len(names) > 1 else "assumes"
        yield f"{errors} {units.listed(names)} {assume} {units.names(kept)} in {BASELINE}."


def _same_error(recipes: list[RecipeError], one: RecipeError) -> list[RecipeError]:
    """The recipes whose error, rounded as it is printed, is the same as this one's."""
    return [row for row in recipes if error_text(row.error) == error_text(one.error)]


def _have(recipes: list[RecipeError]) -> str:
    return f"{units.listed(row.recipe for row in recipes)} {'have' if len(recipes) > 1 else 'has'}"


def _fastest(recipes: list[RecipeError]) -> RecipeError | None:
    """The recipe with the highest speedup; None if no speedup is known."""
    return max((row for row in recipes if row.speedup is not None), key=lambda row: _gain(row.speedup), default=None)


def _called_fastest(fastest: RecipeError) -> str:
    """The fastest recipe, or the recipes that are too close to call."""
    if fastest.rivals:
        return f"The fastest are {units.listed([fastest.recipe, *fastest.rivals])}, too close to call. {fastest.recipe}"
    return f"The fastest is {fastest.recipe}"


def _along_depth(result: NumericsResult) -> Iterator[str]:
    """The error of the last layer's output in the recipe that the answer is about, if a module was run."""
    recipe = _main_recipe(result)
    error = next((row.forward[-1] for row in result.depth if row.recipe == recipe and row.forward), None)
    if error is not None:
        yield f"{recipe} in all linears at once: the output of the last layer has an error of {error_text(error)}."


def _too_close(chosen: Mix) -> bool:
    """Whether the mix is too close to BF16 to call it faster, or slower: its interval is not above 1."""
    return chosen.speedup is not None and chosen.speedup.known and not chosen.speedup.above_one


def _gain(speedup: Interval | None) -> float:
    return speedup.value if speedup is not None else 0.0


def _speed(result: NumericsResult, speedup: Interval | None) -> str:
    """The speedup with its origin; empty if it is not known."""
    return f", {units.speedup(speedup)} {_over_baseline(result)}" if speedup is not None else ""


def _over_baseline(result: NumericsResult) -> str:
    what = "in the training step" if result.speed_of == "step" else "in the linears"
    return f"over {BASELINE} {what}{' (FORECAST)' if result.speed_origin == 'forecast' else ''}"


def _speeds(result: NumericsResult, recipes: list[RecipeError]) -> str:
    """The speedup of a recipe, or those of several by name."""
    known = {row.recipe: row.speedup for row in recipes if row.speedup is not None}
    if len(recipes) == 1 or not known:
        return _speed(result, recipes[0].speedup)
    speedups = ", ".join(f"{name} {units.speedup(speedup)}" for name, speedup in known.items())
    return f": {speedups} {_over_baseline(result)}"


def _mix_text(result: NumericsResult, mix: Mix | None) -> str:
    """A mix with its error and speedup."""
    if mix is None:
        return ""
    return f"{mix_name(mix, kept_names(result))}, error {error_text(mix.error)}{_speed(result, mix.speedup)}"


def _below_bound(result: NumericsResult, chosen: Mix | None, bound: float) -> str:
    limit, smallest = error_text(bound), _low(result)[0]
    least = f"{error_text(smallest.error)} in {smallest.recipe}"
    if chosen is None:
        return f"No mix has an error of at most {limit}: the smallest error of a low-precision recipe is {least}."
    if chosen.recipe == BASELINE and smallest.error <= bound:
        return f"Use {BASELINE}: no recipe and no mix with an error of at most {limit} is faster."
    if chosen.recipe == BASELINE:
        return f"Only {BASELINE} in all linears stays below {limit}: the smallest error of a low-precision recipe is {least}."
    if _too_close(chosen):
        return f"Stay with {BASELINE}: nothing with an error of at most {limit} is faster by more than its interval."
    best = "Fastest" if result.speed_of else "Fewest bits"
    return f"{best} with an error of at most {limit}: {_mix_text(result, chosen)}."


def _alternatives(result: NumericsResult, chosen: Mix | None) -> list[str]:
    """What else could be used: the same recipe in all linears, and the best single recipe below the bound."""
    if chosen is None or chosen.recipe == BASELINE:
        return []
    texts, bound = [], result.mixed.bound if result.mixed is not None else None
    if _too_close(chosen):
        texts.append(f"The fastest is {_mix_text(result, chosen)}.")
    whole = next((row for row in _low(result) if row.recipe == chosen.recipe), None)
    if chosen.is_mixed and whole is not None:
        kept = f"This mix keeps {units.percent(chosen.kept_share)} of the linears' FLOPs in {chosen.higher}."
        texts.append(f"{kept} {whole.recipe} in all linears: error {error_text(whole.error)}{_plain_speed(whole.speedup)}.")
    single = [row for row in _low(result) if bound is not None and row.error <= bound and row.recipe != chosen.recipe]
    complete = [row for row in single if row.recipe not in kept_in_baseline(result)] or single
    known = [row for row in complete if row.speedup is not None] or complete
    if known:
        best = max(known, key=lambda row: _gain(row.speedup))
        other = "Without mixing" if chosen.is_mixed else "Next"
        close = "; too close to call" if not chosen.is_mixed and chosen.recipe in best.rivals else ""
        same = [row.recipe for row in _same_error(known, best)] if best.speedup is None else [best.recipe]
        texts.append(f"{other}: {' or '.join(same)}, error {error_text(best.error)}{_plain_speed(best.speedup)}{close}.")
    return texts


def _plain_speed(speedup: Interval | None) -> str:
    return f", {units.speedup(speedup)}" if speedup is not None else ""


def _worst(result: NumericsResult) -> str:
    """The linears with the largest errors, in the recipe that the answer is about."""
    recipe = _main_recipe(result)
    errors = sorted(
        ((linear.error or 0.0, linear.name) for linear in result.counted if linear.recipe == recipe and linear.error is not None),
        reverse=True,
    )
    if not errors:
        return ""
    named = units.names(f"{name} {error_text(error)}" for error, name in errors[:3])
    return f"Largest errors of single linears in {recipe}: {named}."


def _main_recipe(result: NumericsResult) -> str:
    """The recipe that the answer is about: that of the chosen mix, else the fastest, else the one with the largest error."""
    chosen = result.mixed.chosen if result.mixed is not None else None
    low = _low(result)
    if chosen is not None and chosen.recipe != BASELINE:
        return chosen.recipe
    return (_fastest(low) or low[-1]).recipe if low else BASELINE


def _limits(result: NumericsResult) -> list[str]:
    """What these numbers do not show."""
    if not _low(result):
        return []
    return [{"checkpoint": WEIGHTS_ONLY, "synthetic": NOT_REAL}.get(result.source, JUDGE)]


def _figures(result: NumericsResult) -> tuple[KeyFigure, ...]:
    chosen = result.mixed.chosen if result.mixed is not None else None
    if chosen is None or chosen.recipe == BASELINE:
        return tuple(
            KeyFigure(f"Error of {row.recipe}", error_text(row.error), f"{units.speedup(row.speedup)}" if row.speedup else "")
            for row in _low(result)[:4]
        )
    speed = (
        [KeyFigure(f"Speedup over {BASELINE}", f"{chosen.speedup.value:.2f}x", units.ends(chosen.speedup, 2))]
        if chosen.speedup
        else []
    )
    bound = result.mixed.bound if result.mixed is not None else None
    return (
        KeyFigure("Recipe", chosen.recipe),
        KeyFigure("Error", error_text(chosen.error), f"bound {error_text(bound)}" if bound is not None else ""),
        *speed,
        KeyFigure(f"Kept in {chosen.higher}", units.percent(chosen.kept_share), "of the linears' FLOPs"),
    )


# --- everything -----------------------------------------------------------------------------------------------------------


def _sections(result: NumericsResult, marked: str) -> Iterator[Section]:
    scatter, maps = _scatter(result, marked), list(heat_maps(result, _main_recipe(result), marked))
    by_recipe = recipe_map(result, marked, main=scatter is None and not maps)
    groups: dict[str, list[Block | None]] = {
        "Speed and error": [scatter, recipe_table(result, marked), mix_table(result, marked)],
        "Layers and linears": [*maps, worst_table(result, marked)],
        "Linears and passes": [by_recipe, linear_table(result, marked), operand_table(result, marked)],
        "Delayed scaling": [stale_table(result, marked)],
        "Along depth": [*depth_charts(result, marked), loss_table(result, marked)],
    }
    for title, blocks in groups.items():
        shown = tuple(block for block in blocks if block is not None)
        if shown:
            yield Section(title, shown)


def _scatter(result: NumericsResult, marked: str) -> ScatterChart | None:
    """Speedup against error of the recipes and mixes whose speed is known."""
    known = [(row, row.speedup) for row in _low(result) if row.speedup is not None]
    if not known:
        return None
    dots = tuple(
        Dot(row.recipe, speedup, row.error, (("error", error_text(row.error)), ("speedup", units.speedup(speedup)),
                                             ("worst linear", f"{row.worst} {error_text(row.worst_error)}")))
        for row, speedup in known
    )  # fmt: skip
    mixed = result.mixed
    chosen, short = mixed.chosen if mixed is not None else None, kept_names(result)
    mixes, least = list[Dot](), inf
    for mix in mixed.frontier if mixed is not None else ():  # the fastest first; simpler ones that others beat are in the table
        dot = _dot(mix, short)
        if dot is not None and mix.error < least:
            mixes.append(dot)
            least = mix.error
    forecast = "FORECAST, " if result.speed_origin == "forecast" else ""
    what = "the training step" if result.speed_of == "step" else "all linears"
    return ScatterChart(
        f"{marked}{forecast}speedup of {what} on {result.speed_gpu} against error",
        dots,
        tuple(mixes),
        _dot(chosen, short) if chosen is not None else None,
        bound=mixed.bound if mixed is not None else None,
        note="Lower and further right is better.",
        main=True,
    )


def _dot(mix: Mix, short: Mapping[str, str]) -> Dot | None:
    speedup = mix.speedup if mix.speedup is not None else Interval(1.0) if mix.recipe == BASELINE else None
    if speedup is None:
        return None
    facts = (
        ("error", error_text(mix.error)),
        ("speedup", units.speedup(speedup)),
        ("kept higher", units.percent(mix.kept_share)),
    )
    return Dot(mix_name(mix, short), speedup, mix.error, facts)


def _next(result: NumericsResult) -> str:
    if result.mixed is not None and result.mixed.bound is None and result.recipes:
        return "find the fastest mix below an error bound: add --bound 5% to the same command"
    if result.speed_of is None and result.recipes:
        return "show speedups next to the errors: add --speed RUNFILE, a run file of bench, step or forecast"
    if result.mixed is not None and result.mixed.chosen is not None and result.mixed.chosen.is_mixed:
        return (
            "measure or forecast the mix: write this result with --json, then run gemmscope step or forecast with --mix RUNFILE"
        )
    return ""


def _method(result: NumericsResult) -> Facts:
    lines = [
        ("tensors", f"{KINDS[result.source]}: {result.origin}"),
        ("error of a linear", "root mean square of the relative errors of its GEMMs (fprop, dgrad, wgrad), float32 accumulation"),
        (
            "error of a recipe",
            "root mean square over all linears of all layers; the experts of a layer count once; the head does not",
        ),
        ("time of a mix", "the time in BF16 minus the time that each linear saves in its recipe" if result.speed_of else ""),
        ("computed on", ", ".join([result.device, *(f"{name} {version}" for name, version in result.versions.items())])),
        ("duration", f"{result.seconds:.0f} s" if result.seconds else ""),
    ]
    return (*((name, value) for name, value in lines if value), *command_facts(result))
