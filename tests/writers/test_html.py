"""The page in a real browser: no errors, no requests, charts drawn, sorting and hovering work.

`GEMMSCOPE_SCREENSHOTS=folder` keeps pictures of every page to look at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmscope.app.report import report
from gemmscope.writers.html import page
from support.browser import CHROMIUM, Browser, Tab
from support.report_files import put, run_data
from support.results import RESULTS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
EVIL = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>"
WIDTHS = (390, 1400)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind of run, and of several."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {name: [run_data(name)] for name in RESULTS}
    runs["several"] = [run_data(name) for name in ("bench", "bench again", "forecast")]
    evil = run_data("bench")
    evil["model"]["name"] = evil["device"]["name"] = EVIL
    for place in (*evil["linears"]["cases"], *evil["linears"]["ops"], *evil["linears"]["speedups"]):
        place["op"] = EVIL + place["op"] if place["op"] else ""
    for cell in evil["linears"]["ops"]:
        for proof in cell["evidence"].values():
            proof["kernels"] = [EVIL]
    runs["evil"] = [evil]
    written = {}
    for name, files in runs.items():
        paths = [put(folder, f"{name}-{index}.json", file) for index, file in enumerate(files)]
        written[name] = folder / f"{name}.html"
        written[name].write_text(page(*report(paths)), encoding="utf-8")
    return written


PAGES = (*RESULTS, "several", "evil")
CHARTLESS = ("shapes", "shapes of experts", "compare")
DRAWN = """[...document.querySelectorAll(".plot")].filter((plot) => {
  const box = plot.querySelector("svg")?.getBoundingClientRect();
  return box && box.width > 200 && box.height > 100 && plot.querySelectorAll("svg path").length > 5;
}).length"""


LOOKS = [(width, dark) for width in WIDTHS for dark in (False, True)]
FEW = [(390, True), (1400, False)]  # for pages that show nothing that others do not


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        pytest.param(name, *look, id=f"{name}-{look[0]}-{'dark' if look[1] else 'light'}")
        for name in PAGES
        for look in (LOOKS if name in ("bench", "step", "several") else FEW)
    ],
)
def test_pages(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    tab = browser.open(pages[name], width=width, dark=dark)
    try:
        assert tab.complaints() == []
        assert tab.requests() == [pages[name].resolve().as_uri()]
        charts = tab.evaluate("document.querySelectorAll('.plot').length")
        assert tab.evaluate(DRAWN) == charts
        assert (charts == 0) is (name in CHARTLESS)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        assert tab.evaluate("window.broken") is None
        brightness = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert (brightness < 64) is dark
        if folder := os.environ.get("GEMMSCOPE_SCREENSHOTS"):
            tab.screenshot(Path(folder) / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    finally:
        tab.close()


def _bar(tab: Tab, chart: int, label: str) -> None:
    """Point at the lowest part of the bar that stands on that label."""
    tab.evaluate(f"document.querySelectorAll('.plot')[{chart}].scrollIntoView({{block: 'center', behavior: 'instant'}})")
    place = tab.evaluate(
        f"""(() => {{
          const plot = document.querySelectorAll(".plot")[{chart}];
          const name = [...plot.querySelectorAll("text")].find((text) => text.textContent === {label!r}).getBoundingClientRect();
          const middle = name.left + name.width / 2;
          const boxes = [...plot.querySelectorAll("path")].map((path) => path.getBoundingClientRect());
          const over = boxes.filter((box) => box.left < middle && box.right > middle && box.width < 200 && box.height > 10);
          const box = over.sort((one, other) => other.bottom - one.bottom)[0];
          return [middle, box.top + box.height / 2];
        }})()"""
    )
    tab.point(place[0] - 3, place[1])
    tab.point(*place)


TIP = """[...document.querySelectorAll(".tip")].filter((tip) => getComputedStyle(tip).visibility !== "hidden")
  .map((tip) => tip.innerText).filter((text) => text).join("\\n")"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("bench", "FP8Current", ("fprop kernel", "nvjet_sm90_q", "SM clock", "samples", "bursts")),
        ("step", "FP8Delayed", ("GEMMs", "nvjet", "steps timed", "bursts")),
    ],
)
def test_hovering_shows_kernels_clocks_and_samples(
    browser: Browser, pages: dict[str, Path], name: str, label: str, expected: tuple[str, ...], width: int
) -> None:
    tab = browser.open(pages[name], width=width)
    try:
        _bar(tab, 0, label)
        tab.wait_for(f"{TIP} !== ''")
        shown = tab.evaluate(TIP)
        assert label in shown
        for words in expected:
            assert words in shown
        box = tab.evaluate(
            "(() => { const box = document.querySelector('.tip').getBoundingClientRect(); return [box.left, box.right]; })()"
        )
        assert box[0] >= 0
        assert box[1] <= width
        if folder := os.environ.get("GEMMSCOPE_SCREENSHOTS"):
            tab.screenshot(Path(folder) / f"hover-{name}-{width}.png", whole=False)
    finally:
        tab.close()


