"""The documentation site and the package: no dead link, no stale output, no dependency on torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from gemmscope.toml import parse_toml
from support.browser import CHROMIUM, Browser
from support.doc_words import MOST, MOST_AROUND, REFERENCE, WRITTEN, pages, words
from support.schemas import FILES
from support.site_pages import page_problems, results_of_search

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ON_SITE = [path for path in PAGES if path.name != "findings.md"]  # a list of all codes, for those who read run files by program
TEXTS = [*PAGES, *ROOT.glob("*.md")]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_dead_link(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:|#", link):
            assert (path.parent / link.split("#")[0]).exists(), link


def test_every_anchor_exists() -> None:
    """Links from texts outside of the site, which its builder does not check."""
    for path in (*ROOT.glob("*.md"),):
        for link in re.findall(r"\]\((docs/[^)\s]+#[^)\s]+)\)", path.read_text()):
            page, anchor = link.split("#")
            heads = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{path.name}: {link}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors from a copy, so that nothing is written into the repository."""
    pytest.importorskip("zensical", reason="the site is built by zensical")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "No issues found" in child.stdout + child.stderr
    return folder / "build" / "site"


def test_the_site_is_complete(site: Path) -> None:
    """Every page, the schemas that pages link to, and none of the scripts that generate them."""
    assert {str(path.relative_to(site)) for path in site.rglob("*.html")} - {"404.html"} == {
        str(path.relative_to(DOCS).with_suffix(".html")) for path in ON_SITE
    }
    assert all((site / "schema" / name).exists() for name in FILES)
    assert not list(site.rglob("*.py"))
    assert "QKV Proj" in (site / "tutorial.html").read_text()


def test_no_link_of_the_built_site_is_broken(site: Path) -> None:
    """Every link inside the site leads to a file, and every anchor to an element of that page."""
    texts = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r"\bid=\"?([^\s\">]+)", text)) for path, text in texts.items()}
    count = 0
    for path, text in texts.items():
        for link in re.findall(r"<a\b[^>]*\bhref=\"?([^\s\">]+)", text):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), f"{path.name}: {link}"
            assert not anchor or target not in anchors or anchor in anchors[target], f"{path.name}: {link}"
            count += 1
    assert count > 1000


def test_the_documentation_is_short_enough() -> None:
    """At most 40,000 words that people wrote; `support/doc_words.py` says what counts."""
    assert sum(words(path) for path in pages()) <= MOST, "python tests/support/doc_words.py lists every page"


@pytest.mark.parametrize("name", [*WRITTEN, *REFERENCE])
def test_pages_that_do_not_count_are_generated(name: str) -> None:
    path = DOCS / name
    if name in WRITTEN:
        assert re.search(r"Written by `(?:python )?benchmarks/\w+\.py", path.read_text()[:400])
    else:
        assert words(path) <= MOST_AROUND
        assert "<!-- made: " in path.read_text() or "<!-- traces -->" in path.read_text()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"(?:https?:)?//")
    for path in site.rglob("*.html"):
        assert not loaded.search(path.read_text()), path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", path.read_text()), path.name


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w/.-]+\.md", str(parse_toml((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert sorted(listed) == sorted({str(path.relative_to(DOCS)) for path in ON_SITE})


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_pages_fit_a_phone_and_search_works_offline(site: Path, tmp_path: Path) -> None:
    """The pages with the widest content, opened from their files; `make docs-check` looks at all of them."""
    browser = Browser(tmp_path)
    for name in ("tutorial", "commands", "how-to/frameworks", "recipes"):
        assert not page_problems(browser, site / f"{name}.html", 390, dark=name == "commands")
    results = results_of_search(browser, site / "index.html", "delayed scaling")
    assert any("concepts/recipes.html" in address for address in results), results
    browser.close()


def test_every_schema_has_its_place_on_the_page() -> None:
    page = (DOCS / "run-files.md").read_text()
    for name in FILES:
        assert f"(schema/{name})" in page
        assert f"| `{name.split('-')[0]}` |" in page


def test_exit_codes_are_documented() -> None:
    """Every code that the sources exit with is in the table; signals have lines of their own."""
    codes = {"0"}
    for path in (ROOT / "src" / "gemmscope" / "cli").glob("*.py"):
        codes |= set(re.findall(r"(?:typer\.Exit|sys\.exit|os\._exit)\((\d+)\)", path.read_text()))
    listed = set(re.findall(r"^\| (\d+) \|", (DOCS / "command-line.md").read_text(), flags=re.MULTILINE))
    assert codes <= listed


def test_citation_and_templates() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["title"].startswith("gemmscope")
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        template = yaml.safe_load(path.read_text())
        assert any("gemmscope doctor" in part["attributes"]["label"] for part in template["body"]), path.name


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist, as they would be published."""
    pytest.importorskip("hatchling", reason="packages are built by hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def test_the_wheel_brings_what_it_needs_and_no_torch(packages: dict[str, Path]) -> None:
    with zipfile.ZipFile(packages["wheel"]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, flags=re.MULTILINE)
    assert [name for name, rest in required if "extra ==" in rest] == ["ray"]
    needed = {name for name, rest in required if "extra ==" not in rest}
    assert needed == {
        "jinja2", "matplotlib", "numpy", "nvidia-ml-py", "platformdirs", "pydantic", "pyyaml", "rich", "tomli", "typer",
    }  # fmt: skip
    for asset in ("echarts.min.js", "echarts.LICENSE", "page.html.j2", "page.css", "page.js"):
        assert f"gemmscope/writers/assets/{asset}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


def test_the_sdist_can_be_tested_and_documented(packages: dict[str, Path]) -> None:
    with tarfile.open(packages["sdist"]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    for name in ("zensical.toml", "requirements-dev.txt", "CITATION.cff", "tests/commands/test_report.py", "docs/tutorial.md"):
        assert name in names
    assert not any(name.startswith((".venv", "build/")) for name in names)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown(shell: str) -> None:
    environment = {"_GEMMSCOPE_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    code = "import sys; sys.argv[0] = 'gemmscope'; from gemmscope.__main__ import run; run()"
    path = {"PYTHONPATH": str(ROOT / "src")}
    child = subprocess.run([sys.executable, "-c", code], env=environment | path, capture_output=True, text=True, check=False)
    assert "gemmscope" in child.stdout, child.stderr


def test_no_color_is_respected() -> None:
    """Also on a terminal with colors."""
    terminal = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    terminal.pop("NO_COLOR", None)
    code = (
        "from gemmscope.document.table import FALLBACK_CELL, Head, Table; from gemmscope.writers.terminal import show_table;"
        "show_table(Table('name', 'title', (Head('Op'),), ((FALLBACK_CELL,),)))"
    )
    shown = [
        subprocess.run([sys.executable, "-c", code], env=terminal | extra, capture_output=True, text=True, check=True).stdout
        for extra in ({}, {"NO_COLOR": "1"})
    ]
    colored = re.compile(r"\x1b\[(?:\d+;)*3\d")
    assert colored.search(shown[0])
    assert not colored.search(shown[1])
