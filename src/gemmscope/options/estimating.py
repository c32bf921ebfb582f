"""Options of commands that compute without measuring: listing, forecasting, planning, and numerics."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from gemmscope.choices import RECOMPUTE, SWITCHES, ClockState, StatePrecision, SyntheticKind
from gemmscope.options.declare import OWN, Option, Options, RunFile, options_of
from gemmscope.options.job import LoraOptions, OverlapOptions, SystemOptions
from gemmscope.options.measuring import AXIS, KEEP_HIGHER, MIX, SHAPES_HELP, TOKENS, RecipeOptions
from gemmscope.options.values import (
    Axes,
    Shape,
    axes,
    bare_shapes,
    lower_names,
    names,
    percentage,
    prices,
    variants,
    whole_numbers,
)

STATE = Option(
    "GPU clocks: sustained, under the power limit as in long training, or burst, before the GPU reaches its power limit.",
)


class ShapesOptions(Options):
    """What to list."""

    check: Annotated[
        bool,
        Option(
            "Compare the shapes with a trace of the real model. Needs torch and transformers. Exits with 1 if they differ.",
        ),
    ] = False
    list_presets: Annotated[bool, Option("List the presets, as gemmscope models does.", in_python=False, hidden=True)] = False


class ForecastOptions(RecipeOptions, SystemOptions):
    """Which GPUs, and what to forecast for them."""

    GROUP: ClassVar[str] = OWN

    mix: Annotated[RunFile, MIX] = None
    keep_higher: Annotated[str | None, KEEP_HIGHER] = None
    measured: Annotated[
        RunFile,
        Option(
            "A step of the same model that gemmscope step measured, on any GPU and with any batch: the forecast follows it.",
            metavar="RUNFILE",
            accepts="PathOrResult | None",
            in_sweeps=False,
        ),
    ] = None
    gpus: Annotated[
        int | None,
        Option("Number of GPUs. Sets --dp, and with --tokens also gives the cost of the full run.", keyword="gpu_count"),
    ] = None
    gpu: Annotated[
        list[str],
        Option(
            "GPUs to forecast, side by side: h200, b200 and others, names as nvidia-smi prints them, or a TOML file of your own. "
            "An unknown name lists all names.",
            metavar="NAME,...",
            names="gpu/specs.toml",
            parse=names,
            accepts="Names | None",
        ),
    ] = ()  # type: ignore[assignment]
    sweep: Annotated[
        Axes | None,
        Option(
            "Vary a size, and show the best recipe at each value. NAME=1,2,4 also works. Repeat the option to vary two sizes.",
            metavar=AXIS,
            parse=axes,
            repeated=True,
            in_python=False,
        ),
    ] = None
    price: Annotated[
        float | Mapping[str, float] | None,
        Option(
            "Price of one GPU-hour, the same for all GPUs or one for each, such as h200=2.5,b300=4.",
            metavar="X|NAME=X,...",
            parse=prices,
            accepts="float | str | Mapping[str, float] | None",
            in_sweeps=False,
        ),
    ] = None
    state: Annotated[ClockState, STATE] = "sustained"
    gemms: Annotated[
        str | None,
        Option(
            "Single GEMMs from a file instead of a model: columns m, k, n, format [, layout, groups, library].",
            metavar="FILE.csv|-",
            in_python=False,
        ),
    ] = None
    library: Annotated[
        str | None,
        Option(
            "With --gemms: the library that runs them, with its version if known (vllm==0.24.0).",
            metavar="NAME",
            default="the GPU's usual library",
            in_python=False,
        ),
    ] = None
    shapes: Annotated[
        Sequence[Shape] | None,
        Option(SHAPES_HELP, metavar="N,MxKxN,...", parse=bare_shapes, accepts="Sequence[Shape] | str | None", in_sweeps=False),
    ] = None
    tokens: Annotated[float | None, TOKENS] = None
    cache_weights: Annotated[
        bool,
        Option(
            "Exclude weight quantization from the times of linears, as if weights were quantized once per step.",
            group="Measuring",
            in_sweeps=False,
        ),
    ] = False
    as_te_benchmark: Annotated[
        bool,
        Option(
            "Count linears as Transformer Engine's benchmark_gemm.py does, to compare with its published tables: every GEMM, "
            "including those of the backward pass, is a forward call that quantizes its own X and W.",
            group="Measuring",
            in_sweeps=False,
        ),
    ] = False

    def about_model(self) -> list[str]:
        """The options that were given and are about a model, not about single GEMMs."""
        recipes, other = options_of(RecipeOptions), ("gpu", "state", "power_limit", "sweep", "shapes", "gemms", "library")
        return [name for name in self.typed() if name not in recipes and name not in other]

    def given_recipes(self) -> list[str]:
        """The options that were given and choose recipes or modes."""
        recipes = options_of(RecipeOptions)
        return [name for name in self.typed() if name in recipes]

    def of_one_run(self) -> list[str]:
        modes = [name for name in ("pre_quantize", "autocast_only") if getattr(self, name)]
        return [*modes, *super().of_one_run()]  # a sweep forecasts training steps


class PlanSettings(LoraOptions, OverlapOptions):
    """Settings that all layouts of a plan share."""

    optimizer_state: Annotated[
        StatePrecision | None,
        Option(
            "Precision of the optimizer states in all layouts: fp32 with FP32 master weights, or bf16 for everything.",
            default="fp32",
            group="Run",
            after="global_batch",
        ),
    ] = None
    imbalance: Annotated[
        float | None,
        Option(
            "Load of the busiest expert relative to the average.",
            default="1, balanced",
            group="Parallelism",
            after="etp",
        ),
    ] = None


def _part(name: str, text: str, default: str = "searched", group: str = "Parallelism") -> Option:
    """A part of a layout, which can be restricted to some values."""
    return Option(
        text, metavar="N,...", default=default, parse=whole_numbers(name), accepts="int | str | Sequence[int] | None", group=group
    )


class LayoutOptions(Options):
    """The parts of a layout, each restricted to some values."""

    micro_batch_size: Annotated[
        list[int] | None,
        _part(
            "micro_batch_size",
            "Only these micro-batch sizes: sequences per micro-batch and rank.",
            group="Run",
        ),
    ] = None
    recompute: Annotated[
        list[str] | None,
        Option(
            "Only these kinds of activation recomputation: none, selective, full.",
            metavar="NAME,...",
            choices=RECOMPUTE,
            default="searched",
            parse=lower_names,
            accepts="str | Sequence[str] | None",
            group="Run",
        ),
    ] = None
    tp: Annotated[list[int] | None, _part("tp", "Only these tensor parallel sizes.")] = None
    cp: Annotated[list[int] | None, _part("cp", "Only these context parallel sizes.")] = None
    pp: Annotated[list[int] | None, _part("pp", "Only these pipeline parallel sizes.")] = None
    vp: Annotated[list[int] | None, _part("vp", "Only these numbers of virtual stages per pipeline stage.")] = None
    ep: Annotated[list[int] | None, _part("ep", "Only these expert parallel sizes.")] = None
    etp: Annotated[list[int] | None, _part("etp", "Only these tensor parallel sizes inside experts.", "searched: 1 and tp")] = (
        None
    )
    zero: Annotated[
        list[int] | None,
        _part(
            "zero",
            "Only these kinds of sharding across data parallel ranks: 1 shards the optimizer states, 2 also the gradients, 3 "
            "also the weights (FSDP).",
            "searched: 1, 3",
        ),
    ] = None


class PlanOptions(RecipeOptions, LayoutOptions, PlanSettings, SystemOptions):
    """What is planned, and what the search is restricted to."""

    GROUP: ClassVar[str] = OWN

    gpu: Annotated[
        list[str],
        Option(
            "Type of GPU: h100, b200, gb200 and others. An unknown name lists all names.",
            metavar="NAME",
            names="gpu/specs.toml",
            parse=names,
            accepts="str",
        ),
    ] = ()  # type: ignore[assignment]
    gpus: Annotated[int | None, Option("Number of GPUs.")] = None
    sequence_length: Annotated[
        int | None,
        Option(
            "Tokens per sequence: 8192, or 8k (k = 1024). Required unless the model file sets it or --module returns inputs.",
            group="Run",
            after="micro_batch_size",
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        Option(
            "Sequences per optimizer step on all GPUs. Required unless the model file sets it.",
            group="Run",
            after="sequence_length",
        ),
    ] = None
    vary: Annotated[
        Axes | None,
        Option(
            "Compare variants of the model: hidden, layers, intermediate, heads, experts or sequence with these values. "
            "Dependent sizes are scaled too. Repeat the option for several sizes.",
            metavar="NAME=N,N,...",
            parse=variants,
            repeated=True,
            accepts="Mapping[str, Sequence[int]] | None",
        ),
    ] = None
    price: Annotated[float | None, Option("Price of one GPU-hour.")] = None
    state: Annotated[ClockState, STATE] = "sustained"
    tokens: Annotated[float | None, TOKENS] = None
    recipes: Annotated[
        list[str] | None,
        Option(
            "Only these recipes, such as fp8current,mxfp8.",
            metavar="NAME,...",
            names="recipe/recipes.toml",
            parse=names,
            accepts="Names | None",
            default="all that the GPU supports",
        ),
    ] = None


class ExploreOptions(RecipeOptions):
    """What the page can be set to, and where it goes."""

    GROUP: ClassVar[str] = OWN

    gpu: Annotated[
        list[str],
        Option(
            "GPUs of the page: h200, b200 and others.",
            metavar="NAME,...",
            names="gpu/specs.toml",
            parse=names,
            accepts="Names | None",
        ),
    ] = ()  # type: ignore[assignment]
    gpus: Annotated[int, Option("Number of GPUs of the layouts, beside one GPU.", keyword="gpu_count")] = 8
    stack: Annotated[
        list[str] | None,
        Option(
            "Software stacks, beside an unnamed one.",
            metavar="NAME,...",
            names="forecast/coefficients/stacks.toml stacks",
            parse=lower_names,
            default="nvidia,torchtitan,pytorch",
            accepts="Names | None",
        ),
    ] = None
    micro_batch_size: Annotated[list[int] | None, _part("micro_batch_size", "Micro-batch sizes.", "1,2,4,8", "Run")] = None
    sequence_length: Annotated[
        list[int] | None, _part("sequence_length", "Sequence lengths.", "a quarter, half and all of the usual one", "Run")
    ] = None
    tokens: Annotated[float, TOKENS] = 1e12
    price: Annotated[float | None, Option("Price of one GPU-hour.")] = None
    output: Annotated[
        str, Option("The page.", metavar="PATH|-", flags=("--output", "-o"), accepts="str | Path", group="Output")
    ] = "explore.html"


class NumericsOptions(Options):
    """The tensors, the recipes, the speeds to show with the errors, and the largest error allowed."""

    recording: Annotated[
        str | None,
        Option(
            "A file that gemmscope.record_tensors wrote in your training loop (.safetensors).",
            metavar="RECORDING",
            argument=True,
            accepts="str | Path | None",
        ),
    ] = None
    checkpoint: Annotated[
        str | None,
        Option(
            "Use a checkpoint instead of a recording, for weights only: a safetensors file or a folder of them.",
            metavar="PATH",
            accepts="str | Path | None",
        ),
    ] = None
    synthetic: Annotated[
        SyntheticKind | None,
        Option(
            "Use SYNTHETIC tensors of the model's sizes instead of a recording: normal, heavy-tailed, or with outlier channels.",
        ),
    ] = None
    speed: Annotated[
        RunFile,
        Option(
            "Run file of step, bench or forecast, with the speed of each recipe.",
            metavar="RUNFILE",
            accepts="PathOrResult | None",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Option(
            "Forecast the speedups on this GPU, for the given model. With --speed: the GPU to take from a forecast of several.",
            metavar="NAME",
            names="gpu/specs.toml",
        ),
    ] = None
    bound: Annotated[
        float | None,
        Option(
            "Find the fastest mix of precisions (without speeds: of fewest bits) whose error is at most this. The error is the "
            "root mean square over all linears, weighted by their damage where a recording tells it.",
            metavar="PERCENT",
            parse=percentage,
        ),
    ] = None
    depth: Annotated[
        bool,
        Option(
            "Also run the given model with each recipe in all linears, to get the error that accumulates up to each layer. Needs "
            "transformers. A --module always runs this way, without this flag.",
        ),
    ] = False
    recipes: Annotated[
        list[str] | None,
        Option(
            "Recipes to compare, such as fp8current,nvfp4. Your GPU does not need to support them.",
            metavar="NAME,...",
            names="recipe/recipes.toml",
            parse=names,
            accepts="Names | None",
            default="all of Transformer Engine",
        ),
    ] = None
    later: Annotated[
        list[str] | None,
        Option(
            "Recordings of later steps of the same training, to show beside the first one.",
            metavar="RECORDING,...",
            parse=names,
            accepts="Names | None",
        ),
    ] = None
    without: Annotated[
        list[str] | None,
        Option(
            "Show NVFP4 without its Hadamard transform (hadamard), without stochastic rounding (stochastic), or without both.",
            choices=SWITCHES,
            parse=names,
            accepts="Names | None",
        ),
    ] = None
    backend: Annotated[
        str | None,
        Option(
            "Framework whose quantization to emulate, where frameworks differ.",
            choices=("transformer_engine", "torchao"),
            default="the first that supports the recipe",
        ),
    ] = None
    device: Annotated[str | None, Option("Where to compute the errors.", choices=("cuda", "cpu"), default="cpu")] = None
    seed: Annotated[int, Option("Random seed of SYNTHETIC tensors and of stochastic rounding.")] = 0
