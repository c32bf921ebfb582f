"""Takes a screenshot of the report of a step recorded on an H200. `make pictures` runs it where Chromium is installed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests")]

from gemmscope.document import document
from gemmscope.writers.html import page
from support.browser import CHROMIUM, Browser
from worked_example import llama_step


def main() -> None:
    """Write a screenshot of the top of the page at desktop size."""
    if CHROMIUM is None:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "report.html").write_text(page([document(llama_step())]), encoding="utf-8")
        browser = Browser(folder / "profile")
        browser.open(folder / "report.html", width=1200, height=1340).screenshot(
            ROOT / "docs" / "images" / "report.png", whole=False
        )
        browser.close()


if __name__ == "__main__":
    main()
