"""`gemmscope shapes`: which GEMMs the model runs. No GPU; no torch, unless a module is traced."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from gemmscope.cli.options import ModelOptions, RunOptions, takes
from gemmscope.cli.output import check_targets, say, write
from gemmscope.cli.workload import Subject, subject_of
from gemmscope.errors import UserError
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import RunSpec

if TYPE_CHECKING:  # what a command needs is imported when it runs, so that --help answers at once
    from gemmscope.report.shapes import Table
    from gemmscope.store.runfile import ShapesFile
    from gemmscope.workload.check import Difference
    from gemmscope.workload.summary import Totals
    from gemmscope.workload.trace import Trace

EXAMPLES = """\b
Examples:
  gemmscope shapes --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --tp 2
  gemmscope shapes --config config.json --micro-batch-size 4 --sequence-length 4096 --check
  gemmscope shapes --config pretrain_llama.sh --json shapes.json
  gemmscope shapes --module my_model.py:build --micro-batch-size 1 --sequence-length 2048

\b
Exit codes: 0 done, 1 --check found differences, 2 wrong input, 130 interrupted.
"""


@takes(ModelOptions, RunOptions)
def command(
    model_options: ModelOptions,
    run_options: RunOptions,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="Name the presets and stop.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare with a trace of the live model (needs torch and transformers); exit 1 if they differ.",
        ),
    ] = False,
    json: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write everything as JSON.")] = None,
    csv: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the GEMMs as CSV.")] = None,
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the tables as Markdown.")] = None,
) -> None:
    """Which GEMMs a model runs in one training step, with their FLOPs.

    Lists every matrix product that one rank runs for one micro-batch: three for each linear (fprop, dgrad, wgrad), as
    MxKxN = tokens x input features x output features, and what else the step computes. --config takes Hugging Face,
    Megatron-LM, torchtitan and Megatron-Bridge files.
    """
    if list_presets:
        _list_presets()
        return
    places = {"--json": json, "--csv": csv, "--markdown": markdown}
    check_targets({option: place for option, place in places.items() if place is not None}, model_options.files())
    source = model_options.source()
    run, overridden = run_options.run_spec(source)
    answer = answer_of(source, run, overridden, check=check)
    _deliver(answer, json=json, csv=csv, markdown=markdown)
    if answer.found:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Answer:
    """What was worked out. `trace` where the live model was run; `found` the differences that --check looked for."""

    subject: Subject
    totals: Totals
    notes: tuple[str, ...]
    trace: Trace | None = None
    found: tuple[Difference, ...] | None = None

    def tables(self) -> list[Table]:
        """The products, and what else is computed."""
        from gemmscope.report import shapes

        return [shapes.gemm_table(self.subject.workload, self.totals), shapes.other_table(self.subject.workload)]

    def above(self) -> list[str]:
        """What it is."""
        from gemmscope.report import shapes

        return shapes.headline(self.subject.name, self.subject.source.model, self.subject.run, self.subject.workload)

    def below(self) -> list[str]:
        """What it adds up to."""
        from gemmscope.report import shapes

        return [*shapes.closing(self.totals), *(f"note: {note}" for note in self.notes), *_verdict(self)]

    def file(self) -> ShapesFile:
        """The run file."""
        from gemmscope.store.runfile import shapes_file

        return shapes_file(
            command=[argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:]],
            origin=self.subject.source.origin,
            model=self.subject.source.model,
            run=self.subject.run,
            workload=self.subject.workload,
            totals=self.totals,
            notes=self.notes,
            trace=self.trace,
            found=self.found,
        )


def answer_of(source: ModelSource, run: RunSpec, notes: list[str], *, check: bool) -> Answer:
    """What the model runs, what that adds up to and, if asked for, whether the live model agrees."""
    from gemmscope.workload.summary import totals

    if check and source.model is None:
        raise UserError(f"{source.origin} has no closed form to check: its shapes are traced anyway", "leave out --check")
    subject = subject_of(source, run, notes)
    summary = totals(subject.workload, run, source.model, subject.trace.parameters if subject.trace else 0)
    answer = Answer(subject, summary, subject.notes, subject.trace)
    return _checked(answer) if check else answer


def _checked(answer: Answer) -> Answer:
    """Hold the closed form against the live model."""
    from gemmscope.workload.check import comparable_run, differences
    from gemmscope.workload.trace import trace_huggingface

    source, run, model = answer.subject.source, answer.subject.run, answer.subject.source.model
    if source.config is None or model is None:
        raise UserError(
            f"--check compares with the model that transformers builds, and {source.origin} is no Hugging Face config",
            "use --check with --config config.json or a preset made from one",
        )
    say("checking against the live model on the meta device (importing torch takes a few seconds) …")
    trace = trace_huggingface(source.config, run)
    found = tuple(differences(model, run, trace))
    notes = answer.notes
    if comparable_run(run) != run:
        notes = (*notes, "the check ran the unsharded model with separate projections, as transformers does")
    return replace(answer, trace=trace, found=found, notes=notes)


def _deliver(answer: Answer, *, json: str | None, csv: str | None, markdown: str | None) -> None:
    """Files first; the tables on standard output unless something else was sent there."""
    from gemmscope.report import formats

    tables, above, below = answer.tables(), answer.above(), answer.below()
    if json is not None:
        write(json, answer.file().to_json())
    if csv is not None:
        write(csv, formats.gemms_csv(answer.subject.workload))
    if markdown is not None:
        write(markdown, formats.markdown(tables, above, below))
    if "-" not in (json, csv, markdown):
        formats.print_tables(tables, above, below)


def _verdict(answer: Answer) -> list[str]:
    """The outcome of --check, in words."""
    if answer.found is None or answer.trace is None:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in answer.trace.versions.items())
    live = f"{answer.trace.class_name} ({versions})"
    if not answer.found:
        products = sum(gemm.count for gemm in answer.trace.gemms)
        return [f"check: equal to the live {live}: {products} GEMMs, attention and parameters all agree"]
    lines = [f"check: {len(answer.found)} differences from the live {live}:"]
    return lines + [f"  {each.what}: derived {each.derived}, traced {each.traced}" for each in answer.found]


def _list_presets() -> None:
    from gemmscope.model import presets
    from gemmscope.report import formats
    from gemmscope.report.shapes import Table
    from gemmscope.report.units import parameters

    described = [presets.describe(name) for name in presets.names()]
    rows = tuple(
        (preset.name, parameters(preset.parameters) if preset.parameters else "", preset.description) for preset in described
    )
    formats.print_tables([Table("Presets", ("Name", "Parameters", "Description"), rows)], [], [])
