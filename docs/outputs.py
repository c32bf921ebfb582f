"""Renews the generated blocks of the documentation: `make pictures`. A test fails when one is stale.

A block after a line `<!-- output: NAME -->` is text generated from recorded data. A block between `<!-- made: NAME -->` and
`<!-- /made -->` is Markdown generated from recorded data, forecasts or tables of facts (`worked_example.py` and the like). A
block between `<!-- prints: COMMAND -->` and `<!-- /prints -->` is the current output of the command; with
`<!-- from: WORDS -->` below the first mark, only the table whose title contains these words.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gemmscope.document.build import document
from gemmscope.writers import terminal

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
sys.path[:0] = [str(DOCS), str(DOCS.parent / "tests")]
import finding_table  # noqa: E402
import noise  # noqa: E402
import recipe_tables  # noqa: E402
import worked_example  # noqa: E402


def step() -> str:
    """The recorded Llama step as the command prints it."""
    return _tidy(terminal.text(document(worked_example.llama_step()), detail=False))


def bench() -> str:
    """The recorded bench as the command prints it."""
    return _tidy(terminal.text(document(worked_example.bench()), detail=False))


def _tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


BLOCKS = {"step": step, "bench": bench}
MADE: dict[str, Callable[[], str]] = {
    "speedups on an H200": worked_example.h200_table,
    "speedups on Blackwell": worked_example.blackwell_tables,
    "conclusions": worked_example.conclusions,
    "measured beside forecast": worked_example.side_by_side,
    "published": worked_example.published,
    "the step": worked_example.step_table,
    "in short": worked_example.readme_table,
    "repeats": noise.repeats,
    "lengths": noise.lengths,
    "recipes by architecture": recipe_tables.where,
    "recipes by backend": recipe_tables.backends,
    "operands": recipe_tables.operands,
    "quantization": recipe_tables.quantized,
    "findings": finding_table.findings,
}
MARKED = re.compile(r"(<!-- made: (?P<name>.*?) -->\n).*?(<!-- /made -->)", flags=re.DOTALL)


def renewed(page: str) -> str:
    """The page with all generated blocks renewed."""
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- output: {name} -->\n```\n).*?(\n```)"
        found = re.search(pattern, page, flags=re.DOTALL)
        if found is not None:
            page = page[: found.start()] + found[1] + make() + found[2] + page[found.end() :]
    page = MARKED.sub(lambda found: f"{found[1]}{MADE[found['name']]()}\n{found[3]}", page)
    return PRINTS.sub(_printed_block, page)


PRINTS = re.compile(
    r"<!-- prints: (?P<command>.*?) -->\n(?:<!-- from: (?P<words>.*?) -->\n)?.*?<!-- /prints -->", flags=re.DOTALL
)


def _printed_block(found: re.Match[str]) -> str:
    command, words = found["command"], found["words"]
    shown = _table(_printed(command), words) if words else _printed(command)
    marks = f"<!-- prints: {command} -->\n" + (f"<!-- from: {words} -->\n" if words else "")
    return f"{marks}```\n$ {command}\n{shown}\n```\n<!-- /prints -->"


def _printed(command: str) -> str:
    arguments = [sys.executable, "-m", *shlex.split(command)]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _table(printed: str, words: str) -> str:
    """The table whose title contains the words, with its title."""
    lines = printed.splitlines()
    first = next(index for index, line in enumerate(lines) if words in line)
    last = next((index for index in range(first + 2, len(lines)) if not lines[index]), len(lines))
    return "\n".join(["…", *lines[first:last]])


def main() -> None:
    """Renew all pages."""
    for path in PAGES:
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
