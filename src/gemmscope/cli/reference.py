"""All commands as data, for the reference page of the documentation.

>>> shapes = commands()[0]
>>> shapes.name, shapes.groups[1].title, shapes.groups[1].options[0].usage
('shapes', 'Model', '--preset NAME')
"""

from gemmscope.cli.commands import build
from gemmscope.cli.describe import COMMANDS, CommandHelp

__all__ = ["CommandHelp", "commands"]


def commands() -> tuple[CommandHelp, ...]:
    """Every command in the order of `gemmscope --help`: groups, options, examples, exit codes."""
    return tuple(build(name).described() for name in COMMANDS)