def test_hovering_shows_text_and_never_markup(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["evil"])
    try:
        _bar(tab, 0, "FP8Current")
        tab.wait_for(f"{TIP} !== ''")
        assert "<img" in tab.evaluate(TIP)
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        assert tab.evaluate("window.broken") is None
        assert tab.complaints() == []
    finally:
        tab.close()


def _middle(tab: Tab, element: str) -> tuple[float, float]:
    box = tab.evaluate(f"{element}.getBoundingClientRect().toJSON()")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def _table(title: str) -> str:
    return f"document.querySelector('[aria-label^={json.dumps(title)}] table')"


def _column(title: str, index: int) -> str:
    return f"[...{_table(title)}.tBodies[0].rows].map((row) => row.cells[{index}].textContent)"


def test_sorting_by_click_and_by_key(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["explain"])
    try:
        head, times = f"{_table('By class of kernel')}.tHead.rows[0].cells[1]", _column("By class of kernel", 1)
        before = tab.evaluate(times)
        tab.evaluate(f"{head}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        tab.click(*_middle(tab, f"{head}.firstChild"))
        rising = [float(text) for text in tab.evaluate(times)]
        assert rising == sorted(rising)
        assert rising != [float(text) for text in before]
        assert tab.evaluate(f"{head}.getAttribute('aria-sort')") == "ascending"
        tab.evaluate(f"{head}.firstChild.focus()")
        tab.press("Enter", 13, "\r")
        assert [float(text) for text in tab.evaluate(times)] == rising[::-1]
        assert tab.evaluate(f"{head}.getAttribute('aria-sort')") == "descending"
        tab.evaluate(f"{_table('By class of kernel')}.tHead.rows[0].cells[0].firstChild.click()")
        assert tab.evaluate(f"{head}.getAttribute('aria-sort')") is None
        assert tab.evaluate(f"{_table('By class of kernel')}.querySelectorAll('[aria-sort]').length") == 1
    finally:
        tab.close()


def test_empty_cells_stay_last_when_sorted(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["shapes"])
    try:
        for _ in range(2):
            tab.evaluate(f"{_table('Everything else')}.tHead.rows[0].cells[2].firstChild.click()")
            shown = tab.evaluate(_column("Everything else", 2))
            assert shown[-1] == "-"
            assert shown[0] != "-"
    finally:
        tab.close()


def test_text_to_paste_can_be_copied(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["step"])
    try:
        assert "DelayedScaling" in tab.evaluate("document.querySelector('.paste code').textContent")
        tab.evaluate("document.querySelector('.copy').scrollIntoView({block: 'center', behavior: 'instant'})")
        tab.click(*_middle(tab, "document.querySelector('.copy')"))
        tab.wait_for("document.querySelector('.copy').textContent !== 'Copy'")
        assert tab.evaluate("document.querySelector('.copy').textContent") in ("Copied", "Selected")
        assert tab.complaints() == []
    finally:
        tab.close()


def test_a_changed_theme_and_a_turned_phone_are_followed(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["bench"], width=390)
    try:
        ink = "document.querySelector('.plot text').getAttribute('fill')"
        light = tab.evaluate(ink)
        tab.theme(dark=True)
        tab.wait_for(f"{ink} !== {light!r}")
        tab.call("Emulation.setDeviceMetricsOverride", width=844, height=390, deviceScaleFactor=1, mobile=True)
        tab.wait_for("document.querySelector('.plot svg').getBoundingClientRect().width > 390")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 844
        tab.theme(dark=True, paper=True)
        tab.wait_for(f"{ink} === {light!r}")  # paper is white, whatever the screen is
        assert tab.complaints() == []
    finally:
        tab.close()


def test_charts_have_text_beside_them(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["step"])
    try:
        assert tab.evaluate(
            "[...document.querySelectorAll('.plot')].every((plot) => plot.getAttribute('aria-label').length > 20)"
        )
        assert tab.evaluate("[...document.querySelectorAll('figure')].every((figure) => figure.querySelector('details table'))")
        assert tab.evaluate("document.querySelectorAll('h1').length") == 1
        assert tab.evaluate("new Set([...document.querySelectorAll('[id]')].map((each) => each.id)).size") == tab.evaluate(
            "document.querySelectorAll('[id]').length"
        )
        links = "[...document.querySelectorAll('nav a')].every((link) => document.querySelector(link.getAttribute('href')))"
        assert tab.evaluate(links)
    finally:
        tab.close()


def test_it_prints(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["bench"], dark=True)
    try:
        tab.theme(dark=True, paper=True)
        tab.wait_for("[...document.querySelectorAll('.plot svg')].every((svg) => svg.getBoundingClientRect().height > 100)")
        tab.theme(dark=True)
        printed = tab.pdf()
        assert printed[:5] == b"%PDF-"
        assert len(printed) > 20_000
        if folder := os.environ.get("GEMMSCOPE_SCREENSHOTS"):
            (Path(folder) / "bench.pdf").write_bytes(printed)
    finally:
        tab.close()
