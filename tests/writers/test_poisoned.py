"""Every kind of result with hostile text in every string: no writer lets any of it be more than text.

In a browser, if there is one: nothing of it runs, and nothing is asked for over the network. Everywhere: the pages have no
element and no attribute that they do not have with harmless text.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest
from markdown_it import MarkdownIt

from gemmscope.document import document
from gemmscope.document.model import Document
from gemmscope.results.base import Result
from gemmscope.writers import figure, markdown, tables, terminal
from gemmscope.writers import html as html_writer
from support.browser import Browser
from support.poison import HOSTILE, invisible, poisoned
from support.results import RESULTS

NAMES = (*(name for name in RESULTS if not name.startswith(("explain ", "bench, "))), "explain syncs", "explain experts")
MARKUP = "".join(HOSTILE[:6])


@cache
def evil(name: str) -> Result:
    """Markup in every string."""
    return poisoned(RESULTS[name](), lambda text: MARKUP + text)[0]


PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


@cache
def notebook(name: str, *, hostile: bool = True) -> str:
    """As a notebook shows it. A pixel stands for its picture, which takes a while to draw, except for `bench`;
    `test_figures` draws all of them."""
    result = evil(name) if hostile else RESULTS[name]()
    with mock.patch.object(figure, "image", figure.image if name == "bench" else lambda *_: PIXEL):
        return str(result._repr_html_())


@cache
def mixed(name: str) -> Document:
    """One of every attack, from string to string."""
    turn = NAMES.index(name)
    return document(
        poisoned(RESULTS[name](), lambda text: HOSTILE[(len(text) + turn) % len(HOSTILE)] + text)[0], f"{HOSTILE[8]}.json"
    )


class Elements(HTMLParser):
    """The elements of a page with the names of their attributes, what its links point to, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: set[tuple[str, tuple[str, ...]]] = set()
        self.addresses: set[str] = set()
        self.scripts = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add((tag, tuple(sorted(name for name, _ in attrs))))
        self.scripts += tag == "script"
        self.addresses |= {value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "poster")}


def test_strings_are_poisoned() -> None:
    """What is tested is there: in run files, and on pages as text."""
    for name in NAMES:
        assert evil(name).to_json().count("<script>window.broken") > 5, name
        assert "&lt;script&gt;window.broken" in html_writer.page([document(evil(name))]), name


@pytest.mark.parametrize("name", NAMES)
def test_pages_have_no_other_elements(name: str) -> None:
    both = [html_writer.page([document(result, str(result.command))]) for result in (RESULTS[name](), evil(name))]
    for one, other in (both, (notebook(name, hostile=False), notebook(name))):
        clean, hostile = Elements(one), Elements(other)
        assert hostile.elements <= clean.elements
        assert hostile.scripts == clean.scripts
        assert not [place for place in hostile.addresses if not re.match(r"#[a-z0-9-]*$|data:image/webp;base64,|data:,$", place)]


def test_a_page_of_several_runs_has_no_other_elements() -> None:
    names = ("bench", "bench again", "forecast")
    clean, hostile = (
        Elements(html_writer.page([document(make(name), f"{place}.json") for place, name in enumerate(names)]))
        for make in (lambda name: RESULTS[name](), evil)
    )
    assert hostile.elements <= clean.elements
    assert hostile.scripts == clean.scripts


@pytest.mark.parametrize("name", NAMES)
def test_nothing_invisible_is_shown(name: str) -> None:
    doc = mixed(name)
    texts = [
        terminal.text(doc, detail=True),
        terminal.text(doc, detail=False),
        markdown.markdown([doc]),
        tables.csv_text(doc),
    ]
    for text in (*texts, html_writer.notebook_html(doc)):
        assert not invisible(text, allowed="\n")
        text.encode("utf-8")
    page = html_writer.page([doc])
    page.encode("utf-8")
    assert not invisible(page.replace(html_writer.asset("echarts.min.js"), ""), allowed="\n\t")


