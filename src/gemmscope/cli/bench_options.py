"""Options of commands that measure: bare shapes, precisions, how to time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from gemmscope import app
from gemmscope.cli.options import number, size
from gemmscope.cli.output import FigureOptions
from gemmscope.errors import UserError, option, shown

if TYPE_CHECKING:
    from gemmscope.app.bench import BenchTiming
    from gemmscope.app.choose import Choices
    from gemmscope.workload.cases import Mode

Shape = tuple[int, int, int]

SHAPE_HINT = "for example --shapes 1024,4096 for squares, --shapes 8192x4096x14336 for MxKxN, or --shapes default"
MOST_DIGITS = 12  # more than any size has


def parse_shapes(text: str) -> list[Shape] | None:
    """Squares and MxKxN triplets, separated by commas; None for `default`.

    >>> parse_shapes("1024, 8192x4096x14336")
    [(1024, 1024, 1024), (8192, 4096, 14336)]
    """
    if text.strip().lower() == "default":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise UserError("--shapes names no shape", SHAPE_HINT)
    return [parse_shape(part) for part in parts if part]


def parse_shape(text: str) -> Shape:
    """One square or one MxKxN triplet."""
    matched = re.fullmatch(r"([0-9]+)(?:x([0-9]+)x([0-9]+))?", text.strip().lower())
    if matched is None:
        raise UserError(f"{shown(text)} is not a shape: it must be one size, or three as MxKxN", SHAPE_HINT)
    sizes = [int(part[-MOST_DIGITS:]) if len(part) <= MOST_DIGITS else 10**MOST_DIGITS for part in matched.groups() if part]
    m, k, n = sizes * (3 // len(sizes))
    return m, k, n


class ShapesCommand(TyperCommand):
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
    pre_quantize: Annotated[bool, typer.Option("--pre-quantize", help="Only the GEMMs, on inputs quantized beforehand.")] = False
    autocast_only: Annotated[bool, typer.Option("--autocast-only", help="Only forward and backward with quantization.")] = False

    def left_out(self) -> dict[str, str]:
        """Recipes with the option that leaves them out."""
        options = {
            "FP8Current": "no_fp8_current",
            "FP8Delayed": "no_fp8_delayed",
            "FP8Block": "no_fp8_block",
            "MXFP8": "no_fp8",
            "NVFP4": "no_fp4",
        }
        return {name: flag for name, flag in options.items() if getattr(self, flag)}

    def given(self) -> list[str]:
        """The options that were given."""
        flags = [name for name in ("pre_quantize", "autocast_only") if getattr(self, name)]
        return [*(["recipes"] if self.recipes is not None else []), *self.left_out().values(), *flags]

    def choices(self) -> Choices:
        """As the application takes it."""
        return app.choose.Choices(self._recipes(), tuple(self.left_out()), self._modes())

    def _recipes(self) -> list[str] | None:
        if self.recipes is None:
            return None
        names = [part.strip() for part in self.recipes.split(",") if part.strip()]
        lower = {name.lower() for name in names}
        for name, flag in self.left_out().items():
            if name.lower() in lower:
                raise UserError(f"{option('recipes')} names {name}, and {option(flag)} leaves it out", "keep one of them")
        return names

    def _modes(self) -> list[Mode] | None:
        if self.pre_quantize and self.autocast_only:
            raise UserError(
                f"{option('pre_quantize')} and {option('autocast_only')} leave nothing to measure",
                "keep one of them, or neither for both modes",
            )
        return ["pre-quantized"] if self.pre_quantize else ["autocast"] if self.autocast_only else None


@dataclass(frozen=True)
class ChoiceOptions(RecipeOptions):
    """Also which framework, and on what device."""

    device: Annotated[
        str | None,
        typer.Option(metavar="cuda|cpu", help="Where to measure; the CPU only shows that measuring works. (default: cuda)"),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="transformer_engine|torchao|torch|cpu",
            help="The framework to measure. (default: the first of these that is installed and has the named recipes)",
        ),
    ] = None
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="Measure even if others use the GPU.")] = False

    def choices(self) -> Choices:
        """As the application takes it."""
        return app.choose.Choices(
            self._recipes(), tuple(self.left_out()), self._modes(), self.backend, self.device, self.share_gpu
        )


@dataclass(frozen=True)
class TimingOptions:
    """How to time, and for how long. Fixed counts, if any is given, replace precision and time limit."""

    timing: Annotated[
        str,
        typer.Option(metavar="cuda-events|profiler", help="Time by events around each run, or by the kernels' own timestamps."),
    ] = "cuda-events"
    precision: Annotated[float, typer.Option(metavar="SHARE", help="Measure until every speedup is known this precisely.")] = 0.01
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit.")] = 120.0
    num_warmup: Annotated[int | None, size("Fixed counts: warm-up runs in each round. (default: 10)")] = None
    num_iters: Annotated[int | None, size("Fixed counts: timed runs of each task, instead of a precision. (default: 100)")] = None
    gpu_warmup: Annotated[
        float | None,
        typer.Option(parser=number, metavar="SECONDS", help="Fixed counts: load the GPU for this long first. (default: 5)"),
    ] = None
    cache_weights: Annotated[
        bool, typer.Option("--cache-weights", help="Weights are quantized once per step: leave that out of the times.")
    ] = False
    torchao_filter: Annotated[
        bool,
        typer.Option(
            "--torchao-filter/--no-torchao-filter", help="Leave those layers in BF16 that torchao's own filter would leave."
        ),
    ] = True
    resume: Annotated[bool, typer.Option("--resume", help="Continue the same measurement if it was cut short.")] = False

    def bench_timing(self) -> BenchTiming:
        """As the application takes it."""
        return app.bench.BenchTiming(**{name: value for name, value in vars(self).items() if name != "resume"})


@dataclass(frozen=True)
class BenchOutputs(FigureOptions):
    """Where a measurement goes, and how strict to be with it."""

    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if anything ran in another precision.")] = False
