"""What a command's help says, as data: `help.py` lays it out for the terminal, `reference.py` hands it to the documentation."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Any

from gemmscope.toml import load_data

DATA = load_data("gemmscope.cli", "commands.toml")
COMMANDS: dict[str, dict[str, Any]] = DATA["commands"]
OPTIONS = load_data("gemmscope.cli", "options.toml")
GROUPS: dict[str, str] = OPTIONS["groups"]
OWN = "Options"
"""The title of a command's own options and arguments."""
WIDTH = 80


@dataclass(frozen=True)
class OptionHelp:
    """One option, or one argument (no `flags`). `negative` are the flags that turn it off."""

    name: str
    flags: tuple[str, ...]
    negative: tuple[str, ...]
    metavar: str
    default: str
    help: str

    @property
    def usage(self) -> str:
        """How it is typed: `-o, --output PATH`, `--sequence-parallel / --no-sequence-parallel`, `TRACE...`."""
        flags = ", ".join(sorted(self.flags, key=len))
        spellings = [flags, *self.negative] if self.flags else []
        return " ".join(part for part in (" / ".join(spellings), self.metavar) if part)

    @property
    def text(self) -> str:
        """The help with the default."""
        return f"{self.help} [default: {self.default}]" if self.default else self.help


@dataclass(frozen=True)
class OptionGroup:
    """Options with a title: the command's own ("Options"), or one of the groups in options.toml."""

    title: str
    options: tuple[OptionHelp, ...]


@dataclass(frozen=True)
class CommandHelp:
    """One command. Examples are complete command lines, each on one line; `wrapped` breaks them."""

    name: str
    usage: str
    summary: str
    description: str
    groups: tuple[OptionGroup, ...]
    examples: tuple[str, ...]
    exit_codes: tuple[tuple[int, str], ...]


def settings_of(name: str, command: str) -> dict[str, Any]:
    """The settings of an option in options.toml: in the command's own table first, then in the groups."""
    tables = [OPTIONS["commands"].get(command, {}), OPTIONS["own"], *(OPTIONS[group] for group in GROUPS)]
    entry = next(table[name] for table in tables if name in table)
    return {"help": entry} if isinstance(entry, str) else dict(entry)


def group_of(name: str, command: str) -> str:
    """The group of an option; empty for a command's own options, and for those that have a group but are marked with `own`."""
    if settings_of(name, command).get("own"):
        return ""
    return next((group for group in GROUPS if name in OPTIONS[group]), "")


def describe(name: str, parameters: list[Any]) -> CommandHelp:
    """The help of a command with these parameters, as typer built them."""
    facts, order = COMMANDS[name], _order(name)
    visible = [parameter for parameter in parameters if not getattr(parameter, "hidden", False)]
    members: dict[str, list[OptionHelp]] = {group: [] for group in ("", *GROUPS)}
    for parameter in sorted(visible, key=lambda parameter: order.index(parameter.name)):
        members[group_of(parameter.name, name)].append(_option(parameter, name))
    if [option.name for option in members["output"]] == ["help"]:  # no group of its own: it goes to the last one
        alone = members.pop("output")
        members[[group for group, options in members.items() if options or not group][-1]] += alone
    titles = {"": OWN, **GROUPS}
    if not any(options for group, options in members.items() if group != "output"):  # nothing but outputs
        members = {"": members["output"]}
    arguments = [option.metavar for option in members[""] if not option.flags]
    codes = {int(code): text for code, text in {**DATA["exit_codes"], **facts.get("exit_codes", {})}.items()}
    return CommandHelp(
        name=name,
        usage=" ".join(("gemmscope", name, "[OPTIONS]", *arguments)),
        summary=facts["summary"],
        description=" ".join(facts["description"].split()),
        groups=tuple(OptionGroup(titles[group], tuple(options)) for group, options in members.items() if options),
        examples=tuple(facts["examples"]),
        exit_codes=tuple(sorted(codes.items())),
    )


def _order(command: str) -> list[str]:
    """All names in the order of options.toml."""
    tables = [OPTIONS["commands"].get(command, {}), OPTIONS["own"]]
    own = [name for table in tables for name in table if not group_of(name, command)]
    return [*own, *(name for group in GROUPS for name in OPTIONS[group])]


def _option(parameter: Any, command: str) -> OptionHelp:
    settings = settings_of(parameter.name, command)
    metavar = metavar_of(settings) or parameter.metavar or ""
    if settings.get("argument"):
        usage = f"{metavar}..." if parameter.nargs < 0 else metavar if parameter.required else f"[{metavar}]"
        return OptionHelp(parameter.name, (), (), usage, "", settings["help"])
    hidden = settings.get("aliases", ())
    flags = tuple(flag for flag in parameter.opts if flag not in hidden)
    return OptionHelp(
        name=parameter.name,
        flags=flags,
        negative=tuple(parameter.secondary_opts),
        metavar=metavar if not parameter.is_flag else "",
        default=settings.get("default", _default(parameter)),
        help=settings["help"],
    )


def metavar_of(settings: dict[str, Any]) -> str:
    """How the value is written; empty where it follows from the type."""
    return str(settings.get("metavar") or "|".join(settings.get("choices", ())))


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.secondary_opts and isinstance(value, bool):
        return str((parameter.opts if value else parameter.secondary_opts)[0]).removeprefix("--")
    return "" if value is None or isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def wrapped(example: str, width: int = WIDTH, indent: str = "  ") -> list[str]:
    """An example as lines that can be pasted: broken before options, each line but the last ending in a backslash.

    >>> wrapped("gemmscope bench --preset gpt2 --csv -", 34)
    ['  gemmscope bench --preset gpt2 \\\\', '    --csv -']
    """
    pieces = list[str]()  # the program and its command, each argument, each option with its value
    for number, word in enumerate(example.split(" ")):
        if number == 1 or (re.match("--?[A-Za-z]", pieces[-1] if pieces else "") and not re.match("--?[A-Za-z]", word)):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    lines, line = list[str](), indent + pieces[0]
    for number, piece in enumerate(pieces[1:], start=2):
        room = width - (2 if number < len(pieces) else 0)  # for the backslash
        if len(line) + 1 + len(piece) > room:
            lines.append(f"{line} \\")
            line = f"{indent}  {piece}"
        else:
            line = f"{line} {piece}"
    return [*lines, line]


def filled(text: str, width: int = WIDTH, indent: str = "  ") -> list[str]:
    """Text in lines of at most this width; a word that is longer is broken rather than lost."""
    return textwrap.wrap(
        text, max(width, len(indent) + 10), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
