"""Combines errors and speeds: the table of recipes, and the recommended mix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gemmscope import units
from gemmscope.findings import Finding, finding
from gemmscope.numerics.cells import Cells, cells_of, recipe_errors
from gemmscope.numerics.mixes import recommend_mix
from gemmscope.numerics.speeds import SpeedResult, nominal_speeds, speeds_of
from gemmscope.paste.mix import mix_to_paste
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.base import ModelSummary, Origin
from gemmscope.results.numerics import LinearError, MixedPrecision, RecipeError
from gemmscope.roles import role_named


@dataclass(frozen=True)
class Weighed:
    """The part of a `NumericsResult` that is about all linears."""

    recipes: tuple[RecipeError, ...] = ()
    mixed: MixedPrecision | None = None
    findings: tuple[Finding, ...] = ()
    speed_origin: Origin | None = None
    speed_of: Literal["step", "linears"] | None = None
    speed_gpu: str = ""


def weigh(linears: Sequence[LinearError], speed: SpeedResult | None = None, bound: float | None = None, gpu: str = "") -> Weighed:
    """The recipes, the smallest error first, and the recommended mix. `speed`: a result with times; `gpu`: which of its GPUs."""
    cells = cells_of(linears)
    if cells is None:
        return Weighed()
    findings = list(_stays_in_baseline(cells))
    speeds = nominal_speeds(cells) if speed is None else speeds_of(speed, cells, gpu)
    findings += [*speeds.findings, *_other_model(linears, speed)]
    mixed = recommend_mix(cells, speeds, bound)
    if bound is not None and mixed.chosen is None:
        findings.append(finding("numerics-no-mix", bound=bound, baseline=BASELINE))
    if mixed.chosen is not None:
        mixed = mixed.model_copy(
            update={
                "settings": mix_to_paste(
                    mixed.chosen, cells.linears, len(cells.layers), in_layers=any(linear.layer is not None for linear in linears)
                )
            }
        )
    recipes = tuple(
        row.model_copy(update={"speedup": speeds.speedups.get(row.recipe), "rivals": speeds.rivals.get(row.recipe, ())})
        for row in recipe_errors(linears, cells)
    )
    return Weighed(recipes, mixed, tuple(findings), speeds.origin, speeds.of, speeds.gpu)


def _stays_in_baseline(cells: Cells) -> Iterator[Finding]:
    """One finding for all recipes without errors for the same linears. A recipe that has no errors at all is in no table."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, linears in cells.missing.items():
        if name in cells.squares:
            groups.setdefault(linears, []).append(name)
    for linears, recipes in groups.items():
        yield finding("numerics-stays-in-baseline", recipes=recipes, linears=list(linears), baseline=BASELINE)


def _other_model(linears: Sequence[LinearError], speed: SpeedResult | None) -> list[Finding]:
    """A warning if the speeds seem to be those of another model. SYNTHETIC linears have smaller sizes, and no layers."""
    model = speed.model if speed is not None else None
    reason = mismatch(linears, model) if model is not None else ""
    return [finding("numerics-other-model", model=model.name, reason=reason)] if reason and model is not None else []


def mismatch(every: Sequence[LinearError], model: ModelSummary) -> str:
    """What linears of layers and a model disagree in; empty where they agree, as far as it is known."""
    linears = [linear for linear in every if linear.layer is not None]
    if not linears:
        return ""
    sizes = {size for linear in linears for size in (linear.inputs, linear.outputs) if size}
    layers = max(linear.layer or 0 for linear in linears) + 1
    if model.hidden_size is not None and sizes and model.hidden_size not in sizes:
        return f"with hidden size {model.hidden_size}, but none of the linears with errors has that size"
    if model.num_hidden_layers is not None and layers > model.num_hidden_layers:
        return f"with {units.counted(model.num_hidden_layers, 'layer')}, but the errors are those of {layers} layers"
    of_experts = any((known := role_named(linear.op)) is not None and known.block == "experts" for linear in linears)
    if model.layers == f"{model.num_hidden_layers} dense" and of_experts:
        return "which has no experts, but some errors are those of experts"
    return ""
