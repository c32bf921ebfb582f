"""`gemmscope calibrate`: measurements change the forecast of this GPU and of no other, and damaged files give one message."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.bench.campaign import LinearCampaign
from gemmscope.bench.choose import Choice
from gemmscope.choices import MODES
from gemmscope.commands import calibrate as calibrating
from gemmscope.engine.campaign import LocalWorkers
from gemmscope.engine.journal import RecordedRun, open_journal
from gemmscope.engine.messages import Health, Hello
from gemmscope.errors import UserError
from gemmscope.forecast.calibration import (
    STACKS,
    Calibration,
    OtherChip,
    gemm_factors,
    load,
    place,
    quantize_factors,
    save,
    shipped,
)
from gemmscope.forecast.linear_results import forecast_linears
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.step_estimate import IDLE
from gemmscope.gpu.environment import Environment
from gemmscope.gpu.specs import gpu
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.options.measuring import CalibrateOptions
from gemmscope.parts import StepPart
from gemmscope.progress import QUIET
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.linears import Linears
from gemmscope.workload.cases import Case
from gemmscope.workload.derive import derive
from support.bench_results import MODEL, RECIPES, record, recorded_linears
from support.command import Run, run
from support.machines import machine
from support.workers import forked_workers

__all__ = ["forked_workers", "run"]  # the fixtures

Pretend = Callable[[Environment], list[LinearCampaign]]

LINE = (
    "forecast --hidden_size 4096 --intermediate_size 16384 --num_attention_heads 32 --num_hidden_layers 24 "
    "--micro_batch_size 31 --sequence_length 512"
)


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Simulate a machine with an H200: campaigns are filled with kernels recorded there, and returned in a list."""
    ran: list[LinearCampaign] = []

    def measured(campaign: LinearCampaign) -> None:
        ran.append(campaign)
        record(campaign.results)
        hello = campaign.results.hello
        campaign.results.take(Hello(hello.versions, {**hello.device, "node": "node03", "uuid": "GPU-1"}))
        campaign.results.take(Health({"corrected_errors": 3}))

    def call(machine_facts: Environment) -> list[LinearCampaign]:
        monkeypatch.setattr("gemmscope.commands.calibrate.environment", lambda: machine_facts)
        monkeypatch.setattr("gemmscope.bench.choose.missing_package", lambda _: "")
        monkeypatch.setattr(LinearCampaign, "run", measured)
        return ran

    return call


def forecast(calibration: Calibration | None = None) -> Linears:
    return forecast_linears(Forecaster(gpu("h200"), "sustained", measured=calibration), MODEL, RECIPES, MODES)


def calibration(**how: Any) -> Calibration:
    seen, expected = recorded_linears(MODEL, **how), forecast()
    return Calibration("h200", "NVIDIA H200", gemm_factors(seen, expected, gpu("h200")), quantize_factors(seen, expected))


def test_a_calibrated_forecast_is_what_was_measured() -> None:
    seen, calibrated = recorded_linears(MODEL), forecast(calibration())
    for name in RECIPES:
        for mode in MODES:
            real, forecasted = seen.total(name, mode), calibrated.total(name, mode)
            assert real is not None
            assert forecasted is not None
            # the two modes were recorded at clocks that differ by a tenth; factors come from the GEMMs alone
            near = 0.03 if mode == "pre-quantized" else 0.12
            assert forecasted.total_ms.value == pytest.approx(real.total_ms.value, rel=near)


def test_a_slower_gpu_makes_a_slower_forecast() -> None:
    plain, slow = calibration(), calibration(slower={"FP8Current": 1.5})
    assert slow.gemms["fp8"]["fprop"] == pytest.approx(1.5 * plain.gemms["fp8"]["fprop"], rel=0.01)
    assert slow.gemms["bf16"] == pytest.approx(plain.gemms["bf16"])


