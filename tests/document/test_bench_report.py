"""What `gemmscope bench` says of its results: tables, sentences, CSV, pictures and the run file, from recorded kernels."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.bench_results import LAYER, MODEL, POWER_LIMITED, QKV, RECIPES, SQUARES, recorded_results
from gemmscope.errors import UserError
from gemmscope.measure.campaign import Counts, Settings
from gemmscope.measure.findings import Findings
from gemmscope.measure.memory import memory
from gemmscope.measure.sampler import StoppingRule
from gemmscope.workload.cases import MODES, Mode, Task
from gemmscope.report.bench import tables
from gemmscope.report.bench_csv import COLUMNS, bench_csv
from gemmscope.report.bench_notes import sentences
from gemmscope.report.formats import markdown, print_tables
from gemmscope.report.plot import save_plot
from gemmscope.report.shapes import Table
from gemmscope.store.benchfile import BenchFile, bench_file


def findings(cases: Any = (QKV,), modes: list[Mode] | None = None, *, layer: Any = None, **how: Any) -> Findings:
    modes = modes or list(MODES)
    return Findings(recorded_results(cases, modes=modes, **how), RECIPES, modes, layer=layer)


def text_of(report: Findings) -> str:
    return markdown(tables(report), ["x"], sentences(report))


def table(report: Findings, title: str) -> Table:
    return next(each for each in tables(report) if each.title.startswith(title))


def column(found: Table, name: str) -> dict[str, str]:
    """The cells of one recipe by the first cell of their row."""
    return {row[0]: row[found.columns.index(name)] for row in found.rows}


def test_report_of_a_correct_run_raises_no_alarm() -> None:
    report = findings()
    text = text_of(report)
    for alarm in ("FALLBACK", "warning", "unproven", "emulated", "not measured:", "loses"):
        assert alarm not in text
    assert "FP8Delayed is the same kernel as FP8Current" in text
    assert "HOST-BOUND: FP8Block: all linears take the CPU 216.0" in text
    assert "held back by SW power cap" in text
    assert "dgrad takes so many times as long as fprop, autocast: BF16 1.00, FP8Current 1.05" in text
    cell = report.cell(QKV, "FP8Current", "autocast")
    assert cell is not None
    assert sum(cell.pass_ms.values()) == pytest.approx(cell.total.value)
    assert 0.05 < sum(cell.quantize_ms.values()) / cell.total.value < 0.2
    assert report.columns("pre-quantized") == ["BF16", "FP8Current", "FP8Block"]


def test_passes_have_time_and_rate() -> None:
    found = table(findings(), "Autocast: forward and backward, X, W and dY quantized once each")
    assert [row[1:3] for row in found.rows] == [
        ("fprop", "15872x4096x12288"),
        ("dgrad", "15872x12288x4096"),
        ("wgrad", "4096x15872x12288"),
    ]
    milliseconds, rate = found.rows[0][3].split()
    assert float(rate.strip("()")) == pytest.approx(QKV.flops / float(milliseconds) / 1e9, rel=0.01)


@pytest.mark.parametrize("mode", ["Autocast", "Pre-quantized"])
def test_sums_add_up(mode: str) -> None:
    """Ops make a layer, layers make the model, and passes make the layer."""
    report = findings(MODEL, layer=LAYER)
    cells = column(table(report, f"{mode}: each op once"), "FP8Current")
    numbers = {name: float(cell.split()[0]) for name, cell in cells.items()}
    ops = sum(numbers[case.op] for case in MODEL)
    passes = sum(numbers[f"{name} sum"] for name in ("Fprop", "Dgrad", "Wgrad"))
    assert numbers["One layer"] == pytest.approx(ops, abs=0.01)
    assert numbers["One layer"] == pytest.approx(passes, abs=0.01)
    assert numbers["Full model"] == pytest.approx(24 * numbers["One layer"], rel=0.001)
    assert "x [" in cells["QKV Proj"]
    assert "x [" in cells["Full model"]


def test_layers_that_differ_are_not_averaged() -> None:
    report = findings(MODEL)
    found = table(report, "Autocast: each op once, the model")
    assert "One layer" not in column(found, "BF16")
    assert ("Fprop sum", "model") in [row[:2] for row in found.rows]


def test_every_pair_of_precisions() -> None:
    found = table(findings(), "Times faster")
    pairs = {row[:2]: row[2:] for row in found.rows}
    assert list(pairs) == [
        *((name, "BF16") for name in RECIPES[1:]),
        *(("FP8Delayed", "FP8Current"), ("FP8Block", "FP8Current"), ("FP8Block", "FP8Delayed")),
    ]
    assert pairs[("FP8Delayed", "FP8Current")][1] == "same kernels"
    assert pairs[("FP8Block", "FP8Current")][0].startswith("0.8")


def test_memory_is_computed_and_says_so() -> None:
    found = table(findings(MODEL), "Memory of the linears")
    assert "computed, not measured" in found.title
    weights = sum(case.weights * case.count for case in MODEL)
    kept = sum(case.tokens * case.inputs * case.count for case in MODEL)
    assert memory(MODEL, "BF16").weights == 2 * weights
    assert memory(MODEL, "BF16").copies == 0
    assert memory(MODEL, "FP8Current").copies == 2 * weights
    assert memory(MODEL, "FP8Current", capability="10.0").copies == weights  # Blackwell multiplies from one copy
    assert memory(MODEL, "MXFP8", "torchao") == memory(MODEL, "BF16")  # torchao keeps BF16 and casts again
    assert memory(MODEL, "NVFP4").kept == pytest.approx(0.5625 * kept)
    assert column(found, "Quantized copies")["BF16"] == "0 B"


def test_bare_products_have_no_totals() -> None:
    report = findings(SQUARES, spread=0.01)
    titles = [each.title for each in tables(report)]
    assert titles == [
        "Autocast: X and W quantized once each, then the product (ms, TFLOP/s in brackets)",
        "Autocast: times faster than BF16 (95% interval)",
        "Pre-quantized: each product alone, on quantized operands (ms, TFLOP/s in brackets)",
        "Pre-quantized: times faster than BF16 (95% interval)",
    ]
    text = text_of(report)
    assert "| 4096x4096x4096 |" in text
    assert "Full model" not in text
    assert "Memory" not in text


def test_cached_weights_are_named_in_the_title() -> None:
    results = recorded_results()
    report = Findings(results, RECIPES, list(MODES), cache_weights=True)
    assert "quantizing W is left out, as it is done once per step" in tables(report)[0].title


def test_what_stays_in_the_cache_is_said() -> None:
    results = recorded_results()
    assert "stay in the cache" not in " ".join(sentences(Findings(results, RECIPES, list(MODES))))
    results.hello["device"]["l2_bytes"] = 10**12
    assert "stay in the cache, and measured so: QKV Proj" in " ".join(sentences(Findings(results, RECIPES, list(MODES))))


# --- what must not be overlooked ------------------------------------------------------------------------------------------


def test_report_of_a_fallback() -> None:
    """FP8 asked for, BF16 kernels seen: said loudly, and no speedup is formed."""
    report = findings(MODEL, kernels_of={"FP8Current": "BF16"})
    text = text_of(report)
    assert (
        "FALLBACK: QKV Proj, Attn Out, MLP Up, MLP Down in FP8Current, autocast: fprop: ran bf16 x bf16, asked for e4m3" in text
    )
    assert report.falls_back("FP8Current", "autocast")
    assert report.speedup("FP8Current", "autocast") is None
    assert report.speedup("FP8Current", "autocast", QKV) is None
    assert report.speedup("FP8Block", "autocast", over="FP8Current") is None
    assert column(table(report, "Autocast: each op once"), "FP8Current")["Full model"].endswith("FALLBACK")
    assert all(row[4].endswith("FALLBACK") for row in table(report, "Autocast: forward").rows)
    assert ("FP8Block", "FP8Current", "FALLBACK", "FALLBACK") in table(report, "Times faster").rows


def test_a_fallback_is_red_on_a_terminal() -> None:
    report = findings(kernels_of={"FP8Current": "BF16"})
    for colours in (True, False):
        console = Console(file=io.StringIO(), force_terminal=colours, width=300, color_system="standard" if colours else None)
        print_tables(tables(report), ["x"], sentences(report), console)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "FALLBACK" in shown
        assert ("\x1b[1;31m" in shown) == colours


def test_what_failed_is_a_dash_and_a_sentence_never_a_zero() -> None:
    results = recorded_results(MODEL)
    key = Task(QKV, "FP8Block", "autocast").key
    results.take({"type": "failed", "task": key, "why": "OutOfMemoryError: too large", "kind": "out of memory"})
    report = Findings(results, RECIPES, list(MODES), layer=LAYER)
    cells = column(table(report, "Autocast: each op once"), "FP8Block")
    assert {cells[name] for name in ("QKV Proj", "Fprop sum", "One layer", "Full model")} == {"-"}
    assert "x [" in cells["MLP Up"]
    assert [row[6] for row in table(report, "Autocast: forward").rows[:3]] == ["-"] * 3
    assert "not measured: FP8Block, QKV Proj: OutOfMemoryError: too large" in sentences(report)
    assert report.speedup("FP8Block", "autocast") is None
    line = next(
        line for line in lines_of(report) if (line["op"], line["recipe"], line["pass"]) == ("QKV Proj", "FP8Block", "all")
    )
    assert (line["time_ms"], line["verdict"]) == ("", "not measured")


def test_what_the_framework_left_in_bf16_has_a_time_and_no_speedup() -> None:
    """torchao's filter is no fallback: the op is named, and the model's gain is what it is."""
    words = "torchao's filter leaves this layer in BF16"
    report = findings(MODEL, kernels_of={"FP8Current": "BF16"}, notes={case.op: words for case in MODEL})
    assert f"FP8Current, QKV Proj, Attn Out, MLP Up, MLP Down: {words}; no speedup is formed for it alone" in sentences(report)
    assert "FALLBACK" not in text_of(report)
    cells = column(table(report, "Autocast: each op once"), "FP8Current")
    assert "x [" not in cells["QKV Proj"]
    assert "x [" in cells["Full model"]
    assert {line["verdict"] for line in lines_of(report) if line["recipe"] == "FP8Current"} == {"left as is"}


def test_losers_and_what_is_too_close_to_call() -> None:
    loses = findings([QKV], slower={"FP8Block": 2.0})
    assert any(line.startswith("QKV Proj loses with FP8Block, autocast: 0.6") for line in sentences(loses))
    close = findings([QKV], slower={"FP8Block": 1.3446}, spread=0.02)
    said = sentences(close)
    assert "too close to call: whether FP8Block, autocast, is faster than BF16 for QKV Proj" in said
    assert not any(line.startswith("QKV Proj loses with FP8Block, autocast") for line in said)
    assert table(close, "Times faster").rows[2][2].endswith("too close to call")


def test_unproven_and_emulated_are_named_once() -> None:
    results = recorded_results(MODEL)
    for result in results.tasks.values():
        if result.task.recipe == "FP8Block":
            result.kernels = [["cutlass::device_kernel<mystery>", *rest] for _, *rest in result.kernels[-1:]]
        if result.task.recipe == "FP8Current" and result.task.mode == "autocast":
            result.kernels = []
    said = sentences(Findings(results, RECIPES, list(MODES)))
    assert "unproven: FP8Current: no kernels were recorded that would show its precision" in said
    about_block = [line for line in said if line.startswith("unproven: FP8Block")]
    assert len(about_block) <= 2
    assert any("the kernel's name does not tell its precision" in line for line in about_block)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"throttle": ["HW thermal slowdown"]}, "FP8Block, autocast, ran under HW thermal slowdown"),
        ({"sm_mhz": 1900}, "the clock moved from 1400 to 1900 MHz between bursts of FP8Block, autocast"),
        ({"sm_mhz": 1450}, ""),
    ],
)
def test_states_that_training_would_not_give(state: dict[str, Any], words: str) -> None:
    warnings = [line for line in sentences(findings(states=[POWER_LIMITED, POWER_LIMITED | state])) if line.startswith("warning")]
    assert any(words in line for line in warnings) if words else warnings == []


def test_states_may_be_unknown() -> None:
    """The CPU, or a driver that hides its figures."""
    for state in ({}, {"sm_mhz": 1400, "power_w": None, "temperature_c": None, "throttle": []}):
        assert "power" not in " ".join(sentences(findings(states=[state])))


def test_one_round_has_no_interval() -> None:
    report = findings(rounds=1)
    assert column(table(report, "Autocast: each op once"), "FP8Current")["QKV Proj"].endswith("x [?]")
    assert "one round was measured: times and speedups have no interval" in sentences(report)
    assert "too close" not in text_of(report)
    assert {line["low_ms"] for line in lines_of(report)} == {""}


# --- CSV ------------------------------------------------------------------------------------------------------------------


def lines_of(report: Findings) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(bench_csv(report))))


def test_csv_has_a_line_for_every_pass() -> None:
    report = findings(MODEL, layer=LAYER)
    lines = lines_of(report)
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == len(MODEL) * (4 + 3) * 4  # four recipes in autocast, three in pre-quantized mode; three passes and all
    by_key = {(line["op"], line["recipe"], line["mode"], line["pass"]): line for line in lines}
    passes = [by_key[("MLP Down", "FP8Current", "autocast", name)] for name in ("fprop", "dgrad", "wgrad")]
    whole = by_key[("MLP Down", "FP8Current", "autocast", "all")]
    assert [(line["m"], line["k"], line["n"]) for line in passes] == [
        ("15872", "16384", "4096"),
        ("15872", "4096", "16384"),
        ("16384", "15872", "4096"),
    ]
    assert sum(float(line["time_ms"]) for line in passes) == pytest.approx(float(whole["time_ms"]))
    assert sum(float(line["quantize_ms"]) for line in passes) == pytest.approx(float(whole["quantize_ms"]))
    assert {line["low_ms"] for line in passes} == {""}
    assert float(whole["low_ms"]) <= float(whole["time_ms"]) <= float(whole["high_ms"])
    assert float(whole["speedup_low"]) <= float(whole["speedup"]) <= float(whole["speedup_high"])
    assert whole["verdict"] == "as asked"
    alone = by_key[("MLP Down", "FP8Block", "pre-quantized", "wgrad")]
    assert float(alone["low_ms"]) <= float(alone["time_ms"]) <= float(alone["high_ms"])
    assert float(alone["speedup"]) > 1
    assert by_key[("MLP Down", "BF16", "autocast", "all")]["speedup"] == ""


def test_csv_of_a_fallback_has_no_speedup() -> None:
    fallen = [line for line in lines_of(findings(kernels_of={"FP8Current": "BF16"})) if line["recipe"] == "FP8Current"]
    assert {(line["verdict"], line["speedup"]) for line in fallen} == {("fallback", "")}


# --- pictures -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_plot_of_a_model(tmp_path: Path) -> None:
    """Every recipe has its bar, quantizing is drawn apart, and bars add up to the times measured."""
    report = findings(MODEL, layer=LAYER)
    save_plot(report, "a $model on NVIDIA H200", str(tmp_path / "bench.svg"))
    drawn = (tmp_path / "bench.svg").read_text()
    for words in (*RECIPES, *(case.op for case in MODEL), "quantizing", "wgrad (lighter)", "1.00x", "a $model on NVIDIA H200"):
        assert f">{words}<" in drawn, words
    cell = report.cell(QKV, "FP8Block", "autocast")
    assert cell is not None
    assert sum(cell.product_ms().values()) + sum(cell.quantize_ms.values()) == pytest.approx(cell.total.value)
    with pytest.raises(UserError, match="cannot be written"):
        save_plot(report, "x", str(tmp_path / "bench.nonsense"))


@pytest.mark.filterwarnings("ignore")
def test_plot_of_bare_products(tmp_path: Path) -> None:
    report = findings(SQUARES, kernels_of={"FP8Block": "BF16"}, spread=0.02)
    save_plot(report, "bare products on NVIDIA H200", str(tmp_path / "bench.svg"))
    drawn = (tmp_path / "bench.svg").read_text()
    for words in ("TFLOP/s", "1024", "8192", "side of square matrices", "FALLBACK", *RECIPES):
        assert f">{words}<" in drawn, words
    save_plot(findings(SQUARES[:1], rounds=1), "one round", str(tmp_path / "one.png"))
    assert (tmp_path / "one.png").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore")
def test_nothing_overlaps_in_the_plot() -> None:
    """What stands above a bar neither meets its neighbour's nor leaves the picture, and the legend lies outside of the panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from gemmscope.report import plot

    figure = Figure(layout="constrained")
    canvas = FigureCanvasAgg(figure)
    plot._draw_model(figure, findings(MODEL, layer=LAYER))
    canvas.draw()
    renderer = canvas.get_renderer()
    (legend,) = figure.legends
    for panel in figure.axes:
        assert not panel.get_window_extent(renderer).overlaps(legend.get_window_extent(renderer))
        boxes = [text.get_window_extent(renderer) for text in panel.texts]
        assert max(box.y1 for box in boxes) <= panel.get_window_extent(renderer).y1
        small = boxes[::2]
        assert not any(one.overlaps(other) for one, other in pairwise(small))


