"""`gemmscope`: the commands, and one message with exit code 2 for every invalid input."""

import errno
import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gemmscope import __version__
from gemmscope.cli.help import COMMANDS, SETTINGS, program_help, terminal_width
from gemmscope.errors import UserError, in_shell
from gemmscope.say import complain, say
from gemmscope.signals import Interrupted

SIGINT, SIGPIPE = 2, 13
UsageProblem: Any = typer.BadParameter.__mro__[2]  # ClickException: newer versions of typer have a click of their own
SUMMARY = (
    "Tells you how much FP8, MXFP8 and NVFP4 will speed up your transformer training on your GPU, before you pay for the run."
)
START = "gemmscope forecast llama-3.1-8b h200"


class _OutputClosed(BaseException):
    """The reader of standard output is gone, as in `gemmscope … | head`."""


class LazyGroup(TyperGroup):
    """Imports what a command needs when that command is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names alone: to list and to suggest

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name in COMMANDS:
            return import_module("gemmscope.cli.build").build(cmd_name)
        if import_module("gemmscope.commands").known.is_name(cmd_name):
            hint = f"to forecast it: gemmscope forecast {' '.join(sys.argv[1:])}"
            raise UserError(f"{cmd_name} is not a command", hint)
        return None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # typer would end with exit code 1, as if something had failed
            raise _OutputClosed from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options = [record for parameter in self.get_params(ctx) if (record := parameter.get_help_record(ctx)) is not None]
        formatter.write(
            program_help(
                SUMMARY, [(name, command["summary"]) for name, command in COMMANDS.items()], options, START, terminal_width()
            )
        )


app = typer.Typer(
    name="gemmscope",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: never cut short, and in half the time
    context_settings=SETTINGS,
)


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
    """Run the command line. Exit codes: 0 success, 1 a check failed, 2 invalid input or output, 3 another precision ran, 4 too
    noisy to check, 128 + the number of a signal that ended it (130 for Ctrl-C, 143 for SIGTERM)."""
    if sys.stdout is None:  # closed: whatever is written to it fails, and is not lost silently
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    sys.exit(_exit_code())


def _exit_code() -> int:
    """Run the command; every error becomes a message and an exit code."""
    code = 0
    try:
        code = _command_code()
        sys.stdout.flush()  # while an error can still be reported
    except (_OutputClosed, BrokenPipeError):
        _discard_output()
        return code or 128 + SIGPIPE
    except OSError as error:  # standard output is full, or closed
        reason = "standard output is closed" if error.errno == errno.EBADF else error.strerror or error
        complain(f"the output cannot be written: {reason}")
        _discard_output()
        return code or 2
    return code


def _command_code() -> int:
    try:
        return app(standalone_mode=False, prog_name="gemmscope") or 0
    except UsageProblem as error:
        shown = io.StringIO()
        error.show(shown)
        say(shown.getvalue().rstrip())
        return int(error.exit_code)
    except UserError as error:
        complain(in_shell(error.message), in_shell(error.hint))
        return 2
    except Interrupted as interruption:
        complain(f"interrupted{': ' * bool(interruption.outcome)}{in_shell(interruption.outcome)}")
        return interruption.exit_code
    except typer.Abort:
        complain("interrupted")
        return 128 + SIGINT


def _discard_output() -> None:
    """Drop what is left in the buffer: it cannot be written."""
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
