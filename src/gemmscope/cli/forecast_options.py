"""What `gemmscope forecast` can be told beside the model: which GPUs, in which state, what to vary, a list of products."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmscope.cli.bench_options import RecipeOptions
from gemmscope.cli.options import GPUS, TOKENS, ModelOptions, RunOptions, size
from gemmscope.errors import UserError, closest, shown
from gemmscope.model.spec import check_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmscope.forecast.gemm import State
    from gemmscope.gpu.specs import GpuSpec
    from gemmscope.model.spec import RunSpec
    from gemmscope.step.cost import Budget

SWEEP_HINT = "for example --sweep hidden_size=2048:16384:1024 or --sweep micro_batch_size=1,2,4,8"
MOST_POINTS = 100_000


@dataclass(frozen=True)
class ForecastOptions:
    """Which chips, and what is asked of them."""

    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="GPUs, side by side: h200, b200, b300 … (an unknown one lists them)"),
    ] = None
    state: Annotated[
        str,
        typer.Option(metavar="sustained|burst", help="The power-limited state that training runs in, or the first moments."),
    ] = "sustained"
    dp: Annotated[int | None, size("Data parallel size: replicas that exchange gradients. (default: 1)")] = None
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A:B:STEP", help="Vary a size (or NAME=1,2,4); twice for a plane. The best precision at each."),
    ] = None
    gemms: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.csv|-", help="Products instead of a model: columns m, k, n, format [, layout, groups, library]."
        ),
    ] = None
    library: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --gemms: as this library was measured. (default: the GPU's usual)"),
    ] = None
    tokens: Annotated[float | None, TOKENS] = None
    gpus: Annotated[int | None, GPUS] = None
    price: Annotated[
        str | None, typer.Option(metavar="X|NAME=X,…", help="For one GPU and hour, of all or of each: h200=2.5,b300=4.")
    ] = None
    cache_weights: Annotated[
        bool, typer.Option("--cache-weights", help="Weights are quantized once per step: leave that out of the linears' times.")
    ] = False

    def typed(self) -> list[str]:
        """Options of a model's forecast that were given."""
        given = {"--dp": self.dp, "--tokens": self.tokens, "--gpus": self.gpus, "--price": self.price}
        return [
            *(name for name, value in given.items() if value is not None),
            *(["--cache-weights"] if self.cache_weights else []),
        ]

    def chips(self) -> list[GpuSpec]:
        """The GPUs in the order they were named."""
        from gemmscope.gpu.specs import gpu, gpus

        names = [part for part in (self.gpu or "").split(",") if part.strip()]
        if not names:
            raise UserError("no GPU is named", f"add --gpu, for example --gpu b300,h200; known: {', '.join(gpus())}")
        return list({(found := gpu(name)).name: found for name in names}.values())

    def known_state(self) -> State:
        """The state, checked."""
        if self.state == "sustained":
            return "sustained"
        if self.state == "burst":
            return "burst"
        raise UserError(f"--state {shown(self.state)} is not known", "it can be sustained (as in training) or burst")

    def replicas(self, run: RunSpec | None = None) -> int:
        """How many share gradients: as told, or as many as the GPUs of the run make in its layout."""
        told = check_size("--dp", self.dp, "parallel") if self.dp is not None else None
        budgets = self.budgets(self.chips())
        if not budgets or run is None:
            return told or 1
        found = next(iter(budgets.values())).replicas(run) // run.ep
        if told is not None and told != found:
            raise UserError(f"--gpus {self.gpus} are {found} data-parallel replicas in this layout, not {told}", "leave out --dp")
        return found

    def budgets(self, chips: Sequence[GpuSpec]) -> dict[str, Budget]:
        """What the run's cost is asked for, by GPU; empty if it is not."""
        from gemmscope.step.cost import Budget, prices

        said = prices(self.price) if self.price is not None else None
        budget = Budget.asked(self.tokens, self.gpus, said if isinstance(said, float) else 0.0 if said is not None else None)
        if budget is None:
            return {}
        if said is None or isinstance(said, float):
            return {chip.name: budget for chip in chips}
        strange = [name for name in said if name not in {chip.name for chip in chips}]
        if strange:
            raise UserError(
                f"--price names {strange[0]}, which is not among the GPUs", f"they are {', '.join(chip.name for chip in chips)}"
            )
        return {chip.name: budget.at(said.get(chip.name)) for chip in chips}


