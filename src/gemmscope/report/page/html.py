"""The page: one HTML file that needs nothing else, for screens wide and narrow, light and dark, and for paper."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from gemmscope import __version__
from gemmscope.report.page import charts
from gemmscope.report.page.markup import Markup, joined, script_json, slug, tag
from gemmscope.report.page.parts import REST, Bars, Facts, Finding, Report, RunPart, Table, how, legend

SPEEDUP = re.compile(r"(\d+\.\d+x)( \[[^\]]*\])")
Section = tuple[str, list[Markup]]


def page(report: Report) -> str:
    """The whole file."""
    return Page(report).html()


def asset(name: str) -> str:
    """A file that travels with the package."""
    return (files("gemmscope.report.page") / "assets" / name).read_text(encoding="utf-8")


class Page:
    """Builds the page; charts are numbered as they come."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.charts: list[dict[str, Any]] = []

    def html(self) -> str:
        """Sections that have nothing to say are left out."""
        sections: list[Section] = [
            ("Side by side", self._side_by_side()),
            ("Where the time goes", self._bars()),
            ("From products to the step", self._waterfalls()),
            ("Speedup against size", self._curves()),
            ("What to use", self._recommendations()),
            ("Row by row", [self._sortable(table, run) for run in self.report.runs for table in run.ops]),
            ("Beside the time", [self._sortable(table, run) for run in self.report.runs for table in run.tables]),
            ("Evidence and warnings", self._findings()),
            (how(self.report), _facts(self.report, lambda run: run.method)),
            ("Environment", _facts(self.report, lambda run: run.environment)),
        ]
        shown = [(title, parts) for title, parts in sections if parts]
        scripts = [asset("echarts.min.js"), asset("page.js")]
        return Template(asset("page.html")).substitute(
            title=tag("title", f"gemmscope: {self.report.title}"),
            policy=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
            style=asset("page.css"),
            head=self._head(),
            contents=joined(*(tag("a", title, href=f"#{slug(title)}") for title, _ in shown)),
            sections=joined(*(tag("section", tag("h2", title), *parts, id=slug(title)) for title, parts in shown)),
            version=__version__,
            data=script_json(self.charts),
            echarts=scripts[0],
            script=scripts[1],
        )

    def _head(self) -> Markup:
        """The answer first."""
        answers = []
        for run in self.report.runs:
            label = self.report.label(run)
            answers.append(
                tag(
                    "div",
                    *([tag("p", tag("b", label), f", {run.name}", class_="run")] if label else []),
                    tag("p", _emphasised(run.answer), class_="answer"),
                    *(tag("p", _unbroken(words), class_="because") for words in run.because),
                    class_="forecast" if run.forecast else None,
                )
            )
        alarms = [finding for run in self.report.runs for finding in run.findings if finding.level == "alarm"]
        shown = [*alarms, *self.report.findings]
        return joined(
            tag("h1", self.report.title),
            tag("p", " · ".join(dict.fromkeys(_where(run) for run in self.report.runs)), class_="where"),
            tag("div", *answers, class_="answers" if len(answers) > 1 else None),
            *([_list(shown)] if shown else []),
        )

    # --- charts ----------------------------------------------------------------------------------------------------------

    def _chart(self, chart: dict[str, Any], title: str, words: str, numbers: Table | None) -> Markup:
        """A drawing with its text alternative; None where the table stands beside it anyway."""
        self.charts.append(chart)
        return tag(
            "figure",
            tag("figcaption", tag("b", title), *([" ", tag("span", words)] if words else [])),
            tag(
                "div",
                class_="plot",
                data_chart=str(len(self.charts) - 1),
                role="img",
                aria_label=f"{title}. {words} The numbers follow as a table.",
            ),
            *([tag("details", tag("summary", "The numbers"), _table(numbers))] if numbers is not None else []),
        )

    def _titled(self, run: RunPart, title: str) -> str:
        """With the run's letter beside others, and never without saying that a forecast is one."""
        marked = f"{title}, FORECAST" if run.forecast and "FORECAST" not in title else title
        return f"{self.report.letter(run)} · {marked}" if len(self.report.runs) > 1 else marked

    def _side_by_side(self) -> list[Markup]:
        chart = charts.gains_chart(self.report) if len(self.report.runs) > 1 else None
        if chart is None:
            return []
        numbers = charts.gains_table(self.report)
        figure = self._chart(chart, "Times faster than BF16", "Dots with their intervals; further right is better.", None)
        return [figure, _table(numbers)]

    def _bars(self) -> list[Markup]:
        made: list[Markup] = []
        shown = Markup()  # the last legend: one serves all charts below it that are alike
        tops: dict[str, float] = {}
        for each in (each for run in self.report.runs for each in run.bars):
            tops[each.unit] = max(tops.get(each.unit, 0.0), *(bar.total_ms for bar in each.bars))
        for run in self.report.runs:
            for unit in dict.fromkeys(each.unit for each in run.bars):
                panels = [each for each in run.bars if each.unit == unit]
                explained = _legend(panels)
                made += [explained] if explained != shown else []
                shown = explained
                made.append(tag("div", *(self._bars_figure(run, each, tops[unit]) for each in panels), class_="grid"))
            if run.modes is not None:
                made.append(self._sortable(run.modes, run))
        return made

    def _bars_figure(self, run: RunPart, found: Bars, top_ms: float) -> Markup:
        return self._chart(charts.bars_chart(found, top_ms), self._titled(run, found.title), "", charts.bars_table(found))

    def _waterfalls(self) -> list[Markup]:
        every = [found for run in self.report.runs for found in run.waterfalls]
        if not every:
            return []
        low, high = charts.axis_ends([1.0, *(fall.speedup for found in every for fall in found.falls)])
        figures = [
            self._chart(
                charts.waterfall_chart(found, low, high),
                self._titled(run, found.recipe),
                found.words,
                charts.waterfall_table(found),
            )
            for run in self.report.runs
            for found in run.waterfalls
        ]
        words = (
            "The first row is what the products alone gain over BF16. Each row below adds its time to both sides and pulls the "
            "speedup down (or up) to where its bar ends; the last one is what training gains."
        )
        return [tag("p", words, class_="because"), tag("div", *figures, class_="grid three")]

    def _curves(self) -> list[Markup]:
        every = [curve for run in self.report.runs for curve in run.curves]
        values = [end for curve in every for points in curve.series.values() for point in points
                  for end in (point.gain.value, point.gain.low, point.gain.high) if end is not None]  # fmt: skip
        low, high = charts.axis_ends([1.0, *values])
        figures = [
            self._chart(
                charts.curve_chart(curve, low, high), self._titled(run, curve.title), curve.words, charts.curve_table(curve)
            )
            for run in self.report.runs
            for curve in run.curves
        ]
        return [tag("div", *figures, class_="grid")] if figures else []

    # --- words and tables --------------------------------------------------------------------------------------------------

    def _recommendations(self) -> list[Markup]:
        made: list[Markup] = []
        pasted: set[tuple[str, str]] = set()  # two runs may say the same
        for run in self.report.runs:
            if run.recommendation is not None:
                made.append(tag("p", _emphasised(self._titled(run, run.recommendation.words)), class_="use"))
                for framework, words in run.recommendation.texts.items():
                    if (framework, words) in pasted:
                        continue
                    pasted.add((framework, words))
                    button = tag("button", "Copy", type="button", class_="copy", aria_label=f"Copy the text for {framework}")
                    made.append(
                        tag("div", tag("p", framework, button), tag("pre", tag("code", words), tabindex="0"), class_="paste")
                    )
        return made

    def _sortable(self, table: Table, run: RunPart) -> Markup:
        return joined(
            tag("h3", self._titled(run, table.title)),
            *([tag("p", table.words, class_="because")] if table.words else []),
            _table(table),
        )

    def _findings(self) -> list[Markup]:
        made: list[Markup] = [_list(self.report.findings)] if self.report.findings else []
        for run in self.report.runs:
            if run.findings:
                made += [tag("h3", self._titled(run, run.name))] if len(self.report.runs) > 1 else []
                made.append(_list(run.findings))
        return made


