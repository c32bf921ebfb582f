"""Documents as one HTML page that needs nothing else: for screens wide and narrow, light and dark, and for paper.

`assets/page.html.j2` is the page, `page.css` its style, `page.js` draws the charts with ECharts. All text is escaped by jinja2,
or is text inside JSON; scripts are allowed by their hashes alone.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from gemmscope import __version__
from gemmscope.document import palette
from gemmscope.document.combine import label, letter, side_by_side_table, sources, speedup_rows
from gemmscope.document.model import Block, Document, Message, Section
from gemmscope.document.table import Facts, Table
from gemmscope.units import slug
from gemmscope.writers.chart_data import ChartData, axes_of, chart_data, rounded, side_by_side_data

SPEEDUP = re.compile(r"(\d+\.\d+x)( \[[^\]]*\])")


def page(documents: Sequence[Document], messages: Sequence[Message] = ()) -> str:
    """The whole file; `messages` are about all runs together."""
    scripts = [asset("echarts.min.js"), asset("page.js")]
    charts = _Charts(documents)
    html = (
        _templates()
        .get_template("page.html.j2")
        .render(
            version=__version__,
            policy=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
            style=Markup(palette.css() + asset("page.css")),
            documents=documents,
            messages=messages,
            several=len(documents) > 1,
            label=lambda document: label(documents, document),
            title=next((each.subject.title for each in documents if each.subject.model), documents[0].subject.title),
            contents=_contents(documents),
            anchor=lambda document, section: anchor(documents, document, section),
            charts=charts,
            side_by_side=side_by_side_table(documents) if sources(documents) and len(documents) > 1 else None,
            joined=_joined,
            data=lambda: script_json(rounded(charts.data)),
            echarts=Markup(scripts[0]),
            script=Markup(scripts[1]),
        )
    )
    return html.lstrip()


def notebook_html(document: Document, png: bytes = b"") -> str:
    """The answer, the main tables, and the charts as a picture: what a notebook shows."""
    return _templates().get_template("notebook.html.j2").render(document=document, png=base64.b64encode(png).decode())


def _templates() -> Environment:
    templates = Environment(loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    templates.filters |= {"slug": slug, "emphasize": emphasize, "groupby_kind": _groups}
    templates.tests["table"] = lambda block: isinstance(block, Table)
    return templates


def asset(name: str) -> str:
    """A file that ships with the package."""
    return (files("gemmscope.writers") / "assets" / name).read_text(encoding="utf-8")


class _Charts:
    """Numbers charts as the template reaches them, and keeps their data."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents, self.data, self._axes = documents, list[ChartData](), axes_of(documents)

    def add(self, chart: Any) -> int:
        self.data.append(chart_data(chart, self._axes))
        return len(self.data) - 1

    def add_side_by_side(self) -> int:
        self.data.append(side_by_side_data(speedup_rows(self.documents), list(sources(self.documents))))
        return len(self.data) - 1


def anchor(documents: Sequence[Document], document: Document, section: Section | str) -> str:
    """The id of a section; with the run's letter beside others."""
    title = section if isinstance(section, str) else section.title
    return slug(f"{letter(documents, document)} {title}" if len(documents) > 1 else title)


def _contents(documents: Sequence[Document]) -> list[tuple[str, str]]:
    """Links to the sections: (title, id); with several runs, to the runs."""
    if len(documents) > 1:
        return [(label(documents, document), slug(label(documents, document))) for document in documents]
    [document] = documents
    titles = [section.title for section in document.sections]
    titles = [*(["Recommendation"] if document.advice else []), *(["Findings"] if document.messages else []), *titles]
    return [(title, slug(title)) for title in (*titles, *document.facts)]


def emphasize(text: str) -> Markup:
    """A sentence with its speedups bold, each on one line with its interval."""
    return Markup(SPEEDUP.sub(r'<strong>\1</strong><span class="interval">\2</span>', str(escape(text))))


def _groups(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Neighboring blocks of one kind. Charts stand side by side, tables below one another."""
    return [{"charts": kind is not Table, "blocks": list(group)} for kind, group in groupby(blocks, key=type)]


def _joined(facts: Facts) -> list[tuple[str, str]]:
    """Names that come several times are joined."""
    values: dict[str, str] = {}
    for name, value in facts:
        values[name] = f"{values[name]}; {value}" if name in values else value
    return list(values.items())


def script_json(data: Any) -> Markup:
    """Data inside a script element: no text in it can end the element or begin a comment.

    >>> script_json({"name": "</script>"})
    Markup('{"name":"\\\\u003c/script\\\\u003e"}')
    """
    written = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
