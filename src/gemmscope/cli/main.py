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
from gemmscope.errors import UserError, in_shell
from gemmscope.say import complain, say
from gemmscope.signals import Interrupted
from gemmscope.toml import load_data

SIGINT, SIGPIPE = 2, 13
UsageProblem: Any = typer.BadParameter.__mro__[2]  # ClickException: newer versions of typer have a click of their own
COMMANDS = load_data("gemmscope.cli", "commands.toml")
SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --hidden_size and --hidden-size are the same option
}


class _OutputClosed(BaseException):
    """Whoever read our standard output has gone, as in `gemmscope … | head`."""


class LazyGroup(TyperGroup):
    """Imports a command's module when that command is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names alone: to list and to suggest

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"gemmscope.cli.{cmd_name.replace('-', '_')}")
        examples = "\n\n".join(f"\b\n{paragraph}" for paragraph in COMMANDS[cmd_name]["examples"].split("\n\n"))  # not re-wrapped
        program = typer.Typer(rich_markup_mode=None, context_settings=SETTINGS, add_completion=False)
        program.command(cmd_name, cls=getattr(module, "Command", None), epilog=examples)(module.command)
        return typer.main.get_command(program)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # typer would end with exit code 1, as if something had failed
            raise _OutputClosed from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, command["summary"]) for name, command in COMMANDS.items()])


app = typer.Typer(
    name="gemmscope",
    cls=LazyGroup,
    help="What FP8, MXFP8 and NVFP4 will do for your transformer's training on your GPU, before you pay for the run.",
    epilog="\b\nStart with:\n  gemmscope shapes --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192",
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
    """Run the command line. Exit codes: 0 success, 1 a check failed, 2 invalid input or output, 128 + the number of a signal that
    ended it (130 for Ctrl-C, 143 for SIGTERM)."""
    if sys.stdout is None:  # closed: whatever is written to it fails, and is not lost silently
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    sys.exit(_exit_code())


def _exit_code() -> int:
    """Run the command; every error becomes a message and an exit code."""
    try:
        try:
            return app(standalone_mode=False) or 0
        finally:
            sys.stdout.flush()  # while an error can still be reported
    except UsageProblem as error:
        shown = io.StringIO()
        error.show(shown)
        say(shown.getvalue().rstrip())
        return int(error.exit_code)
    except UserError as error:
        complain(in_shell(error.message), in_shell(error.hint))
        return 2
    except (Interrupted, typer.Abort) as interruption:
        complain("interrupted")
        return getattr(interruption, "exit_code", 128 + SIGINT)
    except (_OutputClosed, BrokenPipeError):
        _discard_output()
        return 128 + SIGPIPE
    except OSError as error:  # standard output is full, or closed
        reason = "standard output is closed" if error.errno == errno.EBADF else error.strerror or error
        complain(f"the output cannot be written: {reason}")
        _discard_output()
        return 2


def _discard_output() -> None:
    """What is left in the buffer cannot be written."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
