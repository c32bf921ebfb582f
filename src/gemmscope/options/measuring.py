"""Options of commands that measure: which recipes on what, how precisely, for how long."""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, ClassVar

from gemmscope.choices import Compile, Mode, OptimizerName, Timing
from gemmscope.errors import UserError, option
from gemmscope.options.declare import OWN, Option, Options, RunFile
from gemmscope.options.values import Axes, Shape, axes, bare_shapes, names, percentage, token_count
from gemmscope.toml import load_data

KEEP_HIGHER = Option(
    "Also compute the speedup of every recipe with these kept in BF16: the first N layers, the last N layers, and linears such "
    "as mlp.down_proj in every layer.",
    metavar="first=N,last=N,NAME",
    in_sweeps=False,
)
MIX = Option(
    "Also compute the speedup of the mix that gemmscope numerics chose: a recipe, and the layers and linears that stay in a "
    "higher precision.",
    metavar="RUNFILE",
    accepts="PathOrResult | None",
    in_sweeps=False,
)
TOKENS = Option(
    "Training tokens, to estimate the cost of the full run: 2T, 15.5T or 1e12 (k, M, B and T are powers of 1000).",
    metavar="N",
    parse=token_count,
    in_sweeps=False,
)
SHAPES_HELP = "Bare GEMMs instead of a model: squares (4k) or MxKxN triplets."
FLEET = Option(
    "Run file of gemmscope fleet. The answer then includes the range that covers 90% of that fleet's GPUs.",
    metavar="RUNFILE",
    accepts="PathOrResult | None",
    in_sweeps=False,
)
PRECISION_HELP = "Measure until every speedup is known to within this."
TIME_LIMIT_HELP = "Time limit in seconds, counted from the first sample."
AXIS = "NAME=A:B:STEP"
RAY_HELP = "ADDRESS is auto, local, HOST:PORT or ray://HOST:PORT. Needs gemmscope[ray]."


@cache
def skip_flags() -> dict[str, str]:
    """The flag of the command line that leaves out a recipe, for those that have one.

    >>> skip_flags()["MXFP8"]
    'no_fp8'
    """
    return {
        name: facts["skipped_by"]
        for name, facts in load_data("gemmscope.recipe", "recipes.toml").items()
        if "skipped_by" in facts
    }


class RecipeOptions(Options):
    """Which precisions, in which modes. The flags of the command line are added to `left_out` and `modes`."""

    GROUP: ClassVar[str] = "Recipes"

    recipes: Annotated[
        list[str] | None,
        Option(
            "Recipes to compare, such as fp8current,mxfp8. BF16 is always included.",
            metavar="NAME,...",
            names="recipe/recipes.toml",
            parse=names,
            accepts="Names | None",
            default="all that the GPU supports",
        ),
    ] = None
    left_out: Annotated[tuple[str, ...], Option("Recipes to skip.", parse=names, in_shell=False, accepts="Names | None")] = ()
    modes: Annotated[
        tuple[Mode, ...] | None,
        Option(
            "autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized beforehand), "
            "or both.",
            default="both",
            parse=names,
            in_shell=False,
            accepts="Mode | Sequence[Mode] | None",
        ),
    ] = None
    no_fp8_current: Annotated[bool, Option("Skip FP8Current.", in_python=False)] = False
    no_fp8_delayed: Annotated[bool, Option("Skip FP8Delayed.", in_python=False)] = False
    no_fp8_block: Annotated[bool, Option("Skip FP8Block.", in_python=False)] = False
    no_fp8: Annotated[bool, Option("Skip MXFP8 only. The other FP8 recipes have their own flags.", in_python=False)] = False
    no_fp4: Annotated[bool, Option("Skip NVFP4.", in_python=False)] = False
    pre_quantize: Annotated[bool, Option("Time only the GEMMs, on inputs quantized beforehand.", in_python=False)] = False
    autocast_only: Annotated[bool, Option("Time only forward and backward with quantization.", in_python=False)] = False

    def __post_init__(self) -> None:
        lower = {name.lower() for name in self.recipes or ()}
        skipped = {name: flag for name, flag in skip_flags().items() if getattr(self, flag)}
        for name, flag in skipped.items():
            if name.lower() in lower:
                raise UserError(f"{option('recipes')} includes {name}, but {option(flag)} skips it", "use only one of them")
        if self.pre_quantize and self.autocast_only:
            both = f"{option('pre_quantize')} and {option('autocast_only')}"
            raise UserError(f"{both} exclude each other", "use only one of them, or neither for both modes")
        self.__dict__["left_out"] = tuple(dict.fromkeys((*self.left_out, *skipped)))
        if self.pre_quantize or self.autocast_only:
            self.__dict__["modes"] = ("pre-quantized",) if self.pre_quantize else ("autocast",)

    @property
    def on_cpu(self) -> bool:
        """Whether everything runs on the CPU."""
        return False


