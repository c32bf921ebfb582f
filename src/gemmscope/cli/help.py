"""The help of a command: as data, for the reference page; and laid out for the terminal.

A command's help is: usage, what it does, an example, its own options, the groups, more examples, exit codes. `commands.toml` has
what it says besides the options.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from dataclasses import dataclass
from typing import Any

from gemmscope.toml import load_data

DATA = load_data("gemmscope.cli", "commands.toml")
COMMANDS: dict[str, dict[str, Any]] = DATA["commands"]
SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --hidden_size and --hidden-size are the same option
}
WIDTH = 80
NARROW = 60
"""Columns below which the help of an option stands under it."""
MOST_FLAG_COLUMNS = 26
"""A longer option has its help on the next line."""
SHORT = 4
"""A left side of at most this width stays beside its text on a narrow terminal: exit codes."""


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
        return " ".join(part for part in (" / ".join([flags, *self.negative] if self.flags else []), self.metavar) if part)

    @property
    def text(self) -> str:
        """The help with the default."""
        return f"{self.help} [default: {self.default}]" if self.default else self.help


@dataclass(frozen=True)
class OptionGroup:
    """Options with a title: the command's own ("Options") or one of the groups that several commands share."""

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


HELP = OptionHelp("help", ("--help", "-h"), (), "", "", "Show this help and exit.")


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


def terminal_width() -> int:
    """Columns of the terminal, at most 80: longer lines are hard to read."""
    return min(shutil.get_terminal_size().columns, WIDTH)


def command_help(command: CommandHelp, width: int) -> str:
    """The help of a command. A newcomer needs the first screen: what it does, one example, its own options."""
    first, *more = command.examples
    parts = [
        [f"Usage: {command.usage}"],
        filled(command.summary, width),
        wrapped(first, width),
        *([f"{group.title}:", *_rows([(one.usage, one.text) for one in group.options], width)] for group in command.groups),
        ["Details:", *filled(command.description, width)],
        *([["More examples:", *(line for example in more for line in wrapped(example, width))]] if more else []),
        ["Exit codes:", *_rows([(str(code), text) for code, text in command.exit_codes], width)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def program_help(summary: str, commands: list[tuple[str, str]], options: list[tuple[str, str]], start: str, width: int) -> str:
    """The help of the program: its commands."""
    parts = [
        ["Usage: gemmscope COMMAND [OPTIONS]"],
        filled(summary, width),
        ["Commands:", *_rows(commands, width)],
        ["Options:", *_rows(options, width)],
        ["Start with:", *wrapped(start, width)],
        filled("gemmscope COMMAND --help shows the options of a command, with examples.", width, ""),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _rows(rows: list[tuple[str, str]], width: int) -> list[str]:
    """Two columns; on a narrow terminal, and for a long left side, the right side stands below the left."""
    longest = max(len(name) for name, _ in rows)
    left = 4 if width < NARROW and longest > SHORT else 2 + 2 + min(MOST_FLAG_COLUMNS, longest)
    lines = []
    for name, text in rows:
        right = filled(text, width, " " * left)
        names = filled(name, width, "  ")
        if len(names) == 1 and len(names[0]) <= left - 2 and right:
            lines += [names[0].ljust(left) + right[0].lstrip(), *right[1:]]
        else:
            lines += [*names, *right]
    return lines
