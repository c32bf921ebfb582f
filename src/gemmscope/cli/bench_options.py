"""What `gemmscope bench` can be told beside the model: bare shapes, precisions, how to time, where results go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from gemmscope.cli.options import number, size
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemmscope.measure.campaign import Counts, Settings
    from gemmscope.measure.sampler import StoppingRule
    from gemmscope.workload.cases import Mode

Shape = tuple[int, int, int]

LADDER = (256, 512, 1024, 2048, 4096, 8192, 16384)
LADDERS = {False: LADDER, True: LADDER[:3]}  # on the CPU: the larger ones take it minutes, and prove nothing more
LARGEST_SIZE = 10**7
SHAPE_HINT = "for example --shapes 1024,4096 for squares, --shapes 8192x4096x14336 for MxKxN, or --shapes default"


def parse_shapes(text: str, ladder: tuple[int, ...] = LADDER) -> list[Shape]:
    """Squares and MxKxN triplets, separated by commas; `default` is the ladder.

    >>> parse_shapes("1024, 8192x4096x14336")
    [(1024, 1024, 1024), (8192, 4096, 14336)]
    >>> parse_shapes("default")[-1]
    (16384, 16384, 16384)
    """
    if text.strip().lower() == "default":
        return [(side, side, side) for side in ladder]
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise UserError("--shapes names no shape", SHAPE_HINT)
    return [parse_shape(part) for part in parts if part]


def parse_shape(text: str) -> Shape:
    """One square or one MxKxN triplet."""
    found = re.fullmatch(r"([0-9]+)(?:x([0-9]+)x([0-9]+))?", text.strip().lower())
    if found is None:
        raise UserError(f"{shown(text)} is not a shape: it is neither one size nor three as MxKxN", SHAPE_HINT)
    digits = [part.lstrip("0") for part in found.groups() if part is not None]
    if not all(digits):
        raise UserError(f"{shown(text)} is not a shape: a size of 0 leaves nothing to multiply", SHAPE_HINT)
    if any(len(each) > len(str(LARGEST_SIZE)) or int(each) > LARGEST_SIZE for each in digits):
        raise UserError(f"{shown(text)} is beyond any matrix (at most {LARGEST_SIZE} a side): a slip?", SHAPE_HINT)
    m, k, n = [int(each) for each in digits] * (3 // len(digits))
    return m, k, n


class BenchCommand(TyperCommand):
    """A bare `--shapes` means the default ladder: typer has no option whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in the value."""
        return super().parse_args(ctx, with_default_shapes(args))


def with_default_shapes(arguments: list[str]) -> list[str]:
    """`--shapes` with nothing after it, or another option, as `--shapes default`.

    >>> with_default_shapes(["--shapes", "--device", "cpu"])
    ['--shapes', 'default', '--device', 'cpu']
    """
    filled = []
    for index, argument in enumerate(arguments):
        filled.append(argument)
        following = arguments[index + 1 : index + 2]
        if argument == "--shapes" and (not following or re.match(r"--?[A-Za-z]", following[0])):
            filled.append("default")
    return filled


@dataclass(frozen=True)
class RecipeOptions:
    """Which precisions, in which modes."""

    recipes: Annotated[str | None, typer.Option(metavar="NAME,…", help="Precisions to compare. (default: all the GPU runs)")] = (
        None
    )
    no_fp8_current: Annotated[bool, typer.Option("--no-fp8-current", help="Leave out FP8Current.")] = False
    no_fp8_delayed: Annotated[bool, typer.Option("--no-fp8-delayed", help="Leave out FP8Delayed.")] = False
    no_fp8_block: Annotated[bool, typer.Option("--no-fp8-block", help="Leave out FP8Block.")] = False
    no_fp8: Annotated[bool, typer.Option("--no-fp8", help="Leave out MXFP8.")] = False
    no_fp4: Annotated[bool, typer.Option("--no-fp4", help="Leave out NVFP4.")] = False
    pre_quantize: Annotated[bool, typer.Option("--pre-quantize", help="Only the products alone, on quantized operands.")] = False
    autocast_only: Annotated[bool, typer.Option("--autocast-only", help="Only forward and backward with quantization.")] = False

    def left_out(self) -> set[str]:
        """The recipes that the --no options name."""
        return set(self._left_out())

    def _left_out(self) -> dict[str, str]:
        """Recipes with the option that leaves them out."""
        named = {
            "FP8Current": "no_fp8_current",
            "FP8Delayed": "no_fp8_delayed",
            "FP8Block": "no_fp8_block",
            "MXFP8": "no_fp8",
            "NVFP4": "no_fp4",
        }
        return {name: f"--{option.replace('_', '-')}" for name, option in named.items() if getattr(self, option)}

    def typed(self) -> list[str]:
        """The options that were given."""
        flags = [f"--{name.replace('_', '-')}" for name in ("pre_quantize", "autocast_only") if getattr(self, name)]
        return [*(["--recipes"] if self.recipes is not None else []), *self._left_out().values(), *flags]

    def modes(self) -> list[Mode]:
        """Both, or the one that was asked for."""
        from gemmscope.workload.cases import MODES

        if self.pre_quantize and self.autocast_only:
            raise UserError(
                "--pre-quantize and --autocast-only leave nothing to measure", "keep one of them, or neither for both"
            )
        if self.pre_quantize:
            return ["pre-quantized"]
        return ["autocast"] if self.autocast_only else list(MODES)

    def named(self) -> list[str] | None:
        """The recipes of --recipes; None if they are to be chosen."""
        from gemmscope.recipe.recipes import parse_names
        from gemmscope.recipe.recipes import recipes as all_recipes

        if self.recipes is None:
            return None
        if not any(part.strip() for part in self.recipes.split(",")):
            raise UserError("--recipes names no recipe", f"recipes: {', '.join(all_recipes())}")
        found, out = parse_names(self.recipes), self._left_out()
        both = [name for name in found if name in out]
        if both:
            raise UserError(f"--recipes names {both[0]}, and {out[both[0]]} leaves it out", "keep one of them")
        return found


@dataclass(frozen=True)
class ChoiceOptions(RecipeOptions):
    """And by which framework, on what."""

    device: Annotated[
        str | None, typer.Option(metavar="cuda|cpu", help="Where to measure; the CPU only proves that it works. (default: cuda)")
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="transformer_engine|torchao|torch|cpu",
            help="Whose code to measure. (default: the first of these that is installed and has the recipes named)",
        ),
    ] = None
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="Measure although others use the GPU.")] = False


def check_limits(precision: float, longest: float) -> None:
    """A `UserError` for a stopping rule that would never stop, or measure nothing."""
    if not 0 < precision < 1:
        raise UserError(f"--precision {precision:g} is no share", "for example --precision 0.01 for one per cent")
    if not longest > 0:
        raise UserError(f"--longest {longest:g} leaves no time to measure", "for example --longest 60")


@dataclass(frozen=True)
class TimingOptions:
    """How to time, and for how long. Fixed counts, where any is given, stand in for the stopping rule."""

    timing: Annotated[
        str,
        typer.Option(metavar="cuda-events|profiler", help="Time by events around each run, or by the kernels' own timestamps."),
    ] = "cuda-events"
    precision: Annotated[float, typer.Option(metavar="SHARE", help="Go on until every speedup is known this well.")] = 0.01
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="Stop measuring after so long all the same.")] = 120.0
    num_warmup: Annotated[int | None, size("Fixed counts: runs before those that count, in each round. (default: 10)")] = None
    num_iters: Annotated[int | None, size("Fixed counts: runs of each that count, instead of a precision. (default: 100)")] = None
    gpu_warmup: Annotated[
        float | None,
        typer.Option(parser=number, metavar="SECONDS", help="Fixed counts: heat the GPU first, for so long. (default: 5)"),
    ] = None
    cache_weights: Annotated[
        bool, typer.Option("--cache-weights", help="Weights are quantized once per step: leave that out of the times.")
    ] = False
    torchao_filter: Annotated[
        bool,
        typer.Option("--torchao-filter/--no-torchao-filter", help="Leave layers in BF16 that torchao's own filter would leave."),
    ] = True
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the same measurement that was cut short.")] = False

    def check(self) -> None:
        """A `UserError` for what cannot be meant."""
        if self.timing not in ("cuda-events", "profiler"):
            raise UserError(f"--timing {shown(self.timing)} is not known", "it can be cuda-events or profiler")
        check_limits(self.precision, self.longest)
        if self.num_iters is not None and self.num_iters < 1:
            raise UserError(f"--num-iters {self.num_iters} measures nothing", "it is 1 or more")
        if self.num_warmup is not None and self.num_warmup < 0:
            raise UserError(f"--num-warmup {self.num_warmup} is not possible", "it is 0 or more")
        if self.gpu_warmup is not None and not 0 <= self.gpu_warmup < float("inf"):
            raise UserError(f"--gpu-warmup {self.gpu_warmup:g} is not possible", "it is a number of seconds, 0 for none")

    def counts(self) -> Counts | None:
        """Fixed counts, if any was asked for."""
        from gemmscope.measure.campaign import Counts

        asked = {"num_warmup": self.num_warmup, "num_iters": self.num_iters, "gpu_warmup": self.gpu_warmup}
        typed: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        return Counts(**typed) if typed else None

    def settings(self, backend: str, *, for_nsight: bool = False) -> Settings:
        """What the worker is told."""
        from gemmscope.measure.campaign import Settings

        counts = self.counts()
        timing: Literal["cuda-events", "profiler"] = "profiler" if self.timing == "profiler" else "cuda-events"
        fixed: dict[str, Any] = {"max_rounds": counts.rounds} if counts else {}
        if counts:  # a burst says nothing until its end, and may be asked to be as long as one likes
            fixed["silence_s"] = 3600.0
        if backend == "cpu":  # it has no clock to settle
            fixed |= {"drop_ms": 5.0, "keep_ms": 30.0}
        return Settings(
            backend,
            counts=counts,
            timing=timing,
            cache_weights=self.cache_weights,
            filter_layers=self.torchao_filter,
            for_nsight=for_nsight,
            **fixed,
        )

    def rule(self) -> StoppingRule:
        """When to stop; with fixed counts, never before the worker does."""
        from gemmscope.measure.sampler import StoppingRule

        if self.counts():
            return StoppingRule(target=-1.0, longest_s=float("inf"))
        return StoppingRule(target=self.precision, least_rounds=2, longest_s=self.longest)


PLOT_ENDINGS = (".png", ".svg", ".pdf", ".eps", ".jpg", ".webp")


@dataclass(frozen=True)
class FileOptions:
    """Where results go."""

    json: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write everything as JSON.")] = None
    csv: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the times and speedups as CSV.")] = None
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the tables as Markdown.")] = None
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="PATH", help="Draw the bars (.png, .svg, .pdf).")] = None

    def named(self) -> dict[str, str]:
        """What was asked for: option → place."""
        places = {"--json": self.json, "--csv": self.csv, "--markdown": self.markdown, "--output": self.output}
        return {option: place for option, place in places.items() if place is not None}

    def check(self, reads: Iterable[str] = ()) -> None:
        """Whatever would go wrong with writing is said before long work begins; what is read is never written over."""
        from gemmscope.cli.output import check_targets

        check_targets(self.named(), reads)
        if self.output is not None and not self.output.lower().endswith(PLOT_ENDINGS):
            raise UserError(
                f"--output {shown(self.output)} is no picture that can be drawn: it ends in none of {', '.join(PLOT_ENDINGS)}",
                "for example -o bench.png",
            )


@dataclass(frozen=True)
class OutputOptions(FileOptions):
    """Where a measurement goes, and how strict to be with it."""

    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if anything ran in another precision.")] = False
