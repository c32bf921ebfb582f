"""Checks every page of the built documentation site in Chromium: `python tests/support/site_pages.py build/site [SCREENSHOTS]`.

Each page is opened from its file, at desktop and phone width, light and dark. It must not be wider than the screen, must not
complain, and must not ask another host for anything.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.browser import Browser, Tab

WIDTHS = (1400, 390)
# What sticks out of the screen although no box of its own scrolls it; commands and tables scroll in theirs.
OVERFLOW = """
(() => {
  const page = document.documentElement, width = page.clientWidth, found = [];
  if (page.scrollWidth > width) found.push("the page is " + page.scrollWidth + " px wide");
  for (const one of document.querySelectorAll(".md-content *")) {
    if (one.closest("svg")) continue;
    const box = one.getBoundingClientRect();
    if (!box.width || box.right <= width + 1) continue;
    let around = one.parentElement;
    while (around && !["auto", "scroll"].includes(getComputedStyle(around).overflowX)) around = around.parentElement;
    if (!around || !around.closest(".md-content")) found.push(one.tagName + ": " + one.textContent.trim().slice(0, 60));
  }
  return JSON.stringify(found.slice(0, 5));
})()
"""
# Commands must not lose their ends: a block either wraps or scrolls.
CLIPPED = """
JSON.stringify([...document.querySelectorAll(".md-content pre > code")].filter(
  code => code.scrollWidth > code.clientWidth + 1 && !["auto", "scroll"].includes(getComputedStyle(code).overflowX)
).map(code => code.textContent.slice(0, 60)))
"""


SEARCH = "[...document.querySelectorAll('*')].map(one => one.shadowRoot).filter(Boolean)"  # the dialog has a root of its own


def pages(site: Path) -> list[Path]:
    """Every page of the site."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def page_problems(browser: Browser, path: Path, width: int, *, dark: bool, picture: Path | None = None) -> list[str]:
    """The problems of a page."""
    tab = browser.open(path, width=width, dark=dark)
    problems = complaints(tab)
    if tab.evaluate("document.body.getAttribute('data-md-color-scheme')") != ("slate" if dark else "default"):
        problems.append("the palette does not follow the system")
    if picture is not None:
        browser.listen(0.5)  # wait for the fade-in
        tab.screenshot(picture)
    tab.close()
    return [f"{path.name}, {width} px, {'dark' if dark else 'light'}: {problem}" for problem in problems]


def complaints(tab: Tab) -> list[str]:
    """Errors, requests to other hosts, and content that is clipped or wider than the screen."""
    elsewhere = [f"asks for {url}" for url in tab.requests() if not url.startswith(("file:", "data:", "about:", "blob:"))]
    wide = [f"too wide: {text}" for text in json.loads(tab.evaluate(OVERFLOW))]
    clipped = [f"clipped: {text}" for text in json.loads(tab.evaluate(CLIPPED))]
    return [*tab.complaints(), *elsewhere, *wide, *clipped]


def results_of_search(browser: Browser, page: Path, query: str) -> list[str]:
    """The pages that the site's search finds, on a page opened from its file."""
    tab = browser.open(page)
    tab.evaluate("document.querySelector('.md-search__button').click()")
    tab.wait_for(f"{SEARCH}.some(root => root.querySelector('input'))")
    tab.call("Input.insertText", text=query)
    tab.wait_for(f"{SEARCH}.some(root => root.querySelector('a'))")
    addresses: str = tab.evaluate(f"{SEARCH}.flatMap(root => [...root.querySelectorAll('a')]).map(a => a.href).join(' ')")
    tab.close()
    return addresses.split()


def look_at_all(site: Path, pictures: Path | None) -> Iterator[str]:
    """The problems of all pages, at every width and in every theme."""
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        for path in pages(site):
            for width in WIDTHS:
                for dark in (False, True):
                    name = f"{path.relative_to(site).with_suffix('')}-{width}-{'dark' if dark else 'light'}.png".replace("/", "-")
                    yield from page_problems(browser, path, width, dark=dark, picture=pictures / name if pictures else None)
        browser.close()


if __name__ == "__main__":
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    wrong = list(look_at_all(Path(sys.argv[1]), folder))
    print("\n".join(wrong) or f"{len(pages(Path(sys.argv[1])))} pages: nothing wrong")  # noqa: T201
    sys.exit(bool(wrong))
