"""Writes the output blocks of the documentation anew from recorded data: `make pictures`.

A block stands behind a line `<!-- output: NAME -->` in a page. A test fails when one is stale.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from gemmscope.report import formats
from gemmscope.report.step import sentences, tables
from gemmscope.step.recommend import Plan, recommend

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))
from recorded_steps import RECIPES, answered  # noqa: E402


def step() -> str:
    """The recorded Llama step: the step's table, the first waterfall, and what is said of it."""
    results, found = answered("llama8b")
    recommended = recommend(results, [Plan(name) for name in RECIPES])
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False, soft_wrap=True)
    formats.print_tables(tables(found)[:2], [], [*sentences(found), f"recommended: {recommended.words}"], console)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


BLOCKS = {"step": step}


def renewed(page: str) -> str:
    """A page with its blocks as they are now."""
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- output: {name} -->\n```\n).*?(\n```)"
        found = re.search(pattern, page, flags=re.DOTALL)
        if found is not None:
            page = page[: found.start()] + found[1] + make() + found[2] + page[found.end() :]
    return page


def main() -> None:
    """All pages."""
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
