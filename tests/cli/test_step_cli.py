"""`gemmscope step` as people type it, on a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmscope.step.predict import StepRun
from gemmscope.step.recommend import Plan
from gemmscope.step.results import StepResults, Variant
from gemmscope.store.stepfile import StepFile
from support.machines import NOTHING
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


def test_smaller_batches(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="steps need torch")
    outcome = run(f"step {SMALL.replace('--micro-batch-size 1', '--micro-batch-size 2')} --longest 1 --break-even --json -")
    assert outcome.code == 0, outcome.err
    file = StepFile.model_validate_json(outcome.out)
    assert [(each.micro_batch_size, each.sequence_length) for each in file.break_even] == [(1, 16), (2, 16)]
    assert all(set(each.speedups) == {"FP32"} for each in file.break_even)


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 6, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_hugging_face_model_of_a_few_layers(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="its own class is built by transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sizes = "--micro-batch-size 1 --sequence-length 16 --device cpu"
    outcome = run(f"step --config {tmp_path}/config.json {sizes} --hugging-face --longest 1 --json {tmp_path}/step.json")
    assert outcome.code == 0, outcome.err
    assert "the whole 6 layers follow from stacks of 4 and 2" in outcome.out
    file = StepFile.model_validate_json((tmp_path / "step.json").read_text())
    assert {variant.depth for variant in file.variants} == {4, 2}
    assert not any(variant.failure for variant in file.variants)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SMALL, "needs a Hugging Face config"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --verify", "nothing to verify"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --tp 2", "cannot split them"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --recompute selective", "not attention alone"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --backend transformer_engine", "runs with torchao"),
    ],
)
def test_what_a_hugging_face_model_cannot(run: Run, tmp_path: Path, options: str, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 2}))
    outcome = run(f"step {options.format(tmp_path / 'config.json')} --hugging-face")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


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


def measured(run: StepRun, ms: Callable[[StepRun, Variant], float | None], rounds: int = 5) -> None:
    """Give a run its times: of each variant as `ms` says, None for one that was not reached."""
    for number in range(rounds):
        for result in run.results.variants.values():
            time = ms(run, result.variant)
            if time is not None:
                burst = {result.variant.name: [time * (1 + 0.001 * number)] * 4}
                run.results.take({"type": "samples", "times_ms": burst, "state": {}})


def test_ctrl_c_while_verifying_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model fitted with three layers only: no prediction of as many is begun, and what was predicted is recommended."""
    asked: list[tuple[bool, int]] = []

    def half(self: StepRun) -> StepResults:
        asked.append((self.real, self.plan.depth))
        if self.real:
            self.results = StepResults(self._variants(3), self.plan.depth)
        measured(self, lambda _, variant: {"BF16": 20.0, "FP32": 10.0}[variant.recipe])
        if self.real:
            raise KeyboardInterrupt
        return self.results

    monkeypatch.setattr(StepRun, "run", half)
    outcome = run(f"step {SMALL} --verify --break-even")
    assert outcome.code == 130
    assert asked == [(False, 5), (True, 5)]
    assert "interrupted after that" in outcome.out
    assert "recommended: use FP32 (2.00x" in outcome.out
    assert "On smaller batches" not in outcome.out


def test_ctrl_c_while_a_mixed_plan_is_tried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only BF16 was reached again: that does not make it the fastest."""

    def half(self: StepRun) -> StepResults:
        measured(
            self,
            lambda run, variant: None if run.mixed and variant.recipe == "FP32" else {"BF16": 2.0, "FP32": 1.0}[variant.recipe],
        )
        if self.mixed:
            raise KeyboardInterrupt
        return self.results

    monkeypatch.setattr(StepRun, "run", half)
    monkeypatch.setattr("gemmscope.step.recommend.candidate", lambda *_: Plan("FP32", ("mlp",)))
    outcome = run(f"step {SMALL}")
    assert outcome.code == 130
    assert "recommended: use FP32 (2.00x" in outcome.out


def test_a_real_model_that_fits_in_part(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is held against the prediction of as many layers, whose time counts as predicting, too."""

    def whole(self: StepRun) -> StepResults:
        if self.real:
            self.results = StepResults(self._variants(3), self.plan.depth)
        measured(self, lambda _, variant: {"BF16": 20.0, "FP32": 10.0}[variant.recipe] * variant.depth)
        self.seconds = 7.0
        return self.results

    monkeypatch.setattr(StepRun, "run", whole)
    outcome = run(f"step {SMALL} --verify --json {tmp_path}/step.json")
    assert outcome.code == 0
    file = StepFile.model_validate_json((tmp_path / "step.json").read_text())
    assert file.seconds == {"predicting": 14.0, "verifying": 7.0}
    assert [each.verified.depth for each in file.recipes if each.verified] == [3, 3]


def test_what_the_stack_leaves_out_is_no_matter_of_a_hugging_face_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "qwen3", "head_dim": 16}))
    monkeypatch.setattr(StepRun, "run", lambda self: measured(self, lambda _, variant: variant.depth))
    options = f"step --config {tmp_path}/config.json --micro-batch-size 1 --sequence-length 16 --device cpu"
    words = "the norms of queries and keys are not run"
    assert words in run(options).out
    assert words not in run(f"{options} --hugging-face").out


def test_a_batch_too_odd_for_a_precision_is_noted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: StepRun) -> StepResults:
        measured(self, lambda _, variant: {"BF16": 2.0, "FP32": 1.0}[variant.recipe])
        if self.plan.micro_batch_size == 1:
            for result in self.results.variants.values():
                if result.variant.recipe == "FP32":
                    name = result.variant.name
                    self.results.take({"type": "failed", "task": name, "why": "too odd", "kind": "unsupported"})
        return self.results

    monkeypatch.setattr(StepRun, "run", whole)
    outcome = run(f"step {SMALL.replace('--micro-batch-size 1', '--micro-batch-size 2')} --break-even")
    assert "FP32 wins already at the smallest batch that was measured, 2 x 16 tokens" in outcome.out
    assert "note: on a batch of 1 x 16 tokens, FP32 was not measured: too odd" in outcome.out


def test_ctrl_c_before_anything_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: StepRun) -> StepResults:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepRun, "run", interrupt)
    outcome = run(f"step {SMALL}")
    assert outcome.code == 130
    assert "interrupted before anything was measured" in outcome.out
    assert "nothing could be measured" in outcome.out
    assert "Step ms" not in outcome.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SMALL.replace("--device cpu", ""), "there is no NVIDIA GPU here"),
        (f"{SMALL} --recipes fp8current", "FP8Current cannot be measured here"),
        (f"{SMALL} --tokens 1e9", "a run's cost needs --tokens and --gpus"),
        (f"{SMALL} --tokens 0 --gpus 8", "no number of tokens"),
        (f"{SMALL} --observed-speedup 0", "is no speedup"),
        (f"{SMALL} --precision 2", "is no share"),
        (f"{SMALL} --pre-quantize", "a step quantizes as it goes"),
        (f"{SMALL} --longest nan", "--longest nan leaves no time"),
        (f"{SMALL} --json /no/such/folder/x.json", "cannot be written"),
        ("--device cpu", "no model is named"),
    ],
)
def test_bad_input(run: Run, options: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.gpu.environment.environment", lambda: NOTHING)
    outcome = run(f"step {options}")
    assert outcome.code == 2
    assert message in outcome.err