class MeasuringOptions(RecipeOptions):
    """What is measured on which device, how precisely, and whether an interrupted measurement continues."""

    GROUP: ClassVar[str] = "Measuring"

    precision: Annotated[float | None, Option(PRECISION_HELP, metavar="PERCENT", parse=percentage, default="1%")] = None
    time_limit: Annotated[float | None, Option(TIME_LIMIT_HELP, metavar="SECONDS", default="120")] = None
    backend: Annotated[
        str | None,
        Option(
            "Framework to measure: transformer_engine, torchao, torch or cpu.",
            metavar="NAME",
            choices=("transformer_engine", "torchao", "torch", "cpu"),
            default="the first that is installed and supports the recipes",
        ),
    ] = None
    device: Annotated[
        str | None,
        Option("Where to measure. Use cpu only to try out the command.", choices=("cuda", "cpu"), default="cuda"),
    ] = None
    share_gpu: Annotated[bool, Option("Measure even if other processes use the GPU.")] = False
    resume: Annotated[bool, Option("Continue a measurement that was interrupted.")] = False

    @property
    def on_cpu(self) -> bool:
        return "cpu" in (self.device, self.backend)


class TimingOptions(MeasuringOptions):
    """How to time linears. Fixed counts, if any is given, replace precision and time limit."""

    timing: Annotated[Timing, Option("Time with CUDA events, or with the profiler's kernel timestamps.")] = "cuda-events"
    cache_weights: Annotated[
        bool, Option("Exclude weight quantization from the times, as if weights were quantized once per step.")
    ] = False
    torchao_filter: Annotated[
        bool,
        Option(
            "Keep in BF16 the layers that torchao's own filter skips.",
            flags=("--torchao-filter/--no-torchao-filter",),
        ),
    ] = True
    num_warmup: Annotated[
        int | None,
        Option(
            "Fixed number of warm-up runs in each round. Implies --num-iters.",
            default="10 with --num-iters",
        ),
    ] = None
    num_iters: Annotated[
        int | None,
        Option(
            "Fixed number of timed runs, instead of --precision and --time-limit.",
            default="100 with --num-warmup or --gpu-warmup",
        ),
    ] = None
    gpu_warmup: Annotated[
        float | None,
        Option(
            "Keep the GPU busy for this long before the fixed number of runs. Implies --num-iters.",
            metavar="SECONDS",
            default="5 with --num-iters",
        ),
    ] = None


class CalibrateOptions(TimingOptions):
    """How a GPU is calibrated."""

    device: Annotated[str | None, Option("Only cuda is possible.", choices=("cuda", "cpu"), hidden=True)] = None


class SweepOptions(Options):
    """What a measured sweep varies, and where its points are measured: GPUs of this machine (None: one), or a Ray cluster."""

    sweep: Annotated[
        Axes | None,
        Option(
            "Measure at several values of a size: micro_batch_size, sequence_length, tp, hidden_size and others, or m, k and n "
            "of one GEMM (--shapes). NAME=1,2,4 also works. Repeat the option to vary two sizes.",
            metavar=AXIS,
            parse=axes,
            repeated=True,
            in_python=False,
        ),
    ] = None
    gpus: Annotated[
        str | None,
        Option(
            "With --sweep: GPUs of this machine that share the points, by their numbers in nvidia-smi. Without --sweep: the GPU "
            "to measure on.",
            metavar="all|N,N,...",
            default="the first GPU",
        ),
    ] = None
    ray: Annotated[
        str | None,
        Option(
            f"With --sweep: spread the points over the GPUs of a Ray cluster. {RAY_HELP}",
            metavar="ADDRESS",
            group="Measuring",
            after="time_limit",
        ),
    ] = None


