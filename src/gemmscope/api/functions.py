"""Functions for everything that needs no model: bare GEMMs, tensors, traces, run files, this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from gemmscope import commands, writers
from gemmscope.api.calls import Axis, Names, PathOrResult, axes_of, context, prepared, takes
from gemmscope.api.jobs import Job
from gemmscope.choices import Mode
from gemmscope.commands.calibrate import Calibrated
from gemmscope.commands.doctor import Diagnosis
from gemmscope.errors import UserError
from gemmscope.options.declare import from_python
from gemmscope.options.estimating import ForecastOptions, NumericsOptions
from gemmscope.options.measuring import BenchOptions, CalibrateOptions, FleetOptions, SweepOptions
from gemmscope.options.reading import CompareOptions, ExplainOptions
from gemmscope.options.values import GEMM_SIZES, Shape, names
from gemmscope.results.base import Result
from gemmscope.results.bench import BenchResult
from gemmscope.results.compare import CompareResult
from gemmscope.results.explain import ExplainResult
from gemmscope.results.fleet import FleetResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.numerics import NumericsResult
from gemmscope.results.step import StepResult
from gemmscope.results.sweep import SweepResult


@takes(BenchOptions)
def bench_gemms(
    shapes: Sequence[Shape] | None = None,
    *,
    deliver: Callable[[BenchResult], None] | None = None,
    # options
    recipes: Names | None = None,
    left_out: Names | None = None,
    modes: Mode | Sequence[Mode] | None = None,
    precision: float | str | None = None,
    time_limit: float | str | None = None,
    backend: str | None = None,
    device: str | None = None,
    share_gpu: bool = False,
    resume: bool = False,
    timing: Literal["cuda-events", "profiler"] = "cuda-events",
    cache_weights: bool = False,
    as_te_benchmark: bool = False,
    torchao_filter: bool = True,
    num_warmup: int | str | None = None,
    num_iters: int | str | None = None,
    gpu_warmup: float | str | None = None,
    fleet: PathOrResult | None = None,
    verify_dgrad: bool = False,
) -> BenchResult:
    """Time bare GEMMs of these (M, K, N) on this GPU.

    Options:
        recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
        left_out: Recipes to skip.
        modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
            beforehand), or both. [default: both]
        precision: Measure until every speedup is known to within this. [default: 1%; 2% at each point of a sweep]
        time_limit: Time limit in seconds, counted from the first sample. [default: 120; 20 for each point of a sweep]
        backend: Framework to measure: transformer_engine, torchao, torch or cpu. [default: the first that is installed and
            supports the recipes]
        device: Where to measure. Use cpu only to try out the command. [default: cuda]
        share_gpu: Measure even if other processes use the GPU.
        resume: Continue a measurement that was interrupted.
        timing: Time with CUDA events, or with the profiler's kernel timestamps.
        cache_weights: Exclude weight quantization from the times, as if weights were quantized once per step.
        as_te_benchmark: Count linears as Transformer Engine's benchmark_gemm.py does, to compare with its published tables:
            every GEMM, including those of the backward pass, is a forward call that quantizes its own X and W.
        torchao_filter: Keep in BF16 the layers that torchao's own filter skips.
        num_warmup: Fixed number of warm-up runs in each round. Implies num_iters. [default: 10 with num_iters]
        num_iters: Fixed number of timed runs, instead of precision and time_limit. [default: 100 with num_warmup or gpu_warmup]
        gpu_warmup: Keep the GPU busy for this long before the fixed number of runs. Implies num_iters. [default: 5 with
            num_iters]
        fleet: Run file of gemmscope fleet. The answer then includes the range that covers 90% of that fleet's GPUs.
        verify_dgrad: Dgrad is always measured.
    """
    options, run = prepared("gemmscope.bench_gemms", locals(), BenchOptions)
    return commands.bench.run_bench(None, options.but(shapes=shapes), run)


@takes(SweepOptions, BenchOptions, axes=GEMM_SIZES, one_run=False)
def bench_gemm_sweep(
    shape: Shape,
    *,
    deliver: Callable[[SweepResult], None] | None = None,
    stream: Callable[[SweepResult], None] | None = None,
    # options
    m: Axis = None,
    k: Axis = None,
    n: Axis = None,
    gpus: str | None = None,
    recipes: Names | None = None,
    left_out: Names | None = None,
    modes: Mode | Sequence[Mode] | None = None,
    precision: float | str | None = None,
    time_limit: float | str | None = None,
    ray: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    share_gpu: bool = False,
    resume: bool = False,
    timing: Literal["cuda-events", "profiler"] = "cuda-events",
    cache_weights: bool = False,
    torchao_filter: bool = True,
    num_warmup: int | str | None = None,
    num_iters: int | str | None = None,
    gpu_warmup: float | str | None = None,
    verify_dgrad: bool = False,
) -> SweepResult:
    """Time one bare GEMM of (M, K, N) with one or two of its sizes varied: `bench_gemm_sweep((8192, 4096, 14336), m=[1024])`.

    Options:
        m, k, n: The values of one or two sizes to vary.
        gpus: With sweep: GPUs of this machine that share the points, by their numbers in nvidia-smi. Without sweep: the GPU to
            measure on. [default: the first GPU]
        recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
        left_out: Recipes to skip.
        modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
            beforehand), or both. [default: both]
        precision: Measure until every speedup is known to within this. [default: 1%; 2% at each point of a sweep]
        time_limit: Time limit in seconds, counted from the first sample. [default: 120; 20 for each point of a sweep]
        ray: With sweep: spread the points over the GPUs of a Ray cluster. ADDRESS is auto, local, HOST:PORT or ray://HOST:PORT.
            Needs gemmscope[ray].
        backend: Framework to measure: transformer_engine, torchao, torch or cpu. [default: the first that is installed and
            supports the recipes]
        device: Where to measure. Use cpu only to try out the command. [default: cuda]
        share_gpu: Measure even if other processes use the GPU.
        resume: Continue a measurement that was interrupted.
        timing: Time with CUDA events, or with the profiler's kernel timestamps.
        cache_weights: Exclude weight quantization from the times, as if weights were quantized once per step.
        torchao_filter: Keep in BF16 the layers that torchao's own filter skips.
        num_warmup: Fixed number of warm-up runs in each round. Implies num_iters. [default: 10 with num_iters]
        num_iters: Fixed number of timed runs, instead of precision and time_limit. [default: 100 with num_warmup or gpu_warmup]
        gpu_warmup: Keep the GPU busy for this long before the fixed number of runs. Implies num_iters. [default: 5 with
            num_iters]
        verify_dgrad: Dgrad is always measured.
    """
    given = locals()
    options, run = prepared("gemmscope.bench_gemm_sweep", {**given, "shape": (shape,)}, BenchOptions, ["shape"])
    return commands.sweep.gemm_sweep(shape, options, SweepOptions(sweep=axes_of(given, GEMM_SIZES), gpus=gpus, ray=ray), run)


@takes(FleetOptions)
def fleet_gemms(
    shapes: Sequence[Shape] | None = None,
    *,
    deliver: Callable[[FleetResult], None] | None = None,
    # options
    recipes: Names | None = None,
    left_out: Names | None = None,
    modes: Mode | Sequence[Mode] | None = None,
    precision: float | str | None = None,
    time_limit: float | str | None = None,
    ray: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    share_gpu: bool = False,
    resume: bool = False,
    timing: Literal["cuda-events", "profiler"] = "cuda-events",
    cache_weights: bool = False,
    torchao_filter: bool = True,
    num_warmup: int | str | None = None,
    num_iters: int | str | None = None,
    gpu_warmup: float | str | None = None,
    step: bool = False,
    gpus: str | Sequence[int] | None = None,
    repeat: int | str = 1,
    at_once: int | str | None = None,
    folder: str | Path | None = None,
    tolerance: float | str | None = None,
    hugging_face: bool = False,
    compile: Literal["whole", "layers", "none"] | None = None,
    optimizer: Literal["adamw", "adam", "sgd", "none"] | None = None,
) -> FleetResult:
    """Time bare GEMMs of these (M, K, N) on every GPU, and find outliers.

    Options:
        recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
        left_out: Recipes to skip.
        modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
            beforehand), or both. [default: both]
        precision: Measure until every speedup is known to within this. [default: 1%]
        time_limit: Time limit per GPU in seconds, counted from its first sample. [default: 120; 30 with step]
        ray: Measure every GPU of a Ray cluster. ADDRESS is auto, local, HOST:PORT or ray://HOST:PORT. Needs gemmscope[ray].
        backend: Framework to measure: transformer_engine, torchao, torch or cpu. [default: the first that is installed and
            supports the recipes]
        device: Where to measure. Use cpu only to try out the command. [default: cuda]
        share_gpu: Measure even if other processes use the GPU.
        resume: Continue a measurement that was interrupted.
        timing: Time with CUDA events, or with the profiler's kernel timestamps.
        cache_weights: Exclude weight quantization from the times, as if weights were quantized once per step.
        torchao_filter: Keep in BF16 the layers that torchao's own filter skips.
        num_warmup: Fixed number of warm-up runs in each round. Implies num_iters. [default: 10 with num_iters]
        num_iters: Fixed number of timed runs, instead of precision and time_limit. [default: 100 with num_warmup or gpu_warmup]
        gpu_warmup: Keep the GPU busy for this long before the fixed number of runs. Implies num_iters. [default: 5 with
            num_iters]
        step: Measure a training step of the model, as gemmscope step does, instead of its linears.
        gpus: GPUs of this machine, by their numbers in nvidia-smi. [default: all]
        repeat: Number of measurements per GPU. The median counts, and the repeats show how noisy a single measurement is.
        at_once: Maximum number of GPUs per machine to measure at the same time. 1 measures them one after another. [default:
            all]
        folder: Also write the run file of each GPU into this folder. Required under srun and torchrun, where all processes
            share it.
        tolerance: Smallest difference from the median at which a GPU can be an outlier. [default: 2%]
        hugging_face: With step: run the config's own Hugging Face class.
        compile: With step and a module or hugging_face model: what torch.compile is applied to. [default: layers with torchao,
            else none]
        optimizer: With step and a module or hugging_face model: its optimizer. [default: adamw]
    """
    options, run = prepared("gemmscope.fleet_gemms", locals(), FleetOptions)
    return commands.fleet.run_fleet(None, options.but(shapes=shapes), run)


def gather_fleet(*runs: str | Path, tolerance: float | str | None = None) -> FleetResult:
    """Gather the run files of single GPUs into one fleet: give a folder of run files, or the files. `tolerance`: the smallest
    difference from the median at which a GPU can be an outlier, 0.02 for 2%."""
    run = context("gemmscope.gather_fleet", {"runs": runs, "tolerance": tolerance}, positional=["runs"])
    return commands.fleet.gather_fleet(runs, from_python(FleetOptions, {"tolerance": tolerance}).tolerance, run)


@takes(ForecastOptions, without=("shapes",))
def forecast_gemms(
    *gpus: str | Iterable[str],
    shapes: Sequence[Shape],
    # options
    recipes: Names | None = None,
    left_out: Names | None = None,
    modes: Mode | Sequence[Mode] | None = None,
    stack: str | None = None,
    power_limit: float | str | None = None,
    network: str | float | None = None,
    nvlink_domain: int | str | None = None,
    mix: PathOrResult | None = None,
    keep_higher: str | None = None,
    measured: PathOrResult | None = None,
    gpu_count: int | str | None = None,
    gpu: Names | None = None,
    price: float | str | Mapping[str, float] | None = None,
    state: Literal["sustained", "burst"] = "sustained",
    tokens: float | str | None = None,
    cache_weights: bool = False,
    as_te_benchmark: bool = False,
) -> ForecastResult:
    """Forecast bare GEMMs of these (M, K, N).

    Options:
        recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
        left_out: Recipes to skip.
        modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
            beforehand), or both. [default: both]
        stack: Software that runs the step: nvidia, torchtitan, pytorch and others. An unknown name lists all names. [default:
            that of the model's file, else any that runs on the GPU]
        power_limit: Power limit of each GPU in watts, as nvidia-smi sets it. [default: the GPU's usual limit]
        network: Network between NVLink domains: a name, or GB/s per GPU and direction. An unknown name lists all names.
            [default: the GPU's usual network]
        nvlink_domain: Number of GPUs in one NVLink domain. [default: the GPU's usual size]
        mix: Also compute the speedup of the mix that gemmscope numerics chose: a recipe, and the layers and linears that stay
            in a higher precision.
        keep_higher: Also compute the speedup of every recipe with these kept in BF16: the first N layers, the last N layers,
            and linears such as mlp.down_proj in every layer.
        measured: A step of the same model that gemmscope step measured, on any GPU and with any batch: the forecast follows it.
        gpu_count: Number of GPUs. Sets dp, and with tokens also gives the cost of the full run.
        gpu: GPUs to forecast, side by side: h200, b200 and others, names as nvidia-smi prints them, or a TOML file of your own.
            An unknown name lists all names.
        price: Price of one GPU-hour, the same for all GPUs or one for each, such as h200=2.5,b300=4.
        state: GPU clocks: sustained, under the power limit as in long training, or burst, before the GPU reaches its power
            limit.
        tokens: Training tokens, to estimate the cost of the full run: 2T, 15.5T or 1e12 (k, M, B and T are powers of 1000).
        cache_weights: Exclude weight quantization from the times of linears, as if weights were quantized once per step.
        as_te_benchmark: Count linears as Transformer Engine's benchmark_gemm.py does, to compare with its published tables:
            every GEMM, including those of the backward pass, is a forward call that quantizes its own X and W.
    """
    given, named = locals(), [*names(gpus), *names(gpu or ())]
    options, run = prepared("gemmscope.forecast_gemms", given, ForecastOptions, ["gpus"], gpu=named)
    return commands.forecast.forecast(None, options, run)


@takes(NumericsOptions, without=("recording",))
def quantization_errors(
    recording: str | Path | None = None,
    *,
    deliver: Callable[[NumericsResult], None] | None = None,
    # options
    checkpoint: str | Path | None = None,
    synthetic: Literal["normal", "heavy", "outliers"] | None = None,
    speed: PathOrResult | None = None,
    gpu: str | None = None,
    bound: float | str | None = None,
    depth: bool = False,
    recipes: Names | None = None,
    later: Names | None = None,
    without: Names | None = None,
    backend: str | None = None,
    device: str | None = None,
    seed: int | str = 0,
) -> NumericsResult:
    """Compute the quantization error of each recipe, for every linear, layer and pass, from a file that `record_tensors` wrote.

    Options:
        checkpoint: Use a checkpoint instead of a recording, for weights only: a safetensors file or a folder of them.
        synthetic: Use SYNTHETIC tensors of the model's sizes instead of a recording: normal, heavy-tailed, or with outlier
            channels.
        speed: Run file of step, bench or forecast, with the speed of each recipe.
        gpu: Forecast the speedups on this GPU, for the given model. With speed: the GPU to take from a forecast of several.
        bound: Find the fastest mix of precisions (without speeds: of fewest bits) whose error is at most this. The error is the
            root mean square over all linears, weighted by their damage where a recording tells it.
        depth: Also run the given model with each recipe in all linears, to get the error that accumulates up to each layer.
            Needs transformers. A module always runs this way, without this flag.
        recipes: Recipes to compare, such as fp8current,nvfp4. Your GPU does not need to support them. [default: all of
            Transformer Engine]
        later: Recordings of later steps of the same training, to show beside the first one.
        without: Show NVFP4 without its Hadamard transform (hadamard), without stochastic rounding (stochastic), or without
            both.
        backend: Framework whose quantization to emulate, where frameworks differ. [default: the first that supports the recipe]
        device: Where to compute the errors. [default: cpu]
        seed: Random seed of SYNTHETIC tensors and of stochastic rounding.
    """
    options, run = prepared("gemmscope.quantization_errors", locals(), NumericsOptions, ["recording"])
    return commands.numerics.run_numerics(options, run)


@takes(ExplainOptions)
def explain_trace(
    *traces: str | Path,
    job: Job | None = None,
    # options
    baseline: str | Path | None = None,
    against: PathOrResult | None = None,
    recipe: str | None = None,
    steps: int | str | None = None,
    perfetto: str | Path | None = None,
) -> ExplainResult:
    """Explain where the time of a recorded step went, and why. `job`: the model, to check its FLOPs.

    Options:
        baseline: Trace of the same training in BF16, to compare part by part.
        against: Run file of step or bench, to compare with the prediction.
        recipe: Recipe of the run file to compare with. [default: the recipe in the trace]
        steps: Number of training steps in the trace, if they are not marked.
        perfetto: Write a copy of the trace with the diagnosis added as tracks.
    """
    options, run = prepared("gemmscope.explain_trace", locals(), ExplainOptions, ["traces"])
    return commands.explain.explain(traces, options, run, job=job)


def compare_runs(
    runs: Sequence[str | Path | BenchResult | StepResult | SweepResult | FleetResult],
    *,
    fail_if_slower: float | str | None = None,
) -> CompareResult:
    """Compare results of bench, step, their sweeps or fleet, or run files, oldest first. `fail_if_slower`: the slowdown that is
    allowed, 0.03 for 3%; the result says whether it holds."""
    listed = [str(run) if isinstance(run, (str, Path)) else run for run in runs]
    given = {"runs": listed, "fail_if_slower": fail_if_slower}
    run = context("gemmscope.compare_runs", {**given, "runs": (listed,)}, positional=["runs"])
    return commands.compare.compare(runs, from_python(CompareOptions, given).fail_if_slower, run)


def write_report(runs: Sequence[PathOrResult] | PathOrResult, path: str | Path) -> None:
    """Write one page from results or run files: .html, or .md for Markdown."""
    documents, messages = commands.report.report([runs] if isinstance(runs, (str, Path, Result)) else list(runs))
    ending = Path(path).suffix.lower()
    if ending not in writers.SEVERAL:
        hint = f"use a path that ends in {' or '.join(writers.SEVERAL)}"
        raise UserError(f"{path} has no extension that selects a format", hint)
    writers.save(path, writers.content(ending, documents, messages))


def read(path: str | Path) -> Result:
    """Read the result from a run file."""
    return commands.read_result(path)


@takes(CalibrateOptions)
def calibrate(
    *,
    # options
    recipes: Names | None = None,
    left_out: Names | None = None,
    modes: Mode | Sequence[Mode] | None = None,
    precision: float | str | None = None,
    time_limit: float | str | None = None,
    backend: str | None = None,
    device: str | None = None,
    share_gpu: bool = False,
    resume: bool = False,
    timing: Literal["cuda-events", "profiler"] = "cuda-events",
    cache_weights: bool = False,
    torchao_filter: bool = True,
    num_warmup: int | str | None = None,
    num_iters: int | str | None = None,
    gpu_warmup: float | str | None = None,
) -> Calibrated | None:
    """Measure this GPU to make its forecasts more accurate.

    Options:
        recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
        left_out: Recipes to skip.
        modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
            beforehand), or both. [default: both]
        precision: Measure until every speedup is known to within this. [default: 1%]
        time_limit: Time limit in seconds, counted from the first sample. [default: 120]
        backend: Framework to measure: transformer_engine, torchao, torch or cpu. [default: the first that is installed and
            supports the recipes]
        device: Only cuda is possible.
        share_gpu: Measure even if other processes use the GPU.
        resume: Continue a measurement that was interrupted.
        timing: Time with CUDA events, or with the profiler's kernel timestamps.
        cache_weights: Exclude weight quantization from the times, as if weights were quantized once per step.
        torchao_filter: Keep in BF16 the layers that torchao's own filter skips.
        num_warmup: Fixed number of warm-up runs in each round. Implies num_iters. [default: 10 with num_iters]
        num_iters: Fixed number of timed runs, instead of precision and time_limit. [default: 100 with num_warmup or gpu_warmup]
        gpu_warmup: Keep the GPU busy for this long before the fixed number of runs. Implies num_iters. [default: 5 with
            num_iters]
    """
    options, run = prepared("gemmscope.calibrate", locals(), CalibrateOptions)
    return commands.calibrate.calibrate(options, run)


def doctor() -> Diagnosis:
    """Check what this machine can measure, and what is missing."""
    return commands.doctor.diagnose()
