"""The Document of a bench: what every writer then shows."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import pytest

from gemmscope.bench.measurements import Measurements
from gemmscope.document.bench import bench_document
from gemmscope.document.model import Document, decisive
from gemmscope.document.table import Table
from gemmscope.engine.messages import Failed
from gemmscope.results.bench import BenchResult
from gemmscope.writers import figure, html, markdown, tables, terminal
from support.bench_results import LAYER, MODEL, QKV, RECIPES, recorded_measurements
from support.run_files import BENCHES, bench_result, recorded_bench, squares


def model_bench(**how: Any) -> BenchResult:
    return bench_result(recorded_measurements(MODEL, **how), **LAYER)


def table(document: Document, title: str) -> Table:
    return next(table for table in document.tables() if table.title.startswith(title))


def texts(shown_table: Table, name: str) -> dict[str, str]:
    """The cells of one column by the text columns of their row."""
    place = [column.name for column in shown_table.columns].index(name)
    return {" ".join(cell.text for cell in row[:2]): row[place].text for row in shown_table.rows}


@pytest.mark.parametrize("name", BENCHES)
def test_writers_show_the_same(name: str) -> None:
    """Terminal, Markdown and page have the answer, every finding and every table; CSV has every table."""
    document = bench_document(recorded_bench(name), f"{name}.json")
    shown = terminal.text(document)
    texts_of_writers = (shown, unescape(html.page([document])), markdown.markdown([document]).replace("\\", ""))
    written = tables.csv_text(document)
    for text in texts_of_writers:
        assert all(message.text in text for message in document.messages)
        assert all(
            table.title in text for table in document.tables() if table not in [chart.table() for chart in document.charts()]
        )
    assert document.answer in shown
    for shown_table in document.tables():
        assert shown_table.title in shown
        assert f"\n{shown_table.name}," in written
        assert all(cell.text in shown for row in shown_table.rows for cell in row)


def test_the_short_view_fits_a_screen() -> None:
    document = bench_document(model_bench())
    assert len(terminal.text(document, detail=False).splitlines()) <= 35
    assert document.summary is not None
    assert [column.name for column in document.summary.columns if column.name in RECIPES] == RECIPES[1:]


def test_the_answer_is_the_winner() -> None:
    document = bench_document(model_bench())
    assert document.answer.startswith("FP8Delayed is fastest: ")
    assert document.advice is not None
    assert "Megatron-LM" in document.advice.ready_to_paste
    stay = bench_document(model_bench(slower=dict.fromkeys(RECIPES[1:], 3.0)))
    assert stay.answer.startswith("BF16 is fastest")
    assert stay.advice is not None
    assert not stay.advice.ready_to_paste


def test_every_pass_has_time_and_rate() -> None:
    passes = table(bench_document(model_bench()), "Autocast: time of every pass")
    assert [row[2].text for row in passes.rows[:3]] == ["15872x4096x12288", "15872x12288x4096", "4096x15872x12288"]
    milliseconds, rate = passes.rows[0][4].text.split()
    assert float(rate.strip("()")) == pytest.approx(QKV.flops / float(milliseconds) / 1e9, rel=0.01)
    alone = table(bench_document(model_bench()), "Pre-quantized: time of every pass").rows[0][4]
    assert alone.low is not None
    assert {"One layer all", "All linears all"} <= set(texts(passes, "FP8Current"))


def test_a_fallback_is_everywhere() -> None:
    document = bench_document(model_bench(kernels_of={"FP8Current": "BF16"}))
    assert [message.code for message in document.messages if message.level == "error"] == ["fallback", "fallback"]
    times = texts(table(document, "Autocast: time"), "FP8Current")
    assert all(times[f"{case.op} {name}"].endswith("FALLBACK") for case in MODEL for name in (*case.passes, "all"))
    verdicts = {row[-1].text for row in table(document, "Precision of every pass").rows}
    assert verdicts == {"as requested", "fallback"}
    [autocast, _] = document.charts()
    assert [bar.alarm for bar in autocast.bars] == ["", "FALLBACK", "", ""]  # type: ignore[union-attr]
    assert "FALLBACK" in terminal.text(document, detail=False)


def test_unproven_is_on_every_page() -> None:
    """A regression test: the terminal showed it, but the page did not."""
    measurements = recorded_measurements(MODEL)
    for result in measurements.tasks.values():
        if result.task.recipe == "FP8Current":
            result.kernels = []
    document = bench_document(bench_result(measurements, **LAYER))
    assert "unproven-no-kernels" in {message.code for message in document.messages}
    for text in (terminal.text(document, detail=False), markdown.markdown([document]), html.page([document])):
        assert "Unproven: FP8Current" in text


def test_what_failed_is_a_dash() -> None:
    measurements: Measurements = recorded_measurements(MODEL)
    for key, result in measurements.tasks.items():
        if result.task.recipe == "FP8Block" and result.task.mode == "autocast":
            measurements.take(Failed(key, "too large", "out of memory"))
    document = bench_document(bench_result(measurements, **LAYER))
    assert set(texts(table(document, "Autocast: time"), "FP8Block").values()) == {"-"}
    bars = document.charts()[0].bars  # type: ignore[union-attr]
    assert (bars[-1].note, bars[-1].segments) == ("not measured", ())


def test_nothing_measured() -> None:
    measurements = recorded_measurements(MODEL)
    for key in measurements.tasks:
        measurements.take(Failed(key, "too large", "out of memory"))
    document = bench_document(bench_result(measurements))
    assert (document.sections, document.advice, document.speedups) == ((), None, ())
    assert "nothing-measured" in {message.code for message in document.messages}
    assert "nothing-measured" not in {message.code for message in decisive(document)}  # the answer says it


def test_bare_gemms_are_curves() -> None:
    document = bench_document(squares(kernels_of={"FP8Block": "BF16"}, spread=0.01))
    assert document.subject.bare
    assert [chart.title for chart in document.charts() if chart.main] == [
        "Autocast: speedup over BF16",
        "Pre-quantized: speedup over BF16",
    ]
    rates = table(document, "Autocast: rate (TFLOP/s)")
    assert rates.rows[0][-1].text.endswith("FALLBACK")
    assert "All linears" not in terminal.text(document)
    assert {speedup.what for speedup in document.speedups} >= {"1024x1024x1024, autocast"}


# --- figures --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_figure_of_a_model(tmp_path: Path) -> None:
    """Every recipe has a bar, quantization is a separate part, and the parts add up to the measured times."""
    result = model_bench()
    document = bench_document(result)
    (tmp_path / "bench.svg").write_bytes(figure.image(document, ".svg"))
    drawn = (tmp_path / "bench.svg").read_text()
    for label in (*RECIPES, *(case.op for case in MODEL), "quantization", "wgrad (lighter)", "1.00x"):
        assert f">{label}<" in drawn, label
    bar = document.charts()[0].bars[-1]  # type: ignore[union-attr]
    measured = result.linears.total("FP8Block", "autocast")
    assert measured is not None
    assert bar.total_ms == pytest.approx(measured.total_ms.value, rel=0.001)


@pytest.mark.filterwarnings("ignore")
def test_figure_of_bare_gemms(tmp_path: Path) -> None:
    (tmp_path / "bench.svg").write_bytes(figure.image(bench_document(squares(spread=0.02)), ".svg"))
    drawn = (tmp_path / "bench.svg").read_text()
    for label in ("TFLOP/s", "1024", "8192", "side of square matrices (log scale)", "speedup over BF16", *RECIPES):
        assert f">{label}<" in drawn, label
    (tmp_path / "one.png").write_bytes(figure.image(bench_document(squares(rounds=1)), ".png"))
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_the_page_says_which_gpu_it_was_and_how_healthy() -> None:
    result = model_bench()
    assert "node" not in dict(bench_document(result).facts["Environment"])  # an older run file
    chip = {"node": "node03", "index": 5, "pci_bus": "0000:ba:00.0", "uuid": "GPU-1"}
    healthy = {"uncorrected_errors": 0, "pcie_generation": 5, "pcie_generation_max": 5}
    for health, text in (
        (healthy, "no problems found"),
        (healthy | {"pcie_generation": 3}, "PCIe generation 3 instead of 5"),
        ({}, None),
        ("damaged", None),
    ):
        device = {**result.device, **chip, "health": health}
        facts = dict(bench_document(result.model_copy(update={"device": device})).facts["Environment"])
        assert (facts["node"], facts["UUID"]) == ("node03, GPU 5, PCI bus 0000:ba:00.0", "GPU-1")
        assert facts.get("health under load") == text
