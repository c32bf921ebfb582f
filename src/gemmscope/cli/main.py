"""`gemmscope`: gathers the commands, and turns every wrong input into one message and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from gemmscope import __version__
from gemmscope.cli import bench, calibrate, compare, doctor, explain, forecast, report, shapes, step, trace_me
from gemmscope.cli.bench_options import BenchCommand
from gemmscope.errors import UserError

app = typer.Typer(
    name="gemmscope",
    help="What FP8, MXFP8 and NVFP4 will do for your transformer's training on your GPU, before you pay for the run.",
    epilog="\b\nStart with:\n  gemmscope shapes --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: never cut short, and in half the time
    # --hidden_size and --hidden-size are the same option
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
app.command("shapes", epilog=shapes.EXAMPLES)(shapes.command)
app.command("bench", cls=BenchCommand, epilog=bench.EXAMPLES)(bench.command)
app.command("step", epilog=step.EXAMPLES)(step.command)
app.command("forecast", epilog=forecast.EXAMPLES)(forecast.command)
app.command("calibrate", epilog=calibrate.EXAMPLES)(calibrate.command)
app.command("explain", epilog=explain.EXAMPLES)(explain.command)
app.command("trace-me", epilog=trace_me.EXAMPLES)(trace_me.command)
app.command("compare", epilog=compare.EXAMPLES)(compare.command)
app.command("report", epilog=report.EXAMPLES)(report.command)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gemmscope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 a check found differences, 2 wrong input or output, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark, and the rest
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # while it can still be said that this fails
    except UserError as error:
        _complain(error.message, error.hint)
        sys.exit(2)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)
    except OSError as error:  # standard output is full or closed
        _complain(f"the output cannot be written: {error.strerror or error}")
        os._exit(2)


def run() -> None:
    """The program: `main` in a process of its own."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `gemmscope … | head` ends as other tools do
    for name in ("SIGTERM", "SIGHUP"):  # so that processes and folders made on the way go with us; nohup's wish is left alone
        ending = getattr(signal, name, None)
        if ending is not None and signal.getsignal(ending) == signal.SIG_DFL:
            signal.signal(ending, lambda number, _: sys.exit(128 + number))
    main()


def _complain(message: str, hint: str = "") -> None:
    if sys.stderr is None:
        return
    colour = "red" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else None
    typer.secho(f"gemmscope: {message}", err=True, fg=colour)
    if hint:
        typer.echo(f"  {hint}", err=True)