def test_saved_and_loaded() -> None:
    assert load("h200") is None
    saved = calibration()
    save(saved)
    assert load("h200") == saved
    assert load("b200") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is a damaged calibration"),
        ("[]", "is a damaged calibration"),
        ("{}", "is a damaged calibration"),
        ('{"version": 7}', "of version 7, not 3"),
        ('{"version": 2, "products": {}, "rows": {}}', "of version 2, not 3"),
        ('{"version": 3}', "is a damaged calibration"),
        (
            '{"version": 3, "gpu": "h200", "device": "", "gemms": {}, "quantize": {}, "parts": {"GEMMs": 1.0}}',
            "no calibrated part 'GEMMs'",
        ),
        ('{"version": 3, "gpu": "h200", "device": "", "gemms": {}, "quantize": {}, "rows": {}}', "Unexpected"),
        (
            '{"version": 3, "gpu": "h200", "device": "", "gemms": {"bf16": {"fprop": 99}}, "quantize": {}}',
            "less than or equal to 5",
        ),
        ('{"version": 3, "gpu": "h200", "device": "", "gemms": 3, "quantize": {}}', "is a damaged calibration"),
        ('{"version": 3, "gpu": "h200", "device": "", "gemms": {"bf16": {"fprop": "1.0"}}, "quantize": {}}', "valid number"),
        ('{"version": 3, "gpu": "h200", "device": "", "gemms": {"bf16": {"fprop": true}}, "quantize": {}}', "valid number"),
        (
            '{"version": 3, "gpu": "h200", "device": "", "gemms": {"bf16": {"fprop": NaN}}, "quantize": {}}',
            "finite number",
        ),
        (
            '{"version": 3, "gpu": "h200", "device": "", "gemms": {"bf16": {"fprop": -1.0}}, "quantize": {}}',
            "greater than or equal to 0.2",
        ),
        ('{"version": 3, "gpu": "h200", "device": "", "gemms": {"int3": {"fprop": 1.0}}, "quantize": {}}', "no format 'int3'"),
        (
            '{"version": 3, "gpu": "h200", "device": "", "gemms": {"bf16": {"sideways": 1.0}}, "quantize": {}}',
            "'fprop', 'dgrad' or 'wgrad'",
        ),
        ('{"version": 3, "gpu": "h200", "device": "", "gemms": {}, "quantize": {"FP9": 1.0}}', "recipe 'FP9'"),
        ('{"version": 3, "gpu": "h200", "device": "", "gemms": {"bf16": [1]}, "quantize": {}}', "should be an object"),
        ('{"version": 3, "gpu": "b200", "device": "", "gemms": {}, "quantize": {}}', "it is of 'b200', not of 'h200'"),
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


def own_findings(run: Run, line: str) -> dict[str, Any]:
    forecast = ForecastResult.model_validate_json(run(f"{line} --json -").out)
    return {finding.code: finding for part in (*forecast.gpus, *forecast.sweeps) for finding in part.findings}


def test_the_command(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"attention": 2.2, "GEMMs": 9.0}, {"attention": 2.0, "GEMMs": 9.0}
    monkeypatch.setattr("gemmscope.commands.calibrate._CalibrationRun._step", lambda *_: parts)
    plain = run(f"{LINE} --gpu h200 --json -").out
    pretend(machine())
    outcome = run("calibrate")
    assert outcome.code == 0, outcome.err
    for row in ("bf16 GEMMs, sustained, fprop", "bf16 GEMMs, burst, fprop", "quantization, FP8Current"):
        assert row in outcome.out
    assert json.loads(place("h200").read_text())["device"] == "NVIDIA H200"
    saved = load("h200")
    assert saved is not None
    assert saved.parts == {"attention": 1.1}
    assert (saved.node, saved.uuid, saved.health) == ("node03", "GPU-1", {"corrected_errors": 3})
    calibrated = run(f"{LINE} --gpu h200 --json -").out
    assert json.loads(plain)["gpus"][0]["linears"]["totals"] != json.loads(calibrated)["gpus"][0]["linears"]["totals"]
    assert own_findings(run, f"{LINE} --gpu h200")["calibrated-here"].facts["device"] == "NVIDIA H200"
    sweep = LINE.replace("--micro_batch_size 31", "") + " --gpu h200 --sweep micro_batch_size=1,2"
    assert "calibrated-here" in own_findings(run, sweep)


@pytest.mark.parametrize("choice", ["--device cpu", "--backend cpu"])
def test_a_cpu_cannot_be_calibrated(run: Run, choice: str) -> None:
    outcome = run(f"calibrate {choice}")
    assert outcome.code == 2
    assert f"remove {choice}" in outcome.err


def test_without_a_gpu_it_advises_nothing_that_it_refuses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcome = run("calibrate")
    assert outcome.code == 2
    assert "there is no NVIDIA GPU here to calibrate" in outcome.err
    assert "cpu" not in outcome.err


