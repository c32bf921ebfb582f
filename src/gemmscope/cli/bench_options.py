"""Options of commands that measure: bare shapes, precisions, how to time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from gemmscope import commands
from gemmscope.cli.commands import HelpfulCommand
from gemmscope.cli.output import PageOptions, say
from gemmscope.errors import UserError, in_shell, option, shown
from gemmscope.options import values as sizes
from gemmscope.toml import load_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmscope.workload.cases import Mode

Shape = tuple[int, int, int]

SHAPE_HINT = "for example --shapes 1024,4096 for squares, --shapes 8192x4096x14336 for MxKxN, or --shapes default"
LARGEST = 10**12  # larger than any real size
MOST_SHAPES = 1000


@cache
def skip_options() -> dict[str, str]:
    """The option that leaves out a recipe, for those that have one.

    >>> skip_options()["MXFP8"]
    'no_fp8'
    """
    table = load_data("gemmscope.recipe", "recipes.toml")
    return {name: facts["skipped_by"] for name, facts in table.items() if "skipped_by" in facts}


def parse_shapes(text: str) -> list[Shape] | None:
    """Squares and MxKxN triplets, separated by commas; None for `default`.

    >>> parse_shapes("1024, 8kx4kx14336")
    [(1024, 1024, 1024), (8192, 4096, 14336)]
    """
    if text.strip().lower() == "default":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise UserError("--shapes is empty", SHAPE_HINT)
    if len(parts) > MOST_SHAPES:
        raise UserError(f"--shapes names {len(parts)} shapes, more than {MOST_SHAPES}", "name fewer")
    return [parse_shape(part) for part in parts if part]


def parse_shape(text: str) -> Shape:
    """One square or one MxKxN triplet."""
    parts = text.strip().lower().split("x")
    try:
        sides = [sizes.size(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 3) or "-" in text or "+" in text:
        raise UserError(f"{shown(text)} is not a shape: it must be one size, or three as MxKxN", SHAPE_HINT)
    m, k, n = (min(side, LARGEST) for side in sides * (3 // len(sides)))
    return m, k, n


class ShapesCommand(HelpfulCommand):
    """A bare `--shapes` means the default ladder: typer has no option whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in the value where nothing, or another option, follows."""
        filled = []
        for argument, following in zip(args, [*args[1:], "--end"], strict=False):
            filled.append(argument)
            if argument == "--shapes" and re.match(r"--?[A-Za-z]", following):
                filled.append("default")
        return super().parse_args(ctx, filled)


@dataclass(frozen=True)
class RecipeOptions:
    """Which precisions, in which modes."""

    recipes: str | None = None
    no_fp8_current: bool = False
    no_fp8_delayed: bool = False
    no_fp8_block: bool = False
    no_fp8: bool = False
    no_fp4: bool = False
    pre_quantize: bool = False
    autocast_only: bool = False

    def left_out(self) -> dict[str, str]:
        """Recipes with the option that leaves them out."""
        return {name: flag for name, flag in skip_options().items() if getattr(self, flag)}

    def given(self) -> list[str]:
        """The options that were given."""
        return [name for name, value in vars(self).items() if value is not None and value is not False]

    def explain_no_fp8(self, gpus: Sequence[str] | None = None) -> None:
        """Print a note if --no-fp8 may surprise: it skips MXFP8 only, and other FP8 recipes are still compared.

        `gpus`: the GPUs to forecast; None for this machine's GPU. On GPUs with MXFP8, there is no note if another FP8 recipe is
        skipped by its own flag.
        """
        all_others = [flag for name, flag in skip_options().items() if name.startswith("FP8")]
        others = [flag for flag in all_others if not getattr(self, flag)]
        if not self.no_fp8 or not others or self.recipes is not None:
            return
        able = commands.supported("MXFP8", gpus)
        if able is False or (able and others == all_others):
            why = "" if able else f", which {'these GPUs do' if gpus and len(gpus) > 1 else 'this GPU does'} not support"
            flags = in_shell(" ".join(map(option, others)))
            say(f"note: --no-fp8 skips MXFP8 only{why}. To skip the other FP8 recipes, add {flags}")

    def choices(self) -> commands.Choices:
        """The choices, as commands take them."""
        return commands.Choices(self._recipes(), tuple(self.left_out()), self._modes())

    def _recipes(self) -> list[str] | None:
        if self.recipes is None:
            return None
        names = [part.strip() for part in self.recipes.split(",") if part.strip()]
        lower = {name.lower() for name in names}
        for name, flag in self.left_out().items():
            if name.lower() in lower:
                raise UserError(f"{option('recipes')} includes {name}, but {option(flag)} skips it", "use only one of them")
        return names

    def _modes(self) -> list[Mode] | None:
        if self.pre_quantize and self.autocast_only:
            both = f"{option('pre_quantize')} and {option('autocast_only')}"
            raise UserError(f"{both} exclude each other", "use only one of them, or neither for both modes")
        return ["pre-quantized"] if self.pre_quantize else ["autocast"] if self.autocast_only else None


@dataclass(frozen=True)
class ChoiceOptions(RecipeOptions):
    """The choices of recipes, and which framework runs them on what device."""

    device: str | None = None
    backend: str | None = None
    share_gpu: bool = False

    def explain_no_fp8(self, gpus: Sequence[str] | None = None) -> None:
        """Print the note, but not for the CPU, which supports none of these recipes."""
        if "cpu" not in (self.device, self.backend):
            super().explain_no_fp8(gpus)

    def choices(self) -> commands.Choices:
        """The choices, as commands take them."""
        return replace(super().choices(), device=self.device, backend=self.backend, share_gpu=self.share_gpu)


@dataclass(frozen=True)
class TimingOptions:
    """How to time, and for how long. Fixed counts, if any is given, replace precision and time limit."""

    timing: str = "cuda-events"
    precision: float | None = None
    time_limit: float | None = None
    num_warmup: int | None = None
    num_iters: int | None = None
    gpu_warmup: float | None = None
    cache_weights: bool = False
    torchao_filter: bool = True
    resume: bool = False

    def bench_timing(self, usual: commands.BenchTiming | None = None) -> commands.BenchTiming:
        """The timing, as commands take it; the defaults are `usual`. Raises a `UserError` for options that exclude each other."""
        given = {name: value for name, value in vars(self).items() if name != "resume" and value is not None}
        fixed = [option(name) for name in ("num_iters", "num_warmup", "gpu_warmup") if name in given]
        until = [option(name) for name in ("precision", "time_limit") if name in given]
        if fixed and until:
            raise UserError(f"{fixed[0]} measures a fixed number of times, so {until[0]} has no effect", "use only one of them")
        return replace(usual or commands.DEFAULT_TIMING, **given)


@dataclass(frozen=True)
class BenchOutputs(PageOptions):
    """Where a measurement goes, and how strict to be with it."""

    strict: bool = False
