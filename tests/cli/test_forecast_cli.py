"""`gemmscope forecast` as people type it, right and wrong."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from gemmscope.store.forecastfile import ForecastFile
from test_cli import Run, run

__all__ = ["run"]  # the fixture

SIZES = "--hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24"
REFERENCE = f"forecast {SIZES} --micro_batch_size 31 --sequence_length 512"
GEMMS = "m,k,n,format\n4096,4096,4096,bf16\n8192,8192,8192,fp8\n"


def test_reference_on_two_gpus(run: Run) -> None:
    outcome = run(f"{REFERENCE} --gpu b300,h200")
    assert outcome.code == 0
    assert outcome.out.startswith("FORECAST, not measured: transformer on B300")
    assert "15872x4096x12288" in outcome.out
    assert "b300: FORECAST Autocast" in outcome.out
    assert "h200: FORECAST of the training step" in outcome.out
    assert "too close to call" in outcome.out
    assert "NVFP4" in outcome.out
    assert "90% error bar" in outcome.out
    assert "95%" not in outcome.out


def test_json_is_a_valid_run_file(run: Run) -> None:
    file = ForecastFile.model_validate_json(run(f"{REFERENCE} --gpu h200,b300 --json -").out)
    assert [each.gpu for each in file.gpus] == ["h200", "b300"]
    h200, b300 = file.gpus
    assert {row.recipe for row in h200.rows} == {"BF16", "FP8Current", "FP8Delayed", "FP8Block"}
    assert "NVFP4" in {row.recipe for row in b300.rows}
    assert all(row.total_ms.low is not None and row.total_ms.low < row.total_ms.value for row in h200.rows)
    assert all(each.step_ms.value > 0 for each in h200.step)
    assert h200.basis


def test_csv_names_the_gpu_and_says_forecast(run: Run) -> None:
    lines = list(csv.DictReader(io.StringIO(run(f"{REFERENCE} --gpu b200,h200 --csv -").out)))
    assert {line["gpu"] for line in lines} == {"b200", "h200"}
    assert {line["verdict"] for line in lines} == {"FORECAST"}
    step = next(line for line in lines if line["op"] == "training step" and line["recipe"] == "FP8Current")
    assert float(step["low_ms"]) < float(step["time_ms"]) < float(step["high_ms"])
    assert float(step["speedup"]) > 1


def test_markdown_and_picture(run: Run, tmp_path: Path) -> None:
    outcome = run(f"{REFERENCE} --gpu h200 --markdown {tmp_path}/a.md -o {tmp_path}/a.svg")
    assert outcome.code == 0
    assert "| QKV Proj |" in (tmp_path / "a.md").read_text()
    assert "FORECAST" in (tmp_path / "a.svg").read_text()


def test_burst_is_faster(run: Run) -> None:
    times = [
        ForecastFile.model_validate_json(run(f"{REFERENCE} --gpu h200 --state {state} --json -").out)
        .gpus[0]
        .step[0]
        .step_ms.value
        for state in ("burst", "sustained")
    ]
    assert times[0] < times[1]


def test_what_is_computed_again_is_in_the_step(run: Run) -> None:
    note = "computed again in backward is not in the linears' tables: each pass counts once; the step includes it"
    assert note in run(f"{REFERENCE} --gpu h200 --recompute full").out


def test_what_does_not_gain_is_not_called_fastest(run: Run) -> None:
    small = "forecast --hidden_size 256 --intermediate_size 1024 --num_attention_heads 4 --num_hidden_layers 2"
    out = run(f"{small} --micro_batch_size 1 --sequence_length 256 --gpu h200 --recipes fp8current").out
    assert "h200: stay with BF16: nothing is forecast to gain" in out
    assert "is forecast fastest" not in out


def test_only_one_mode(run: Run) -> None:
    assert "Autocast" not in run(f"{REFERENCE} --gpu h200 --pre-quantize").out


def test_bare_shapes(run: Run) -> None:
    outcome = run("forecast --gpu b200 --shapes 4096,8192x4096x14336")
    assert "8192x4096x14336" in outcome.out
    assert "training step" not in outcome.out


def test_a_split_model(run: Run) -> None:
    line = (
        "forecast --preset llama-3.1-70b --micro-batch-size 1 --sequence-length 8192 --tp 4 --sequence-parallel --dp 8 --gpu b200"
    )
    outcome = run(line)
    assert outcome.code == 0
    assert "communication" in outcome.out


PRESET = "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192"


def test_the_step_by_part_without_a_low_precision(run: Run) -> None:
    outcome = run(f"{PRESET} --gpu h200 --recipes bf16")
    assert " optimizer " in outcome.out
    lines = list(csv.DictReader(io.StringIO(run(f"{PRESET} --gpu h200 --recipes bf16 --csv -").out)))
    parts = {line["op"]: float(line["time_ms"]) for line in lines if line["mode"] == "step"}
    assert sum(parts.values()) == pytest.approx(2 * parts["training step"])
    assert ForecastFile.model_validate_json(run(f"{PRESET} --gpu h200 --recipes bf16 --json -").out).gpus[0].step[0].parts_ms


def test_what_does_not_fit_is_said(run: Run) -> None:
    outcome = run(f"{PRESET} --gpu h200,l40s")
    assert "does not fit: l40s: BF16 78 GB" in outcome.out
    assert "48 GB there; --tp" in outcome.out
    assert "does not fit: h200" not in outcome.out
    assert "does not fit" not in run(f"{PRESET} --gpu l40s --tp 4 --recompute full").out


def test_one_stage_is_not_the_pipeline(run: Run) -> None:
    words = "note: the step is stage 0's own; a pipeline goes at its slowest stage's pace"
    assert words in run(f"{PRESET} --gpu h200 --pp 2 --pp-stage 0").out
    assert "stage's pace" not in run(f"{PRESET} --gpu h200 --pp 2").out


def test_a_chip_without_low_precisions_says_so(run: Run) -> None:
    words = "note: a100 runs nothing below BF16: FP8 products need compute capability 8.9 or later"
    assert words in run(f"{PRESET} --gpu a100,h200").out
    assert words not in run(f"{PRESET} --gpu a100 --recipes bf16").out


def test_a_sweep_of_a_chip_without_low_precisions(run: Run, tmp_path: Path) -> None:
    outcome = run(f"forecast {SIZES} --sequence-length 512 --gpu a100 --sweep micro_batch_size=1,4 -o {tmp_path}/a.svg")
    assert outcome.code == 0
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_the_head_differs_between_tables(run: Run) -> None:
    words = "LM Head: in low precision in the linears' tables, and in BF16 in the step"
    assert words in run(f"{PRESET} --gpu h200").out
    assert words not in run(f"{PRESET} --gpu h200 --recipes bf16").out


def test_each_reason_is_said_once(run: Run) -> None:
    out = run("forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8191 --gpu h200").out
    lines = [line for line in out.splitlines() if line.startswith("not possible: ")]
    assert len(lines) == 1
    assert "QKV Proj, Attn Out" in lines[0]
    assert "which FP8Current, FP8Delayed, FP8Block products need" in lines[0]


def test_block_scales_on_rtx_are_its_own(run: Run) -> None:
    outcome = run(f"{PRESET} --gpu rtx-pro-6000,b200 --recipes fp8block,mxfp8")
    assert "fp8-block: corrections measured on rtx-pro-6000" in outcome.out
    assert "left out: MXFP8: Transformer Engine has none for compute capability 12.0\n" in outcome.out


def test_presets_are_named_by_shapes(run: Run) -> None:
    assert "gemmscopeshapes--list-presets" in "".join(run("forecast --help").out.split())  # wherever lines are broken


# --- single products --------------------------------------------------------------------------------------------------


def test_gemms_come_back_with_times(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text(GEMMS)
    outcome = run(f"forecast --gpu b200 --gemms {tmp_path}/g.csv")
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    assert [row["format"] for row in rows] == ["bf16", "fp8"]
    assert float(rows[0]["quantize_ms"]) == 0
    assert float(rows[1]["quantize_ms"]) > 0
    for row in rows:
        whole = float(row["gemm_ms"]) + float(row["quantize_ms"])
        assert float(row["low_ms"]) < whole < float(row["high_ms"])
    assert run(f"forecast --gpu b200 --gemms {tmp_path}/g.csv -o {tmp_path}/out.csv").code == 0
    assert (tmp_path / "out.csv").read_text() == outcome.out


def test_gemms_keep_other_columns_and_take_layouts_and_groups(run: Run, tmp_path: Path) -> None:
    rows = "id,M,K,N,format,layout,groups\na,4096,4096,4096,bf16,nt,1\nb,16384,4096,4096,bf16,tn,8\nc,512,512,512,nvfp4,,\n"
    (tmp_path / "g.csv").write_text(rows)
    outcome = run(f"forecast --gpu b200,b300 --gemms {tmp_path}/g.csv --state burst")
    found = list(csv.DictReader(io.StringIO(outcome.out)))
    assert outcome.out.splitlines()[0] == "id,M,K,N,format,layout,groups,gpu,gemm_ms,quantize_ms,low_ms,high_ms"
    assert [(row["id"], row["gpu"]) for row in found] == [(each, gpu) for gpu in ("b200", "b300") for each in "abc"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m,k,n\n1,2,3\n", "no column format"),
        ("m,k,n,format\n", "no products"),
        ("", "no column m, k, n, format"),
        ("m,k,n,format\n0,2,3,bf16\n", "line 2: m is '0'"),
        ("m,k,n,format\n512,2.5,3,bf16\n", "line 2: k is '2.5'"),
        ("m,k,n,format\n512,512,512,int8\n", "line 2: there is no format 'int8'"),
        ("m,k,n,format\n512,512,512,nvfp4\n", "h200 has no nvfp4 products"),
        ("m,k,n,format,layout\n512,512,512,bf16,xy\n", "no layout 'xy'"),
        ("m,k,n,format,M\n512,512,512,bf16,1\n", "the column 'm' twice"),
        ("m,k,n,format,groups\n512,512,512,bf16,513\n", "513 groups share m = 512"),
        ("m,k,n,format,groups,layout\n512,256,512,bf16,257,nt\n", "257 groups share k = 256"),
        ("m,k,n,format\n\n\n512,512,512,bf16\n\n0,1,1,bf16\n", "line 6: m is '0'"),
        ("m,k,n,format\n512,512,512,bf16,mine\n", "line 2 has more cells than the first line has columns (4)"),
    ],
)
def test_wrong_gemms(run: Run, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "g.csv").write_text(text)
    outcome = run(f"forecast --gpu h200 --gemms {tmp_path}/g.csv")
    assert outcome.code == 2
    assert says in outcome.err
    assert len(outcome.err.splitlines()) <= 2


def test_gemms_of_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As spreadsheets write it: with a mark at its beginning that it is UTF-8, and the ends of lines of Windows."""

    def typed(text: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))

    typed(b"\xef\xbb\xbf" + GEMMS.replace("\n", "\r\n").encode())
    outcome = run("forecast --gpu h200 --gemms -")
    assert outcome.out.startswith("m,k,n,format,gemm_ms"), outcome.err
    typed(b"m,k,n\n1,1,1\n")
    assert "standard input has no column format" in run("forecast --gpu h200 --gemms -").err


