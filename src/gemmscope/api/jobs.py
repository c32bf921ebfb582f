"""Jobs: a model and how it is run. Their methods correspond to the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gemmscope import commands
from gemmscope.api.calls import Axis, Names, PathOrResult, axes_of, prepared, takes
from gemmscope.choices import Mode
from gemmscope.job.load import ModelRun, model_run
from gemmscope.options.estimating import ForecastOptions, NumericsOptions, ShapesOptions
from gemmscope.options.measuring import BenchOptions, FleetOptions, StepOptions, SweepOptions
from gemmscope.options.values import Shape, names
from gemmscope.results.bench import BenchResult
from gemmscope.results.fleet import FleetResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.numerics import NumericsResult
from gemmscope.results.shapes import ShapesResult
from gemmscope.results.step import StepResult
from gemmscope.results.sweep import SweepResult
from gemmscope.sweep.axes import FORECAST_SIZES, LINEAR_SIZES, MEASURED_SIZES


@dataclass(frozen=True, repr=False)
class Job(ModelRun):
    """A model and how it is run. Its methods correspond to the commands."""

    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""

    def __repr__(self) -> str:
        return f"<Job {self.call}>"

    @takes(ShapesOptions)
    def shapes(
        self,
        *,
        # options
        check: bool = False,
    ) -> ShapesResult:
        """Every GEMM of a training step.

        >>> from gemmscope import load
        >>> load("llama-3.2-1b").on(1, 512).shapes().kind
        'shapes'

        Options:
            check: Compare the shapes with a trace of the real model. Needs torch and transformers. Exits with 1 if they differ.
        """
        options, context = prepared(f"{self.call}.shapes", locals(), ShapesOptions)
        return commands.shapes.shapes(self, options, context)

    @takes(ForecastOptions)
    def forecast(
        self,
        *gpus: str | Iterable[str],
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
        shapes: Sequence[Shape] | str | None = None,
        tokens: float | str | None = None,
        cache_weights: bool = False,
        as_te_benchmark: bool = False,
    ) -> ForecastResult:
        """Forecast the linears and the training step on GPUs that you do not need to have, with 90% error bars.

        GPUs are named one by one, in a list, or separated by commas: `job.forecast("b300", "h200")`, `job.forecast("b300,h200")`.

        Options:
            recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
            left_out: Recipes to skip.
            modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
                beforehand), or both. [default: both]
            stack: Software that runs the step: nvidia, torchtitan, pytorch and others. An unknown name lists all names.
                [default: that of the model's file, else any that runs on the GPU]
            power_limit: Power limit of each GPU in watts, as nvidia-smi sets it. [default: the GPU's usual limit]
            network: Network between NVLink domains: a name, or GB/s per GPU and direction. An unknown name lists all names.
                [default: the GPU's usual network]
            nvlink_domain: Number of GPUs in one NVLink domain. [default: the GPU's usual size]
            mix: Also compute the speedup of the mix that gemmscope numerics chose: a recipe, and the layers and linears that
                stay in a higher precision.
            keep_higher: Also compute the speedup of every recipe with these kept in BF16: the first N layers, the last N
                layers, and linears such as mlp.down_proj in every layer.
            measured: A step of the same model that gemmscope step measured, on any GPU and with any batch: the forecast follows
                it.
            gpu_count: Number of GPUs. Sets dp, and with tokens also gives the cost of the full run.
            gpu: GPUs to forecast, side by side: h200, b200 and others, names as nvidia-smi prints them, or a TOML file of your
                own. An unknown name lists all names.
            price: Price of one GPU-hour, the same for all GPUs or one for each, such as h200=2.5,b300=4.
            state: GPU clocks: sustained, under the power limit as in long training, or burst, before the GPU reaches its power
                limit.
            shapes: Bare GEMMs instead of a model: squares (4k) or MxKxN triplets.
            tokens: Training tokens, to estimate the cost of the full run: 2T, 15.5T or 1e12 (k, M, B and T are powers of 1000).
            cache_weights: Exclude weight quantization from the times of linears, as if weights were quantized once per step.
            as_te_benchmark: Count linears as Transformer Engine's benchmark_gemm.py does, to compare with its published tables:
                every GEMM, including those of the backward pass, is a forward call that quantizes its own X and W.
        """
        given, named = locals(), [*names(gpus), *names(gpu or ())]
        options, context = prepared(f"{self.call}.forecast", given, ForecastOptions, ["gpus"], gpu=named)
        job: ModelRun = self
        if options.gpus is not None and not {"gpus", "dp"} & self.arguments.keys():
            job = model_run(self.source, **self.arguments, gpus=options.gpus)
        return commands.forecast.forecast(job, options, context)

    @takes(ForecastOptions, without=("gpu_count", "modes"), axes=FORECAST_SIZES, one_run=False)
    def sweep(
        self,
        *on_gpus: str | Iterable[str],
        # options
        hidden_size: Axis = None,
        intermediate_size: Axis = None,
        num_attention_heads: Axis = None,
        num_hidden_layers: Axis = None,
        num_key_value_heads: Axis = None,
        head_dim: Axis = None,
        vocab_size: Axis = None,
        num_experts: Axis = None,
        num_experts_per_tok: Axis = None,
        micro_batch_size: Axis = None,
        sequence_length: Axis = None,
        gradient_accumulation: Axis = None,
        tp: Axis = None,
        cp: Axis = None,
        pp: Axis = None,
        ep: Axis = None,
        etp: Axis = None,
        global_batch: Axis = None,
        vp: Axis = None,
        dp: Axis = None,
        zero: Axis = None,
        fsdp: Axis = None,
        gpus: Axis = None,
        recipes: Names | None = None,
        left_out: Names | None = None,
        stack: str | None = None,
        power_limit: float | str | None = None,
        network: str | float | None = None,
        nvlink_domain: int | str | None = None,
        gpu: Names | None = None,
        state: Literal["sustained", "burst"] = "sustained",
    ) -> ForecastResult:
        """Forecast the training step at several values of one or two sizes: `job.sweep("b200", micro_batch_size=[1, 2, 4])`.
        Sizes of the model can vary if it was loaded by its sizes. Ctrl-C returns the points computed so far.

        Options:
            hidden_size, intermediate_size, num_attention_heads, num_hidden_layers, num_key_value_heads, head_dim, vocab_size,
                num_experts, num_experts_per_tok, micro_batch_size, sequence_length, gradient_accumulation, tp, cp, pp, ep, etp,
                global_batch, vp, dp, zero, fsdp, gpus: The values of one or two sizes to vary.
            recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
            left_out: Recipes to skip.
            stack: Software that runs the step: nvidia, torchtitan, pytorch and others. An unknown name lists all names.
                [default: that of the model's file, else any that runs on the GPU]
            power_limit: Power limit of each GPU in watts, as nvidia-smi sets it. [default: the GPU's usual limit]
            network: Network between NVLink domains: a name, or GB/s per GPU and direction. An unknown name lists all names.
                [default: the GPU's usual network]
            nvlink_domain: Number of GPUs in one NVLink domain. [default: the GPU's usual size]
            gpu: GPUs to forecast, side by side: h200, b200 and others, names as nvidia-smi prints them, or a TOML file of your
                own. An unknown name lists all names.
            state: GPU clocks: sustained, under the power limit as in long training, or burst, before the GPU reaches its power
                limit.
        """
        given = locals()
        options, context = prepared(
            f"{self.call}.sweep", given, ForecastOptions, ["on_gpus"], gpu=[*names(on_gpus), *names(gpu or ())]
        )
        options = options.but(sweep=axes_of(given, FORECAST_SIZES))
        return commands.forecast.sweep(self.model_arguments, self.arguments, options, context)

    @takes(BenchOptions)
    def bench(
        self,
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
        """Time the linears on this GPU. `deliver` gets the result while the measurement can still be resumed.

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
            num_iters: Fixed number of timed runs, instead of precision and time_limit. [default: 100 with num_warmup or
                gpu_warmup]
            gpu_warmup: Keep the GPU busy for this long before the fixed number of runs. Implies num_iters. [default: 5 with
                num_iters]
            fleet: Run file of gemmscope fleet. The answer then includes the range that covers 90% of that fleet's GPUs.
            verify_dgrad: Dgrad is always measured.
        """
        options, context = prepared(f"{self.call}.bench", locals(), BenchOptions)
        return commands.bench.run_bench(self, options, context)

    @takes(StepOptions)
    def step(
        self,
        *,
        deliver: Callable[[StepResult], None] | None = None,
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
        mix: PathOrResult | None = None,
        keep_higher: str | None = None,
        verify: bool = False,
        break_even: bool = False,
        cuda_graphs: bool = False,
        hugging_face: bool = False,
        compile: Literal["whole", "layers", "none"] | None = None,
        optimizer: Literal["adamw", "adam", "sgd", "none"] | None = None,
        observed_speedup: float | str | None = None,
        price: float | str | None = None,
        tokens: float | str | None = None,
        fleet: PathOrResult | None = None,
        gpu_count: int | str | None = None,
        try_mixed: bool = True,
    ) -> StepResult:
        """Predict the training step on this GPU. `deliver` gets the result while the measurement can still be resumed.

        Options:
            recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
            left_out: Recipes to skip.
            modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
                beforehand), or both. [default: both]
            precision: Measure until every speedup is known to within this. [default: 1%; 2% at each point of a sweep]
            time_limit: Time limit in seconds, counted from the first sample. [default: 30; 20 for each point of a sweep]
            backend: Framework to measure: transformer_engine, torchao, torch or cpu. [default: the first that is installed and
                supports the recipes]
            device: Where to measure. Use cpu only to try out the command. [default: cuda]
            share_gpu: Measure even if other processes use the GPU.
            resume: Continue a measurement that was interrupted.
            mix: Also compute the speedup of the mix that gemmscope numerics chose: a recipe, and the layers and linears that
                stay in a higher precision.
            keep_higher: Also compute the speedup of every recipe with these kept in BF16: the first N layers, the last N
                layers, and linears such as mlp.down_proj in every layer.
            verify: Also run the real model, with as many layers as fit in memory.
            break_even: Also run smaller batches, to find the batch size at which each recipe starts to win.
            cuda_graphs: Recommend by the step captured in CUDA graphs. Without this option, graphs are measured where launching
                takes long.
            hugging_face: Run the config's own Hugging Face class, with all layers that fit in memory, converted by torchao or
                Transformer Engine.
            compile: What torch.compile is applied to: the whole model with its loss, each layer, or nothing. [default: layers
                with torchao, else none]
            optimizer: Optimizer of a module or hugging_face step, fused where PyTorch supports it. The learning rate is zero.
                [default: adamw]
            observed_speedup: The speedup over BF16 that you observed, to compare with the prediction.
            price: Price of one GPU-hour.
            tokens: Training tokens, to estimate the cost of the full run: 2T, 15.5T or 1e12 (k, M, B and T are powers of 1000).
            fleet: Run file of gemmscope fleet. The answer then includes the range that covers 90% of that fleet's GPUs.
            gpu_count: Number of GPUs of the full run, to estimate its cost.
            try_mixed: Also run a recipe with some linears in BF16, where that may be faster.
        """
        options, context = prepared(f"{self.call}.step", locals(), StepOptions)
        return commands.step.run_step(self, options, context)

    @takes(FleetOptions)
    def fleet(
        self,
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
        """Run the same measurement on every GPU, and find outliers: the linears, or with `step` the training step.
        `gemmscope.gather_fleet` does the same from run files.

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
            num_iters: Fixed number of timed runs, instead of precision and time_limit. [default: 100 with num_warmup or
                gpu_warmup]
            gpu_warmup: Keep the GPU busy for this long before the fixed number of runs. Implies num_iters. [default: 5 with
                num_iters]
            step: Measure a training step of the model, as gemmscope step does, instead of its linears.
            gpus: GPUs of this machine, by their numbers in nvidia-smi. [default: all]
            repeat: Number of measurements per GPU. The median counts, and the repeats show how noisy a single measurement is.
            at_once: Maximum number of GPUs per machine to measure at the same time. 1 measures them one after another.
                [default: all]
            folder: Also write the run file of each GPU into this folder. Required under srun and torchrun, where all processes
                share it.
            tolerance: Smallest difference from the median at which a GPU can be an outlier. [default: 2%]
            hugging_face: With step: run the config's own Hugging Face class.
            compile: With step and a module or hugging_face model: what torch.compile is applied to. [default: layers with
                torchao, else none]
            optimizer: With step and a module or hugging_face model: its optimizer. [default: adamw]
        """
        options, context = prepared(f"{self.call}.fleet", locals(), FleetOptions)
        return commands.fleet.run_fleet(self, options, context)

    @takes(SweepOptions, BenchOptions, axes=LINEAR_SIZES, one_run=False)
    def bench_sweep(
        self,
        *,
        deliver: Callable[[SweepResult], None] | None = None,
        stream: Callable[[SweepResult], None] | None = None,
        # options
        hidden_size: Axis = None,
        intermediate_size: Axis = None,
        num_attention_heads: Axis = None,
        num_hidden_layers: Axis = None,
        num_key_value_heads: Axis = None,
        head_dim: Axis = None,
        vocab_size: Axis = None,
        num_experts: Axis = None,
        num_experts_per_tok: Axis = None,
        micro_batch_size: Axis = None,
        sequence_length: Axis = None,
        tp: Axis = None,
        cp: Axis = None,
        pp: Axis = None,
        ep: Axis = None,
        etp: Axis = None,
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
        """Time the linears at several values of one or two sizes: `job.bench_sweep(micro_batch_size=[1, 2, 4], gpus="all")`.

        Sizes of the model can vary if it was loaded by its sizes. Ctrl-C returns the points measured so far, and `resume=True`
        continues; `stream` is a function that receives the points so far every few seconds.

        Options:
            hidden_size, intermediate_size, num_attention_heads, num_hidden_layers, num_key_value_heads, head_dim, vocab_size,
                num_experts, num_experts_per_tok, micro_batch_size, sequence_length, tp, cp, pp, ep, etp: The values of one or
                two sizes to vary.
            gpus: With sweep: GPUs of this machine that share the points, by their numbers in nvidia-smi. Without sweep: the GPU
                to measure on. [default: the first GPU]
            recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
            left_out: Recipes to skip.
            modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
                beforehand), or both. [default: both]
            precision: Measure until every speedup is known to within this. [default: 1%; 2% at each point of a sweep]
            time_limit: Time limit in seconds, counted from the first sample. [default: 120; 20 for each point of a sweep]
            ray: With sweep: spread the points over the GPUs of a Ray cluster. ADDRESS is auto, local, HOST:PORT or
                ray://HOST:PORT. Needs gemmscope[ray].
            backend: Framework to measure: transformer_engine, torchao, torch or cpu. [default: the first that is installed and
                supports the recipes]
            device: Where to measure. Use cpu only to try out the command. [default: cuda]
            share_gpu: Measure even if other processes use the GPU.
            resume: Continue a measurement that was interrupted.
            timing: Time with CUDA events, or with the profiler's kernel timestamps.
            cache_weights: Exclude weight quantization from the times, as if weights were quantized once per step.
            torchao_filter: Keep in BF16 the layers that torchao's own filter skips.
            num_warmup: Fixed number of warm-up runs in each round. Implies num_iters. [default: 10 with num_iters]
            num_iters: Fixed number of timed runs, instead of precision and time_limit. [default: 100 with num_warmup or
                gpu_warmup]
            gpu_warmup: Keep the GPU busy for this long before the fixed number of runs. Implies num_iters. [default: 5 with
                num_iters]
            verify_dgrad: Dgrad is always measured.
        """
        given = locals()
        options, context = prepared(f"{self.call}.bench_sweep", given, BenchOptions)
        sweep = SweepOptions(sweep=axes_of(given, LINEAR_SIZES), gpus=gpus, ray=ray)
        return commands.sweep.bench_sweep(self.model_arguments, self.arguments, options, sweep, context)

    @takes(SweepOptions, StepOptions, axes=MEASURED_SIZES, one_run=False)
    def step_sweep(
        self,
        *,
        deliver: Callable[[SweepResult], None] | None = None,
        stream: Callable[[SweepResult], None] | None = None,
        # options
        hidden_size: Axis = None,
        intermediate_size: Axis = None,
        num_attention_heads: Axis = None,
        num_hidden_layers: Axis = None,
        num_key_value_heads: Axis = None,
        head_dim: Axis = None,
        vocab_size: Axis = None,
        num_experts: Axis = None,
        num_experts_per_tok: Axis = None,
        micro_batch_size: Axis = None,
        sequence_length: Axis = None,
        gradient_accumulation: Axis = None,
        tp: Axis = None,
        cp: Axis = None,
        pp: Axis = None,
        ep: Axis = None,
        etp: Axis = None,
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
        hugging_face: bool = False,
        compile: Literal["whole", "layers", "none"] | None = None,
        optimizer: Literal["adamw", "adam", "sgd", "none"] | None = None,
    ) -> SweepResult:
        """Measure the training step at several values of one or two sizes: `job.step_sweep(sequence_length=["2k", "8k"])`.
        Otherwise like `bench_sweep`.

        Options:
            hidden_size, intermediate_size, num_attention_heads, num_hidden_layers, num_key_value_heads, head_dim, vocab_size,
                num_experts, num_experts_per_tok, micro_batch_size, sequence_length, gradient_accumulation, tp, cp, pp, ep, etp:
                The values of one or two sizes to vary.
            gpus: With sweep: GPUs of this machine that share the points, by their numbers in nvidia-smi. Without sweep: the GPU
                to measure on. [default: the first GPU]
            recipes: Recipes to compare, such as fp8current,mxfp8. BF16 is always included. [default: all that the GPU supports]
            left_out: Recipes to skip.
            modes: autocast (forward and backward with quantization), pre-quantized (only the GEMMs, on inputs quantized
                beforehand), or both. [default: both]
            precision: Measure until every speedup is known to within this. [default: 1%; 2% at each point of a sweep]
            time_limit: Time limit in seconds, counted from the first sample. [default: 30; 20 for each point of a sweep]
            ray: With sweep: spread the points over the GPUs of a Ray cluster. ADDRESS is auto, local, HOST:PORT or
                ray://HOST:PORT. Needs gemmscope[ray].
            backend: Framework to measure: transformer_engine, torchao, torch or cpu. [default: the first that is installed and
                supports the recipes]
            device: Where to measure. Use cpu only to try out the command. [default: cuda]
            share_gpu: Measure even if other processes use the GPU.
            resume: Continue a measurement that was interrupted.
            hugging_face: Run the config's own Hugging Face class, with all layers that fit in memory, converted by torchao or
                Transformer Engine.
            compile: What torch.compile is applied to: the whole model with its loss, each layer, or nothing. [default: layers
                with torchao, else none]
            optimizer: Optimizer of a module or hugging_face step, fused where PyTorch supports it. The learning rate is zero.
                [default: adamw]
        """
        given = locals()
        options, context = prepared(f"{self.call}.step_sweep", given, StepOptions)
        sweep = SweepOptions(sweep=axes_of(given, MEASURED_SIZES), gpus=gpus, ray=ray)
        return commands.sweep.step_sweep(self.model_arguments, self.arguments, options, sweep, context)

    @takes(NumericsOptions, without=("recording",))
    def numerics(
        self,
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
        """Compute quantization errors for this model, as `quantization_errors` does. The model gives the sizes of SYNTHETIC
        tensors (`synthetic="outliers"`), and `gpu="b200"` forecasts the speeds.

        Options:
            checkpoint: Use a checkpoint instead of a recording, for weights only: a safetensors file or a folder of them.
            synthetic: Use SYNTHETIC tensors of the model's sizes instead of a recording: normal, heavy-tailed, or with outlier
                channels.
            speed: Run file of step, bench or forecast, with the speed of each recipe.
            gpu: Forecast the speedups on this GPU, for the given model. With speed: the GPU to take from a forecast of several.
            bound: Find the fastest mix of precisions (without speeds: of fewest bits) whose error is at most this. The error is
                the root mean square over all linears, weighted by their damage where a recording tells it.
            depth: Also run the given model with each recipe in all linears, to get the error that accumulates up to each layer.
                Needs transformers. A module always runs this way, without this flag.
            recipes: Recipes to compare, such as fp8current,nvfp4. Your GPU does not need to support them. [default: all of
                Transformer Engine]
            later: Recordings of later steps of the same training, to show beside the first one.
            without: Show NVFP4 without its Hadamard transform (hadamard), without stochastic rounding (stochastic), or without
                both.
            backend: Framework whose quantization to emulate, where frameworks differ. [default: the first that supports the
                recipe]
            device: Where to compute the errors. [default: cpu]
            seed: Random seed of SYNTHETIC tensors and of stochastic rounding.
        """
        options, context = prepared(f"{self.call}.numerics", locals(), NumericsOptions, ["recording"])
        return commands.numerics.run_numerics(options, context, job=self)