def _where(run: RunPart) -> str:
    batch = dict(run.method).get("micro-batch", "")
    return ", ".join(part for part in (run.where, batch) if part)


def _emphasised(words: str) -> Markup:
    """A speedup bold, its interval beside it."""
    return _with_speedups(words, lambda found: joined(tag("strong", found[1]), tag("span", found[2], class_="interval")))


def _unbroken(words: str) -> Markup:
    """A speedup and its interval on one line."""
    return _with_speedups(words, lambda found: tag("span", found[0], class_="unbroken"))


def _with_speedups(words: str, look: Callable[[re.Match[str]], Markup]) -> Markup:
    parts: list[str] = []
    end = 0
    for found in SPEEDUP.finditer(words):
        parts += [words[end : found.start()], look(found)]
        end = found.end()
    return joined(*parts, words[end:])


def _legend(bars: Sequence[Bars]) -> Markup:
    """Which colour is what, and what the shades mean."""
    shades = {segment.shade for each in bars for bar in each.bars for segment in bar.segments}
    items = [_swatch(f"c{colour}" if colour != REST else "rest", name) for name, colour in legend(bars).items()]
    if "light" in shades:
        items += [_swatch("dark", "fprop + dgrad"), _swatch("light", "wgrad (fainter)")]
    if "hatched" in shades:
        hatched = next(one.name for each in bars for bar in each.bars for one in bar.segments if one.shade == "hatched")
        items.append(_swatch("hatched", hatched))
    return tag("ul", *items, class_="legend")


