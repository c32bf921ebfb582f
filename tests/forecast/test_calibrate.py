"""`gemmscope calibrate`: what is measured moves the forecast of this GPU, and of no other; damaged files are one message."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.bench_results import MODEL, RECIPES, recorded_results
from gemmscope.cli.calibrate import _forecast, _step
from gemmscope.cli.choose import Choice
from gemmscope.errors import UserError
from gemmscope.forecast.calibration import STACKS, Calibration, compare, load, place, save, shipped
from gemmscope.forecast.findings import ForecastFindings
from gemmscope.forecast.linears import Adjustment, Forecaster
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import gpu
from gemmscope.measure.findings import Findings
from gemmscope.workload.cases import MODES, Case
from gemmscope.model.flags import from_hyperparameters
from gemmscope.model.spec import RunSpec
from gemmscope.workload.derive import derive
from support.machines import machine
from test_bench_cli import Pretend, pretend
from test_cli import Run, run

__all__ = ["pretend", "run"]  # fixtures

LINE = (
    "forecast --hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def findings(**how: object) -> Findings:
    return Findings(recorded_results(MODEL, **how), RECIPES, list(MODES))  # type: ignore[arg-type]


def forecast(calibration: Calibration | None = None) -> ForecastFindings:
    measured = calibration.adjustment() if calibration else None
    return ForecastFindings(Forecaster(gpu("h200"), "sustained", measured=measured), MODEL, RECIPES, list(MODES))


def test_a_calibrated_forecast_is_what_was_measured() -> None:
    seen = findings()
    calibrated = forecast(compare(seen, forecast()))
    for name in RECIPES:
        for mode in MODES:
            real, found = seen.total(name, mode), calibrated.total(name, mode)
            assert real is not None
            assert found is not None
            # the two modes were recorded at clocks that differ by a tenth; factors come from the products alone
            assert found.value == pytest.approx(real.value, rel=0.03 if mode == "pre-quantized" else 0.12)


def test_a_slower_chip_makes_a_slower_forecast() -> None:
    plain, slow = compare(findings(), forecast()), compare(findings(slower={"FP8Current": 1.5}), forecast())
    assert slow.products["fp8"]["fprop"] == pytest.approx(1.5 * plain.products["fp8"]["fprop"], rel=0.01)
    assert slow.products["bf16"] == pytest.approx(plain.products["bf16"])


def test_saved_and_loaded() -> None:
    assert load("h200") is None
    found = compare(findings(), forecast())
    save(found)
    assert load("h200") == found
    assert load("b200") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is a damaged calibration"),
        ("[]", "is a damaged calibration"),
        ("{}", "is a damaged calibration"),
        ('{"version": 7}', "of version 7, not 2"),
        ('{"version": 2}', "is a damaged calibration"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {"bf16": {"fprop": 99}}, "quantize": {}}', "a factor of 99"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": 3, "quantize": {}}', "is a damaged calibration"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {"bf16": {"fprop": "1.0"}}, "quantize": {}}', "no number"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {"bf16": {"fprop": true}}, "quantize": {}}', "no number"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {"bf16": {"fprop": NaN}}, "quantize": {}}', "a factor of nan"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {"bf16": {"fprop": -1.0}}, "quantize": {}}', "a factor of -1"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {"int3": {"fprop": 1.0}}, "quantize": {}}', "no format 'int3'"),
        (
            '{"version": 2, "gpu": "h200", "device": "", "products": {"bf16": {"sideways": 1.0}}, "quantize": {}}',
            "no pass 'sideways'",
        ),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {}, "quantize": {"FP9": 1.0}}', "no recipe 'FP9'"),
        ('{"version": 2, "gpu": "h200", "device": "", "products": {"bf16": [1]}, "quantize": {}}', "is no table"),
        ('{"version": 2, "gpu": "b200", "device": "", "products": {}, "quantize": {}}', "it is of 'b200', not of 'h200'"),
    ],
)
def test_damaged_files_are_one_message(run: Run, text: str, says: str) -> None:
    place("h200").parent.mkdir(parents=True)
    place("h200").write_text(text)
    with pytest.raises(UserError, match=says):
        load("h200")
    outcome = run(f"{LINE} --gpu h200")
    assert outcome.code == 2
    assert says in outcome.err
    assert "gemmscope calibrate again" in outcome.err
    assert run(f"{LINE} --gpu b200").code == 0


def test_the_command(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"attention": 2.2, "products": 9.0}, {"attention": 2.0, "products": 9.0}
    monkeypatch.setattr("gemmscope.cli.calibrate._step", lambda *_: rows)
    plain = run(f"{LINE} --gpu h200 --json -").out
    pretend(machine())
    outcome = run("calibrate")
    assert outcome.code == 0, outcome.err
    assert "bf16, sustained: measured over forecast: fprop" in outcome.err
    assert "bf16, burst: measured over forecast: fprop" in outcome.err
    assert "quantizing for FP8Current" in outcome.err
    assert "attention: measured over forecast: 1.100" in outcome.err
    assert json.loads(place("h200").read_text())["device"] == "NVIDIA H200"
    calibrated = run(f"{LINE} --gpu h200 --json -").out
    assert json.loads(plain)["gpus"][0]["totals"] != json.loads(calibrated)["gpus"][0]["totals"]
    assert "calibrated on NVIDIA H200" in run(f"{LINE} --gpu h200").out
    assert (
        "calibrated on NVIDIA H200"
        in run(f"{LINE.replace('--micro_batch_size 31', '')} --gpu h200 --sweep micro_batch_size=1,2").out
    )
    assert run("calibrate --device cpu").code == 2


def test_a_place_that_cannot_be_written_is_said_first(
    run: Run, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after minutes of measuring."""
    ran = pretend(machine())
    (tmp_path / "file").write_text("")
    for folder, why in ((tmp_path / "file", "Not a directory"), (tmp_path / "config", "no permission")):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        outcome = run("calibrate")
        assert outcome.code == 2
        assert f"h200.json cannot be written: {why}" in outcome.err
    assert not ran


