"""`gemmscope explain`: why a real run gained less, from its trace."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemmscope.cli.options import ModelOptions, RunOptions, size, takes
from gemmscope.cli.output import check_targets, say, write
from gemmscope.errors import UserError

if TYPE_CHECKING:
    from gemmscope.explain.diagnose import Diagnosis
    from gemmscope.explain.pair import Pair
    from gemmscope.report.shapes import Table

EXAMPLES = """\b
Examples:
  gemmscope explain trace.json.gz
  gemmscope explain fp8.json.gz --baseline bf16.json.gz
  gemmscope explain fp8.json.gz --against step_run.json --markdown comment.md
  gemmscope explain rank0.json.gz rank1.json.gz rank2.json.gz rank3.json.gz
  gemmscope explain trace.json.gz --perfetto annotated.json.gz

\b
A trace is what the PyTorch profiler writes (export_chrome_trace), plain or gzipped. `gemmscope trace-me` says how to
record a good one in three lines.
"""


@dataclass(frozen=True)
class ExplainOptions:
    """What to hold the trace against, and where to write."""

    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE", help="One trace; ranks of one job, or their folder; or BF16 and low precision."),
    ]
    baseline: Annotated[str | None, typer.Option(metavar="TRACE", help="The same training in BF16.")] = None
    against: Annotated[str | None, typer.Option(metavar="RUNFILE", help="A run file of step or bench: what was predicted.")] = (
        None
    )
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="Which of its recipes, if the trace does not tell.")] = None
    steps: Annotated[int | None, size("How many steps the trace holds, where nothing in it marks them.")] = None
    json: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write everything as JSON.")] = None
    csv: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write classes, products and causes with plain numbers.")] = (
        None
    )
    markdown: Annotated[str | None, typer.Option(metavar="PATH|-", help="Write the tables as Markdown.")] = None
    perfetto: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write the trace again with the diagnosis on tracks of its own.")
    ] = None

    def check(self) -> None:
        """Whatever could not be written is said before a large trace is read."""
        places = {"--json": self.json, "--csv": self.csv, "--markdown": self.markdown, "--perfetto": self.perfetto}
        read = [path for given in self.traces for path in _files(given)]
        read += [path for path in (self.baseline, self.against) if path is not None]
        check_targets({option: place for option, place in places.items() if place is not None}, read)
        if self.steps is not None and self.steps < 1:
            raise UserError(f"--steps {self.steps}: a trace holds at least one step", "for example --steps 3")
        if self.perfetto == "-":
            raise UserError("--perfetto writes a file, not to standard output", "for example --perfetto annotated.json.gz")
        if self.recipe is not None and self.against is None:
            raise UserError("--recipe names a recipe of a run file, and none is given", "add --against RUNFILE")


@takes(ExplainOptions, ModelOptions, RunOptions)
def command(options: ExplainOptions, model_options: ModelOptions, run_options: RunOptions) -> None:
    """Say why a training step is not faster: from a profiler trace, with the evidence, the cost, and what to do.

    It finds the steps, gives every microsecond of them to a class, counts which products really ran in low precision, and
    names the causes in the order of what they cost. Nothing is named without evidence; a healthy run is "as expected". With
    --baseline, a run file or a model, the difference is accounted for row by row.
    """
    from gemmscope.report import explain as report
    from gemmscope.report import formats

    options.check()
    if run_options.typed() and not model_options.ways():
        typed = ", ".join(f"--{name.replace('_', '-')}" for name in run_options.typed())
        raise UserError(
            f"{typed} says how a model is run, and no model is named", "add --config PATH or --preset NAME, or leave it out"
        )
    found, pairs, made, words = _diagnose(options)
    if options.against is not None:
        from gemmscope.compare.predicted import with_prediction
        from gemmscope.store.read import read_run

        pairs.append(with_prediction(found, read_run(options.against), options.recipe, options.against))
    words += _against_model(found, model_options, run_options)
    made = [*report.tables(found), *(report.pair_table(pair) for pair in pairs), *made]
    told = [line for pair in pairs for line in pair.words]
    above, below = report.above(found), [*told, *words, *report.below(found)]
    if options.json is not None:
        from gemmscope.store.explainfile import explain_file

        arguments = [argument.encode("utf-8", "replace").decode() for argument in sys.argv[1:]]
        write(options.json, explain_file(arguments, found, pairs, words).to_json())
    if options.csv is not None:
        write(options.csv, report.as_csv(found))
    if options.markdown is not None:
        write(options.markdown, formats.markdown(made, above, below))
    if options.perfetto is not None:
        from gemmscope.explain.annotate import write_annotated

        write_annotated(found, options.perfetto)
        say(f"wrote {options.perfetto}; open it at https://ui.perfetto.dev")
    if "-" not in (options.json, options.csv, options.markdown):
        formats.print_tables(made, above, below)


def _diagnose(options: ExplainOptions) -> tuple[Diagnosis, list[Pair], list[Table], list[str]]:
    """The trace that is explained, what it is held against, and what several ranks say."""
    from gemmscope.explain.diagnose import diagnose
    from gemmscope.explain.pair import with_twin
    from gemmscope.explain.ranks import rank_rows, rank_words, slowest
    from gemmscope.explain.trace import read_trace
    from gemmscope.report.explain import rank_table
    from gemmscope.store.read import looks_like_run

    paths = [path for given in options.traces for path in _files(given)]
    for path in (*paths, *([options.baseline] if options.baseline else [])):
        if looks_like_run(path):
            raise UserError(
                f"{path} is a run file, not a trace",
                f"gemmscope explain TRACE --against {path}, if step or bench wrote it; gemmscope report {path} shows any of them",
            )
    every = [diagnose(read_trace(path), options.steps) for path in paths]
    slow = diagnose(read_trace(options.baseline), options.steps) if options.baseline else None
    ranks = [each.trace.rank for each in every]
    made: list[Table] = []
    words: list[str] = []
    if len(every) == 1:
        found = every[0]
    elif None not in ranks and len(set(ranks)) == len(ranks) and _one_job(every):
        rows = rank_rows(every)
        found, made, words = slowest(every), [rank_table(rows)], rank_words(rows)
        words.append(f"explained above: rank {found.trace.rank}, which computes longest")
    elif len(every) == 2 and slow is None and sum(each.evidence.low_share < 0.01 for each in every) == 1:
        slow, found = sorted(every, key=lambda each: each.evidence.low_share)
    else:
        raise UserError(
            f"{len(every)} traces that are neither ranks of one job nor BF16 beside low precision",
            "give one trace, and the same training in BF16 with --baseline",
        )
    return found, [with_twin(slow, found)] if slow is not None else [], made, words


def _one_job(every: list[Diagnosis]) -> bool:
    """Ranks of one job know of equally many ranks, and run in one precision: BF16 of one and FP8 of another are a pair."""
    low = [each.evidence.low_share >= 0.01 for each in every if each.evidence.products]
    return len({each.trace.world_size for each in every}) == 1 and (all(low) or not any(low))


def _files(given: str) -> list[str]:
    """The traces of a folder, as the profiler's TensorBoard handler leaves them: one of each rank."""
    folder = Path(given)
    if not folder.is_dir():
        return [given]
    found = sorted(str(path) for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    if not found:
        raise UserError(f"{given} is a folder without traces (.json, .json.gz)", "name a trace, or the folder that holds them")
    return found


def _against_model(found: Diagnosis, model_options: ModelOptions, run_options: RunOptions) -> list[str]:
    """If a model is named: do its products add up to those of the trace?"""
    if not model_options.ways():
        return []
    from gemmscope.cli.workload import subject_of
    from gemmscope.compare.predicted import with_sizes
    from gemmscope.workload.summary import totals

    source = model_options.source()
    run, overridden = run_options.run_spec(source)
    subject = subject_of(source, run, overridden)
    summed = totals(subject.workload, subject.run, subject.source.model)
    per_step = summed.gemm_flops * found.account.micro_batches
    return with_sizes(found, per_step, subject.name)
