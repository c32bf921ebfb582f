"""The Document of a `NumericsResult`: which recipe or mix, what it loses and gains, where the error is, what it does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from gemmscope import units
from gemmscope.document.charts import Dot, ScatterChart
from gemmscope.document.common import command_facts, facts, phrase, sections, versions_text
from gemmscope.document.model import Advice, Document, KeyFigure, Message, Section, Subject
from gemmscope.document.numerics_tables import (
    damage_shares,
    depth_charts,
    heat_maps,
    kept_in_baseline,
    kept_names,
    kept_table,
    linear_table,
    loss_table,
    mix_name,
    mix_table,
    moments_table,
    operand_table,
    probed_table,
    recipe_map,
    recipe_table,
    stale_table,
    summary,
    weighted,
    worst_table,
)
from gemmscope.document.table import Facts, error_text, grouped
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.numerics import Mix, NumericsResult, RecipeError

MOSTLY = 0.75  # of the FLOPs
SYNTHETIC = "SYNTHETIC"
KINDS = {"recording": "recorded tensors", "checkpoint": "the weights of a checkpoint", "synthetic": "SYNTHETIC tensors"}


def numerics_document(result: NumericsResult, name: str = "") -> Document:
    """Build the Document of the result."""
    (answer, because), (purpose, command) = _answer(result), _next(result)
    synthetic, forecast = result.source == "synthetic", result.speed_origin == "forecast"
    marked, mixed, chosen = f"{SYNTHETIC}: " if synthetic else "", result.mixed, _chosen(result)
    speeds = f", with speeds on {result.speed_gpu}" if result.speed_of else ""
    where = f"{SYNTHETIC} tensors" if synthetic else "errors only"
    tags = [f"{SYNTHETIC} tensors" if synthetic else "", "speeds are a FORECAST" if forecast else ""]
    advised = mixed is not None and mixed.settings and chosen is not None and not (_too_close(chosen) or _mostly_baseline(chosen))
    return Document(
        kind="numerics",
        title=phrase(f"numerics-title-{result.source}", name=result.name) + speeds + (" (FORECAST)" if forecast else ""),
        subject=Subject(
            f"{result.name}: quantization error of {KINDS[result.source]}", model={"number of layers": result.layers or None}
        ),
        where=result.speed_gpu + (", FORECAST" if forecast else "") if result.speed_of else where,
        answer=f"{marked}{answer}",
        because=(*because, *_along_depth(result), *([phrase(f"numerics-limit-{result.source}")] if _low(result) else [])),
        key_figures=_figures(result),
        summary=summary(result) if result.recipes else None,
        context=tuple(_context(result)),
        sections=_sections(result, marked),
        messages=tuple(map(Message.of, result.findings)),
        advice=Advice(f"{_mix_text(result, chosen)}.", mixed.settings) if advised and mixed is not None else None,
        facts={"Method": _method(result)},
        tag="; ".join(filter(None, tags)),
        next_purpose=purpose,
        next_command=command,
        name=name,
    )


def _chosen(result: NumericsResult) -> Mix | None:
    """The mix to use; None if there is none."""
    return result.mixed.chosen if result.mixed is not None else None


def _context(result: NumericsResult) -> Iterator[str]:
    linears = {linear.name for linear in result.counted}
    origin = result.origin.removeprefix(f"{SYNTHETIC}: ")
    source = phrase(f"numerics-source-{result.source}", steps=units.steps(result.steps) if result.steps else "", origin=origin)
    batch = "" if result.source == "synthetic" else " of one micro-batch"
    tokens = f"; {units.counted(result.tokens, 'token')}{batch}" if result.tokens else ""
    yield f"{source}{tokens}"
    layers = f" in {units.counted(result.layers, 'layer')}" if result.layers else ""
    yield phrase("numerics-weighted" if weighted(result) else "numerics-error", linears=len(linears), layers=layers)
    if result.without:
        yield phrase("numerics-without", listed=units.listed([phrase(f"numerics-switch-{one}") for one in result.without]))
    if result.speed_of is not None:
        how = phrase(f"numerics-speeds-{result.speed_origin}")
        file = f"; {result.speed_file}" if result.speed_file else ""
        yield phrase("numerics-speeds", what=phrase(f"numerics-of-{result.speed_of}"), gpu=result.speed_gpu, how=how, file=file)


# --- the answer -----------------------------------------------------------------------------------------------------------


def _low(result: NumericsResult) -> list[RecipeError]:
    return [row for row in result.recipes if row.recipe != BASELINE]


def _answer(result: NumericsResult) -> tuple[str, list[str]]:
    low, mixed = _low(result), result.mixed
    if not low:
        return phrase("numerics-baseline-only" if result.recipes else "numerics-nothing", baseline=BASELINE), []
    if mixed is not None and mixed.bound is not None:
        used = [mixed.chosen.recipe, mixed.chosen.higher] if mixed.chosen is not None else []
        because = [*_assumed(result, used), *_alternatives(result, mixed.chosen), _worst(result)]
        return _below_bound(result, mixed.chosen, mixed.bound), because
    smallest, largest, fastest = _same_error(low, low[0]), _same_error(low, low[-1]), _fastest(low)
    recipes = [row.recipe for row in smallest]
    least = error_text(low[0].error) + _speeds(result, smallest)
    reason = []
    if fastest is not None and fastest not in smallest:
        rivals = units.listed([fastest.recipe, *fastest.rivals])
        which = phrase("numerics-fastest-are" if fastest.rivals else "numerics-fastest-is", recipe=fastest.recipe, recipes=rivals)
        speed = _speed(result, fastest.speedup)
        reason = [phrase("numerics-fastest", fastest=which, error=error_text(fastest.error), speed=speed)]
    elif len(low) > len(smallest):
        worst = [row.recipe for row in largest]
        reason = [phrase("numerics-largest", listed=units.listed(worst), recipes=worst, error=error_text(low[-1].error))]
    answer = phrase("numerics-smallest", listed=units.listed(recipes), recipes=recipes, error=least)
    return answer, [*_assumed(result, recipes), *reason, _worst(result)]


def _assumed(result: NumericsResult, recipes: list[str]) -> Iterator[str]:
    """The linears without errors in these recipes, which make their errors smaller."""
    groups = grouped((tuple(linears), recipe) for recipe, linears in kept_in_baseline(result).items() if recipe in recipes)
    for kept, names in groups.items():
        yield phrase("numerics-assumed", recipes=names, listed=units.listed(names), kept=kept, baseline=BASELINE)


def _same_error(recipes: list[RecipeError], one: RecipeError) -> list[RecipeError]:
    """The recipes whose error, rounded as it is printed, is the same as this one's."""
    return [row for row in recipes if error_text(row.error) == error_text(one.error)]