class BenchOptions(TimingOptions):
    """How linears are measured."""

    GROUP: ClassVar[str] = OWN

    precision: Annotated[
        float | None,
        Option(PRECISION_HELP, metavar="PERCENT", parse=percentage, default="1%; 2% at each point of a --sweep"),
    ] = None
    time_limit: Annotated[
        float | None,
        Option(TIME_LIMIT_HELP, metavar="SECONDS", default="120; 20 for each point of a --sweep"),
    ] = None
    shapes: Annotated[
        Sequence[Shape] | None,
        Option(SHAPES_HELP, metavar="N,MxKxN,...", default="256 to 16384", parse=bare_shapes, in_python=False),
    ] = None
    strict: Annotated[
        bool,
        Option("Exit with 3 if anything ran in a different precision than requested.", in_python=False),
    ] = False
    profile: Annotated[
        bool,
        Option(
            "Run everything a few times inside NVTX ranges, for Nsight Systems. Nothing is timed.",
            in_python=False,
            in_sweeps=False,
        ),
    ] = False
    profile_shape: Annotated[
        str | None,
        Option(
            "The GEMM that --profile runs if no model is given.",
            metavar="N|MxKxN",
            default="4096",
            in_python=False,
            in_sweeps=False,
        ),
    ] = None
    as_te_benchmark: Annotated[
        bool,
        Option(
            "Count linears as Transformer Engine's benchmark_gemm.py does, to compare with its published tables: every GEMM, "
            "including those of the backward pass, is a forward call that quantizes its own X and W.",
            group="Measuring",
            after="cache_weights",
            in_sweeps=False,
        ),
    ] = False
    fleet: Annotated[RunFile, FLEET] = None
    verify_dgrad: Annotated[bool, Option("Dgrad is always measured.", hidden=True)] = False


class StepSweepOptions(SweepOptions):
    """What a sweep of training steps varies, and where; or the number of GPUs that the cost of one step is for."""

    sweep: Annotated[
        Axes | None,
        Option(
            "Measure at several values of a size: micro_batch_size, sequence_length, tp, hidden_size and others. NAME=1,2,4 also "
            "works. Repeat the option to vary two sizes.",
            metavar=AXIS,
            parse=axes,
            repeated=True,
            in_python=False,
        ),
    ] = None
    gpus: Annotated[
        str | None,
        Option(
            "Number of GPUs of the full run, to estimate its cost. With --sweep: GPUs of this machine that share the points, by "
            "their numbers in nvidia-smi, or all.",
            metavar="N|all|N,N,...",
        ),
    ] = None


class StepOptions(MeasuringOptions):
    """What to measure besides the step itself, how precisely, and the cost of the run."""

    GROUP: ClassVar[str] = OWN

    precision: Annotated[
        float | None,
        Option(PRECISION_HELP, metavar="PERCENT", parse=percentage, default="1%; 2% at each point of a --sweep"),
    ] = None
    time_limit: Annotated[
        float | None,
        Option(TIME_LIMIT_HELP, metavar="SECONDS", default="30; 20 for each point of a --sweep"),
    ] = None
    mix: Annotated[RunFile, MIX] = None
    keep_higher: Annotated[str | None, KEEP_HIGHER] = None
    verify: Annotated[bool, Option("Also run the real model, with as many layers as fit in memory.", in_sweeps=False)] = False
    break_even: Annotated[
        bool,
        Option(
            "Also run smaller batches, to find the batch size at which each recipe starts to win.",
            in_sweeps=False,
        ),
    ] = False
    cuda_graphs: Annotated[
        bool,
        Option(
            "Recommend by the step captured in CUDA graphs. Without this option, graphs are measured where launching takes long.",
            in_sweeps=False,
        ),
    ] = False
    hugging_face: Annotated[
        bool,
        Option(
            "Run the config's own Hugging Face class, with all layers that fit in memory, converted by torchao or Transformer "
            "Engine.",
        ),
    ] = False
    compile: Annotated[
        Compile | None,
        Option(
            "What torch.compile is applied to: the whole model with its loss, each layer, or nothing.",
            default="layers with torchao, else none",
        ),
    ] = None
    optimizer: Annotated[
        OptimizerName | None,
        Option(
            "Optimizer of a --module or --hugging-face step, fused where PyTorch supports it. The learning rate is zero.",
            default="adamw",
        ),
    ] = None
    observed_speedup: Annotated[
        float | None,
        Option(
            "The speedup over BF16 that you observed, to compare with the prediction.",
            in_sweeps=False,
        ),
    ] = None
    price: Annotated[float | None, Option("Price of one GPU-hour.", in_sweeps=False)] = None
    tokens: Annotated[float | None, TOKENS] = None
    fleet: Annotated[RunFile, FLEET] = None
    gpu_count: Annotated[
        int | None,
        Option("Number of GPUs of the full run, to estimate its cost.", in_shell=False, in_sweeps=False),
    ] = None
    try_mixed: Annotated[
        bool,
        Option(
            "Also run a recipe with some linears in BF16, where that may be faster.",
            in_shell=False,
            in_sweeps=False,
        ),
    ] = True


