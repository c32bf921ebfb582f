"""Fills the output blocks of the documentation with what commands print now: `make pictures`.

A block is ``<!-- output: COMMAND -->``, optionally ``<!-- from: WORDS -->`` (the part that begins with the line that holds them,
up to the next blank line), the fenced output, and ``<!-- /output -->``. A test fails when a block is not what the command prints.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"<!-- output: (?P<command>.*?) -->\n(?:<!-- from: (?P<words>.*?) -->\n)?.*?<!-- /output -->", flags=re.DOTALL)


def filled(text: str) -> str:
    """The text with every block as it should be."""
    return BLOCK.sub(_block, text)


def _block(found: re.Match[str]) -> str:
    command, words = found["command"], found["words"]
    shown = _part(_printed(command), words) if words else _printed(command)
    marks = f"<!-- output: {command} -->\n" + (f"<!-- from: {words} -->\n" if words else "")
    return f"{marks}```\n$ {command}\n{shown}\n```\n<!-- /output -->"


def _printed(command: str) -> str:
    arguments = [sys.executable, "-m", *shlex.split(command)]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _part(printed: str, words: str) -> str:
    """From the line that holds the words: a title, the blank line of its table, and the table."""
    lines = printed.splitlines()
    first = next(index for index, line in enumerate(lines) if words in line)
    last = next((index for index in range(first + 2, len(lines)) if not lines[index]), len(lines))
    return "\n".join(["…", *lines[first:last]])


if __name__ == "__main__":
    for page in sorted(Path(__file__).parent.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