@pytest.mark.parametrize("name", NAMES)
def test_markdown_has_no_markup_links_or_images(name: str) -> None:
    reader = MarkdownIt("gfm-like", {"linkify": False, "html": True})
    for doc in (mixed(name), document(evil(name))):
        text = markdown.markdown([doc])
        html = Elements(reader.render(text))
        allowed = "h1 h2 p strong br ul ol li pre code table thead tbody tr th td".split()
        assert {tag for tag, _ in html.elements} <= set(allowed)
        assert html.addresses == set()
        outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"(?<!\\)<|https?://|www\.", outside)  # sites make links of bare addresses
        for line in outside.splitlines():
            if line.startswith("|"):
                assert line.endswith("|")
        expected = sum(len(table.rows) + 2 for table in doc.tables())
        assert sum(line.startswith("|") for line in outside.splitlines()) == expected


@pytest.mark.parametrize("name", NAMES)
def test_csv_has_no_formulas(name: str) -> None:
    doc = mixed(name)
    rows = list(csv.reader(io.StringIO(tables.csv_text(doc))))
    assert len(rows) == 1 + sum(len(table.rows) for table in doc.tables())
    for cell in (cell for row in rows for cell in row):
        assert not re.match(r"[=@\t\r]|[+-](?![0-9.,]|$)", cell), cell


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("bench again", "step of a small model", "explain syncs")]
)
def test_figures(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dollar is a dollar, a missing glyph is a box, and the files are well formed."""
    monkeypatch.setattr(figure, "DPI", 40)
    doc = mixed(name)
    if not doc.charts():
        pytest.skip("it has no charts")
    (tmp_path / "figure.svg").write_bytes(figure.image(doc, ".svg"))
    if name in ("bench", "sweep of a plane"):
        (tmp_path / "figure.png").write_bytes(figure.image(doc, ".png"))
    tree = ElementTree.parse(tmp_path / "figure.svg")
    assert {element.tag.rpartition("}")[2] for element in tree.iter()} & {"script", "a", "foreignObject"} == set()
    addresses = [value for element in tree.iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert not [address for address in addresses if not address.startswith(("#", "data:image/png"))]
    assert capfd.readouterr().err == ""


# --- in a browser -------------------------------------------------------------------------------------------------------


HOVERED = """[...document.querySelectorAll(".plot")].slice(0, 6).flatMap((plot) => {
  plot.scrollIntoView({ block: "center", behavior: "instant" });
  const box = plot.getBoundingClientRect();
  return [0.25, 0.5, 0.75].map((share) => [box.left + box.width * share, box.top + box.height * 0.7]);
})"""


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs_in_a_browser(browser: Browser, tmp_path: Path, name: str) -> None:
    forms = {"page": html_writer.page([document(evil(name), f"{MARKUP}.json")])}
    # where a notebook shows it, nothing forbids scripts
    forms["notebook"] = f"<!doctype html><meta charset=utf-8><title>notebook</title>{notebook(name)}"
    for form, text in forms.items():
        path = tmp_path / f"{form}.html"
        path.write_text(text, encoding="utf-8")
        tab = browser.open(path)
        try:
            title = tab.evaluate("document.title")
            assert title == "notebook" if form == "notebook" else title.startswith("gemmscope: ")
            for x, y in tab.evaluate(HOVERED):
                tab.point(x, y)  # what is shown on hover is made of the same strings
            tab.evaluate("[...document.querySelectorAll('button, summary, a')].slice(0, 200).forEach((each) => each.click())")
            assert tab.evaluate("window.broken") is None
            assert tab.complaints() == []
            assert [address for address in tab.requests() if not address.startswith("data:")] == [path.resolve().as_uri()]
            assert not [event for event in browser.events if event.get("method") == "Page.javascriptDialogOpening"]
        finally:
            tab.close()
