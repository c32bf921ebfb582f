"""Regression tests for contradictions between outputs, on the Document that every writer shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

import gemmscope as gs
from gemmscope.bench.findings import linear_findings
from gemmscope.bench.linears import measured_linears
from gemmscope.choices import MODES
from gemmscope.document import document
from gemmscope.document.model import Document
from gemmscope.engine.messages import Noticed
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.base import Result
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.sweep import SweepPoint
from gemmscope.writers import html, markdown, terminal
from support.bench_results import MODEL, RECIPES, recorded_measurements
from support.forecast_files import forecast_result, plane, several_gpus, sweep
from support.recorded_steps import replayed
from support.run_files import recorded_bench
from support.step_files import recorded_step


def columns(doc: Document) -> set[str]:
    return {column.name for table in doc.tables() for column in table.columns}


def codes(doc: Document) -> list[str]:
    return [message.code for message in doc.messages]


def test_a_precision_that_kernels_do_not_prove_is_told_by_every_writer() -> None:
    measurements = recorded_measurements(MODEL)
    for task in measurements.tasks.values():
        if task.task.recipe == "FP8Current":
            task.kernels = []
    linears = measured_linears(measurements, RECIPES, MODES)
    told = linear_findings(linears)
    unproven = [finding for finding in told if finding.code == "unproven-no-kernels"]
    assert [finding.facts["recipe"] for finding in unproven] == ["FP8Current"]
    doc = document(recorded_bench("first").model_copy(update={"linears": linears, "findings": tuple(told)}))
    [sentence] = [message.text for message in doc.messages if message.code == "unproven-no-kernels"]
    assert sentence in " ".join(terminal.text(doc, detail=False).split())
    assert sentence in terminal.text(doc)
    assert sentence in markdown.markdown([doc])
    assert sentence in html.page([doc])


def test_a_forecast_that_is_too_close_to_call_says_so_in_its_document() -> None:
    result = several_gpus()
    doc = document(result)
    assert any(gpu.step and gpu.step.winner and gpu.step.winner.rivals for gpu in result.gpus)
    for gpu in result.gpus:
        assert gpu.step is not None
        winner = gpu.step.winner
        for rival in winner.rivals if winner is not None else ():
            assert winner is not None
            assert any(
                message.code == "too-close-to-call" and rival in message.text and winner.best in message.text
                for message in doc.messages
            )


@pytest.mark.parametrize("result", [recorded_step("llama8b"), forecast_result()], ids=["measured", "forecast"])
def test_mfu_is_in_every_document_of_a_step(result: Result) -> None:
    assert "MFU (BF16)" in columns(document(result))


@pytest.mark.parametrize("result", [sweep(), plane()], ids=["line", "plane"])
def test_a_sweep_counts_the_points_that_its_table_shows_as_faster(result: ForecastResult) -> None:
    for swept in result.sweeps:
        reasons = " ".join(document(result.model_copy(update={"sweeps": (swept,)})).because)
        possible = [point for point in swept.points if not point.why_not]
        faster = [point for point in possible if _faster(point)]
        assert faster == [point for point in possible if point.gains]
        assert f"{len(faster)} of {len(possible)}" in reasons


def _faster(point: SweepPoint) -> bool:
    """By the interval that the table shows."""
    best = point.winner.best if point.winner else BASELINE
    return best in point.speedups and point.speedups[best].above_one


def test_warnings_of_a_step_are_in_its_measurements() -> None:
    measurements = replayed("llama8b")
    measurements.take(Noticed("journal-incomplete", {"reason": "disk full"}))
    assert [finding.code for finding in measurements.findings] == ["journal-incomplete"]


def test_a_result_made_from_python_names_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    job = gs.load("llama-3.2-1b").on(micro_batch_size=1, sequence_length=512, tp=2)
    for result, call in (
        (job.shapes(), "shapes()"),
        (job.forecast("b300", recipes=["fp8current"]), "forecast('b300', recipes=['fp8current'])"),
    ):
        assert result.command == f"gemmscope.load('llama-3.2-1b').on(micro_batch_size=1, sequence_length=512, tp=2).{call}"


def test_one_rule_calls_every_winner() -> None:
    """Recommendation, answer, findings and the result's own winner agree, in steps and in benches."""
    step = recorded_step("llama8b")
    winner, advice = step.step.winner, step.recommendation
    assert winner is not None
    assert advice is not None
    assert (advice.recipe, set(advice.rivals)) == (winner.best, set(winner.rivals))
    doc = document(recorded_bench("first"))
    best = recorded_bench("first").linears.winners["autocast"].best
    assert doc.advice is not None
    assert best in doc.advice.text
    assert best in doc.answer
    assert _told_close(codes(doc), recorded_bench("first").linears.winners["autocast"].rivals)


def _told_close(told: Sequence[str], rivals: Sequence[str]) -> bool:
    return ("too-close-to-call" in told) == bool(rivals)
