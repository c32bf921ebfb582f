"""The Document of `gemmscope shapes`, and that every writer shows all of it."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from gemmscope.document import document
from gemmscope.document.common import same_model
from gemmscope.document.model import decisive
from gemmscope.findings import finding
from gemmscope.job.load import model_run
from gemmscope.model import presets
from gemmscope.results.shapes import Check, ShapesResult
from gemmscope.workload.check import Difference
from gemmscope.writers.markdown import markdown
from gemmscope.writers.tables import csv_text
from gemmscope.writers.terminal import text
from support.commands import shapes


def result_of(preset: str, **run: object) -> ShapesResult:
    job = model_run(presets.load(preset), **{"micro_batch_size": 1, "sequence_length": 4096, **run})
    return shapes(job, command="gemmscope shapes")


DENSE = result_of("llama-3.1-8b")
SPLIT = result_of("deepseek-v3", tp=2, pp=4, pp_layers=(16, 15, 15, 15), ep=8, imbalance=1.5)
RESULTS = {"dense": DENSE, "split": SPLIT}


def test_the_answer_and_the_totals() -> None:
    dense = document(DENSE)
    count = sum(gemm.count for gemm in DENSE.gemms)
    assert f"{count:,} GEMMs" in dense.answer
    gemms, totals, *_ = dense.tables()
    assert len(gemms.rows) == len(DENSE.gemms)
    assert sum(row[-1].value or 0.0 for row in gemms.rows) == pytest.approx(1)
    by_name = {row[0].text: row for row in totals.rows}
    assert by_name["GEMMs"][2].value == sum(gemm.flops * gemm.count for gemm in DENSE.gemms)


def test_every_op_that_is_not_a_linear_has_a_row() -> None:
    for result in RESULTS.values():
        *_, others = document(result).tables()
        names = {op.op for op in result.ops if op.kind not in ("linear", "grouped linear")}
        assert {row[0].text for row in others.rows} == names


def test_findings_are_messages_of_the_same_code() -> None:
    split = document(SPLIT)
    assert [message.code for message in split.messages] == [finding.code for finding in SPLIT.findings]
    assert {"pipeline-stage-chosen", "experts-shared", "busiest-experts"} <= {message.code for message in split.messages}


def test_the_short_view_is_a_subset() -> None:
    for result in RESULTS.values():
        whole = document(result)
        assert whole.summary is not None
        assert set(decisive(whole)) <= set(whole.messages)


@pytest.mark.parametrize("name", RESULTS)
def test_every_writer_shows_everything(name: str) -> None:
    whole = document(RESULTS[name])
    pages = {"terminal": text(whole, detail=True), "markdown": markdown([whole]).replace("\\", "")}
    for page in pages.values():
        for said in (whole.title, whole.answer, *whole.because, *(message.text for message in whole.messages)):
            assert said in page
        for table in whole.tables():
            assert table.title in page
            for row in table.rows:
                assert all(cell.text in page for cell in row)
    rows = list(csv.DictReader(io.StringIO(csv_text(whole))))
    assert len(rows) == sum(len(table.rows) for table in whole.tables())


def test_the_stage_that_is_shown_is_named_everywhere() -> None:
    whole = document(SPLIT)
    facts = dict(whole.facts["Method"])
    assert f"stage {SPLIT.stage}" in facts["micro-batch"]
    assert any(f"stage {SPLIT.stage}" in line for line in whole.context)


def test_differences_from_the_live_model_are_a_table_and_a_warning() -> None:
    check = Check(differences=(Difference("parameters", 10, 11),), model_class="LlamaForCausalLM", versions={"torch": "2.13"})
    differs = finding("check-differs", differences=1, model_class="LlamaForCausalLM", versions="torch 2.13")
    differing = document(DENSE.model_copy(update={"check": check, "findings": (differs,)}))
    assert [message.code for message in decisive(differing)] == ["check-differs"]
    assert [cell.text for cell in differing.tables()[-1].rows[0]] == ["parameters", "10", "11"]


def test_a_run_file_reads_back_as_the_same_document() -> None:
    for result in RESULTS.values():
        again = ShapesResult.model_validate_json(result.to_json())
        assert again == result
        assert replace(document(again), name="") == replace(document(result), name="")


def test_the_next_command_names_the_same_model() -> None:
    typed = "--config c.json --ignore-key one --ignore-key two --micro-batch-size 1 --no-sequence-parallel"
    listed = DENSE.model_copy(update={"command": f"gemmscope shapes {typed} --check --json run.json"})
    assert same_model("forecast", listed) == f"gemmscope forecast {typed}"
