"""Builds the commands: the module of each is imported when it is called, described or completed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from gemmscope.cli.describe import CommandHelp, describe
from gemmscope.cli.help import command_help, terminal_width

SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --hidden_size and --hidden-size are the same option
}


class HelpfulCommand(TyperCommand):
    """A command whose help is in groups, from commands.toml and options.toml."""

    def described(self, ctx: Any = None) -> CommandHelp:
        """The help of the command, as data."""
        context = ctx or self.make_context(self.name, [], resilient_parsing=True)
        return describe(str(self.name), self.get_params(context))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help for the terminal."""
        formatter.write(command_help(self.described(ctx), terminal_width()))


def build(name: str) -> Any:
    """The command of this name, as typer runs it."""
    module = import_module(f"gemmscope.cli.{name.replace('-', '_')}")
    program = typer.Typer(rich_markup_mode=None, context_settings=SETTINGS, add_completion=False)
    program.command(name, cls=getattr(module, "Command", HelpfulCommand))(module.command)
    return typer.main.get_command(program)