def _fastest(recipes: list[RecipeError]) -> RecipeError | None:
    """The recipe with the highest speedup; None if no speedup is known."""
    return max((row for row in recipes if row.speedup is not None), key=lambda row: _gain(row.speedup), default=None)


def _along_depth(result: NumericsResult) -> Iterator[str]:
    """The error of the last layer's output in the recipe that the answer is about, if a module was run."""
    recipe = _main_recipe(result)
    error = next((row.forward[-1] for row in result.depth if row.recipe == recipe and row.forward), None)
    if error is not None:
        yield phrase("numerics-last-layer", recipe=recipe, error=error_text(error))


def _too_close(chosen: Mix) -> bool:
    """Whether the mix is too close to BF16 to call it faster, or slower: its interval is not above 1."""
    return chosen.speedup is not None and chosen.speedup.known and not chosen.speedup.above_one


def _mostly_baseline(chosen: Mix) -> bool:
    """Whether a mix without a known speed leaves so little in low precision that it is not worth its settings."""
    return chosen.speedup is None and chosen.higher == BASELINE and chosen.kept_share > MOSTLY


def _gain(speedup: Interval | None) -> float:
    return speedup.value if speedup is not None else 0.0


def _speed(result: NumericsResult, speedup: Interval | None) -> str:
    """The speedup with its origin; empty if it is not known."""
    return f", {units.speedup(speedup)} {_over_baseline(result)}" if speedup is not None else ""


