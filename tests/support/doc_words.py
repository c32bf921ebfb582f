"""How many words the documentation has: `python tests/support/doc_words.py` lists every page.

A word is whatever stands between spaces, as `wc -w` counts: prose, tables, code, markup and output of commands. Two kinds of
text do not count. Pages of reference that a benchmark writes as a whole (`WRITTEN`) are linked from the site's navigation.
Pages of reference (`REFERENCE`) count without their generated blocks; what people wrote around these blocks counts.
Everywhere else, generated blocks count as if they were written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MOST = 40_000
# The benchmark that writes the page says so in its first lines.
WRITTEN = ("measured/steps.md", "measured/forecasts.md", "measured/h200.md", "measured/explain.md")
REFERENCE = (
    "commands.md",
    "findings.md",
    "recipes.md",
    "model-types.md",
    "how-to/cluster-files.md",
    "measured/example.md",
    "measured/fleet.md",
    "measured/runs.md",
    "measured/traces.md",
)
GENERATED = re.compile(r"<!-- (made|prints|traces)\b.*?<!-- /\1 -->", flags=re.DOTALL)
MOST_AROUND = 450  # words that people wrote on a page of reference


def pages() -> list[Path]:
    """README, and all pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def words(path: Path) -> int:
    """The words of a page that count."""
    name, text = path.relative_to(ROOT).as_posix().removeprefix("docs/"), path.read_text(encoding="utf-8")
    if name in WRITTEN:
        return 0
    return len((GENERATED.sub("", text) if name in REFERENCE else text).split())


if __name__ == "__main__":
    for page in pages():
        print(f"{words(page):6,} {page.relative_to(ROOT)}")  # noqa: T201
    print(f"{sum(map(words, pages())):6,} in all, of {MOST:,}")  # noqa: T201