def recipes_for(options: RecipeOptions, chips: list[GpuSpec]) -> tuple[dict[str, list[str]], list[str]]:
    """By GPU, the precisions to forecast, and what was left out and why.

    Those named must run on at least one of the GPUs; by default, all of Transformer Engine's that a GPU runs.
    """
    from gemmscope.recipe.recipes import BASELINE, recipe, recipes
    from gemmscope.recipe.support import support

    named, left_out, notes = options.named(), options.left_out(), []
    usual = [name for name, each in recipes().items() if "transformer_engine" in each.backends]
    chosen: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for chip in chips:
        chosen[chip.name] = []
        for name in named or usual:
            known = support(name, chip.capability)
            if name in left_out:
                continue
            if recipe(name).backends == ("cpu",):
                reasons.setdefault(name, []).append("it only runs on CPUs")
            elif not known.runs:
                reasons.setdefault(name, []).append(known.why_not(chip.name, chip.capability))
            else:
                chosen[chip.name].append(name)
                if known.note:
                    notes.append(f"emulated: {name} on {chip.name}: {known.note}")
    for name in named or ():
        if name not in left_out and not any(name in each for each in chosen.values()):
            able = [each for each in usual if any(each in group for group in chosen.values())]
            able += [
                each for each in recipes() if each not in able and support(each, chips[0].capability).runs and each != "FP32"
            ]
            where = " or ".join(chip.name for chip in chips)
            raise UserError(f"{name} cannot run on {where}: {reasons[name][0]}", f"recipes that can: {', '.join(able)}")
    if named:
        notes += [f"left out: {name}: {why}" for name, found in reasons.items() for why in found]
    elif not left_out:
        for chip in chips:
            if chosen[chip.name] == [BASELINE]:
                why = support("FP8Current", chip.capability).why_not(chip.name, chip.capability)
                notes.append(f"{chip.name} runs nothing below {BASELINE}: {why}")
    return chosen, notes


# --- what to vary -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One size and its values."""

    name: str
    values: tuple[int, ...]


def sizes_that_vary() -> tuple[str, ...]:
    """Names that --sweep takes: the model's plain sizes, and whole numbers of the run."""
    of_model = [field.name for field in fields(ModelOptions) if "int" in str(field.type)]
    of_run = [field.name for field in fields(RunOptions) if "int" in str(field.type) and field.name != "pp_stage"]
    return (*of_model, *of_run)


def parse_sweeps(texts: list[str]) -> list[Axis]:
    """`hidden_size=2048:16384:1024` or `micro_batch_size=1,2,4`, at most two, of different names.

    >>> parse_sweeps(["hidden-size=1024:3072:1024"])
    [Axis(name='hidden_size', values=(1024, 2048, 3072))]
    """
    axes = [_parse_sweep(text) for text in texts]
    if len(axes) > 2:
        raise UserError(f"--sweep is given {len(axes)} times: a table has two sides", "keep two of them")
    if len({axis.name for axis in axes}) < len(axes):
        raise UserError(f"--sweep varies {axes[0].name} twice", "vary another size, or give all its values in one --sweep")
    points = math.prod(len(axis.values) for axis in axes)
    if points > MOST_POINTS:
        raise UserError(f"--sweep asks for {points} points, more than {MOST_POINTS}", "take larger steps")
    return axes


def _parse_sweep(text: str) -> Axis:
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    known = sizes_that_vary()
    if name not in known:
        similar = closest(name, known)
        hint = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise UserError(f"--sweep {shown(text)}: {shown(name)} is no size that can vary", f"{hint}sizes: {', '.join(known)}")
    spoken = values.strip()
    if re.fullmatch(r"\d+:\d+:\d+", spoken):
        first, last, step = map(int, spoken.split(":"))
        if step == 0:
            raise UserError(f"--sweep {shown(text)} has a step of zero: it would never end", SWEEP_HINT)
        if first > last:
            raise UserError(f"--sweep {shown(text)} ends before it begins", f"turn it round: {name}={last}:{first}:{step}")
        if (last - first) // step >= MOST_POINTS:
            raise UserError(f"--sweep {shown(text)} asks for more than {MOST_POINTS} values", "take larger steps")
        return Axis(name, tuple(range(first, last + 1, step)))
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", spoken):
        return Axis(name, tuple(dict.fromkeys(int(part) for part in spoken.split(","))))
    raise UserError(f"--sweep {shown(text)} is neither NAME=FIRST:LAST:STEP nor NAME=VALUE,VALUE,…", SWEEP_HINT)


def with_value(model: ModelOptions, run: RunOptions, name: str, value: int) -> tuple[ModelOptions, RunOptions]:
    """The options as if this value had been typed."""
    if name in {field.name for field in fields(RunOptions)}:
        changed: Any = {name: value}
        return model, replace(run, **changed)
    other = [way for way in ("config", "preset", "module") if getattr(model, way) is not None]
    if other:
        raise UserError(
            f"--sweep {name} varies a model given by its sizes, and --{other[0]} names one",
            "give the sizes (--hidden-size N …) instead, or vary the run: micro_batch_size, sequence_length, tp, …",
        )
    varied: Any = {name: value}
    return replace(model, **varied), run
