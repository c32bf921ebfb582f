"""`gemmscope bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from gemmscope import app
from gemmscope.cli.bench_options import BenchOutputs, ChoiceOptions, ShapesCommand, TimingOptions, parse_shape, parse_shapes
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import check_targets, deliver, say, typed_command
from gemmscope.errors import UserError, option

if TYPE_CHECKING:
    from gemmscope.results.bench import TaskResult

PROFILE_SHAPE = "4096"
Command = ShapesCommand


@takes(ModelOptions, RunOptions, ChoiceOptions, TimingOptions, BenchOutputs)
def command(
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
) -> None:
    """Time a model's linears in every recipe on this GPU."""
    check_targets(outputs.targets(), model_options.files())
    timing = timing_options.bench_timing()
    timing.check()
    named = [*model_options.given(), *run_options.given()]
    if profile or profile_shape is not None:
        shapes = _shape_to_profile(shapes, profile_shape, profile=profile, named=bool(named))
    if named and shapes is not None:
        raise UserError(
            f"{option('shapes')} measures bare GEMMs, and {', '.join(map(option, named))} describes a model",
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
        "reporter": app.progress.Console(),
    }
    if profile:
        if outputs.targets():
            say(f"note: --profile times nothing, so {', '.join(f'--{name}' for name in outputs.targets())} is not written")
        _report_profile(app.bench.run_for_nsight(job, **arguments))
        return
    arguments |= {"resume": timing_options.resume, "verify_dgrad": verify_dgrad, "as_te_benchmark": as_te_benchmark}
    result = app.bench.run_bench(job, **arguments, deliver=lambda result: deliver(result, outputs))
    if not result.linears.ops:
        raise typer.Exit(1)
    if outputs.strict and result.has("fallback"):
        raise typer.Exit(3)


def _shape_to_profile(shapes: str | None, shape: str | None, *, profile: bool, named: bool) -> str | None:
    """What --profile runs: the model that is named, else one shape."""
    if not profile:
        raise UserError("--profile-shape selects what --profile runs", "add --profile, or use --shapes to measure")
    if named:
        if shape is not None:
            raise UserError("--profile runs the model that is named, or --profile-shape, not both", "use only one of them")
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
    say(f"{ran} of {len(tasks)} tasks ran, each in an NVTX range of its name; nothing was timed")
    if not ran:
        raise typer.Exit(1)
