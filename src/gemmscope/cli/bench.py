"""`gemmscope bench`: times the GEMMs in every precision, with and without the cost of quantizing."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmscope.cli.bench_options import LADDERS, ChoiceOptions, OutputOptions, TimingOptions, parse_shape, parse_shapes
from gemmscope.cli.bench_output import Measured, Target, load_reporting
from gemmscope.cli.choose import Choice, choose
from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import interrupted, say
from gemmscope.cli.progress import Progress
from gemmscope.cli.workload import layer_of, linears_of, subject_of
from gemmscope.errors import UserError
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import RunSpec

if TYPE_CHECKING:
    from gemmscope.gpu.environment import Environment
    from gemmscope.measure.campaign import Campaign, Counts
    from gemmscope.measure.link import Link
    from gemmscope.measure.results import Results
    from gemmscope.store.journal import Journal

EXAMPLES = """\b
Examples:
  gemmscope bench --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192
  gemmscope bench --config config.json --micro-batch-size 4 --sequence-length 4096 --recipes fp8current,fp8block -o bench.png
  gemmscope bench --shapes 4096,8192x4096x14336 --csv -
  gemmscope bench --preset smollm2-135m --micro-batch-size 1 --sequence-length 128 --device cpu

\b
Exit codes: 0 done, 1 nothing could be measured, 2 wrong input or output, 3 --strict found another precision, 130 interrupted.
"""
NSYS = "nsys profile --capture-range=cudaProfilerApi --trace=cuda,nvtx -o gemmscope --capture-range-end=stop"
PROFILE_SHAPE = "4096"


@takes(ModelOptions, RunOptions, ChoiceOptions, TimingOptions, OutputOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    choices: ChoiceOptions,
    timing: TimingOptions,
    outputs: OutputOptions,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="N,MxKxN,…", help="Bare products instead of a model: squares and triplets. (default: 256 to 16384)"),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="For Nsight Systems: run everything a few times in NVTX ranges, time nothing.")
    ] = False,
    profile_shape: Annotated[
        str | None, typer.Option(metavar="N|MxKxN", help="What --profile runs where no model is named. (default: 4096)")
    ] = None,
    verify_dgrad: Annotated[bool, typer.Option("--verify-dgrad", hidden=True, help="Dgrad is always measured.")] = False,
) -> None:
    """Time a model's linears in every precision, in the state that training runs in.

    Each linear is measured twice: autocast, forward and backward as training runs it, quantizing included; and
    pre-quantized, each product alone. Precisions are interleaved in random order until the interval of every speedup is
    narrow enough. Kernel names prove which precision ran. Without a model, bare products are measured.
    """
    from gemmscope.gpu.environment import environment
    from gemmscope.measure.link import Link

    outputs.check(model_options.files())
    timing.check()
    if profile or profile_shape is not None:
        named = bool(model_options.ways() or run_options.typed())
        shapes = _to_profile(shapes, profile_shape, profile=profile, named=named)
    target = bare_target(model_options, run_options, shapes, on_cpu="cpu" in (choices.device, choices.backend))
    source = model_options.source() if target is None else None
    run, overridden = run_options.run_spec(source) if source is not None else (None, [])
    machine = environment()
    choice = choose(choices, machine, cache_weights=timing.cache_weights)
    with Link() as started:  # it imports torch, which takes seconds, while the rest is read and derived
        if source is not None and run is not None:
            target = model_target(source, run, overridden)
        assert target is not None
        if verify_dgrad:
            target.notes.append("dgrad is always measured: --verify-dgrad changes nothing")
        campaign, journal = campaign_of(target, choice, timing, started, for_nsight=profile)
        if profile:
            if outputs.named():
                say(f"note: --profile times nothing, so {', '.join(outputs.named())} gets nothing to write")
            _run_for_nsight(campaign)
            return
        measured = measured_of(target, choice, campaign, journal, machine, resume=timing.resume, named=bool(choices.recipes))
    measured.deliver(outputs)
    if measured.interrupted:
        raise typer.Exit(130)
    if not measured.findings.cells():
        raise typer.Exit(1)
    if outputs.strict and measured.fell_back():
        raise typer.Exit(3)


def campaign_of(
    target: Target, choice: Choice, timing: TimingOptions, started: Link, *, for_nsight: bool
) -> tuple[Campaign, Journal]:
    """The campaign that measures a target, and the journal it writes."""
    from gemmscope.measure.campaign import Campaign
    from gemmscope.recipe.recipes import recipes
    from gemmscope.store.journal import Journal, state_folder
    from gemmscope.workload.cases import tasks_of

    same = {name: other for name, each in recipes().items() if (other := each.same_kernels_as)}
    journal = Journal(state_folder() / "journal.sqlite3")
    campaign = Campaign(
        tasks_of(target.cases, choice.recipes, choice.modes, same),
        timing.settings(choice.backend, for_nsight=for_nsight),
        timing.rule(),
        journal,
        command=sys.argv[1:],
        started=started,
    )
    return campaign, journal


def measured_of(
    target: Target,
    choice: Choice,
    campaign: Campaign,
    journal: Journal,
    machine: Environment,
    *,
    resume: bool = False,
    named: bool = False,
) -> Measured:
    """Run the campaign."""
    ended, interrupted = measure(campaign, resume=resume)
    return Measured(target, choice, campaign, journal, machine, ended, named, interrupted)


def bare_target(model: ModelOptions, run: RunOptions, shapes: str | None, *, on_cpu: bool) -> Target | None:
    """Bare products, where shapes are named or nothing is; None where a model is."""
    from gemmscope.workload.cases import bare_gemms

    named = [*model.ways(), *(f"--{name.replace('_', '-')}" for name in run.typed())]
    if not named:
        asked = "default" if shapes is None else shapes
        notes = ["the CPU gets the small shapes of the ladder only"] if on_cpu and asked == "default" else []
        return Target("bare products", "shapes", bare_gemms(parse_shapes(asked, LADDERS[on_cpu])), notes)
    if shapes is not None:
        raise UserError(
            f"--shapes measures bare products, and {', '.join(named)} describes a model: it is one or the other",
            "leave out --shapes for the model, or keep it alone",
        )
    return None


def model_target(source: ModelSource, run: RunSpec, overridden: list[str]) -> Target:
    """The model's linears."""
    from gemmscope.workload.cases import cases_of

    subject = subject_of(source, run, overridden)
    linears, notes = linears_of(subject.workload)
    cases = cases_of(linears)
    if not cases:
        raise UserError(f"{subject.name} has no linear layers to measure", "gemmscope shapes lists what it runs")
    return Target(subject.name, source.origin, cases, [*subject.notes, *notes], subject, layer_of(linears, cases))


