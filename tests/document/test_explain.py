"""The Document of `explain`: every number of the result, in every writer."""

from __future__ import annotations

import html
import re

import pytest

from gemmscope.document import document
from gemmscope.document.charts import BarChart
from gemmscope.document.model import Document
from gemmscope.document.table import Table
from gemmscope.results.explain import ExplainResult
from gemmscope.writers.html import page
from gemmscope.writers.markdown import markdown
from gemmscope.writers.tables import csv_text
from gemmscope.writers.terminal import text
from support.commands import explain
from support.explain_files import explanation
from support.traces import recorded


def table(doc: Document, title: str) -> Table:
    return next(table for table in doc.tables() if table.title.startswith(title))


def plain(markup: str) -> str:
    """The visible text of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<(script|style).*?</\1>", "", markup, flags=re.DOTALL)))


@pytest.mark.parametrize("name", ["recompute", "unaligned_torchao", "host_bound", "healthy_te_current"])
def test_parts_and_classes_sum_to_the_step(name: str) -> None:
    result = explanation(name)
    doc = document(result)
    [chart] = doc.charts()
    assert isinstance(chart, BarChart)
    assert chart.bars[0].total_ms == pytest.approx(result.account.step_ms)
    classes = {row[0].text: row[1].value or 0.0 for row in table(doc, "By class").rows}
    assert classes.pop("total") == pytest.approx(result.account.step_ms)
    assert classes == pytest.approx(result.account.classes_ms)


def test_the_chart_table_has_shares() -> None:
    rows = table(document(explanation()), "Where the time of a step goes").rows
    assert sum(row[2].value or 0.0 for row in rows[:-1]) == pytest.approx(1)
    assert rows[-1][2].value == 1


def test_every_cause_has_its_evidence_and_advice_in_every_writer() -> None:
    result = explanation("unaligned_torchao")
    doc = document(result, "run.json")
    outputs = [text(doc), markdown([doc]).replace("\\", ""), plain(page([doc]))]
    for cause in result.causes:
        for sentence in (*(finding.text for finding in cause.evidence), *cause.advice, *cause.kernels):
            assert all("".join(sentence.split()) in "".join(output.split()) for output in outputs), sentence  # long names wrap
        assert f"cause-{cause.code}" in [message.code for message in doc.messages]
        assert cause.title in [card.title for card in doc.cards]


def twins() -> ExplainResult:
    return explain([recorded("healthy_te_current")], baseline=recorded("healthy_te_bf16"))


def test_comparisons_add_up_and_lead_the_answer() -> None:
    result = twins()
    doc = document(result)
    rows = table(doc, "Comparison with the BF16 trace").rows
    assert sum(row[3].value or 0.0 for row in rows[:-1]) == pytest.approx(rows[-1][3].value)
    assert [finding.text for finding in result.comparisons[0].findings if finding.level == "note"] == list(doc.because[1:])
    assert "Speedup so far" in csv_text(doc)