def test_what_is_read_is_not_written_over(run: Run, tmp_path: Path) -> None:
    products = tmp_path / "g.csv"
    products.write_text(GEMMS)
    assert f"--csv {products} would overwrite what is read" in run(f"forecast --gpu h200 --gemms {products} --csv {products}").err
    assert products.read_text() == GEMMS


def test_a_library_that_was_not_measured_has_wider_bars(run: Run, tmp_path: Path) -> None:
    rows = "4096.0,4096,4096,bf16,\n4096,4096,4096,bf16,mine\n4096,4096,4096,bf16,sglang\n4096,4096,4096,bf16,vllm\n"
    (tmp_path / "g.csv").write_text("m,k,n,format,library\n" + rows)
    outcome = run(f"forecast --gpu h200 --gemms {tmp_path}/g.csv")
    assert outcome.code == 0
    none, mine, sglang, vllm = csv.DictReader(io.StringIO(outcome.out))
    assert none["gemm_ms"] == mine["gemm_ms"] == sglang["gemm_ms"] == vllm["gemm_ms"]
    highs = [float(row["high_ms"]) for row in (vllm, none, mine, sglang)]
    assert highs[0] <= highs[1] < highs[2] == highs[3]
    assert "bf16: measured on h200 (sustained, vllm), for want of sglang" in outcome.err
    assert "'mine' was measured nowhere (known: sglang, trtllm, vllm)" in outcome.err
    assert run(f"forecast --gpu b200 --gemms {tmp_path}/g.csv --library mine").code == 0


