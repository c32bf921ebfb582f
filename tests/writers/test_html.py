"""The page in a real browser: no errors, no requests, charts drawn, sorting and hovering work.

`GEMMSCOPE_SCREENSHOTS=folder` keeps pictures of every page to look at.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from pypdf import PdfReader

from gemmscope.commands.report import report
from gemmscope.document.combine import MOST_RUNS
from gemmscope.results.base import Result
from gemmscope.writers.html import page
from support.browser import CHROMIUM, Browser, Tab
from support.commands import explain
from support.report_files import RunData, put, run_data
from support.results import RESULTS
from support.traces import recorded

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
EVIL = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>"
WIDTHS = (390, 1400)
HOVERS = 50
TRACES = [name for name in RESULTS if name.startswith("explain ")]
SEVERAL = {
    "several": ("bench", "bench again", "forecast"),
    "two runs": tuple(name for name in RESULTS if name.startswith("bench, ")),
    **{f"traces from {place}": tuple(TRACES[place : place + MOST_RUNS]) for place in range(0, len(TRACES), MOST_RUNS)},
}
TOGETHER = {name for names in SEVERAL.values() for name in names}  # a page of several shows everything that their own would show
PAGES = (*(name for name in RESULTS if name not in TOGETHER or name in ("bench", "forecast")), *SEVERAL, "with a twin", "evil")
CHARTLESS = ("shapes", "shapes of experts", "compare")
LOOKS = [(390, True), (1400, False)]
MORE = [(800, False), (1400, True), (2200, False)]  # for pages with most kinds of content
Pages = Callable[[str], Path]


def _evil() -> RunData:
    evil = run_data("bench")
    evil["model"]["name"] = evil["device"]["name"] = EVIL
    for place in (*evil["linears"]["cases"], *evil["linears"]["ops"], *evil["linears"]["speedups"]):
        place["op"] = EVIL + place["op"] if place["op"] else ""
    for cell in evil["linears"]["ops"]:
        for proof in cell["evidence"].values():
            proof["kernels"] = [EVIL]
    return evil


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The page of a result of any kind, or of several; made when it is asked for."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def page_of(name: str) -> Path:
        if name == "evil":
            runs: list[Path | Result] = [put(folder, "evil.json", _evil())]
        elif name == "with a twin":
            runs = [explain([recorded("long_sequence")], baseline=recorded("long_sequence_bf16"))]
        else:
            runs = [RESULTS[result_name]() for result_name in SEVERAL.get(name, (name,))]
        path = folder / f"{name}.html"
        path.write_text(page(*report(runs)), encoding="utf-8")
        return path

    return page_of


DRAWN = """[...document.querySelectorAll(".plot")].filter((plot) => {
  const box = plot.querySelector("svg")?.getBoundingClientRect();
  return box && box.width > 200 && box.height > 60 && plot.querySelectorAll("svg path").length > 5;
}).length"""
CLIPPED = """[...document.querySelectorAll("h1, h2, h3, h4, p, li, dd, dt, figcaption")].filter((each) =>
  each.clientWidth && each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline")
  .map((each) => each.textContent)"""
EXPONENT = r"(document.querySelector('main').textContent.match(/(^|[^\w.])\d+(\.\d+)?e[+-]\d+/g) || [])"


@pytest.mark.parametrize("name", PAGES)
def test_pages(browser: Browser, pages: Pages, name: str) -> None:
    path = pages(name)
    tab = browser.open(path, width=LOOKS[0][0], dark=LOOKS[0][1])
    try:
        charts = tab.evaluate("document.querySelectorAll('.plot').length")
        assert (charts == 0) is (name in CHARTLESS)
        for width, dark in (*LOOKS, *(MORE if name in ("bench", "step", "several") else ())):
            tab.emulate(width=width, dark=dark)
            assert tab.evaluate(DRAWN) == charts
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
            assert tab.evaluate(CLIPPED) == []
            brightness = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
            assert (brightness < 64) is dark
            if folder := os.environ.get("GEMMSCOPE_SCREENSHOTS"):
                tab.screenshot(Path(folder) / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        assert tab.evaluate(EXPONENT) == []
        assert tab.evaluate("window.broken") is None
        assert tab.complaints() == []
        assert tab.requests() == [path.resolve().as_uri()]
    finally:
        tab.close()


@pytest.mark.parametrize("name", ["step", "bench", "forecast", "forecast of several GPUs", "sweep of a plane", "with a twin"])
def test_the_first_screen_has_the_answer_and_the_chart_beside_it(browser: Browser, pages: Pages, name: str) -> None:
    tab = browser.open(pages(name), width=1400, height=900)
    try:
        boxes = tab.evaluate(
            """[".answer", ".beside .plot svg", ".copy", ".card", ".figures"].map((each) => document.querySelector(each))
              .filter((each) => each).map((each) => [each.className, each.getBoundingClientRect().toJSON()])"""
        )
        answer, chart = boxes[0][1], tab.evaluate("document.querySelector('.beside .plot svg').getBoundingClientRect().toJSON()")
        assert chart["left"] > answer["right"] - 1
        assert answer["top"] < chart["bottom"]
        assert max(box["bottom"] for _, box in boxes) <= 900
        if folder := os.environ.get("GEMMSCOPE_SCREENSHOTS"):
            tab.screenshot(Path(folder) / f"first-{name}.png", whole=False)
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


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("bench", "FP8Current", ("fprop kernel", "nvjet_sm90_q", "SM clock", "samples", "bursts")),
        ("step", "FP8Delayed", ("GEMMs", "nvjet", "steps timed", "bursts")),
    ],
)
def test_hovering_shows_kernels_clocks_and_samples(
    browser: Browser, pages: Pages, name: str, label: str, expected: tuple[str, ...]
) -> None:
    tab = browser.open(pages(name), width=WIDTHS[0])
    try:
        for width in WIDTHS:
            tab.emulate(width=width)
            shown = _tip(tab, label)
            assert label in shown
            for text in expected:
                assert text in shown
            box = tab.evaluate(
                "(() => { const box = document.querySelector('.tip').getBoundingClientRect(); return [box.left, box.right]; })()"
            )
            assert box[0] >= 0
            assert box[1] <= width
            if folder := os.environ.get("GEMMSCOPE_SCREENSHOTS"):
                tab.screenshot(Path(folder) / f"hover-{name}-{width}.png", whole=False)
    finally:
        tab.close()


def test_hovering_shows_text_and_never_markup(browser: Browser, pages: Pages) -> None:
    tab = browser.open(pages("evil"))
    try:
        assert "<img" in _tip(tab, "FP8Current")
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        assert tab.evaluate("window.broken") is None
        assert tab.complaints() == []
    finally:
        tab.close()


def _tip(tab: Tab, label: str) -> str:
    """What hovering over the first bar of that label shows. Once more if nothing: a chart may be redrawn in the meantime."""
    for _ in range(HOVERS):
        tab.point(1, 1)
        _bar(tab, 0, label)
        if shown := tab.evaluate(f"new Promise((done) => setTimeout(() => done({TIP}), 200))"):
            return str(shown)
    raise AssertionError(f"hovering over {label} shows nothing")


def _middle(tab: Tab, element: str) -> tuple[float, float]:
    box = tab.evaluate(f"{element}.getBoundingClientRect().toJSON()")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def _table(title: str) -> str:
    return f"document.querySelector('[aria-label^={json.dumps(title)}] table')"


def _column(title: str, index: int) -> str:
    return f"[...{_table(title)}.tBodies[0].rows].map((row) => row.cells[{index}].textContent)"


def test_sorting_by_click_and_by_key(browser: Browser, pages: Pages) -> None:
    tab = browser.open(pages("explain"))
    try:
        head, times = f"{_table('By class of kernel')}.tHead.rows[0].cells[1]", _column("By class of kernel", 1)
        tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
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


def test_empty_cells_stay_last_when_sorted(browser: Browser, pages: Pages) -> None:
    tab = browser.open(pages("shapes"))
    try:
        for _ in range(2):
            tab.evaluate(f"{_table('Everything else')}.tHead.rows[0].cells[2].firstChild.click()")
            shown = tab.evaluate(_column("Everything else", 2))
            assert shown[-1] == "-"
            assert shown[0] != "-"
    finally:
        tab.close()


SHOWN = """[...document.querySelectorAll(".paste")].filter((each) => each.offsetHeight)
  .map((each) => each.querySelector("code").textContent)"""


def test_settings_of_one_framework_are_shown_and_copied(browser: Browser, pages: Pages) -> None:
    tab = browser.open(pages("step"))
    try:
        [first] = tab.evaluate(SHOWN)
        assert "DelayedScaling" in first
        tab.click(*_middle(tab, "document.querySelector('.copy')"))
        tab.wait_for("document.querySelector('.copy').textContent !== 'Copy'")
        assert tab.evaluate("document.querySelector('.copy').textContent") in ("Copied", "Selected")
        tab.click(*_middle(tab, "document.querySelectorAll('[role=tab]')[1]"))
        [second] = tab.evaluate(SHOWN)
        assert second != first
        tab.press("ArrowLeft", 37)
        assert tab.evaluate(SHOWN) == [first]
        assert tab.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
        assert tab.complaints() == []
    finally:
        tab.close()


def test_a_changed_theme_and_a_turned_phone_are_followed(browser: Browser, pages: Pages) -> None:
    tab = browser.open(pages("bench"), width=390)
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


def test_charts_have_text_beside_them(browser: Browser, pages: Pages) -> None:
    tab = browser.open(pages("step"))
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


@pytest.mark.parametrize("name", ["bench", "step", "explain", "compare"])
def test_it_prints_on_a4_and_letter_without_blank_pages(browser: Browser, pages: Pages, name: str) -> None:
    tab = browser.open(pages(name), dark=True)
    try:
        for size in ((8.27, 11.69), (8.5, 11.0)):
            printed = tab.pdf(*size)
            texts = [sheet.extract_text() for sheet in PdfReader(io.BytesIO(printed)).pages]
            assert all(len(text.split()) > 15 for text in texts), "a page is blank"
            if folder := os.environ.get("GEMMSCOPE_SCREENSHOTS"):
                (Path(folder) / f"{name}-{size[0]}.pdf").write_bytes(printed)
    finally:
        tab.close()


def test_charts_on_paper_are_as_wide_as_the_paper(browser: Browser, pages: Pages) -> None:
    tab = browser.open(pages("bench"), dark=True)
    try:
        tab.theme(dark=True, paper=True)
        tab.wait_for("document.documentElement.dataset.drawn === 'paper'")
        assert tab.evaluate("[...document.querySelectorAll('.plot svg')].every((svg) => svg.getBoundingClientRect().height > 60)")
        assert tab.evaluate("[...document.querySelectorAll('.paste')].every((each) => each.offsetHeight)"), "all settings"
    finally:
        tab.close()
