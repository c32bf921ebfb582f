"""`gemmscope explain`."""

from dataclasses import asdict, dataclass

from gemmscope import commands
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import FigureOptions, check_targets, deliver, typed_command
from gemmscope.errors import UserError, option


@dataclass(frozen=True)
class ExplainOptions:
    """The traces, and what to compare them with."""

    traces: list[str]
    baseline: str | None = None
    against: str | None = None
    recipe: str | None = None
    steps: int | None = None
    perfetto: str | None = None


@takes(ExplainOptions, FigureOptions, ModelOptions, RunOptions)
def command(options: ExplainOptions, outputs: FigureOptions, model_options: ModelOptions, run_options: RunOptions) -> None:
    """Explain from a profiler trace why a training step is not faster."""
    files = [str(path) for path in commands.explain.trace_files(options.traces)]
    reads = [*files, *(path for path in (options.baseline, options.against) if path is not None), *model_options.files()]
    perfetto = {"perfetto": options.perfetto} if options.perfetto not in (None, "-") else {}
    check_targets({**outputs.targets(), **perfetto}, reads)
    if run_options.given() and not model_options.given():
        given = ", ".join(map(option, run_options.given()))
        raise UserError(
            f"{given}: these options need a model, but none is given",
            f"add {option('config', 'PATH')} or {option('preset', 'NAME')}, or remove them",
        )
    choices = {**asdict(options), "traces": files}
    job = run_options.of(model_options.load()) if model_options.given() else None
    result = commands.explain.explain(**choices, job=job, command=typed_command(), reporter=commands.Console())
    deliver(result, outputs)