def test_gemms_say_that_they_are_forecast(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text(GEMMS)
    outcome = run(f"forecast --gpu b200 --gemms {tmp_path}/g.csv")
    assert outcome.err.startswith("FORECAST, not measured")
    assert "b200: bf16: measured on b200 (sustained, vllm); fp8: measured on b200" in outcome.err


def test_a_format_that_one_of_two_gpus_lacks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("m,k,n,format\n512,512,512,nvfp4\n512,512,512,bf16\n")
    outcome = run(f"forecast --gpu h200,b200 --gemms {tmp_path}/g.csv")
    assert outcome.code == 0
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    assert [row["gemm_ms"] != "" for row in rows] == [False, True, True, True]
    assert rows[0]["high_ms"] == ""
    assert "left empty: h200 has no nvfp4 products" in outcome.err


@pytest.mark.parametrize(
    "option",
    [
        "--recipes fp8current",
        "--dp 2",
        "--cache-weights",
        "--pre-quantize",
        "--autocast-only",
        "--no-fp4",
        "-o a.png",
        "-o a.SVG",
    ],
)
def test_options_that_change_nothing_for_gemms(run: Run, tmp_path: Path, option: str) -> None:
    (tmp_path / "g.csv").write_text(GEMMS)
    outcome = run(f"forecast --gpu h200 --gemms {tmp_path}/g.csv {option}")
    assert outcome.code == 2
    assert option.split()[0] in outcome.err
    assert len(outcome.err.splitlines()) <= 2


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_sweep_of_two_sizes(run: Run, tmp_path: Path) -> None:
    sweep = "--sweep hidden_size=1024:4096:1024 --sweep micro_batch_size=1,4"
    outcome = run(f"forecast {SIZES} --sequence-length 2048 --gpu b300,h200 {sweep} -o {tmp_path}/heat.png")
    assert outcome.code == 0
    assert "micro_batch_size=4" in outcome.out
    assert "break-even: FP8Current gains" in outcome.out
    assert (tmp_path / "heat.png").stat().st_size > 10_000


def test_sweep_of_one_size_as_files(run: Run, tmp_path: Path) -> None:
    line = f"forecast --preset llama-3.1-8b --sequence-length 4096 --gpu h200 --sweep micro-batch-size=1,2 -o {tmp_path}/a.svg"
    file = ForecastFile.model_validate_json(run(f"{line} --json -").out)
    assert [point.values for point in file.sweeps[0].points] == [{"micro_batch_size": 1}, {"micro_batch_size": 2}]
    assert file.sweeps[0].points[1].speedups["FP8Delayed"].value > 1
    rows = list(csv.DictReader(io.StringIO(run(f"{line} --csv -").out)))
    assert {row["recipe"] for row in rows} == {"FP8Current", "FP8Delayed", "FP8Block"}


def test_sweeps_say_what_is_too_close_and_what_the_host_bounds(run: Run) -> None:
    line = f"forecast {SIZES} --sequence-length 512 --gpu h200 --sweep micro_batch_size=1,32"
    outcome = run(line)
    assert "FP8Delayed 1.08x HOST-BOUND" in outcome.out
    assert "FP8Delayed 1.60x ?" in outcome.out
    assert "FP8Delayed gains from micro_batch_size 32 on" in outcome.out
    assert "HOST-BOUND: h200: launching FP8Current, FP8Delayed, FP8Block takes a CPU longer than the GPU at 1:" in outcome.out
    rows = list(csv.DictReader(io.StringIO(run(f"{line} --csv -").out)))
    said = {(row["micro_batch_size"], row["recipe"]): row["verdict"] for row in rows}
    assert said["1", "FP8Delayed"] == "FORECAST, HOST-BOUND"
    assert said["32", "FP8Delayed"] == "FORECAST, too close to call"
    assert said["32", "FP8Block"] == "FORECAST"
    points = ForecastFile.model_validate_json(run(f"{line} --json -").out).sweeps[0].points
    assert "FP8Delayed" in points[0].host_bound
    assert not points[1].certain


def test_impossible_points_are_shown_as_such(run: Run) -> None:
    outcome = run(f"forecast {SIZES} --micro-batch-size 1 --sequence-length 2048 --gpu h200 --sweep hidden_size=0,4096")
    assert outcome.code == 0
    assert "not possible: 0: hidden_size must be at least 1, not 0" in outcome.out


def test_what_a_sweep_leaves_out_has_a_reason(run: Run) -> None:
    line = f"forecast {SIZES} --micro-batch-size 8 --gpu b200 --sweep sequence_length=2045,2046,2048"
    out = run(line).out
    assert "not possible: b200: FP8Current, FP8Delayed, FP8Block, MXFP8, NVFP4 at 2045: QKV Proj: tokens = 16360 is no" in out
    assert "not possible: b200: MXFP8 at 2046: QKV Proj: tokens = 16368 is no multiple of 32, which MXFP8 products need" in out
    points = ForecastFile.model_validate_json(run(f"{line} --json -").out).sweeps[0].points
    assert [list(point.not_possible) for point in points] == [
        ["FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4"],
        ["MXFP8"],
        [],
    ]


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        ("--gpu b3000", "there is no GPU 'b3000'", "b300, gb300"),
        ("", "no GPU is named", "--gpu b300,h200"),
        ("--gpu h200 --recipes nvfp4", "NVFP4 cannot run on h200", "FP8Current"),
        ("--gpu h200 --recipes nvfp5", "no recipe 'nvfp5'", "NVFP4"),
        ("--gpu h200 --state hot", "--state 'hot' is not known", "sustained"),
        ("--gpu h200 --dp 0", "--dp must be at least 1, not 0", ""),
        ("--gpu h200 --dp 99999999", "--dp = 99999999 is beyond anything trained", "at most 131072"),
        ("--gpu h200 --sweep hidden_size=1:9:0", "a step of zero", "--sweep hidden_size=2048"),
        ("--gpu h200 --sweep hidden_size=9:1:1", "ends before it begins", "hidden_size=1:9:1"),
        ("--gpu h200 --sweep hiden_size=1,2", "no size that can vary", "hidden_size"),
        ("--gpu h200 --sweep hidden_size=a", "neither", "--sweep"),
        ("--gpu h200 --sweep hidden_size=1:100000000:1", "more than", "larger steps"),
        ("--gpu h200 --sweep tp=1,2 --sweep pp=1,2 --sweep cp=1,2", "3 times", "two"),
        ("--gpu h200 --sweep tp=1,2 --sweep tp=1,2", "twice", "another"),
        ("--gpu h200 --library vllm", "--library belongs to --gemms", "leave it out"),
        ("--gpu h200 --gemms x.csv", "describes a model", "keep one"),
        ("--gpu h200 --sweep tp=1,2 --cache-weights", "--cache-weights is about its linears", "leave it out"),
        ("--gpu h200 --sweep tp=1,2 --pre-quantize", "--pre-quantize is about its linears", "leave it out"),
        ("--gpu h200 --sweep tp=1,2 --autocast-only", "--autocast-only is about its linears", "leave it out"),
        ("--gpu h200 --recipes fp8block --no-fp8-block", "--no-fp8-block leaves it out", "keep one"),
        ("--gpu h200 --pre-quantize --autocast-only", "leave nothing", "keep one"),
        ("--gpu h200 -o picture.txt", "no picture", ".png"),
    ],
)
def test_wrong_input_is_one_message(run: Run, arguments: str, says: str, hint: str) -> None:
    outcome = run(f"{REFERENCE} {arguments}")
    assert outcome.code == 2
    assert says in outcome.err
    assert hint in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    assert not outcome.out


def test_sweeping_the_sizes_of_a_preset(run: Run) -> None:
    outcome = run("forecast --preset llama-3.1-8b --gpu h200 --micro-batch-size 1 --sequence-length 512 --sweep hidden_size=1,2")
    assert outcome.code == 2
    assert "varies a model given by its sizes" in outcome.err


def test_nothing_named(run: Run) -> None:
    outcome = run("forecast --gpu h200")
    assert outcome.code == 2
    assert "no model is named" in outcome.err


def test_a_recipe_only_one_of_two_gpus_runs(run: Run) -> None:
    outcome = run(f"{REFERENCE} --gpu b300,h200 --recipes nvfp4,fp8current")
    assert outcome.code == 0
    assert "left out: NVFP4" in outcome.out