# --- the run file ---------------------------------------------------------------------------------------------------------


def run_file(report: Findings, settings: Settings | None = None) -> BenchFile:
    made = bench_file(
        command=["bench"], origin="test", model=None, run=None, settings=settings or Settings("transformer_engine"),
        rule=StoppingRule(), environment={}, findings=report, ended="known", notes=["a note"],
    )  # fmt: skip
    return BenchFile.model_validate_json(made.to_json())


def test_run_file_has_settings_pairs_totals_and_memory() -> None:
    counts = Counts(num_iters=20)
    settings = Settings("transformer_engine", counts=counts, timing="profiler", cache_weights=True)
    file = run_file(findings(MODEL, layer=LAYER), settings)
    assert file.settings.counts is not None
    assert file.settings.counts.model_dump() == asdict(counts)
    assert (file.settings.timing, file.settings.cache_weights, file.settings.precision) == ("profiler", True, None)
    assert file.layers == 24
    pairs = {(each.recipe, each.over) for each in file.speedups if not each.op and each.mode == "autocast"}
    assert {("FP8Current", "BF16"), ("FP8Block", "FP8Delayed")} <= pairs
    total = next(each for each in file.totals if (each.recipe, each.mode) == ("FP8Current", "autocast"))
    assert total.layer_ms == pytest.approx(sum(total.pass_ms.values()))
    assert total.total_ms.value == pytest.approx(24 * total.layer_ms)
    assert {each.recipe for each in file.memory} == set(RECIPES)
    assert file.rows[0].passes == ["fprop", "dgrad", "wgrad"]


def test_run_file_of_bare_products_has_no_model() -> None:
    file = run_file(findings(SQUARES, rounds=1))
    assert (file.model, file.run, file.layers, file.totals, file.memory) == (None, None, None, [], [])
    assert {each.op for each in file.speedups} == {case.op for case in SQUARES}
    assert {each.speedup.low for each in file.speedups} == {None}
    json.dumps(file.model_dump(), allow_nan=False)


def test_run_file_of_a_fallback_has_no_speedup() -> None:
    file = run_file(findings(kernels_of={"FP8Current": "BF16"}))
    assert "FP8Current" not in {each.recipe for each in file.speedups} | {each.over for each in file.speedups}
    assert "FP8Block" in {each.recipe for each in file.speedups}


def test_run_file_keeps_notes() -> None:
    words = "torchao's filter leaves this layer in BF16"
    file = run_file(findings(notes={"QKV Proj": words}))
    assert {row.note for row in file.rows if row.recipe != "BF16"} == {words}
