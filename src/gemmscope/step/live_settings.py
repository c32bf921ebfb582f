"""The settings of the step of a live module: what it needs, how it is compiled, how many of its layers fit into memory."""

from dataclasses import replace

from gemmscope.bench.choose import missing_package
from gemmscope.choices import COMPILES, OPTIMIZERS, Compile, OptimizerName
from gemmscope.errors import UserError, option, shown
from gemmscope.findings import Finding
from gemmscope.gpu.environment import Environment
from gemmscope.gpu.visible import visible_gpu
from gemmscope.job.load import ModelRun
from gemmscope.options.measuring import StepOptions
from gemmscope.process import free_memory_bytes
from gemmscope.recipe.frameworks import backends
from gemmscope.results.step import StepSettings
from gemmscope.step.answer import BYTES_PER_PARAMETER
from gemmscope.step.module_plan import LEAST_DEPTH, ModulePlan, depth_of
from gemmscope.units import listed, si

CPU_BYTES_PER_PARAMETER = 16  # the same in FP32, which the CPU runs for comparison
COMPILING_S = 1200.0  # allowed time without a message: compiling a whole model takes minutes, and so does tuning kernels
ALL_FIT, SOME_FIT = 0.85, 0.5  # of the memory, for the parameters of all layers; of some layers, at two depths


def for_live(job: ModelRun, options: StepOptions) -> StepOptions:
    """Checks what the step of a module or a Hugging Face model needs, and chooses its backend: torchao where it is installed."""
    source, run = job.source, job.run
    name = option("module" if source.module is not None else "hugging_face")
    split = run.tp * run.cp * run.ep * run.pp > 1
    whole, sizes = option("recompute", "full"), f"{option('tp')} and the other parallel sizes"
    module = source.module is not None
    where = f"give it with {option('config')}: config.json, its folder, or a hub ID"
    for applies, message, hint in (
        (source.module is None and source.config is None, "needs a Hugging Face config", where),
        (module and run.recompute != "none", "runs as it is, and cannot be recomputed", f"remove {option('recompute')}"),
        (module and options.break_even, "runs with its own inputs, not with smaller batches", f"remove {option('break_even')}"),
        (run.recompute == "selective", "can recompute whole layers, not attention alone", f"use {whole}, or remove {name}"),
        (options.verify, "runs the real layers already: there is nothing to verify", f"remove {option('verify')}"),
        (split, "runs whole layers and cannot split them", f"remove {sizes}" + ("" if module else f", or {name}")),
    ):
        if applies:
            raise UserError(f"{name} {message}", hint)
    if options.backend is not None or options.recipes is not None or options.on_cpu or missing_package("torchao"):
        return options
    return options.but(backend="torchao")


def step_settings(backend: str, compile_what: Compile | None, optimizer: OptimizerName | None, *, live: bool) -> StepSettings:
    """How to measure. Defaults are those of the frameworks: torchao's layers are compiled, Transformer Engine's are not."""
    for name, value, known in (("compile", compile_what, COMPILES), ("optimizer", optimizer, OPTIMIZERS)):
        if value is not None and value not in known:
            raise UserError(f"{option(name)} must be {listed(known, 'or')}, not {shown(value)}")
    for applies, message, hint in (
        (
            optimizer not in (None, "adamw"),
            f"{option('optimizer')} is for {option('module')} and {option('hugging_face')}: other steps run AdamW",
            f"remove {option('optimizer')}",
        ),
        (
            compile_what not in (None, "none") and backend == "transformer_engine",
            "Transformer Engine's modules are not compiled: they are fused kernels already",
            f"remove {option('compile')}, or add {option('backend', 'torchao')}",
        ),
    ):
        if applies and not live:
            raise UserError(message, hint)
    settings = StepSettings(
        backend,
        compile=compile_what or ("layers" if backend == "torchao" else "none"),
        optimizer=optimizer or "adamw",
        silence_s=COMPILING_S if live or compile_what == "whole" else StepSettings.silence_s,
    )
    return replace(settings, drop_ms=5.0, keep_ms=30.0) if backend in backends("cpu") else settings  # its clock need not settle


def live_plan(job: ModelRun) -> tuple[ModulePlan, list[Finding]]:
    """What a live module runs. Nothing is left out of it, so there are no findings."""
    source, run = job.source, job.run
    config = source.config if source.module is None else None
    if config is not None and not depth_of(config) and source.model is not None:
        config = {**config, "num_hidden_layers": len(source.model.layers)}
    plan = ModulePlan(
        module=source.module,
        config=config,
        depth=depth_of(config) if config is not None else 0,
        micro_batch_size=job.micro_batch or (1 if config is not None else 0),
        sequence_length=job.sequence or 0,
        accumulation=run.gradient_accumulation,
        recompute=run.recompute,
    )
    return plan, []


def layers_that_fit(plan: ModulePlan, parameters: int, machine: Environment, *, on_cpu: bool = False) -> int | None:
    """How many layers to try first; None: all. Only running them shows whether they fit with their activations.

    A CPU has no such second chance, because the system kills a process that needs too much memory: a `UserError` if even the
    fewest layers do not fit.
    """
    gpu = visible_gpu(machine)
    memory_bytes = free_memory_bytes() if on_cpu else gpu.memory_bytes if gpu is not None else None
    if memory_bytes is None or not parameters:
        return None
    needed = parameters * (CPU_BYTES_PER_PARAMETER if on_cpu else BYTES_PER_PARAMETER)
    if needed <= ALL_FIT * memory_bytes:
        return None
    least = needed * LEAST_DEPTH / max(plan.depth, LEAST_DEPTH)
    if on_cpu and least > ALL_FIT * memory_bytes:
        what = f"{LEAST_DEPTH} of its layers need" if plan.depth > LEAST_DEPTH else "it needs"
        message = f"{what} about {si(least, 'B')} of memory, and this machine has {si(memory_bytes, 'B')} free"
        raise UserError(f"the model is too large for a step on this CPU: {message}", "use a smaller model, or run it on a GPU")
    return max(LEAST_DEPTH, int(plan.depth * SOME_FIT * memory_bytes / needed)) if plan.depth else None
