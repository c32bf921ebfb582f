"""`gemmscope step` as people type it, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.step.predict import StepRun
from gemmscope.step.results import StepResults
from gemmscope.store.stepfile import StepFile
from machines import NOTHING
from test_cli import Run, run

__all__ = ["run"]  # the fixture

SIZES = "--hidden-size 32 --intermediate-size 64 --num-attention-heads 2 --num-hidden-layers 5 --vocab-size 61"
SMALL = f"{SIZES} --micro-batch-size 1 --sequence-length 16 --device cpu"


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_step_on_the_cpu(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="steps need torch")
    budget = "--tokens 1e9 --gpus 8 --price 2.5 --observed-speedup 0.01"
    outcome = run(f"step {SMALL} --longest 1 --verify {budget} --json {tmp_path}/step.json --markdown {tmp_path}/step.md")
    assert outcome.code == 0, outcome.err
    assert "Predicted against the real model" in outcome.out
    assert "The whole run, without communication" in outcome.out
    assert "observed 0.01x against" in outcome.out
    assert "recommended: " in outcome.out
    file = StepFile.model_validate_json((tmp_path / "step.json").read_text())
    assert (file.depth, file.layers) == (5, 5)
    assert {variant.real for variant in file.variants} == {True, False}
    assert all(each.verified is not None and each.cost is not None for each in file.recipes)
    assert "| BF16 |" in (tmp_path / "step.md").read_text()


def test_ctrl_c_shows_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two rounds of each: the prediction so far, no verification, exit code 130."""

    def interrupt(self: StepRun) -> StepResults:
        for number in range(2):
            for variant in self.results.variants.values():
                burst = [10.0 + number] * 4
                self.results.take({"type": "samples", "times_ms": {variant.variant.name: burst}, "state": {}})
        raise KeyboardInterrupt

    monkeypatch.setattr(StepRun, "run", interrupt)
    outcome = run(f"step {SMALL} --verify")
    assert outcome.code == 130
    assert "interrupted: what was measured stands below" in outcome.out
    assert "10.50" in outcome.out
    assert "Predicted against the real model" not in outcome.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SMALL.replace("--device cpu", ""), "there is no NVIDIA GPU here"),
        (f"{SMALL} --recipes fp8current", "FP8Current cannot be measured here"),
        (f"{SMALL} --tokens 1e9", "a run's cost needs --tokens and --gpus"),
        (f"{SMALL} --tokens 0 --gpus 8", "no number of tokens"),
        (f"{SMALL} --observed-speedup 0", "is no speedup"),
        (f"{SMALL} --precision 2", "is no share"),
        (f"{SMALL} --json /no/such/folder/x.json", "cannot be written"),
        ("--device cpu", "no model is named"),
    ],
)
def test_bad_input(run: Run, options: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: NOTHING)
    outcome = run(f"step {options}")
    assert outcome.code == 2
    assert message in outcome.err
