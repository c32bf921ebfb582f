"""`gemmscope forecast` as people type it, right and wrong."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from gemmscope.document import document
from gemmscope.document.sweep_tables import speedup_of
from gemmscope.findings import Finding
from gemmscope.gpu.specs import GB
from gemmscope.results.forecast import ForecastResult
from support.command import Run, run
from support.refusals import unnamed

__all__ = ["run"]  # the fixture

SIZES = "--hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24"
REFERENCE = f"forecast {SIZES} --micro_batch_size 31 --sequence_length 512"
PRESET = "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192"
GEMMS = "m,k,n,format\n4096,4096,4096,bf16\n8192,8192,8192,fp8\n"


def result(run: Run, line: str) -> ForecastResult:
    outcome = run(f"{line} --json -")
    assert outcome.code == 0, outcome.err
    return ForecastResult.model_validate_json(outcome.out)


def findings(run: Run, line: str) -> dict[str, Finding]:
    """The findings of the run and of all its GPUs, by code."""
    forecast = result(run, line)
    own = [finding for gpu in (*forecast.gpus, *forecast.sweeps) for finding in gpu.findings]
    return {finding.code: finding for finding in (*own, *forecast.findings)}


def step_ms(forecast: ForecastResult) -> float:
    step = forecast.gpus[0].step
    assert step is not None
    return step.recipes[0].step_ms.value


def test_reference_on_two_gpus(run: Run) -> None:
    outcome = run(f"{REFERENCE} --gpu b300,h200")
    assert outcome.code == 0
    assert outcome.out.startswith("FORECAST, not measured: transformer on B300")
    assert "NVFP4" in outcome.out
    assert "90% error bar" in outcome.out
    assert "--detail: every table and note" in outcome.out
    assert len(outcome.out.splitlines()) <= 30
    detailed = run(f"{REFERENCE} --gpu b300,h200 --detail").out
    assert "15872x4096x12288" in detailed
    assert "b300: FORECAST Autocast" in detailed
    assert "h200: FORECAST: Where the time of a step goes" in detailed
    assert "too close to call" in detailed
    assert "95%" not in detailed


def test_json_is_a_valid_run_file(run: Run) -> None:
    forecast = result(run, f"{REFERENCE} --gpu h200,b300")
    assert [gpu.gpu for gpu in forecast.gpus] == ["h200", "b300"]
    h200, b300 = forecast.gpus
    assert {op.recipe for op in h200.linears.ops} == {"BF16", "FP8Current", "FP8Delayed", "FP8Block"}
    assert "NVFP4" in {op.recipe for op in b300.linears.ops}
    assert h200.linears.origin == "forecast"
    assert all(op.total_ms.known for op in h200.linears.ops)
    assert h200.step is not None
    assert all(time.step_ms.value > 0 for time in h200.step.recipes)
    assert h200.basis
    assert forecast.command.startswith("gemmscope forecast --hidden_size 4096")


def test_csv_names_the_gpu_and_says_forecast(run: Run) -> None:
    lines = list(csv.DictReader(io.StringIO(run(f"{REFERENCE} --gpu b200,h200 --csv -").out)))
    assert all("FORECAST" in line["title"] for line in lines)
    assert {line["GPU"] for line in lines if line["GPU"]} == {"b200", "h200"}
    step = next(line for line in lines if line["GPU"] == "b200" and line["Recipe"] == "FP8Current")
    assert float(step["Step ms low"]) < float(step["Step ms"]) < float(step["Step ms high"])
    assert float(step["Speedup over BF16"]) > 1


def test_markdown_and_figure(run: Run, tmp_path: Path) -> None:
    outcome = run(f"{REFERENCE} --gpu h200 --markdown {tmp_path}/a.md -o {tmp_path}/a.svg")
    assert outcome.code == 0
    assert "| QKV Proj |" in (tmp_path / "a.md").read_text()
    assert "FORECAST" in (tmp_path / "a.svg").read_text()


def test_burst_is_faster(run: Run) -> None:
    burst, sustained = (step_ms(result(run, f"{REFERENCE} --gpu h200 --state {state}")) for state in ("burst", "sustained"))
    assert burst < sustained


def test_what_is_recomputed_is_in_the_step(run: Run) -> None:
    codes = findings(run, f"{REFERENCE} --gpu h200 --recompute full")
    assert "recompute-in-step" in codes
    assert "recompute-not-in-linears" not in codes


def test_what_does_not_gain_is_not_called_fastest(run: Run) -> None:
    small = "forecast --hidden_size 256 --intermediate_size 1024 --num_attention_heads 4 --num_hidden_layers 2"
    line = f"{small} --micro_batch_size 1 --sequence_length 256 --gpu h200 --recipes fp8current"
    step = result(run, line).gpus[0].step
    assert step is not None
    assert step.winner is not None
    assert step.winner.best == "BF16"
    assert "Stay with BF16" in run(line).out


def test_only_one_mode(run: Run) -> None:
    assert "utocast" not in run(f"{REFERENCE} --gpu h200 --pre-quantize --detail").out


def test_bare_shapes(run: Run) -> None:
    outcome = run("forecast --gpu b200 --shapes 4096,8192x4096x14336")
    assert "8192x4096x14336" in outcome.out
    assert "training step" not in outcome.out
    forecast = result(run, "forecast --gpu b200,h200 --shapes default")
    assert forecast.gpus[0].step is None
    assert forecast.gpus[0].linears.bare
    assert len(forecast.gpus[0].linears.cases) == 7


def test_a_split_model(run: Run) -> None:
    layout = "--tp 4 --sequence-parallel --dp 8"
    forecast = result(run, f"forecast --preset llama-3.1-70b --micro-batch-size 1 --sequence-length 8192 {layout} --gpu b200")
    assert forecast.dp == 8
    assert forecast.gpus[0].step is not None
    assert "exposed communication" in forecast.gpus[0].step.recipes[0].parts_ms


def test_the_step_by_part_without_a_low_precision(run: Run) -> None:
    line = f"{PRESET} --gpu h200 --recipes bf16"
    assert "\noptimizer  " in run(f"{line} --detail").out
    step = result(run, line).gpus[0].step
    assert step is not None
    assert sum(step.recipes[0].parts_ms.values()) == pytest.approx(step.recipes[0].step_ms.value)


def test_what_does_not_fit(run: Run) -> None:
    h200, l40s = result(run, f"{PRESET} --gpu h200,l40s").gpus
    [finding] = [finding for finding in l40s.findings if finding.code == "does-not-fit"]
    memory = next(memory for memory in l40s.memory if memory.recipe == "BF16")
    usual, least, most = (round(size / GB) for size in (memory.total_bytes, memory.least_bytes, memory.most_bytes))
    assert isinstance(finding.facts["needed_gb"], list)
    assert finding.facts["needed_gb"][0] == f"BF16 {usual} [{least}, {most}]"
    assert finding.facts["memory_gb"] == pytest.approx(45, abs=0.1)  # of 48 GB, what the driver reports
    assert not [finding for finding in h200.findings if finding.code == "does-not-fit"]
    assert "warning: l40s: Does not fit" in run(f"{PRESET} --gpu h200,l40s").out
    assert "does-not-fit" not in findings(run, f"{PRESET} --gpu l40s --tp 4 --recompute full")
    assert l40s.step is not None
    assert (l40s.step.winner, l40s.step.unfit) == (None, tuple(time.recipe for time in l40s.step.recipes))


def test_what_does_not_fit_is_not_priced(run: Run) -> None:
    cost = "--tokens 1T --gpus 8 --price 2"
    h200, l40s = result(run, f"{PRESET} --gpu h200,l40s {cost}").gpus
    assert h200.step is not None
    assert l40s.step is not None
    assert all(time.cost is not None for time in h200.step.recipes)
    assert not any(time.cost is not None for time in l40s.step.recipes)
    assert "this layout certainly fits only on h200" in run(f"{PRESET} --gpu h200,l40s {cost}").out


def test_a_sweep_says_what_does_not_fit(run: Run) -> None:
    large = "forecast --preset llama-3.1-405b --micro-batch-size 1 --sequence-length 8k --gpu h100 --sweep tp=1,8"
    [swept] = result(run, large).sweeps
    assert all(point.winner is None and point.unfit and "does not fit" in point.why_not for point in swept.points)
    assert [finding.code for finding in swept.findings] == ["sweep-does-not-fit"]
    mixed = "forecast --preset llama-3.1-8b --sequence-length 8k --gpu h200 --sweep micro_batch_size=1,2,4"
    [swept] = result(run, mixed).sweeps
    assert [point.winner is None for point in swept.points] == [False, False, True]
    assert "FORECAST, not measured: micro_batch_size of llama-3.1-8b varied on h200" in run(mixed).out


def test_more_micro_batches_change_what_comes_once_per_step(run: Run) -> None:
    """The help's example of a cost: the same decision with 1 and 16 micro-batches per step, and a note on what differs."""
    line = "forecast --preset llama-3.1-70b --micro-batch-size 1 --sequence-length 8k --tp 8 --sequence-parallel --gpu h200,b300"
    line += " --tokens 2T --gpus 256 --price h200=2.5,b300=4 --gradient-accumulation"
    costs = {}
    for batches in (1, 16):
        forecast = result(run, f"{line} {batches}")
        for gpu in forecast.gpus:
            assert gpu.step is not None
            assert gpu.step.winner is not None
            best = gpu.step.of(gpu.step.winner.best)
            assert best is not None
            assert best.cost is not None
            assert best.cost.money is not None
            costs[batches, gpu.gpu] = best.cost.money.value
        codes = {about.code for gpu in forecast.gpus for about in gpu.findings}
        assert bool(codes & {"once-per-step", "once-per-step-decides"}) == (batches == 1)
        cheapest = [min(("h200", "b300"), key=lambda gpu: costs[batches, gpu]) for batches in {key[0] for key in costs}]
    assert len(set(cheapest)) == 1


