"""`gemmscope numerics` as people type it. A stand-in computes the errors: tests/numerics checks the real worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemmscope as gs
from gemmscope.commands import numerics
from gemmscope.numerics.evaluation.requests import (
    REQUEST,
    ComputedErrors,
    ErrorsRequest,
    TensorsOpened,
    TensorSource,
    from_line,
    to_line,
)
from gemmscope.results.numerics import NumericsResult
from support.command import Run, run
from support.forecast_files import several_gpus
from support.numerics_files import linear_errors, numerics_result
from support.refusals import refused, unnamed
from support.step_files import recorded_step

__all__ = ["run"]  # the fixture

MODEL = "--preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8k"


def opened(count: int = 21, **facts: Any) -> TensorsOpened:
    """What the worker says of its tensors."""
    given: dict[str, Any] = {"model_name": "", "steps": (), "tokens": None, "layers": 0} | facts
    return TensorsOpened(NumericsResult(command="", **given, device="cpu", versions={}), count)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[ErrorsRequest]:
    """Record the requests to the worker, and answer with the errors of a small model."""
    asked: list[ErrorsRequest] = []

    def compute(request: ErrorsRequest, progress: Callable[[int, int], None]) -> ComputedErrors:
        asked.append(request)
        assert from_line(REQUEST, to_line(REQUEST, request)) == request, "the worker gets the same"
        recipes = tuple(name for name in request.recipes if name != "BF16")
        facts = opened(source=request.source.kind, origin=request.source.origin, model_name="tiny", layers=3, tokens=512)
        progress(21, 21)
        return ComputedErrors(facts, 21, list(linear_errors(3, recipes)), complete=True)

    monkeypatch.setattr(numerics, "compute_errors", compute)
    monkeypatch.setattr(numerics, "read_recording", lambda _: None)  # these tests have no file
    return asked


def test_the_answer_with_speeds_and_a_bound(run: Run, requests: list[ErrorsRequest], tmp_path: Path) -> None:
    several_gpus().save(tmp_path / "f.json")
    outcome = run(f"numerics recording.safetensors --speed {tmp_path}/f.json --gpu b300 --bound 15% --json {tmp_path}/n.json")
    assert outcome.code == 0
    assert "Fastest with an error of at most 15.0%: NVFP4 with " in " ".join(outcome.out.split())
    assert requests[0].recipes == ("BF16", "FP8Current", "FP8Delayed", "FP8Block", "MXFP8", "NVFP4")
    written = json.loads((tmp_path / "n.json").read_text())
    assert (written["kind"], written["mixed"]["bound"], written["speed_of"]) == ("numerics", 0.15, "step")
    assert written["speed_file"].endswith("f.json")
    assert gs.read(tmp_path / "n.json").to_json() == (tmp_path / "n.json").read_text()


def test_a_gpu_is_forecast_for_the_model(run: Run, requests: list[ErrorsRequest]) -> None:
    outcome = run(f"numerics {MODEL} --synthetic outliers --recipes mxfp8,nvfp4 --gpu b200 --detail")
    assert outcome.code == 0
    assert outcome.out.startswith("SYNTHETIC")
    assert "FORECAST" in outcome.out
    assert requests[0].recipes == ("MXFP8", "NVFP4")
    assert (requests[0].source.kind, requests[0].source.origin) == ("synthetic", "outliers")
    assert list(requests[0].source.sizes) == ["QKV Proj", "Attn Out", "MLP Gate+Up", "MLP Down"]  # no head


def test_a_measured_step_gives_speeds(run: Run, requests: list[ErrorsRequest], tmp_path: Path) -> None:
    recorded_step("llama8b").save(tmp_path / "step.json")
    outcome = run(f"numerics --checkpoint weights --speed {tmp_path}/step.json --recipes fp8current,nvfp4 --csv -")
    assert outcome.code == 0
    assert requests[0].source == TensorSource("checkpoint", "weights")
    assert "FP8Current" in outcome.out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("numerics", "no tensors are given; give exactly one source of tensors"),
        ("numerics a.safetensors --checkpoint b", "a recording and --checkpoint are given"),
        ("numerics --synthetic outliers", "--synthetic outliers needs a model"),
        ("numerics --synthetic odd", "'odd' is not known"),
        ("numerics a --gpu b200", "--gpu b200 forecasts the speeds, which needs the model"),
        ("numerics a --gpu b999", "b999"),
        ("numerics a --speed nowhere.json", "nowhere.json"),
        ("numerics a --bound 5", "must be a percentage such as 3%"),
        ("numerics a --bound 0", "--bound must be between 0 and 1"),
        ("numerics a --recipes mxfp9", "unknown recipe 'mxfp9'"),
        ("numerics a --recipes ,", "--recipes is empty"),
        ("numerics a --backend torch", "'torch'"),
        ("numerics a --without rounding", "--without 'rounding' is not known"),
        ("numerics --checkpoint a --without hadamard", "--without hadamard needs a recording or SYNTHETIC tensors"),
        ("numerics a --without hadamard --backend torchao", "quantized by Transformer Engine"),
        ("numerics a --device tpu", "'tpu' is not known"),
        ("numerics a --seed -1", "--seed must be a whole number between 0 and"),
        ("numerics a --seed 99999999999999999999", "--seed must be a whole number between 0 and"),
        ("numerics a --micro-batch-size 1", "--micro-batch-size: these options need a model"),
        ("numerics a --json nowhere/n.json", "there is no folder nowhere"),
    ],
)
def test_bad_input_is_one_message(run: Run, requests: list[ErrorsRequest], line: str, message: str) -> None:
    outcome = run(line)
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())
    assert not outcome.out
    assert not requests


def test_a_file_that_is_no_recording(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not tensors")
    for name, message in (("notes.txt", "notes.txt"), ("nowhere.safetensors", "cannot be read")):
        outcome = run(f"numerics {tmp_path}/{name}")
        assert outcome.code == 2
        assert message in outcome.err
        assert "gemmscope.record_tensors" in outcome.err


def test_an_input_is_never_overwritten(run: Run, requests: list[ErrorsRequest], tmp_path: Path) -> None:
    (tmp_path / "r.safetensors").write_bytes(b"x")
    outcome = run(f"numerics {tmp_path}/r.safetensors --json {tmp_path}/r.safetensors")
    assert outcome.code == 2
    assert unnamed(outcome.err, f"--json {tmp_path}/r.safetensors") == []
    for checkpoint in (tmp_path, tmp_path / "r.safetensors", tmp_path / "model.safetensors.index.json"):
        outcome = run(f"numerics --checkpoint {checkpoint} --json {tmp_path}/r.safetensors")
        assert outcome.code == 2
        assert unnamed(outcome.err, f"--json {tmp_path}/r.safetensors") == []
    assert run(f"numerics --checkpoint {tmp_path}/r.safetensors --json {tmp_path}/n.json").code == 0
    assert run(f"numerics --checkpoint {tmp_path}/r.safetensors --json {tmp_path}/n.json").code == 0  # its own earlier result


def test_nothing_computed_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [
        one.model_copy(update={"passes": (), "failure": "all of its values are NaN"}) for one in linear_errors(1, ("MXFP8",))
    ]
    tensors = opened(7, source="recording", origin="r")
    monkeypatch.setattr(numerics, "compute_errors", lambda *_: ComputedErrors(tensors, 7, failed, complete=True))
    monkeypatch.setattr(numerics, "read_recording", lambda _: None)
    outcome = run("numerics r")
    assert outcome.code == 1
    assert "nothing could be computed" in outcome.out
    assert "all of its values are NaN" in outcome.out


def test_python_gives_the_same(run: Run, requests: list[ErrorsRequest], tmp_path: Path) -> None:
    result = gs.quantization_errors("r.safetensors", recipes="mxfp8, nvfp4", speed=several_gpus(), gpu="b300", bound=0.1)
    assert result.mixed is not None
    assert result.command.startswith("gemmscope.quantization_errors('r.safetensors', ")
    run("numerics r.safetensors --recipes mxfp8,nvfp4")
    assert requests[0] == requests[1]
    job = gs.load("llama-3.1-8b").on(1, 8192)
    assert job.numerics(synthetic="normal", recipes=["mxfp8"], gpu="b200").speed_origin == "forecast"
    with refused("speeds"):
        gs.quantization_errors("r.safetensors", speeds="x.json")
    with refused("bound", 0, 1):
        gs.quantization_errors("r.safetensors", bound=5.0)
    assert gs.quantization_errors("r.safetensors", bound="10%").mixed.bound == 0.1  # type: ignore[union-attr]
    for wrong, message in (
        ({"bound": "much"}, "bound must be between 0 and 1, not 'much'"),
        ({"seed": 1.5}, "seed must be a whole number between"),
        ({"speed": 3}, "speed must be a result or a run file, not 3"),
    ):
        with pytest.raises(gs.UserError, match=message):
            gs.quantization_errors("r.safetensors", **wrong)


def test_a_mix_is_read_from_runs_of_numerics_alone(run: Run, tmp_path: Path) -> None:
    several_gpus().save(tmp_path / "f.json")
    outcome = run(f"forecast {MODEL} --gpu b300 --mix {tmp_path}/f.json")
    assert outcome.code == 2
    assert unnamed(outcome.err, "f.json", "numerics", "'forecast'") == []


def test_a_report_page_of_it(run: Run, tmp_path: Path) -> None:
    numerics_result(4, bound=0.12).save(tmp_path / "n.json")
    outcome = run(f"report {tmp_path}/n.json -o {tmp_path}/page.html")
    assert outcome.code == 0
    assert "Fastest with an error" in outcome.out
    assert "Speed and error" in (tmp_path / "page.html").read_text()
