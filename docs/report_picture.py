"""Takes the README's picture of a report: a recorded step on an H200, in Chromium. `make pictures` runs it where there is one."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import CHROMIUM, Browser
from support.step_files import recorded_step

from gemmscope.document.build import document
from gemmscope.writers.html import page


def main() -> None:
    """The top of the page, as a desktop shows it."""
    if CHROMIUM is None:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "report.html").write_text(page([document(recorded_step("llama8b"))]), encoding="utf-8")
        browser = Browser(folder / "profile")
        browser.open(folder / "report.html", width=1200, height=1340).screenshot(
            ROOT / "docs" / "images" / "report.png", whole=False
        )
        browser.close()


if __name__ == "__main__":
    main()