def test_one_stage_is_not_the_pipeline(run: Run) -> None:
    assert findings(run, f"{PRESET} --gpu h200 --pp 2 --pp-stage 0")["one-stage-only"].facts["stage"] == 0
    assert "one-stage-only" not in findings(run, f"{PRESET} --gpu h200 --pp 2")


def test_a_gpu_without_low_precisions(run: Run) -> None:
    a100, h200 = result(run, f"{PRESET} --gpu a100,h200").gpus
    assert [finding.facts["gpu"] for finding in a100.findings if finding.code == "only-baseline-runs"] == ["a100"]
    assert not [finding for finding in h200.findings if finding.code == "only-baseline-runs"]
    assert "only-baseline-runs" not in findings(run, f"{PRESET} --gpu a100 --recipes bf16")


def test_a_sweep_of_a_gpu_without_low_precisions(run: Run, tmp_path: Path) -> None:
    outcome = run(f"forecast {SIZES} --sequence-length 512 --gpu a100 --sweep micro_batch_size=1,4 -o {tmp_path}/a.svg")
    assert outcome.code == 0
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_the_head_differs_between_tables(run: Run) -> None:
    assert findings(run, f"{PRESET} --gpu h200")["head-in-baseline"].facts["ops"] == ["LM Head"]
    assert "head-in-baseline" not in findings(run, f"{PRESET} --gpu h200 --recipes bf16")


