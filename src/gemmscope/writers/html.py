"""Documents as one self-contained HTML page, for wide and narrow screens, light and dark, and for print.

`assets/page.html.j2` is the page and `parts.html.j2` its pieces, `page.css` its style; `charts.js` and `ranks.js` draw the charts
with ECharts, `page.js` does the rest. All text is escaped by jinja2, or is text inside JSON; only scripts with
known hashes are allowed to run.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from gemmscope import __version__
from gemmscope.document.combine import common_baselines, label, side_by_side_table, sources, speedup_rows
from gemmscope.document.common import first_rows
from gemmscope.document.model import Block, Document, Message
from gemmscope.document.palette import css
from gemmscope.document.table import Facts, Table
from gemmscope.units import slug
from gemmscope.writers.chart_data import ChartData, axes_of, chart_data, rounded, side_by_side_data
from gemmscope.writers.page_view import View, is_small, rates_data, views, without

SPEEDUP = re.compile(r"(\d+\.\d+x)( \[[^\]]*\])")
LONG, LONG_ALONE = 8, 60  # rows of a table that is shown at once; longer ones are opened by a click
MOST_ROWS = 1000  # of a table: thousands make a page slow


def page(documents: Sequence[Document], messages: Sequence[Message] = (), *, refresh_s: int | None = None) -> str:
    """The whole file; `messages` are about all runs together. `refresh_s`: browsers reload it after this many seconds."""
    scripts = [asset("echarts.min.js"), asset("charts.js") + asset("ranks.js") + asset("page.js")]
    charts, axes, baselines = list[ChartData](), axes_of(documents), common_baselines(documents)

    def numbered(chart: ChartData) -> int:
        """Keep the data of a chart; charts are numbered in the order in which the template adds them."""
        charts.append(chart)
        return len(charts) - 1

    shown = views(documents)
    html = (
        _templates()
        .get_template("page.html.j2")
        .render(
            version=__version__,
            refresh_s=refresh_s,
            policy=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
            style=Markup(css() + asset("page.css")),
            views=shown,
            messages=messages,
            several=len(documents) > 1,
            title=_title(documents),
            contents=_contents(documents, shown),
            baselines=baselines,
            add=lambda chart: numbered(chart_data(chart, axes)),
            add_rates=lambda: numbered(rates_data(baselines[0])),
            add_side_by_side=lambda: numbered(side_by_side_data(speedup_rows(documents), list(sources(documents)))),
            side_by_side=side_by_side_table(documents) if sources(documents) and len(documents) > 1 else None,
            joined=_joined,
            is_small=lambda section: is_small([block for block in section.blocks if not _is_long(block, documents)]),
            is_long=lambda block: _is_long(block, documents),
            data=lambda: script_json(rounded(charts)),
            echarts=Markup(scripts[0]),
            script=Markup(scripts[1]),
        )
    )
    return html.lstrip()


def explorer(data: Mapping[str, Any]) -> str:
    """The page of `gemmscope explore`: its data is packed, and unpacked by the page itself."""
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    return (
        _templates()
        .get_template("explorer.html.j2")
        .render(
            version=__version__,
            model=data["model"],
            policy=f"'sha256-{_hash(asset('explorer.js'))}'",
            style=Markup(css() + asset("page.css")),
            data=base64.b64encode(packed).decode(),
            script=Markup(asset("explorer.js")),
        )
    )


def notebook_html(document: Document, picture: bytes = b"") -> str:
    """The answer, the main tables, and the charts as a picture: what a notebook shows."""
    return _templates().get_template("notebook.html.j2").render(document=document, picture=base64.b64encode(picture).decode())


@cache
def _templates() -> Environment:
    """The templates, compiled once: compiling takes longer than rendering."""
    templates = Environment(
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "slug": slug,
        "emphasize": emphasize,
        "without": without,
        "first_rows": lambda table, most=MOST_ROWS: first_rows(table, most),
    }
    templates.tests["table"] = lambda block: isinstance(block, Table)
    return templates


@cache
def asset(name: str) -> str:
    """A file that ships with the package."""
    return (files("gemmscope.writers") / "assets" / name).read_text(encoding="utf-8")


def _title(documents: Sequence[Document]) -> str:
    """The title of the page: the model if it is known, else the common title of the runs, else how many runs there are."""
    titles = [document.subject.title for document in documents]
    model = next((document.subject.title for document in documents if document.subject.model), "")
    return model or (titles[0] if len(set(titles)) == 1 else f"{len(titles)} runs")


def _contents(documents: Sequence[Document], shown: Sequence[View]) -> list[tuple[str, str]]:
    """Links as (title, id): to the runs if there are several, else to the GPUs or sections."""
    if len(documents) > 1:
        return [(label(documents, document), slug(label(documents, document))) for document in documents]
    [view] = shown
    titles = [*(["Findings"] if view.messages else []), *(["Other causes"] if len(view.document.cards) > 1 else [])]
    for group in view.groups:
        titles += [group.gpu] if group.gpu else [section.title for section in group.sections]
    return [(title, view.anchor(title)) for title in (*titles, *view.document.facts)]


def _is_long(block: Block, documents: Sequence[Document]) -> bool:
    """Whether a block is a table that is closed at first. On a page without charts, longer tables are open."""
    return isinstance(block, Table) and len(block.rows) > (
        LONG if any(document.charts() for document in documents) else LONG_ALONE
    )


def emphasize(text: str) -> Markup:
    """A sentence with its speedups bold, each on one line with its interval."""
    return Markup(SPEEDUP.sub(r'<strong>\1</strong><span class="interval">\2</span>', str(escape(text))))


def _joined(facts: Facts) -> list[tuple[str, str]]:
    """Facts with the same name are joined into one."""
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
