"""Lays out the help of a command: usage, what it does, an example, its own options, the groups, more examples, exit codes."""

from __future__ import annotations

import shutil

from gemmscope.cli.describe import WIDTH, CommandHelp, OptionGroup, filled, wrapped

NARROW = 60
"""Columns below which the help of an option stands under it."""
MOST_FLAG_COLUMNS = 26
"""A longer option has its help on the next line."""
SHORT = 4
"""A left side of at most this width stays beside its text on a narrow terminal: exit codes."""


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
        *(_group(group, width) for group in command.groups),
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


def _group(group: OptionGroup, width: int) -> list[str]:
    return [f"{group.title}:", *_rows([(option.usage, option.text) for option in group.options], width)]


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
