"""Compares a page of `gemmscope explore` with `gemmscope forecast`, in Chromium: random settings, digit by digit.

    python tests/support/explorer_page.py PAGE [--settings 50] [--pictures FOLDER]

Also: how long it takes to load at desktop and phone width, its size, its requests, script errors, and whether it is too wide.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shlex
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))
from gemmscope.cli.main import main as command_line
from support.browser import Browser, Tab

READY = "document.documentElement.dataset.ready === 'yes'"
SHOWN = """JSON.stringify({
  rows: [...document.querySelectorAll("#table tr")].map(row => [...row.children].map(cell => cell.textContent)),
  answer: document.getElementById("answer").textContent,
  chosen: (document.querySelector("tr.chosen td") || {}).textContent,
  command: document.getElementById("command").textContent,
})"""


def forecast(command: str) -> tuple[int, str]:
    """What a command prints."""
    out = io.StringIO()
    with patch.object(sys, "argv", shlex.split(command)), patch.dict("os.environ", {"COLUMNS": "300"}), redirect_stdout(out):
        try:
            command_line()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def choose(tab: Tab, chosen: list[int]) -> None:
    """Set the controls."""
    tab.evaluate(
        f"{json.dumps(chosen)}.forEach((value, at) => {{ const one = document.querySelectorAll('select')[at];"
        " one.value = String(value); one.dispatchEvent(new Event('change')); })"
    )


def differences(tab: Tab) -> list[str]:
    """Where the view differs from its command: every cell of the table, and the answer."""
    shown = json.loads(tab.evaluate(SHOWN))
    code, printed = forecast(shown["command"])
    if not shown["rows"]:
        return [] if code == 2 else [f"{shown['command']}: the page says {shown['answer']!r}"]
    lines = [line.removesuffix(" ←").split("  ") for line in printed.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    wrong = [f"{shown['command']}: {row}" for row in shown["rows"] if row not in cells]
    answered = " ".join(shown["answer"].split()) in " ".join(printed.split())
    return wrong if answered else [*wrong, f"{shown['command']}: {shown['answer']!r} is not printed"]


def check(page: Path, settings: int, pictures: Path | None) -> list[str]:
    """The problems of a page."""
    problems, dice = [], random.Random(1)
    size_mb = page.stat().st_size / 1e6
    print(f"{size_mb:.2f} MB")  # noqa: T201
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        for width in (1400, 390):
            begin = time.perf_counter()
            tab = browser.open(page, width=width)
            tab.wait_for(READY)
            print(f"{width} px: {time.perf_counter() - begin:.2f} s until it is drawn")  # noqa: T201
            if (wide := tab.evaluate("document.documentElement.scrollWidth")) > width:
                problems.append(f"{width} px: the page is {wide} px wide")
            for dark in (False, True) if pictures is not None else ():
                tab.theme(dark=dark)
                tab.screenshot(pictures / f"explorer-{width}-{'dark' if dark else 'light'}.png")
            problems += tab.complaints()
            problems += [url for url in tab.requests() if not url.startswith(("file:", "data:", "blob:"))]
        counts = json.loads(tab.evaluate("JSON.stringify([...document.querySelectorAll('select')].map(one => one.length))"))
        for number in range(settings):
            choose(tab, [dice.randrange(count) for count in counts])
            differing = differences(tab)
            problems += differing
            before = tab.evaluate(SHOWN)
            link = tab.evaluate("location.hash")
            tab.evaluate("document.querySelectorAll('select').forEach(one => { one.value = '0'; })")
            tab.evaluate(f"location.hash = ''; location.hash = {json.dumps(link)}")
            tab.wait_for(f"({SHOWN}) === {json.dumps(before)}")
            print(f"{number + 1}: {'differs' if differing else 'equal'}", flush=True)  # noqa: T201
        browser.close()
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--settings", type=int, default=50)
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    wrong = check(given.page, given.settings, given.pictures)
    print("\n".join(wrong) or "nothing wrong")  # noqa: T201
    sys.exit(bool(wrong))