def test_single_products_are_calibrated(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("m,k,n,format,layout\n8192,4096,4096,bf16,tn\n8192,4096,4096,bf16,nn\n")
    line = f"forecast --gpu h200 --gemms {tmp_path}/g.csv"

    def times(options: str = "") -> list[float]:
        return [float(row["gemm_ms"]) for row in csv.DictReader(io.StringIO(run(line + options).out))]

    plain, rested = times(), times(" --state burst")
    save(Calibration("h200", "NVIDIA H200", {"bf16": {"fprop": 1.5}}, {}))
    assert times() == pytest.approx([1.5 * plain[0], plain[1]], rel=1e-4)
    assert "h200: calibrated on NVIDIA H200" in run(line).err
    assert times(" --state burst") == pytest.approx([1.5 * rested[0], rested[1]], rel=1e-4)  # nothing nearer is known
    save(Calibration("h200", "NVIDIA H200", {}, {}, burst={"bf16": {"fprop": 0.9}}))
    assert times(" --state burst") == pytest.approx([0.9 * rested[0], rested[1]], rel=1e-4)


def test_no_factor_makes_a_product_beat_the_chip(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("m,k,n,format\n8192,4096,4096,bf16\n")
    save(Calibration("h200", "NVIDIA H200", {"bf16": {"fprop": 0.3}}, {}))
    least = 2 * 8192 * 4096 * 4096 / (989 * 1e9)
    [row] = csv.DictReader(io.StringIO(run(f"forecast --gpu h200 --gemms {tmp_path}/g.csv").out))
    assert float(row["gemm_ms"]) == pytest.approx(least, rel=1e-4)
    forecaster = Forecaster(gpu("h200"), "sustained", measured=Adjustment({"bf16": {"fprop": 0.3}}, {}))
    assert forecaster.linear(Case("a", 8192, 4096, 4096), "BF16").products["fprop"].value == pytest.approx(least)


FACTORS = st.fixed_dictionaries({each: st.floats(0.3, 3.0) for each in ("fprop", "dgrad", "wgrad")})


@settings(max_examples=60, deadline=None)
@given(st.none() | FACTORS, st.none() | FACTORS, st.integers(4, 400), st.integers(4, 400))
def test_no_calibration_makes_sustained_faster_than_a_burst(
    sustained: dict[str, float] | None, burst: dict[str, float] | None, tokens: int, outputs: int
) -> None:
    known = [{"bf16": each, "fp8-block": each} if each else {} for each in (sustained, burst)]
    model = from_hyperparameters(
        hidden_size=1024, intermediate_size=16 * outputs, num_attention_heads=8, num_hidden_layers=2, vocab_size=512
    )
    run = RunSpec(1, 16 * tokens)
    workload, measured = derive(model, run), Adjustment(known[0], {}, {}, known[1])
    slow, fast = (
        StepForecast(Forecaster(gpu("h200"), state, measured=measured), model, run, workload) for state in ("sustained", "burst")
    )
    for name in ("BF16", "FP8Block"):
        rows, rested = slow.step(name).rows, fast.step(name).rows
        assert all(rows[row].value >= rested[row].value * (1 - 1e-9) for row in rows)
        for case in slow.cases:
            pairs = zip(*(each.forecaster.linear(case, name).products.values() for each in (slow, fast)), strict=True)
            assert all(one.value >= other.value * (1 - 1e-9) for one, other in pairs)


def test_what_was_not_measured_keeps_its_doubt() -> None:
    """Eight dense linears of usual sizes say little of grouped products and of sizes far beyond them."""
    found = shipped("h200")
    assert found is not None
    forecaster = Forecaster(gpu("h200"), "sustained", measured=found.adjustment())
    dense, grouped, huge = (
        forecaster.linear(case, "BF16").product()
        for case in (
            Case("a", 8192, 4096, 4096),
            Case("b", 8192, 4096, 4096, rows=(1024,) * 8),
            Case("c", 1_000_000, 4096, 4096),
        )
    )
    assert dense.shared == pytest.approx(0.03)
    other = Forecaster(gpu("h200"), "sustained", measured=found.adjustment(other_chip=True))
    assert other.linear(Case("a", 8192, 4096, 4096), "BF16").product().shared > dense.shared
    assert grouped.shared > 0.1
    assert huge.shared > 0.1


def test_the_shipped_one_is_checked_alike(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    place = tmp_path / "coefficients" / "calibrated"
    place.mkdir(parents=True)
    monkeypatch.setattr("gemmscope.forecast.calibration.files", lambda _: tmp_path)
    for text, says in (("{", "is a damaged calibration"), ('{"version": 1}', "is a calibration of version 1, not 2")):
        (place / "h200.json").write_text(text)
        outcome = run(f"{LINE} --gpu h200")
        assert outcome.code == 2
        assert f"calibrated/h200.json {says}" in outcome.err
        assert len(outcome.err.splitlines()) <= 2


def test_what_cannot_be_is_left_out(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row that went wrong must not make the file unreadable."""
    rows = {"attention": 22.0, "optimizer": 2.2}, {"attention": 2.0, "optimizer": 2.0}
    monkeypatch.setattr("gemmscope.cli.calibrate._step", lambda *_: rows)
    pretend(machine())
    outcome = run("calibrate")
    assert outcome.code == 0
    assert "left out, no GPU is so far from its forecast: attention: 11.000" in outcome.err
    found = load("h200")
    assert found is not None
    assert found.rows == {"optimizer": 1.1}


def test_cached_weights_are_cached_on_both_sides() -> None:
    """Else the forecast would quantize weights that the measurement does not."""
    for caches in (True, False):
        seen = Findings(recorded_results(MODEL), RECIPES, list(MODES), cache_weights=caches)
        cell = _forecast(seen, gpu("h200"), "sustained").cell(MODEL[0], "FP8Current", "autocast")
        assert cell is not None
        assert ("W" in cell.quantize_ms) != caches


def test_examples_stand_on_lines_of_their_own(run: Run) -> None:
    assert "  gemmscope calibrate\n" in run("calibrate --help").out


def test_a_calibrated_row_moves_the_step() -> None:
    model, shape = STACKS[0]
    workload = derive(model, shape)

    def attention(rows: dict[str, float]) -> float:
        forecaster = Forecaster(gpu("h200"), "sustained", measured=Adjustment({}, {}, rows))
        return StepForecast(forecaster, model, shape, workload).step("BF16").rows["attention"].value

    assert attention({"attention": 1.5}) == pytest.approx(1.5 * attention({}))


def test_a_step_is_run_and_forecast() -> None:
    """On the CPU, whose kernels are not seen: its rows stay empty, and calibrate nothing."""
    model = from_hyperparameters(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
    choice = Choice("cpu", ["BF16"], ["autocast"])
    none = Calibration("h200", "", {}, {})
    measured, forecast_rows = _step(choice, gpu("h200"), none, model, RunSpec(micro_batch_size=1, sequence_length=16))
    assert measured == {}
    assert forecast_rows["attention"] > 0


def test_without_a_gpu(run: Run) -> None:
    outcome = run("calibrate")
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) <= 2