def _over_baseline(result: NumericsResult) -> str:
    forecast = " (FORECAST)" if result.speed_origin == "forecast" else ""
    return phrase(f"numerics-over-{result.speed_of or 'linears'}", baseline=BASELINE, forecast=forecast)


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
    smallest = _low(result)[0]
    about = {
        "limit": error_text(bound),
        "least": f"{error_text(smallest.error)} in {smallest.recipe}",
        "baseline": BASELINE,
        "mix": _mix_text(result, chosen),
    }
    if chosen is None:
        return phrase("numerics-no-mix", **about)
    if chosen.recipe == BASELINE:
        return phrase("numerics-use-baseline" if smallest.error <= bound else "numerics-only-baseline", **about)
    if _too_close(chosen):
        return phrase("numerics-stay", **about)
    if _mostly_baseline(chosen):
        return phrase("numerics-mostly-baseline", share=chosen.kept_share, **about)
    return phrase("numerics-fastest-mix" if result.speed_of else "numerics-fewest-bits", **about)


def _alternatives(result: NumericsResult, chosen: Mix | None) -> list[str]:
    """What else could be used: the same recipe in all linears, and the best single recipe below the bound."""
    if chosen is None or chosen.recipe == BASELINE:
        return []
    bound = result.mixed.bound if result.mixed is not None else None
    texts = [phrase("numerics-fastest-is-mix", mix=_mix_text(result, chosen))] if _too_close(chosen) else []
    whole = next((row for row in _low(result) if row.recipe == chosen.recipe), None)
    if chosen.is_mixed and whole is not None:
        error = error_text(whole.error) + _plain_speed(whole.speedup)
        about: dict[str, Any] = {"share": chosen.kept_share, "higher": chosen.higher, "recipe": whole.recipe, "error": error}
        texts.append(phrase("numerics-kept", **about))
    single = [row for row in _low(result) if bound is not None and row.error <= bound and row.recipe != chosen.recipe]
    complete = [row for row in single if row.recipe not in kept_in_baseline(result)] or single
    known = [row for row in complete if row.speedup is not None] or complete
    if known:
        best = max(known, key=lambda row: _gain(row.speedup))
        same = [row.recipe for row in _same_error(known, best)] if best.speedup is None else [best.recipe]
        error = error_text(best.error) + _plain_speed(best.speedup)
        close = "; too close to call" if not chosen.is_mixed and chosen.recipe in best.rivals else ""
        code = "numerics-without-mixing" if chosen.is_mixed else "numerics-second"
        texts.append(phrase(code, recipes=" or ".join(same), error=error, close=close))
    return texts


def _plain_speed(speedup: Interval | None) -> str:
    return f", {units.speedup(speedup)}" if speedup is not None else ""


def _worst(result: NumericsResult) -> str:
    """The linears with the most damage, or the largest errors, in the recipe that the answer is about."""
    recipe = _main_recipe(result)
    if weighted(result):
        shares = damage_shares(result, recipe)
        most = sorted(shares, key=lambda name: -shares[name])[:3]
        return phrase("numerics-most-damage", recipe=recipe, named=[f"{name} {units.percent(shares[name])}" for name in most])
    errors = sorted(
        ((linear.error or 0.0, linear.name) for linear in result.counted if linear.recipe == recipe and linear.error is not None),
        reverse=True,
    )
    named = [f"{name} {error_text(error)}" for error, name in errors[:3]]
    return phrase("numerics-largest-of-linears", recipe=recipe, named=named) if named else ""


def _main_recipe(result: NumericsResult) -> str:
    """The recipe that the answer is about: that of the chosen mix, else the fastest, else the one with the largest error."""
    chosen, low = _chosen(result), _low(result)
    if chosen is not None and chosen.recipe != BASELINE:
        return chosen.recipe
    return (_fastest(low) or low[-1]).recipe if low else BASELINE


