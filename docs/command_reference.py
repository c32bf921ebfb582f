"""The pages of the command line, generated from the commands themselves: options in groups, examples, exit codes."""

from __future__ import annotations

import html
from collections.abc import Iterable

from gemmscope.cli.build import every_command
from gemmscope.cli.help import CommandHelp, OptionHelp, wrapped

SIGNALS = 128  # from here on, a signal ended the command
OWN = "Options"  # the group of a command's own options
PAGES = {
    "shapes": "shapes.md",
    "bench": "bench.md",
    "step": "step.md",
    "fleet": "fleet.md",
    "forecast": "forecast.md",
    "explore": "forecast.md#a-page-to-explore",
    "plan": "plan.md",
    "numerics": "numerics.md",
    "calibrate": "forecast.md#on-your-own-gpu",
    "explain": "explain.md",
    "trace-me": "explain.md#recording-a-good-trace",
    "compare": "compare.md",
    "report": "report.md",
    "models": "models.md",
    "gpus": "forecast.md",
    "doctor": "bench.md#what-can-be-measured-here",
}


def summary() -> str:
    """Every command with its sentence."""
    lines = ["| command | what it does | more |", "| --- | --- | --- |"]
    lines += [
        f"| [`{command.name}`](#{command.name}) | {command.summary} | [how it works]({PAGES[command.name]}) |"
        for command in every_command()
    ]
    return "\n".join(lines)


def each_command() -> str:
    """Every command: what it does, its own options, the groups that it shares, examples."""
    return "\n\n".join(_command(command) for command in every_command())


def _command(command: CommandHelp) -> str:
    own = [option for group in command.groups if group.title == OWN for option in _listed(group.options)]
    shared = [group.title for group in command.groups if group.title != OWN and _listed(group.options)]
    parts = [f"### {command.name}", f"```text\n{command.usage}\n```", html.escape(command.description, quote=False)]
    if own:
        parts.append(_table(own))
    if shared:
        links = ", ".join(f"[{title.lower()}](#{title.lower().replace(' ', '-')})" for title in shared)
        parts.append(f"{'Also' if own else 'Options'}: {links}.")
    examples = "\n".join("\n".join(wrapped(example, 88, "")) for example in command.examples)
    parts.append(f"```bash\n{examples}\n```")
    return "\n\n".join(parts)


def shared_options() -> str:
    """The groups that several commands share, each option once; where not all of these commands have it, they are named."""
    every = every_command()
    longest = sorted(every, key=lambda command: -len(command.groups))
    titles = dict.fromkeys(group.title for command in longest for group in command.groups if group.title != OWN)
    parts = []
    for title in titles:
        takers: dict[OptionHelp, list[str]] = {}  # an option that differs between commands is listed once for each
        for command in every:
            for group in command.groups:
                for option in _listed(group.options) if group.title == title else ():
                    takers.setdefault(option, []).append(command.name)
        accepting = [command.name for command in every if any(command.name in names for names in takers.values())]
        if accepting:
            everywhere = ", ".join(f"[`{name}`](#{name})" for name in accepting)
            only = {option: names for option, names in takers.items() if len(names) < len(accepting)}
            parts += [f"### {title}", f"Options of {everywhere}.", _table(takers, only)]
    return "\n\n".join(parts)


def _listed(options: Iterable[OptionHelp]) -> list[OptionHelp]:
    return [option for option in options if "--help" not in option.flags]


def _table(options: Iterable[OptionHelp], only: dict[OptionHelp, list[str]] | None = None) -> str:
    lines = ["| option | what it does |", "| --- | --- |"]
    for option in options:
        takers = f" *({', '.join((only or {})[option])} only)*" if option in (only or {}) else ""
        lines.append(f"| <code>{_safe(option.usage)}</code> | {_safe(option.text)}{takers} |")
    return "\n".join(lines)


def _safe(text: str) -> str:
    """Text in a cell: no markup, no end of the cell."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;").replace("_", "&#95;").replace("`", "")


def exit_codes() -> str:
    """Every exit code, what it means, and the commands that end with it."""
    meanings: dict[tuple[int, str], list[str]] = {}
    for command in every_command():
        for code, meaning in command.exit_codes:
            if code < SIGNALS:
                meanings.setdefault((code, meaning), []).append(command.name)
    lines = ["| code | means | from |", "| ---: | --- | --- |"]
    for (code, meaning), names in sorted(meanings.items()):
        others = [f"`{command.name}`" for command in every_command() if command.name not in names]
        most = f"every command except {' and '.join(others)}" if others else "every command"
        where = most if len(names) > len(others) else ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {code} | {_safe(meaning)} | {where} |")
    return "\n".join(lines)
