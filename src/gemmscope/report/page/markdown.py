"""The report as Markdown, for pull requests and wikis: the same answers, tables and findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from gemmscope.report.page.charts import bars_table, curve_table, gains_table, waterfall_table
from gemmscope.report.page.parts import Facts, Finding, Report, RunPart, Table, how

SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_<>|#"})


def markdown(report: Report) -> str:
    """The whole file."""
    return "\n\n".join(_blocks(report)) + "\n"


def _blocks(report: Report) -> Iterator[str]:
    several = len(report.runs) > 1
    yield f"# {_plain(report.title)}"
    for run in report.runs:
        if several:
            yield f"**{_plain(report.label(run))}** ({_plain(run.name)})"
        yield f"**{_plain(run.answer)}**"
        yield from (_plain(words) for words in run.because)
    alarms = [finding for run in report.runs for finding in run.findings if finding.level == "alarm"]
    if alarms or report.findings:
        yield _findings([*alarms, *report.findings])
    if several and any(run.gains for run in report.runs):
        yield "## Side by side"
        yield pipe_table(gains_table(report))
    for title, of in SECTIONS.items():
        found = [(run, block) for run in report.runs for block in of(run)]
        if found:
            yield f"## {how(report) if title == HOW else title}"
        for run, block in found:
            yield f"*{_plain(report.label(run))}*\n\n{block}" if several else block


def _bars(run: RunPart) -> list[str]:
    tables = [_titled(bars_table(each)) for each in run.bars]
    return [*tables, *([_titled(run.modes)] if run.modes is not None else [])]


def _recommendation(run: RunPart) -> list[str]:
    if run.recommendation is None:
        return []
    texts = [f"{_plain(framework)}:\n\n{_fenced(words)}" for framework, words in run.recommendation.texts.items()]
    return [_plain(run.recommendation.words), *texts]


HOW = "How it was measured"
SECTIONS: dict[str, Callable[[RunPart], list[str]]] = {
    "Where the time goes": _bars,
    "From products to the step": lambda run: [_titled(waterfall_table(each)) for each in run.waterfalls],
    "Speedup against size": lambda run: [_titled(curve_table(each)) for each in run.curves],
    "What to use": _recommendation,
    "Row by row": lambda run: [_titled(table) for table in run.ops],
    "Beside the time": lambda run: [_titled(table) for table in run.tables],
    "Evidence and warnings": lambda run: [_findings(run.findings)] if run.findings else [],
    HOW: lambda run: [_facts(run.method)] if run.method else [],
    "Environment": lambda run: [_facts(run.environment)] if run.environment else [],
}


def _titled(table: Table) -> str:
    words = f"\n\n{_plain(table.words)}" if table.words else ""
    return f"**{_plain(table.title)}**{words}\n\n{pipe_table(table)}"


def pipe_table(table: Table) -> str:
    """Without its title."""
    heads = f"| {' | '.join(map(_plain, table.columns))} |"
    rule = "|" + "|".join(" ---: " if numeric else " --- " for numeric in table.columns.values()) + "|"
    rows = [f"| {' | '.join(_plain(cell.text) for cell in row)} |" for row in table.rows]
    return "\n".join([heads, rule, *rows])


def _findings(findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"- {'**' if each.level == 'alarm' else ''}{_plain(each.words)}{'**' if each.level == 'alarm' else ''}"
        for each in findings
    )


def _facts(facts: Facts) -> str:
    return "\n".join(f"- {_plain(name)}: {_plain(value)}" for name, value in facts)


def _plain(words: str) -> str:
    """On one line, and nothing in it is markup; brackets of intervals stay, those of links do not."""
    return re.sub(r"\](?=[(\[:])|^\[|!\[", lambda found: "\\" + found[0], " ".join(words.split()).translate(SPECIAL))


def _fenced(words: str) -> str:
    """A code block that its own text cannot end."""
    fence = "```"
    while fence in words:
        fence += "`"
    return f"{fence}\n{words}\n{fence}"