class FleetOptions(TimingOptions):
    """Which GPUs, what they measure, and when one is an outlier."""

    GROUP: ClassVar[str] = OWN

    runs: Annotated[
        tuple[str, ...],
        Option(
            "Gather run files instead of measuring: folders with one run file per GPU, or files of bench or step.",
            metavar="FOLDER|RUNFILE",
            argument=True,
            repeated=True,
            in_python=False,
        ),
    ] = ()
    step: Annotated[
        bool,
        Option("Measure a training step of the model, as gemmscope step does, instead of its linears."),
    ] = False
    shapes: Annotated[
        Sequence[Shape] | None,
        Option(SHAPES_HELP, metavar="N,MxKxN,...", default="256 to 16384", parse=bare_shapes, in_python=False),
    ] = None
    gpus: Annotated[
        str | None,
        Option(
            "GPUs of this machine, by their numbers in nvidia-smi.",
            metavar="all|N,N,...",
            default="all",
            accepts="str | Sequence[int] | None",
        ),
    ] = None
    ray: Annotated[
        str | None,
        Option(f"Measure every GPU of a Ray cluster. {RAY_HELP}", metavar="ADDRESS", group="Measuring", after="time_limit"),
    ] = None
    repeat: Annotated[
        int,
        Option(
            "Number of measurements per GPU. The median counts, and the repeats show how noisy a single measurement is.",
        ),
    ] = 1
    at_once: Annotated[
        int | None,
        Option(
            "Maximum number of GPUs per machine to measure at the same time. 1 measures them one after another.",
            default="all",
        ),
    ] = None
    folder: Annotated[
        str | None,
        Option(
            "Also write the run file of each GPU into this folder. Required under srun and torchrun, where all processes share "
            "it.",
            metavar="FOLDER",
            accepts="str | Path | None",
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        Option(
            "Smallest difference from the median at which a GPU can be an outlier.",
            metavar="PERCENT",
            parse=percentage,
            default="2%",
        ),
    ] = None
    fail_if_outlier: Annotated[
        bool,
        Option(
            "Exit with 3 if a GPU or a node is slow, or if a GPU could not be measured. Use it as a health check before a job. "
            "GPUs that are faster than the others do not fail the check.",
            in_python=False,
        ),
    ] = False
    hugging_face: Annotated[bool, Option("With --step: run the config's own Hugging Face class.")] = False
    compile: Annotated[
        Compile | None,
        Option(
            "With --step and a --module or --hugging-face model: what torch.compile is applied to.",
            default="layers with torchao, else none",
        ),
    ] = None
    optimizer: Annotated[
        OptimizerName | None,
        Option("With --step and a --module or --hugging-face model: its optimizer.", default="adamw"),
    ] = None
    time_limit: Annotated[
        float | None,
        Option(
            "Time limit per GPU in seconds, counted from its first sample.",
            metavar="SECONDS",
            default="120; 30 with --step",
        ),
    ] = None

    def not_for_run_files(self) -> list[str]:
        """The options that were given and apply only to measuring."""
        return [name for name in self.typed() if name not in ("runs", "tolerance", "fail_if_outlier")]