def _to_profile(shapes: str | None, shape: str | None, *, profile: bool, named: bool) -> str | None:
    """What --profile runs: the model that is named, else one shape."""
    if not profile:
        raise UserError("--profile-shape says what --profile runs", "add --profile, or name shapes to measure with --shapes")
    if named:
        if shape is not None:
            raise UserError("--profile runs the model that is named, or --profile-shape, not both", "keep one of them")
        return shapes
    chosen = PROFILE_SHAPE if shape is None else shape
    parse_shape(chosen)
    if shapes is not None:
        say(f"note: --profile runs --profile-shape {chosen} alone: --shapes is left aside")
    return chosen


def measure(campaign: Campaign, *, resume: bool) -> tuple[str, bool]:
    """Run it. Returns why it ended, and whether that was Ctrl-C."""
    if resume and campaign.journal.unfinished(campaign.fingerprint) is None:
        say("note: there is nothing to resume: no measurement of just this was cut short, so it begins anew")
    with Progress(campaign) as show:

        def on_message(message: dict[str, Any], results: Results) -> None:
            if message["type"] == "hello":
                load_reporting()  # while the worker prepares
            show(message, results)

        campaign.on_message = on_message
        try:
            campaign.run(resume=resume)
        except KeyboardInterrupt:
            measured = any(result.rounds for result in campaign.results.tasks.values())
            return f"{interrupted(measured=measured)}; go on with --resume", True
    counts = campaign.settings.counts
    return (
        _fixed(counts, heats=campaign.settings.backend != "cpu")
        if counts
        else campaign.rule.why or "all that could be measured was"
    ), False


def _fixed(counts: Counts, *, heats: bool) -> str:
    runs = f"fixed counts: {counts.num_iters} runs of each, {counts.num_warmup} to warm up before those of every round"
    return runs + (f", {counts.gpu_warmup:g} s of heating first" if heats else "")


def _run_for_nsight(campaign: Campaign) -> None:
    """Everything a few times for a profiler that watches from outside."""
    line = f"{NSYS} {shlex.join(['gemmscope', *sys.argv[1:]])}"
    say(f"for Nsight Systems to see it, type:\n  {line}")
    with Progress(campaign) as show:
        campaign.on_message = show
        campaign.run()
    results = campaign.results.tasks.values()
    for result in results:
        if result.failure:
            say(f"not run: {result.task.key}: {result.failure}")
    ran = sum(bool(result.facts) and not result.failure for result in results)
    say(f"{ran} of {len(results)} tasks ran, each in an NVTX range of its name; nothing was timed")
    if not ran:
        raise typer.Exit(1)
