"""`gemmscope bench`: times the GEMMs in every precision, with and without the cost of quantizing."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import say, write
from gemmscope.errors import UserError

if TYPE_CHECKING:
    from gemmscope.gpu.environment import Environment

EXAMPLES = """\b
Examples:
  gemmscope bench --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192
  gemmscope bench --config config.json --micro-batch-size 4 --sequence-length 4096 --recipes fp8current,fp8block
  gemmscope bench --preset smollm2-135m --micro-batch-size 1 --sequence-length 128 --device cpu
"""


@takes(ModelOptions, RunOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    recipes: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Precisions to measure. (default: all this GPU runs)")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cuda|cpu", help="Where to measure; the CPU only proves that it works.")
    ] = "cuda",
    pre_quantize: Annotated[bool, typer.Option("--pre-quantize", help="Only the products alone, on quantized operands.")] = False,
    autocast_only: Annotated[bool, typer.Option("--autocast-only", help="Only forward and backward with quantization.")] = False,
    precision: Annotated[float, typer.Option(metavar="SHARE", help="Go on until every speedup is known this well.")] = 0.01,
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="Stop measuring after so long all the same.")] = 120.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the same measurement that was cut short.")] = False,
    share_gpu: Annotated[bool, typer.Option("--share-gpu", help="Measure although others use the GPU.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if anything ran in another precision.")] = False,
    json: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write everything as JSON, samples included.")] = None,
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the tables as Markdown.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="PATH", help="Draw the bars (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Time a model's linears in every precision, in the state that training runs in.

    Each linear is measured twice: autocast, forward and backward as training runs it, quantizing included; and
    pre-quantized, each product alone. Precisions are interleaved in random order until the interval of every speedup is
    narrow enough. Kernel names prove which precision ran.
    """
    from gemmscope.gpu.environment import environment
    from gemmscope.measure.campaign import Campaign, Settings
    from gemmscope.measure.sampler import StoppingRule
    from gemmscope.measure.task import MODES, cases_of, tasks_of
    from gemmscope.recipe.recipes import parse_names
    from gemmscope.recipe.recipes import recipes as all_recipes
    from gemmscope.report import formats
    from gemmscope.report.bench import BenchReport
    from gemmscope.store.journal import Journal, state_folder
    from gemmscope.workload.derive import derive
    from gemmscope.workload.ops import Linear

    modes = [
        mode for mode in MODES if not (pre_quantize and mode == "autocast") and not (autocast_only and mode == "pre-quantized")
    ]
    if not modes:
        raise UserError("--pre-quantize and --autocast-only leave nothing to measure", "keep one of them, or neither for both")
    source = model_options.source()
    run, overridden = run_options.run_spec(source)
    if source.model is None:
        raise UserError(f"{source.origin} has no closed form: its linears cannot be measured yet", "gemmscope shapes traces it")
    workload = derive(source.model, run)
    machine = environment()
    backend = _backend(device, machine, share=share_gpu)
    names = parse_names(recipes) if recipes else [name for name, each in all_recipes().items() if backend in each.backends]
    cases = cases_of(op for op in workload.ops if isinstance(op, Linear))
    same = {name: other for name, each in all_recipes().items() if (other := each.same_kernels_as)}
    campaign = Campaign(
        tasks_of(cases, names, modes, same),
        Settings(backend),
        StoppingRule(target=precision, longest_s=longest),
        Journal(state_folder() / "journal.sqlite3"),
        command=sys.argv[1:],
    )
    interrupted = False
    with _Progress(campaign) as show:
        campaign.on_message = show
        try:
            campaign.run(resume=resume)
            ended = campaign.rule.why or "all that could be measured was"
        except KeyboardInterrupt:
            interrupted = True
            ended = "interrupted: what was measured stands below; go on with --resume"
    results = campaign.results
    measured = [name for name in names if any(result.measured for mode in modes for result in results.of(name, mode))]
    notes = [*source.notes, *overridden, *workload.notes]
    if json is not None:
        from gemmscope.store.benchfile import bench_file

        file = bench_file(
            command=sys.argv[1:], origin=source.origin, model=source.model, run=run, workload=workload, results=results,
            environment=asdict(machine), recipes=measured, modes=modes, ended=ended, notes=notes,
        )  # fmt: skip
        write(json, file.to_json())
    report = BenchReport(results, measured, modes)
    tables = report.tables()
    above = [f"{source.model.name} on {results.hello.get('device', {}).get('name', 'this machine')}"]
    above += [f"{results.complete_rounds} rounds: {ended}"]
    below = [*report.sentences(), *(f"note: {note}" for note in notes)]
    if output is not None:
        from gemmscope.report.plot import save_plot

        save_plot(report, above[0], output)
        say(f"wrote {output}")
    if markdown is not None:
        write(markdown, formats.markdown(tables, above, below))
    if "-" not in (json, markdown):
        formats.print_tables(tables, above, below)
    if interrupted:
        raise typer.Exit(130)
    if strict and any(cell is not None and cell.fallback for cell in report.cells.values()):
        raise typer.Exit(3)


def _backend(device: str, machine: Environment, *, share: bool) -> str:
    """Which backend measures on this device. The parent only looks whether GPU and packages are there."""
    if device not in ("cuda", "cpu"):
        raise UserError(f"--device {device!r} is not known", "it can be cuda or cpu")
    if device == "cuda" and not machine.gpus:
        raise UserError(
            "there is no NVIDIA GPU here to measure on",
            "gemmscope shapes needs none; --device cpu shows that measuring works, though not how fast a GPU is",
        )
    for package in ["torch"] if device == "cpu" else ["torch", "transformer_engine"]:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"measuring on {device} needs {package}, which is not installed", "gemmscope doctor says what is here"
            )
    busy = next((gpu for gpu in machine.gpus[:1] if gpu.processes or (gpu.utilization or 0) > 10), None)
    if device == "cuda" and busy is not None and not share:
        who = (
            f"processes {', '.join(map(str, busy.processes))}"
            if busy.processes
            else f"something that keeps it {busy.utilization}% busy"
        )
        raise UserError(f"the GPU is in use by {who}: times measured beside it are not this model's", "wait, or add --share-gpu")
    return "cpu" if device == "cpu" else "transformer_engine"


class _Progress:
    """One line on standard error that says where it is; nothing when that is not a terminal."""

    def __init__(self, campaign: Any) -> None:
        self._campaign, self._shown, self._began = campaign, sys.stderr.isatty(), time.monotonic()

    def __enter__(self) -> Any:
        return self.show

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")

    def show(self, message: dict[str, Any], results: Any) -> None:
        """Redraw after each message."""
        if not self._shown or message["type"] not in ("hello", "ready", "round"):
            return
        ready = sum(bool(result.facts) or bool(result.failure) for result in results.tasks.values())
        text = f"preparing {ready} of {len(results.tasks)}"
        if results.complete_rounds:
            widest = self._campaign.rule.widest(results, self._campaign.recipes, self._campaign.modes)
            text = f"round {results.complete_rounds}" + (f", speedups known to ±{widest:.1%}" if widest is not None else "")
        sys.stderr.write(f"\r\033[K{text}, {time.monotonic() - self._began:.0f} s")
        sys.stderr.flush()
