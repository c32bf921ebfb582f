"""Builds the commands: their options become parameters of typer, and come back as filled-in objects.

A command of `commands.py` names the classes of its options in its signature. Nothing else is imported for `--help`, and nothing
heavy for the completion of values: presets, GPUs, recipes and others, and choices.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from gemmscope import commands as functions
from gemmscope.cli import commands
from gemmscope.cli.help import COMMANDS, DATA, HELP, SETTINGS, CommandHelp, OptionGroup, OptionHelp, command_help, terminal_width
from gemmscope.options.declare import GROUPS, OWN, Declared, Options, options_of
from gemmscope.toml import load_data

OUTPUT = GROUPS[-1]


class HelpfulCommand(TyperCommand):
    """A command whose help is in groups, and whose arguments people may spell in several ways."""

    def described(self) -> CommandHelp:
        """The help of the command, as data."""
        return describe(str(self.name), list(shell_options(function_of(str(self.name))).values()))

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the help for the terminal."""
        formatter.write(command_help(self.described(), terminal_width()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments as `spelled_out` writes them. The result keeps them as its command."""
        if not ctx.resilient_parsing:  # completion
            args = spelled_out(str(self.name), args)
            sys.argv[1:] = [str(self.name), *args]
        return super().parse_args(ctx, list(args))


def spelled_out(name: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of a command as options by their own names: other spellings (`options/spellings.toml`), the default value of
    `--shapes`, and words without an option that name the model or the GPUs. What is not known stays, for typer to report.

    >>> spelled_out("forecast", ["h200", "--mbs", "2", "llama-3.1-8b", "--seq_len=4k"])
    ['--preset', 'llama-3.1-8b', '--gpu', 'h200', '--micro-batch-size', '2', '--sequence-length=4k']
    """
    options = shell_options(function_of(name))
    arguments_of = [declared for declared in options.values() if declared.option.argument]
    known = {
        flag: declared
        for declared in options.values()
        if declared not in arguments_of
        for flag in "/".join(declared.flags).split("/")
    }
    spellings = load_data("gemmscope.options", "spellings.toml")
    takes_model, left = "preset" in options, list(reversed(arguments))
    written, positional = list[str](), list[str]()
    while left:
        argument = left.pop()
        if not re.match(r"--?[A-Za-z]|--$", argument):
            positional.append(argument)
            continue
        typed, equals, value = argument.partition("=")
        flag, *fixed = str(spellings.get(typed.replace("_", "-"), typed)).split()
        if typed == "--model" and takes_model and (equals or left):
            positional.append(value if equals else left.pop())
            continue
        declared = known.get(flag.replace("_", "-"))
        if declared is None:  # not an option of this command, or the end of options
            return [*written, *positional, argument, *reversed(left)]
        written.append(f"{flag}{equals}{value}")
        if fixed or declared.is_flag or equals:
            written += fixed
        elif left and (flag != "--shapes" or not re.match(r"--?[A-Za-z]", left[-1])):
            written.append(left.pop())
        elif flag == "--shapes":
            written.append("default")
    if takes_model and positional:
        takes = [option for option in ("gpu", "gpus") if option in options]
        named, positional = functions.known.named(positional, name, takes, written, own=bool(arguments_of))
        written = [*named, *written]
    return [*written, *positional]


def function_of(name: str) -> Callable[..., int | None]:
    """The function of the command with this name."""
    function: Callable[..., int | None] = getattr(commands, name.replace("-", "_"))
    return function


def build(name: str) -> Any:
    """The command of this name, as typer runs it."""
    program = typer.Typer(rich_markup_mode=None, context_settings=SETTINGS, add_completion=False)
    program.command(name, cls=HelpfulCommand)(spread(function_of(name)))
    return typer.main.get_command(program)


def every_command() -> tuple[CommandHelp, ...]:
    """Every command in the order of `gemmscope --help`, for the reference page: groups, options, examples, exit codes.

    >>> shapes = every_command()[0]
    >>> shapes.name, shapes.groups[1].title, shapes.groups[1].options[0].usage
    ('shapes', 'Model', '--preset NAME')
    """
    return tuple(build(name).described() for name in COMMANDS)


def option_groups(command: Callable[..., int | None]) -> dict[str, type[Options]]:
    """The classes of options that a command takes, by the names of its parameters."""
    return {name: group for name, group in get_type_hints(command).items() if name != "return"}


def shell_options(command: Callable[..., int | None]) -> dict[str, Declared]:
    """The options that the command line has for a command."""
    return {name: declared for name, declared in options_of(*option_groups(command).values()).items() if declared.option.in_shell}


def spread(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """The command as a function of single options, with a signature that typer reads."""
    groups, options = option_groups(command), shell_options(command)

    @functools.wraps(command)
    def run(**values: Any) -> int | None:
        return command(**{name: _filled(group, values) for name, group in groups.items()})

    annotations = {name: _described(declared) for name, declared in options.items()}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(options[name]), annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    run.__annotations__ = annotations
    del run.__wrapped__  # or the original signature would be read through it
    return run


def _filled(group: type[Options], values: Mapping[str, Any]) -> Options:
    """The options of one class, from the values that typer read."""
    given = {}
    for name, declared in options_of(group).items():
        value = values.get(name)
        if declared.option.repeated:  # typer gives a list of texts, empty if there is none
            value = None if not value else tuple(value) if declared.parse is None else declared.parse(value)
        if value is not None:
            given[name] = value
    return group(**given)


def _default(declared: Declared) -> Any:
    return inspect.Parameter.empty if declared.option.required else None if declared.option.repeated else declared.default


def _described(declared: Declared) -> Any:
    """The type of an option as typer sees it: a flag, or texts that are parsed here."""
    option = declared.option
    parse = _parser(declared.parse) if declared.parse is not None and not option.repeated else None
    facts: dict[str, Any] = {
        "help": option.help,
        "metavar": declared.metavar or None,
        "parser": parse,
        "autocompletion": completion(declared),
    }
    hint: Any = (declared.hint if declared.is_flag else list[str] if option.repeated else str) | None
    if declared.is_flag and declared.default is not None:
        hint = bool
    if option.argument:
        return Annotated[hint if not option.required else list[str], typer.Argument(**facts)]
    return Annotated[hint, typer.Option(*declared.flags, hidden=option.hidden, **facts)]


def _parser(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of option values that reports invalid text as typer does."""

    def parse(text: Any) -> Any:
        try:
            return read(text) if isinstance(text, str) else text  # typer also passes the default
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def describe(name: str, options: Sequence[Declared]) -> CommandHelp:
    """The help of a command with these options."""
    facts = COMMANDS[name]
    members: dict[str, list[OptionHelp]] = {group: [] for group in GROUPS}
    for declared in options:
        if not declared.option.hidden:
            members[declared.group].append(option_help(declared))
    shared = [group for group in GROUPS if members[group] and group != OUTPUT]
    if members[OUTPUT] and not shared:  # nothing but outputs
        members[OWN], members[OUTPUT] = members[OUTPUT], []
    members[OUTPUT if members[OUTPUT] else [OWN, *shared][-1]].append(HELP)
    arguments = [option.metavar for option in members[OWN] if not option.flags]
    codes = {int(code): text for code, text in {**DATA["exit_codes"], **facts.get("exit_codes", {})}.items()}
    return CommandHelp(
        name=name,
        usage=" ".join(("gemmscope", name, "[OPTIONS]", *arguments)),
        summary=facts["summary"],
        description=" ".join(facts["description"].split()),
        groups=tuple(OptionGroup(group, tuple(listed)) for group, listed in members.items() if listed),
        examples=tuple(facts["examples"]),
        exit_codes=tuple(sorted(codes.items())),
    )


def option_help(declared: Declared) -> OptionHelp:
    """The help of one option."""
    option, metavar = declared.option, declared.metavar
    if option.argument:
        usage = f"{metavar}..." if option.repeated else metavar if option.required else f"[{metavar}]"
        return OptionHelp(declared.name, (), (), usage, "", option.help)
    spellings = [flag.partition("/") for flag in declared.flags]
    on, off = tuple(flag for flag, _, _ in spellings), tuple(flag for _, _, flag in spellings if flag)
    return OptionHelp(
        declared.name, on, off, metavar, (option.default or _default_in_words(declared.default, on, off)), option.help
    )


def _default_in_words(value: Any, on: Sequence[str], off: Sequence[str]) -> str:
    """The default in words. That of a flag is one of its spellings, if it has two."""
    if isinstance(value, bool) and off:
        return (on if value else off)[0].removeprefix("--")
    return "" if value in (None, ()) or isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def listed(names: str) -> list[str]:
    """The names in a file of facts, in a table of it, or of the files of a folder.

    >>> listed("gpu/specs.toml")[:2], listed("forecast/coefficients/network.toml networks")[0], listed("model/presets/")[0]
    (['a100', 'h100'], 'infiniband-hdr', 'bamba-9b')
    """
    if names.endswith("/"):
        return sorted(
            entry.name.removesuffix(".toml")
            for entry in files("gemmscope").joinpath(names).iterdir()
            if entry.name.endswith(".toml")
        )
    file, _, table = names.partition(" ")
    facts = load_data("gemmscope", file)
    return list(facts[table] if table else facts)


def completion(declared: Declared) -> Callable[[str], list[str]] | None:
    """The function that completes the values of an option; None if the shell completes file names."""
    if not declared.option.names and not declared.choices:
        return None

    def complete(incomplete: str) -> list[str]:
        known = listed(declared.option.names) if declared.option.names else declared.choices
        return matching(known, incomplete, several="," in declared.option.metavar)

    return complete


def matching(known: Sequence[str], typed: str, *, several: bool) -> list[str]:
    """The names that begin as typed, in any case; after a comma, those that are not yet in the list.

    >>> matching(["h100", "h200", "b200"], "b200,h", several=True), matching(["FP8Block", "MXFP8"], "m", several=True)
    (['b200,h100', 'b200,h200'], ['mxfp8'])
    """
    before, comma, start = typed.rpartition(",") if several else ("", "", typed)
    used = {name.strip().lower() for name in before.split(",")}
    fitting = [name for name in known if name.lower().startswith(start.lower()) and name.lower() not in used]
    return [
        before + comma + name for name in [name.lower() if start.islower() else start + name[len(start) :] for name in fitting]
    ]
