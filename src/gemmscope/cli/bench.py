"""`gemmscope bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from gemmscope import commands
from gemmscope.cli.bench_options import (
    BenchOutputs,
    ChoiceOptions,
    Shape,
    ShapesCommand,
    TimingOptions,
    parse_shape,
    parse_shapes,
)
from gemmscope.cli.codes import FALLBACK, NOTHING_MEASURED, POINTS_LOST
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import check_targets, deliver, say, typed_command
from gemmscope.cli.streaming import StreamedFiles
from gemmscope.cli.sweep_options import SweepOptions
from gemmscope.errors import UserError, option

if TYPE_CHECKING:
    from gemmscope.results.bench import TaskResult

PROFILE_SHAPE = "4096"
Command = ShapesCommand


@takes(SweepOptions, ModelOptions, RunOptions, ChoiceOptions, TimingOptions, BenchOutputs)
def command(
    sweep_options: SweepOptions,
    model_options: ModelOptions,
    run_options: RunOptions,
    choice_options: ChoiceOptions,
    timing_options: TimingOptions,
    outputs: BenchOutputs,
    shapes: str | None = None,
    profile: bool = False,
    profile_shape: str | None = None,
    verify_dgrad: bool = False,
    as_te_benchmark: bool = False,
    fleet: str | None = None,
) -> None:
    """Time a model's linears in every recipe on this GPU."""
    check_targets(outputs.targets(), [*model_options.files(), *([fleet] if fleet is not None else [])])
    if sweep_options.sweep:
        given = {
            "profile": profile,
            "profile_shape": profile_shape is not None,
            "as_te_benchmark": as_te_benchmark,
            "fleet": fleet is not None,
        }
        if unused := [name for name, value in given.items() if value]:
            raise UserError(
                f"{option('sweep')} measures many points, but {option(unused[0])} applies to a single run", "remove one of them"
            )
        _sweep(sweep_options, model_options, run_options, choice_options, timing_options, outputs, shapes)
        return
    sweep_options.check_alone()
    timing = timing_options.bench_timing()
    timing.check()
    named = [*model_options.given(), *run_options.given()]
    if profile or profile_shape is not None:
        shapes = _shape_to_profile(shapes, profile_shape, profile=profile, named=bool(named))
    if named and shapes is not None:
        raise UserError(
            f"{option('shapes')} measures bare GEMMs, but {', '.join(map(option, named))} describes a model",
            f"remove {option('shapes')}, or use it without them",
        )
    parsed = parse_shapes(shapes) if shapes is not None else None
    job = run_options.of(model_options.load()) if named else None
    choice_options.explain_no_fp8()
    arguments: dict[str, Any] = {
        "shapes": parsed,
        "choices": choice_options.choices(),
        "timing": timing,
        "command": typed_command(),
        "reporter": commands.Console(),
    }
    with commands.one_gpu(sweep_options.gpus, on_cpu=arguments["choices"].on_cpu):
        if profile:
            if outputs.targets():
                say(f"note: --profile times nothing, so {', '.join(f'--{name}' for name in outputs.targets())} is not written")
            _report_profile(commands.bench.run_for_nsight(job, **arguments))
            return
        arguments |= {
            "resume": timing_options.resume,
            "verify_dgrad": verify_dgrad,
            "as_te_benchmark": as_te_benchmark,
            "fleet": fleet,
        }
        result = commands.bench.run_bench(job, **arguments, deliver=lambda result: deliver(result, outputs))
    if not result.linears.ops:
        raise typer.Exit(NOTHING_MEASURED)
    if outputs.strict and result.has("fallback"):
        raise typer.Exit(FALLBACK)


def _sweep(
    sweep_options: SweepOptions,
    model_options: ModelOptions,
    run_options: RunOptions,
    choice_options: ChoiceOptions,
    timing_options: TimingOptions,
    outputs: BenchOutputs,
    shapes: str | None,
) -> None:
    """Every point of a sweep, as many at a time as there are GPUs."""
    choice_options.explain_no_fp8()
    axes, files = sweep_options.axes(), StreamedFiles(outputs)
    model, run = model_options.given(), run_options.given()
    arguments: dict[str, Any] = {
        "choices": choice_options.choices(),
        "timing": timing_options.bench_timing(commands.sweep.DEFAULT_TIMING),
        "places": sweep_options.places(),
        "resume": timing_options.resume,
        "command": typed_command(),
        "reporter": commands.Console(),
        "deliver": lambda result: deliver(result, outputs),
        "stream": files.write,
    }
    if shapes is not None:
        if named := [*model, *run]:
            others = ", ".join(map(option, named))
            raise UserError(f"{option('shapes')} is a bare GEMM, but {others} describes a model", "use only one of them")
        result = commands.sweep.gemm_sweep(_one_shape(shapes), axes, **arguments)
    else:
        if gemm := [name for name in axes if name in commands.sweep.GEMM_SIZES]:
            problem = f"{gemm[0]} is a size of a bare GEMM, but no GEMM is given"
            raise UserError(
                problem, f"for example {option('shapes', '8192x4096x14336')}, of which {option('sweep')} varies {gemm[0]}"
            )
        result = commands.sweep.bench_sweep(model, run, axes, **arguments)
    files.finish()
    if not result.sample_count:
        raise typer.Exit(NOTHING_MEASURED)
    if outputs.strict and result.has("sweep-fallback"):
        raise typer.Exit(FALLBACK)
    if result.has("sweep-point-lost"):
        raise typer.Exit(POINTS_LOST)


def _one_shape(text: str) -> Shape:
    parsed = parse_shapes(text)
    if parsed is None or len(parsed) != 1:
        raise UserError(
            f"{option('sweep')} varies m, k or n of one GEMM, but {option('shapes')} gives {len(parsed) if parsed else 'many'}",
            f"give one: {option('shapes', '8192x4096x14336')} {option('sweep', 'm=1k:16k:1k')}",
        )
    return parsed[0]


def _shape_to_profile(shapes: str | None, shape: str | None, *, profile: bool, named: bool) -> str | None:
    """What --profile runs: the model that is named, else one shape."""
    if not profile:
        raise UserError("--profile-shape selects what --profile runs", "add --profile, or use --shapes to measure")
    if named:
        if shape is not None:
            raise UserError("--profile runs a model or --profile-shape, not both", "use only one of them")
        return shapes
    chosen = PROFILE_SHAPE if shape is None else shape
    parse_shape(chosen)
    if shapes is not None:
        say(f"note: --profile runs --profile-shape {chosen} only: --shapes is ignored")
    return chosen


def _report_profile(tasks: list[TaskResult]) -> None:
    for task in tasks:
        if task.failure:
            say(f"not run: {task.task.key}: {task.failure}")
    ran = sum(bool(task.facts) and not task.failure for task in tasks)
    say(f"{ran} of {len(tasks)} tasks ran, each in an NVTX range with its name; nothing was timed")
    if not ran:
        raise typer.Exit(NOTHING_MEASURED)