def _swatch(look: str, name: str) -> Markup:
    return tag("li", tag("i", class_=look), name)


def _table(table: Table) -> Markup:
    """Headings are buttons that sort."""
    heads = [
        tag("th", tag("button", name, type="button"), scope="col", class_="num" if numeric else None)
        for name, numeric in table.columns.items()
    ]
    rows = []
    for row in table.rows:
        cells = [
            tag("td", cell.text, class_=" ".join(filter(None, ("num" if numeric else "", cell.level))) or None,
                data_value=repr(float(cell.value)) if cell.value is not None else None)
            for cell, numeric in zip(row, table.columns.values(), strict=True)
        ]  # fmt: skip
        rows.append(tag("tr", *cells))
    inner = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="sortable")
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=table.title)


def _list(findings: Sequence[Finding]) -> Markup:
    return tag("ul", *(tag("li", finding.words, class_=finding.level) for finding in findings), class_="findings")


def _facts(report: Report, of: Callable[[RunPart], Facts]) -> list[Markup]:
    """Names and values; several runs side by side, what differs marked."""
    runs = [run for run in report.runs if of(run)]
    if not runs:
        return []
    if len(report.runs) == 1:
        pairs = [part for name, value in of(runs[0]) for part in (tag("dt", name), tag("dd", value))]
        return [tag("dl", *pairs)]
    values = [_by_name(of(run)) for run in runs]
    rows = []
    for name in dict.fromkeys(name for each in values for name in each):
        row = [each.get(name, "-") for each in values]
        rows.append(
            tag(
                "tr",
                tag("th", name, scope="row"),
                *(tag("td", value) for value in row),
                class_="differs" if _differ(row) else None,
            )
        )
    heads = tag("tr", tag("th", "", scope="col"), *(tag("th", report.label(run), scope="col") for run in runs))
    table = tag("table", tag("thead", heads), tag("tbody", *rows), class_="facts")
    return [tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="side by side")]


def _differ(values: Sequence[str]) -> bool:
    """Whether runs that both have it have it differently; what was typed always differs."""
    return len({value for value in values if value != "-" and not value.startswith("gemmscope ")}) > 1


def _by_name(facts: Facts) -> dict[str, str]:
    """Names that come several times are joined."""
    made: dict[str, str] = {}
    for name, value in facts:
        made[name] = f"{made[name]}; {value}" if name in made else value
    return made


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
