"""Options of commands that read traces and run files."""

from typing import Annotated, Literal

from gemmscope.options.declare import Option, Options, RunFile
from gemmscope.options.values import percentage

Kind = Literal["loop", "trainer", "plain"]


class ExplainOptions(Options):
    """The traces, and what to compare them with."""

    traces: Annotated[
        tuple[str, ...],
        Option(
            "One trace, the traces of several ranks of a job or a folder of them, or one trace in BF16 and one in low precision.",
            metavar="TRACE",
            argument=True,
            required=True,
            repeated=True,
            in_python=False,
        ),
    ] = ()
    baseline: Annotated[
        str | None,
        Option(
            "Trace of the same training in BF16, to compare part by part.",
            metavar="TRACE",
            accepts="str | Path | None",
        ),
    ] = None
    against: Annotated[
        RunFile,
        Option(
            "Run file of step or bench, to compare with the prediction.",
            metavar="RUNFILE",
            accepts="PathOrResult | None",
        ),
    ] = None
    recipe: Annotated[
        str | None,
        Option(
            "Recipe of the run file to compare with.",
            metavar="NAME",
            names="recipe/recipes.toml",
            default="the recipe in the trace",
        ),
    ] = None
    steps: Annotated[int | None, Option("Number of training steps in the trace, if they are not marked.")] = None
    perfetto: Annotated[
        str | None,
        Option(
            "Write a copy of the trace with the diagnosis added as tracks.",
            metavar="PATH",
            accepts="str | Path | None",
        ),
    ] = None


class CompareOptions(Options):
    """The runs, and which slowdown fails."""

    files: Annotated[
        tuple[str, ...],
        Option(
            "Run files of bench, step, their sweeps, or fleet, oldest first.",
            metavar="RUNFILE",
            argument=True,
            required=True,
            repeated=True,
            in_python=False,
        ),
    ] = ()
    fail_if_slower: Annotated[
        float | None,
        Option(
            "Fail if a row of the last run is slower than in the first run by at least this much, such as 3%. Exits with 1 if a "
            "row is slower, and with 4 if the runs are too noisy to tell.",
            metavar="PERCENT",
            parse=percentage,
        ),
    ] = None


class ReportOptions(Options):
    """The run files of one page, and where it goes."""

    runs: Annotated[
        tuple[str, ...],
        Option("Run files written by --json, plain or gzipped.", metavar="RUNFILE", argument=True, required=True, repeated=True),
    ] = ()
    markdown: Annotated[str | None, Option("Write the same content as Markdown.", metavar="PATH|-", group="Output")] = None
    output: Annotated[
        str | None,
        Option(
            "Path of the HTML page.",
            metavar="PATH|-",
            flags=("--output", "-o"),
            default="report.html, unless another output is given",
            group="Output",
        ),
    ] = None
    figures: Annotated[
        str | None,
        Option("Draw every chart into this folder, as PNG and SVG.", metavar="FOLDER", group="Output"),
    ] = None


class ListOptions(Options):
    """Which names to list."""

    search: Annotated[
        tuple[str, ...],
        Option("Only those with all of these words.", metavar="WORD", argument=True, repeated=True, in_python=False),
    ] = ()


class DoctorOptions(Options):
    """Where the diagnosis goes."""

    json: Annotated[str | None, Option("Write the diagnosis as JSON.", metavar="PATH|-", group="Output")] = None


class TraceMeOptions(Options):
    """Whose training loop it is."""

    kind: Annotated[
        Kind,
        Option(
            "Code for your own loop, for the Hugging Face Trainer, or for a loop without gemmscope installed (plain).",
        ),
    ] = "loop"