def test_each_reason_is_said_once(run: Run) -> None:
    [gpu] = result(run, "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8191 --gpu h200").gpus
    [finding] = [finding for finding in gpu.findings if finding.code == "sizes-misaligned"]
    assert finding.facts["ops"][:2] == ["QKV Proj", "Attn Out"]  # type: ignore[index]
    assert finding.facts["recipes"] == ["FP8Current", "FP8Delayed", "FP8Block"]
    assert (finding.facts["what"], finding.facts["padded"]) == ("tokens", 8192)
    assert gpu.step is not None
    assert set(gpu.step.failures) == {"FP8Current", "FP8Delayed", "FP8Block"}


def test_block_scales_on_rtx_are_its_own(run: Run) -> None:
    rtx, b200 = result(run, f"{PRESET} --gpu rtx-pro-6000,b200 --recipes fp8block,mxfp8").gpus
    assert any(source.startswith("fp8-block: corrections measured on rtx-pro-6000") for source in rtx.basis)
    assert [finding.facts["recipe"] for finding in rtx.findings if finding.code == "recipe-left-out"] == ["MXFP8"]
    assert [finding.facts["recipe"] for finding in b200.findings if finding.code == "recipe-emulated"] == ["FP8Block"]


def test_presets_are_named(run: Run) -> None:
    assert "gemmscopemodels" in "".join(run("forecast --help").out.split())  # independent of line breaks