def test_what_could_not_be_measured_is_not_written(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(machine())
    monkeypatch.setattr(LinearCampaign, "run", lambda *_, **__: None)
    outcome = run("calibrate")
    assert outcome.code == 1
    assert load("h200") is None


def test_a_place_that_cannot_be_written_is_said_first(
    run: Run, pretend: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before measuring starts, not minutes later."""
    ran = pretend(machine())
    (tmp_path / "file").write_text("")
    for folder, why in ((tmp_path / "file", "Not a directory"), (tmp_path / "config", "no permission")):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        outcome = run("calibrate")
        assert outcome.code == 2
        assert f"h200.json cannot be written: {why}" in outcome.err
    assert not ran


def test_single_gemms_are_calibrated(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("m,k,n,format,layout\n8192,4096,4096,bf16,tn\n8192,4096,4096,bf16,nn\n")
    line = f"forecast --gpu h200 --gemms {tmp_path}/g.csv"

    def times(options: str = "") -> list[float]:
        return [float(row["gemm_ms"]) for row in csv.DictReader(io.StringIO(run(line + options).out))]

    plain, rested = times(), times(" --state burst")
    save(Calibration("h200", "NVIDIA H200", {"bf16": {"fprop": 1.5}}, {}))
    assert times() == pytest.approx([1.5 * plain[0], plain[1]], rel=1e-3)
    assert "Calibrated on NVIDIA H200" in run(line).err
    assert times(" --state burst") == pytest.approx([1.5 * rested[0], rested[1]], rel=0.02)  # nothing nearer is known
    save(Calibration("h200", "NVIDIA H200", {}, {}, burst={"bf16": {"fprop": 0.9}}))
    assert times(" --state burst") == pytest.approx([0.9 * rested[0], rested[1]], rel=0.005)


def test_no_factor_makes_a_gemm_beat_the_chip(run: Run, tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text("m,k,n,format\n8192,4096,4096,bf16\n")
    save(Calibration("h200", "NVIDIA H200", {"bf16": {"fprop": 0.3}}, {}))
    least = 2 * 8192 * 4096 * 4096 / (989 * 1e9)
    [row] = csv.DictReader(io.StringIO(run(f"forecast --gpu h200 --gemms {tmp_path}/g.csv").out))
    assert float(row["gemm_ms"]) == pytest.approx(least, rel=1e-4)
    forecaster = Forecaster(gpu("h200"), "sustained", measured=Calibration("h200", "", {"bf16": {"fprop": 0.3}}, {}))
    assert forecaster.linear(Case("a", 8192, 4096, 4096), "BF16").gemms["fprop"].value == pytest.approx(least)


FACTORS = st.fixed_dictionaries({pass_name: st.floats(0.3, 3.0) for pass_name in ("fprop", "dgrad", "wgrad")})


@settings(max_examples=60, deadline=None)
@given(st.none() | FACTORS, st.none() | FACTORS, st.integers(4, 400), st.integers(4, 400))
def test_no_calibration_makes_sustained_faster_than_a_burst(
    sustained: dict[str, float] | None, burst: dict[str, float] | None, tokens: int, outputs: int
) -> None:
    known = [{"bf16": factor, "fp8-block": factor} if factor else {} for factor in (sustained, burst)]
    model = from_hyperparameters(
        hidden_size=1024, intermediate_size=16 * outputs, num_attention_heads=8, num_hidden_layers=2, vocab_size=512
    )
    run = RunSpec(1, 16 * tokens)
    workload, measured = derive(model, run), Calibration("h200", "", known[0], {}, known[1])
    slow, fast = (
        StepForecast(Forecaster(gpu("h200"), state, measured=measured), model, run, workload) for state in ("sustained", "burst")
    )
    for name in ("BF16", "FP8Block"):
        parts, rested = slow.step(name).parts, fast.step(name).parts
        assert all(parts[part].value >= rested[part].value * (1 - 1e-9) for part in parts if part != IDLE)
        for case in slow.cases:
            pairs = zip(*(setup.forecaster.linear(case, name).gemms.values() for setup in (slow, fast)), strict=True)
            assert all(one.value >= other.value * (1 - 1e-9) for one, other in pairs)


def test_what_was_not_measured_keeps_its_uncertainty() -> None:
    """Eight dense linears of usual sizes say little about grouped GEMMs or much larger sizes."""
    calibrated = shipped("h200")
    assert calibrated is not None
    forecaster = Forecaster(gpu("h200"), "sustained", measured=Calibration(**vars(calibrated)))
    dense, grouped, huge = (
        forecaster.linear(case, "BF16").all_gemms()
        for case in (
            Case("a", 8192, 4096, 4096),
            Case("b", 8192, 4096, 4096, rows=(1024,) * 8),
            Case("c", 1_000_000, 4096, 4096),
        )
    )
    assert 0.02 < dense.shared <= 0.03
    other = Forecaster(gpu("h200"), "sustained", measured=calibrated)
    assert other.linear(Case("a", 8192, 4096, 4096), "BF16").all_gemms().shared > dense.shared
    assert grouped.shared > 0.1
    assert huge.shared > 0.1


def test_the_shipped_one_is_checked_alike(monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    place = tmp_path / "coefficients" / "calibrated"
    place.mkdir(parents=True)
    monkeypatch.setattr("gemmscope.forecast.calibration.files", lambda _: tmp_path)
    for text, says in (("{", "is a damaged calibration"), ('{"version": 1}', "is a calibration of version 1, not 3")):
        (place / "h200.json").write_text(text)
        outcome = run(f"{LINE} --gpu h200")
        assert outcome.code == 2
        assert f"calibrated/h200.json {says}" in outcome.err
        assert len(outcome.err.splitlines()) <= 2


def test_what_is_implausible_is_dropped(run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One implausible part must not make the file unreadable."""
    parts = {"attention": 22.0, "optimizer": 2.2}, {"attention": 2.0, "optimizer": 2.0}
    monkeypatch.setattr("gemmscope.commands.calibrate._CalibrationRun._step", lambda *_: parts)
    pretend(machine())
    outcome = run("calibrate")
    assert outcome.code == 0
    assert "attention: measured/forecast = 11.000 is implausible" in outcome.err
    loaded = load("h200")
    assert loaded is not None
    assert loaded.parts == {"optimizer": 1.1}


def session(backend: str = "cpu") -> Any:
    choice = Choice(backend, ["BF16"], ["autocast"])
    return calibrating._CalibrationRun(
        choice, CalibrateOptions(), gpu("h200"), RecordedRun(open_journal(), 1), LocalWorkers(), QUIET
    )


def test_cached_weights_are_cached_on_both_sides() -> None:
    """Otherwise the forecast would quantize weights that the measurement does not."""
    for caches in (True, False):
        seen = recorded_linears(MODEL, about={"cache_weights": caches})
        op = session().forecast(seen, "sustained").op_time(MODEL[0].op, "FP8Current", "autocast")
        assert op is not None
        assert ("W" in op.quantize_ms) != caches


def test_a_calibrated_part_changes_the_step() -> None:
    model, shape = STACKS[0]
    workload = derive(model, shape)

    def attention(parts: dict[StepPart, float]) -> float:
        forecaster = Forecaster(gpu("h200"), "sustained", measured=Calibration("h200", "", {}, {}, parts=parts))
        return StepForecast(forecaster, model, shape, workload).step("BF16").parts["attention"].value

    assert attention({"attention": 1.5}) == pytest.approx(1.5 * attention({}), rel=0.005)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.3, 3.0), st.sampled_from(["gemms", "casts", "parts"]), st.floats(0.03, 0.4))
def test_a_calibration_is_followed_within_3_percent_and_narrows_the_bar(factor: float, what: str, uncertainty: float) -> None:
    """Whatever the forecast was sure of: where the measurement contradicts it, the measurement is right."""
    known = Calibration("h200", "", {}, {}).multiplier(factor, what, uncertainty)
    assert known.factor == pytest.approx(factor, rel=0.03)
    assert known.half_width < 0.05
    assert OtherChip("h200", "", {}, {}).multiplier(factor, what, uncertainty).half_width == pytest.approx(uncertainty)


@pytest.mark.usefixtures("forked_workers")
def test_a_step_is_run_and_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, kernels are not profiled: the parts stay empty and calibrate nothing."""
    pytest.importorskip("torch")
    monkeypatch.setattr(calibrating, "STEPS_PRECISION", 0.9)
    monkeypatch.setattr(calibrating, "STEPS_LIMIT_S", 1.0)
    model = from_hyperparameters(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
    measured, expected = session()._step(Calibration("h200", "", {}, {}), model, RunSpec(micro_batch_size=1, sequence_length=16))
    assert measured == {}
    assert expected["attention"] > 0


def test_without_a_gpu(run: Run) -> None:
    outcome = run("calibrate")
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) <= 2
