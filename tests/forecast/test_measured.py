"""A measured step of the user's own software takes the forecast to other GPUs and layouts (`--measured`)."""

from __future__ import annotations

import gzip
import json
from math import log
from pathlib import Path
from typing import Any

import pytest

from support.command import Run, run

__all__ = ["run"]  # the fixture
STEP = Path(__file__).parents[2] / "docs" / "measured" / "h200_llama_step.json.gz"
JOB = "forecast --preset llama-3.2-1b --micro-batch-size 8 --sequence-length 4k --json -"


def of_forecast(run: Run, arguments: str, recipe: str = "BF16") -> dict[str, Any]:
    outcome = run(f"{JOB} {arguments}")
    assert outcome.code == 0, outcome.err
    [time] = [time for time in json.loads(outcome.out)["gpus"][0]["step"]["recipes"] if time["recipe"] == recipe]
    return dict(time)


def test_a_measured_step_moves_the_forecast_to_it_and_narrows_the_bar(run: Run, tmp_path: Path) -> None:
    measured = tmp_path / "step.json"
    measured.write_bytes(gzip.decompress(STEP.read_bytes()))
    real = {time["recipe"]: time["step_ms"]["value"] for time in json.loads(measured.read_text())["step"]["recipes"]}
    for recipe in ("BF16", "FP8Delayed"):
        both = ("", f"--measured {measured}")
        before, after = (of_forecast(run, f"--gpu h200 {more}", recipe)["step_ms"]["value"] for more in both)
        assert abs(after / real[recipe] - 1) < 0.5 * abs(before / real[recipe] - 1)
    unnamed, known = (of_forecast(run, f"--gpu h100 --gpus 8 {more}")["step_ms"] for more in ("", f"--measured {measured}"))
    assert known["value"] < unnamed["value"]  # it is not eager PyTorch
    assert log(known["high"] / known["low"]) < 0.75 * log(unnamed["high"] / unnamed["low"])


def test_a_measured_step_of_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    measured = tmp_path / "step.json"
    measured.write_bytes(gzip.decompress(STEP.read_bytes()))
    outcome = run(f"forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 4k --gpu h200 --measured {measured}")
    assert outcome.code == 2
    assert "is a step of another model (16 dense layers, hidden 2048" in outcome.err.replace("\n  ", " ")
    assert "gemmscope step --preset llama-3.1-8b --json step.json" in outcome.err


def test_a_measured_launch_time_takes_the_place_of_the_assumed_one(run: Run, tmp_path: Path) -> None:
    """The CPU of the user is another: its launch time was assumed within 40%."""
    job, measured = "--gpu h200 --micro-batch-size 1", tmp_path / "step.json"
    file = json.loads(gzip.decompress(STEP.read_bytes()))
    assumed = of_forecast(run, job)["host_ms"]
    [time] = [time for time in file["step"]["recipes"] if time["recipe"] == "BF16"]
    time["host_ms"] = {"value": 2 * assumed["value"], "low": 1.99 * assumed["value"], "high": 2.01 * assumed["value"]}
    measured.write_text(json.dumps(file))
    known = of_forecast(run, f"{job} --measured {measured}")["host_ms"]
    assert known["value"] / assumed["value"] == pytest.approx(2.0, rel=0.02)
    assert log(known["high"] / known["low"]) < 0.2 * log(assumed["high"] / assumed["low"])