# --- single GEMMs -----------------------------------------------------------------------------------------------------


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
    printed = list(csv.DictReader(io.StringIO(outcome.out)))
    assert outcome.out.splitlines()[0] == "id,M,K,N,format,layout,groups,gpu,gemm_ms,quantize_ms,low_ms,high_ms"
    assert [(row["id"], row["gpu"]) for row in printed] == [(letter, gpu) for gpu in ("b200", "b300") for letter in "abc"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m,k,n\n1,2,3\n", "no column format"),
        ("m,k,n,format\n", "no GEMMs"),
        ("", "no column m, k, n, format"),
        ("m,k,n,format\n0,2,3,bf16\n", "line 2: m is '0'"),
        ("m,k,n,format\n512,2.5,3,bf16\n", "line 2: k is '2.5'"),
        ("m,k,n,format\n512,512,512,int8\n", "line 2: there is no format 'int8'"),
        ("m,k,n,format\n512,512,512,nvfp4\n", "h200 has no nvfp4 GEMMs"),
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
    """As spreadsheets write it: with a UTF-8 byte order mark and Windows line endings."""

    def typed(text: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))

    typed(b"\xef\xbb\xbf" + GEMMS.replace("\n", "\r\n").encode())
    outcome = run("forecast --gpu h200 --gemms -")
    assert outcome.out.startswith("m,k,n,format,gemm_ms"), outcome.err
    typed(b"m,k,n\n1,1,1\n")
    assert unnamed(run("forecast --gpu h200 --gemms -").err, "standard input", "format") == []