def _figures(result: NumericsResult) -> tuple[KeyFigure, ...]:
    chosen = _chosen(result)
    if chosen is None or chosen.recipe == BASELINE:
        return tuple(
            KeyFigure(f"Error of {row.recipe}", error_text(row.error), f"{units.speedup(row.speedup)}" if row.speedup else "")
            for row in _low(result)[:4]
        )
    speedup, bound = chosen.speedup, result.mixed.bound if result.mixed is not None else None
    gain = [KeyFigure(f"Speedup over {BASELINE}", f"{speedup.value:.2f}x", units.ends(speedup, 2))] if speedup else []
    return (
        KeyFigure("Recipe", chosen.recipe),
        KeyFigure("Error", error_text(chosen.error), f"bound {error_text(bound)}" if bound is not None else ""),
        *gain,
        KeyFigure(f"Kept in {chosen.higher}", units.percent(chosen.kept_share), "of the linears' FLOPs"),
    )


# --- everything -----------------------------------------------------------------------------------------------------------


def _sections(result: NumericsResult, marked: str) -> tuple[Section, ...]:
    scatter, maps = _scatter(result, marked), list(heat_maps(result, _main_recipe(result), marked))
    by_recipe = recipe_map(result, marked, main=scatter is None and not maps)
    return sections(
        {
            "Speed and error": [scatter, recipe_table(result, marked), mix_table(result, marked), probed_table(result, marked)],
            "Along the training": [moments_table(result, marked)],
            "Layers and linears": [*maps, worst_table(result, marked)],
            "Linears and passes": [
                by_recipe,
                linear_table(result, marked),
                kept_table(result, marked),
                operand_table(result, marked),
            ],
            "Delayed scaling": [stale_table(result, marked)],
            "Along depth": [*depth_charts(result, marked), loss_table(result, marked)],
        }
    )


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
    mixed, chosen, short = result.mixed, _chosen(result), kept_names(result)
    mixes, least = list[Dot](), inf
    for mix in mixed.frontier if mixed is not None else ():  # the fastest first; simpler ones that others beat are in the table
        dot = _dot(mix, short)
        if dot is not None and mix.error < least:
            mixes.append(dot)
            least = mix.error
    forecast = "FORECAST, " if result.speed_origin == "forecast" else ""
    what = phrase(f"numerics-of-{result.speed_of or 'linears'}")
    return ScatterChart(
        "speedup_and_error",
        f"{marked}{forecast}speedup of {what} on {result.speed_gpu} against error",
        dots,
        tuple(mixes),
        _dot(chosen, short) if chosen is not None else None,
        bound=mixed.bound if mixed is not None else None,
        note=phrase("numerics-better"),
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


def _next(result: NumericsResult) -> tuple[str, str]:
    """What to do next, and the command where one is known."""
    mixed, chosen = result.mixed, _chosen(result)
    if mixed is not None and mixed.bound is None and result.recipes:
        return phrase("numerics-next-bound"), f"{result.command} --bound 5%" * result.command.startswith("gemmscope ")
    if result.speed_of is None and result.recipes and chosen is not None and chosen.recipe != BASELINE:
        return phrase("numerics-next-speed"), ""
    return phrase("numerics-next-mix") if chosen is not None and chosen.is_mixed else "", ""


def _method(result: NumericsResult) -> Facts:
    return facts(
        ("tensors", f"{KINDS[result.source]}: {result.origin}"),
        ("error of a linear", phrase("numerics-error-of-linear")),
        ("error of a recipe", phrase("numerics-error-of-recipe")),
        ("weights", phrase("numerics-weights") if weighted(result) else ""),
        ("time of a mix", phrase("numerics-time-of-mix") if result.speed_of else ""),
        ("computed on", ", ".join(filter(None, [result.device, versions_text(result.versions)]))),
        *command_facts(result),
    )