def test_what_is_read_is_not_written_over(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "g.csv"
    path.write_text(GEMMS)
    assert unnamed(run(f"forecast --gpu h200 --gemms {path} --csv {path}").err, f"--csv {path}") == []
    assert path.read_text() == GEMMS
    assert path.read_text() == GEMMS


def test_a_library_that_was_not_measured_has_wider_bars(run: Run, tmp_path: Path) -> None:
    rows = "4096.0,4096,4096,bf16,\n4096,4096,4096,bf16,mine\n4096,4096,4096,bf16,sglang\n4096,4096,4096,bf16,vllm\n"
    (tmp_path / "g.csv").write_text("m,k,n,format,library\n" + rows)
    outcome = run(f"forecast --gpu h200 --gemms {tmp_path}/g.csv")
    assert outcome.code == 0
    none, mine, sglang, vllm = csv.DictReader(io.StringIO(outcome.out))
    assert none["gemm_ms"] == mine["gemm_ms"] == sglang["gemm_ms"] == vllm["gemm_ms"]
    highs = [float(row["high_ms"]) for row in (vllm, none, mine, sglang)]
    assert highs[0] <= highs[1] < highs[2] == highs[3]
    assert unnamed(outcome.err, "bf16", "h200", "sustained", "vllm", "sglang") == []
    assert unnamed(outcome.err, "'mine'", "sglang, trtllm, vllm") == []
    assert run(f"forecast --gpu b200 --gemms {tmp_path}/g.csv --library mine").code == 0


def test_gemms_say_that_they_are_forecast(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text(GEMMS)
    outcome = run(f"forecast --gpu b200 --gemms {tmp_path}/g.csv")
    assert outcome.err.startswith("FORECAST")
    assert unnamed(outcome.err, "b200", "bf16", "fp8", "vllm") == []


def test_a_format_that_one_of_two_gpus_lacks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("m,k,n,format\n512,512,512,nvfp4\n512,512,512,bf16\n")
    outcome = run(f"forecast --gpu h200,b200 --gemms {tmp_path}/g.csv")
    assert outcome.code == 0
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    assert [row["gemm_ms"] != "" for row in rows] == [False, True, True, True]
    assert rows[0]["high_ms"] == ""
    assert unnamed(outcome.err, "h200", "nvfp4") == []


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
    outcome = run(f"forecast {SIZES} --sequence-length 2048 --gpu b300,h200 {sweep} -o {tmp_path}/heat.png --detail")
    assert outcome.code == 0
    assert "micro_batch_size=4" in outcome.out
    assert "FORECAST break-even" in outcome.out
    assert (tmp_path / "heat.png").stat().st_size > 10_000


def test_sweep_of_one_size_as_files(run: Run, tmp_path: Path) -> None:
    line = f"forecast --preset llama-3.1-8b --sequence-length 4096 --gpu h200 --sweep micro-batch-size=1,2 -o {tmp_path}/a.svg"
    [swept] = result(run, line).sweeps
    assert [point.values for point in swept.points] == [{"micro_batch_size": 1}, {"micro_batch_size": 2}]
    assert swept.points[1].speedups["FP8Delayed"].value > 1
    rows = list(csv.DictReader(io.StringIO(run(f"{line} --csv -").out)))
    assert {"FP8Current", "FP8Delayed low", "FP8Block", "Best"} <= set(rows[0])


def test_sweeps_say_what_is_too_close_and_what_is_host_bound(run: Run) -> None:
    line = f"forecast {SIZES} --sequence-length 512 --gpu b300 --sweep micro_batch_size=1,8,32"
    [swept] = result(run, line).sweeps
    first, second, third = swept.points
    assert "FP8Delayed" in first.host_bound
    assert not first.gains
    assert second.winner is not None
    assert second.winner.rivals
    assert third.gains
    since = {crossing.recipe: crossing.since for crossing in swept.break_even}
    assert since["FP8Delayed"] == 8
    assert since["FP8Current"] == 32  # it has more launches, and at 8 these may still be the limit
    [bound] = [finding for finding in swept.findings if finding.code == "sweep-host-bound"]
    assert bound.facts["places"] == ["1", "8"]
    out = run(line).out
    assert "Host-bound at 1, 8" in out
    assert f"{second.winner.best}" in out


def test_impossible_points_are_shown_as_such(run: Run) -> None:
    line = f"forecast {SIZES} --micro-batch-size 1 --sequence-length 2048 --gpu h200 --sweep hidden_size=0,4096"
    finding = findings(run, line)["sweep-point-not-possible"]
    assert finding.facts["places"] == ["0"]
    assert unnamed(run(line).out, "hidden_size", "at least 1") == []


def test_what_a_sweep_leaves_out_has_a_reason(run: Run) -> None:
    [swept] = result(run, f"forecast {SIZES} --micro-batch-size 8 --gpu b200 --sweep sequence_length=2045,2046,2048").sweeps
    assert [list(point.not_possible) for point in swept.points] == [
        ["FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4"],
        ["MXFP8"],
        [],
    ]
    findings_of_recipes = [finding for finding in swept.findings if finding.code == "sweep-recipe-not-possible"]
    assert [finding.facts["places"] for finding in findings_of_recipes] == [["2045"], ["2046"]]
    assert "16384" in str(findings_of_recipes[1].facts["reason"])


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        ("--gpu b3000", "GPU 'b3000'", "b300, gb300"),
        ("", "no GPU is named", "--gpu b300,h200"),
        ("--gpu h200 --recipes nvfp4", "NVFP4 cannot run on h200", "FP8Current"),
        ("--gpu h200 --recipes nvfp5", "recipe 'nvfp5'", "NVFP4"),
        ("--gpu h200 --state hot", "--state 'hot' is not known", "sustained"),
        ("--gpu h200 --dp 0", "--dp must be at least 1, not 0", ""),
        ("--gpu h200 --dp 99999999", "--dp must be at most 131072", ""),
        ("--gpu h200 --sweep hidden_size=1:9:0", "a step of zero", "--sweep hidden_size=2k"),
        ("--gpu h200 --sweep hidden_size=9:1:1", "ends before it begins", "hidden_size=1:9:1"),
        ("--gpu h200 --sweep hiden_size=1,2", "is not a size that a sweep can vary", "hidden_size"),
        ("--gpu h200 --sweep hidden_size=a", "neither", "--sweep"),
        (f"--gpu h200 --sweep hidden_size={'9' * 5000}", "--hidden-size must be at most", ""),
        (f"--gpu h200 --sweep hidden_size=1:{'9' * 5000}:1", "has more than 100000 values", "larger steps"),
        ("--gpu h200 --sweep hidden_size=1:100000000:1", "more than 100000 values", "larger steps"),
        ("--gpu h200 --sweep tp=1,2 --sweep pp=1,2 --sweep cp=1,2", "not 3", "two"),
        ("--gpu h200 --sweep tp=1,2 --sweep tp=1,2", "twice", "another"),
        ("--gpu h200 --library vllm", "--library applies only to --gemms", "remove it"),
        ("--gpu h200 --gemms x.csv", "describes a model", "use only one"),
        ("--gpu h200 --sweep tp=1,2 --cache-weights", "--cache-weights applies to the linears", "remove it"),
        ("--gpu h200 --sweep tp=1,2 --pre-quantize", "--pre-quantize applies to the linears", "remove it"),
        ("--gpu h200 --sweep tp=1,2 --autocast-only", "--autocast-only applies to the linears", "remove it"),
        ("--gpu h200 --recipes fp8block --no-fp8-block", "--no-fp8-block skips it", "use only one"),
        ("--gpu h200 --pre-quantize --autocast-only", "exclude each other", "use only one"),
        ("--gpu h200 -o figure.txt", "is not a figure file", ".png"),
        ("--gpu h200 -o page.html", "is not a figure file", "gemmscope report"),
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
    assert unnamed(outcome.err, "hidden_size") == []


def test_nothing_named(run: Run) -> None:
    outcome = run("forecast --gpu h200")
    assert outcome.code == 2
    assert unnamed(outcome.err, "gemmscope models", "--config") == []


def test_a_recipe_only_one_of_two_gpus_runs(run: Run) -> None:
    outcome = run(f"{REFERENCE} --gpu b300,h200 --recipes nvfp4,fp8current")
    assert outcome.code == 0
    by_code = findings(run, f"{REFERENCE} --gpu b300,h200 --recipes nvfp4,fp8current")
    assert by_code["recipe-left-out"].facts["recipe"] == "NVFP4"


def test_bare_gemms_are_told_with_quantization_too(run: Run) -> None:
    """What is left with quantization is the answer, and what is slower is in it: not in a warning alone."""
    shown = document(result(run, "forecast --shapes 1024,4096x4096x16384 --gpu h200"))
    assert "4096x4096x16384 gains most over BF16 with quantization, as in training (autocast): " in shown.answer
    assert shown.answer.endswith(" 1024x1024x1024 is slower than BF16 in every recipe.")
    [because] = shown.because
    assert because.startswith("Upper bound: the GEMMs alone, pre-quantized, reach ")
    assert shown.summary is not None
    assert [row[1].text for row in shown.summary.rows] == ["autocast", "pre-quantized"] * 2
    slow = document(result(run, "forecast --shapes 1024 --gpu h200"))
    assert "every shape is slower than BF16 in every recipe with quantization" in slow.answer
    both = document(result(run, "forecast --shapes 4096 --gpu h200,b200"))
    assert both.answer.startswith("FORECAST: On H200")
    assert both.because[0].startswith("On B200")
    assert both.summary is not None
    assert [row[0].text for row in both.summary.rows] == ["h200", "h200", "b200", "b200"]
    assert list(document(result(run, "forecast --shapes 4096 --gpu h200 --autocast-only")).because) == []


def test_sweeps_of_two_gpus_answer_with_the_better_one(run: Run) -> None:
    line = f"forecast {SIZES} --gpu h200,b200 --sweep micro_batch_size=16,32 --sweep sequence_length=512,1024"
    shown = document(result(run, line))
    largest = max(speedup_of(point) for sweep in result(run, line).sweeps for point in sweep.points)
    assert f"{largest:.2f}x" in shown.answer
    assert "b200" in shown.answer
    assert shown.because[0].startswith("On h200, ")
    assert shown.summary is not None
    assert [column.name for column in shown.summary.columns] == ["GPU", "micro_batch_size", "512", "1024"]
    assert len(shown.summary.rows) == 4
