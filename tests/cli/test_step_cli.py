"""`gemmscope step` as people type it, on a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmscope.engine.messages import Failed, Noticed, Sampled
from gemmscope.engine.rule import Uncertainty
from gemmscope.results.read import read_result
from gemmscope.results.step import StepResult, Variant
from gemmscope.step.answer import PartialRecipe
from gemmscope.step.live_settings import layers_that_fit
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.step_campaign import StepCampaign
from support.campaigns import interrupt
from support.command import Run, run
from support.machines import NOTHING
from support.refusals import unnamed
from support.workers import forked_workers

__all__ = ["forked_workers", "run"]  # the fixtures
pytest.importorskip("torch", reason="measuring needs torch")
pytestmark = pytest.mark.usefixtures("forked_workers")

SIZES = "--hidden-size 32 --intermediate-size 64 --num-attention-heads 2 --num-hidden-layers 5 --vocab-size 61"
SMALL = f"{SIZES} --micro-batch-size 1 --sequence-length 16 --device cpu"


def codes(result: StepResult) -> set[str]:
    return {finding.code for finding in result.findings}


def written(path: Path) -> StepResult:
    result = read_result(path, ["step"])
    assert isinstance(result, StepResult)
    return result


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.real_process
def test_step_on_the_cpu(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="steps need torch")
    budget = "--tokens 1e9 --gpus 8 --price 2.5 --observed-speedup 0.01"
    files = {ending: tmp_path / f"step.{ending}" for ending in ("json", "md", "csv", "png")}
    targets = f"--json {files['json']} --markdown {files['md']} --csv {files['csv']} -o {files['png']}"
    outcome = run(f"step {SMALL} --longest 1 --verify {budget} {targets} --detail")
    assert outcome.code == 0, outcome.err
    result = written(files["json"])
    assert (result.depth, result.layers) == (5, 5)
    assert {variant.variant.real for variant in result.variants} == {True, False}
    assert all(time.verified is not None and time.cost is not None for time in result.step.recipes)
    assert any(code.startswith("observed-") for code in codes(result))
    assert result.command.startswith("gemmscope step --hidden-size 32")
    for title in ("Training step per GPU", "Prediction compared with the real model", "Cost of the full run"):
        assert title in outcome.out
    assert "recommended: " in outcome.out
    assert "| BF16 |" in files["md"].read_text()
    assert "Training step per GPU,BF16," in files["csv"].read_text()
    assert files["png"].stat().st_size > 10_000
    assert result.recommendation is not None


def test_smaller_batches(run: Run) -> None:
    pytest.importorskip("torch", reason="steps need torch")
    outcome = run(f"step {SMALL.replace('--micro-batch-size 1', '--micro-batch-size 2')} --longest 1 --break-even --json -")
    assert outcome.code == 0, outcome.err
    result = StepResult.model_validate_json(outcome.out)
    assert [batch.name for batch in result.break_even] == ["1 x 16", "2 x 16"]
    assert all(set(batch.speedups) == {"FP32"} for batch in result.break_even)
    assert any(code.startswith("break-even-") for code in codes(result))


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 6, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_hugging_face_model_with_all_its_layers(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="its own class is built by transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sizes = "--micro-batch-size 1 --sequence-length 16 --device cpu"
    outcome = run(f"step --config {tmp_path}/config.json {sizes} --hugging-face --longest 1 --json {tmp_path}/step.json")
    assert outcome.code == 0, outcome.err
    result = written(tmp_path / "step.json")
    assert (result.ran, result.depth, result.layers) == ("huggingface", 6, 6)
    assert (result.settings.compile, result.settings.optimizer) == ("none", "adamw")
    assert not any(variant.failure for variant in result.variants)


def test_a_hugging_face_model_that_does_not_fit(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is extrapolated from depths that have its kinds of layers in proportion: here two of three layers are windowed."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 8
    hybrid = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 24, "layer_types": kinds, "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps({**hybrid, "head_dim": 16}))
    monkeypatch.setattr("gemmscope.commands.step.layers_that_fit", lambda *_, **__: 7)
    monkeypatch.setattr(StepCampaign, "run", lambda self: measured(self, lambda variant: 10.0 + variant.depth))
    sizes = "--micro-batch-size 1 --sequence-length 16 --device cpu"
    outcome = run(f"step --config {tmp_path}/config.json {sizes} --hugging-face --json {tmp_path}/step.json")
    assert outcome.code == 0, outcome.err
    result = written(tmp_path / "step.json")
    assert (result.depth, result.layers) == (6, 24)
    assert {variant.variant.depth for variant in result.variants} == {6, 3}
    assert result.step.recipes[0].step_ms.value == pytest.approx(34.0, rel=0.01)
    [finding] = [finding for finding in result.findings if finding.code == "step-extrapolated-kinds"]
    assert finding.facts == {"layers": 24, "depths": ["6", "3"]}


def test_a_model_that_is_too_large_for_a_cpu(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system would kill its process. With less memory than all layers need, fewer of them are run."""
    config = {**LLAMA, "num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = "--micro-batch-size 1 --sequence-length 16 --device cpu"
    monkeypatch.setattr("gemmscope.step.live_settings.free_memory_bytes", lambda: 1000)
    outcome = run(f"step --config {tmp_path}/config.json {options} --hugging-face")
    assert outcome.code == 2
    assert unnamed(outcome.err, "CPU", "2 of its layers") == []
    plan = ModulePlan(module=None, config=config, depth=40, micro_batch_size=1, sequence_length=16)
    monkeypatch.setattr("gemmscope.step.live_settings.free_memory_bytes", lambda: 400_000)
    assert layers_that_fit(plan, 40_000, NOTHING, on_cpu=True) == 12
    monkeypatch.setattr("gemmscope.step.live_settings.free_memory_bytes", lambda: 4_000_000)
    assert layers_that_fit(plan, 40_000, NOTHING, on_cpu=True) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SMALL, "--hugging-face needs a Hugging Face config"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --verify", "nothing to verify"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --tp 2", "cannot split them"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --recompute selective", "not attention alone"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --cuda-graphs", "needs a GPU"),
        ("--config {} --micro-batch-size 1 --sequence-length 16 --device cpu --compile all", "whole, layers or none"),
    ],
)
def test_what_a_hugging_face_model_cannot(run: Run, tmp_path: Path, options: str, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 2}))
    outcome = run(f"step {options.format(tmp_path / 'config.json')} --hugging-face")
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


def stop(campaign: StepCampaign) -> None:
    """What Ctrl-C does to a campaign."""
    interrupt()
    campaign.interrupted = True


def ms(variant: Variant) -> float:
    return {"BF16": 2.0, "FP32": 1.0}[variant.recipe]


def measured(run: StepCampaign, ms: Callable[[Variant], float | None] = ms, rounds: int = 5) -> None:
    """Fill a campaign with times: `ms` gives one for each variant, None for a variant that was not reached."""
    for number in range(rounds):
        for variant in [result.variant for result in run.results.tasks.values()]:
            if (time := ms(variant)) is not None:
                burst = {variant.name: [time * (1 + 0.001 * number)] * 4}
                run.results.take(Sampled(burst, {}))


def test_ctrl_c_shows_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After two rounds of each: the prediction so far, no verification, exit code 130."""

    def some(self: StepCampaign) -> None:
        measured(self, lambda _: 10.0, rounds=2)
        stop(self)

    monkeypatch.setattr(StepCampaign, "run", some)
    outcome = run(f"step {SMALL} --verify --json {tmp_path}/step.json")
    assert outcome.code == 130
    result = written(tmp_path / "step.json")
    assert result.interrupted
    assert "step-interrupted" in codes(result)
    assert "10.005" in outcome.out
    assert all(time.verified is None for time in result.step.recipes)


def test_ctrl_c_while_verifying_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real model fitted with three layers only: no prediction of as many is begun, and what was predicted is recommended."""
    asked: list[tuple[bool, int]] = []

    def half(self: StepCampaign) -> None:
        asked.append((self.real, self.plan.depth))
        if self.real:
            self.results = self._empty(3)
        measured(self)
        if self.real:
            stop(self)
        self.rule.conclude([Uncertainty(0.001)])

    monkeypatch.setattr(StepCampaign, "run", half)
    outcome = run(f"step {SMALL} --verify --break-even --json {tmp_path}/step.json")
    assert outcome.code == 130
    assert asked == [(False, 5), (True, 5)]
    result = written(tmp_path / "step.json")
    assert {"precision-reached", "step-interrupted-later"} <= codes(result)
    assert result.recommendation is not None
    assert result.recommendation.recipe == "FP32"
    assert "\nUse FP32: 2.000x [" in outcome.out
    assert result.break_even == ()


def test_ctrl_c_while_a_mixed_plan_is_tried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only BF16 was measured again before the interruption. That does not make it the fastest."""

    def half(self: StepCampaign) -> None:
        measured(self, lambda variant: None if self.mixed and variant.recipe == "FP32" else ms(variant))
        if self.mixed:
            stop(self)

    monkeypatch.setattr(StepCampaign, "run", half)
    monkeypatch.setattr("gemmscope.step.session.candidate", lambda *_: PartialRecipe("FP32", ("mlp",)))
    outcome = run(f"step {SMALL}")
    assert outcome.code == 130
    assert "\nUse FP32: 2.000x [" in outcome.out


def test_a_mixed_plan_that_wins_is_recommended(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        StepCampaign, "run", lambda self: measured(self, lambda variant: 0.5 if variant.left_out else ms(variant))
    )
    monkeypatch.setattr("gemmscope.step.session.candidate", lambda *_: PartialRecipe("FP32", ("mlp",)))
    outcome = run(f"step {SMALL} --json {tmp_path}/step.json")
    assert outcome.code == 0
    best = written(tmp_path / "step.json").recommendation
    assert best is not None
    assert (best.recipe, best.left_out, best.rivals) == ("FP32", ("mlp",), ())
    assert "\nFaster still: FP32 with mlp in BF16, 4.000x [" in outcome.out


def test_what_cuda_graphs_change_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both recipes are captured and run without the host's share; then FP32 cannot be captured."""

    def whole(self: StepCampaign) -> None:
        measured(self, lambda variant: ms(variant) - 0.9 * variant.captured)
        requests.append({name: self.request(list(self.results.tasks))[name] for name in ("host", "profile")})
        self.seconds = 7.0
        if self.captured_depth is not None and fails:
            (odd,) = self.results.of("FP32")
            self.results.take(Failed(odd.variant.name, "it synchronizes", "error"))

    requests: list[dict[str, bool]] = []
    fails = False
    monkeypatch.setattr(StepCampaign, "run", whole)
    monkeypatch.setattr("gemmscope.commands.step.CANNOT_CAPTURE", ())
    outcome = run(f"step {SMALL} --cuda-graphs --json {tmp_path}/step.json")
    assert outcome.code == 0
    line = "Captured in CUDA graphs, a step takes BF16 1.1, FP32 0.1 ms (launched: BF16 2.0, FP32 1.0 ms). Speedup over BF16:"
    assert line in " ".join(outcome.out.split())
    result = written(tmp_path / "step.json")
    captured = {time.recipe: time.captured for time in result.step.recipes}
    assert captured["BF16"] is not None
    assert captured["FP32"] is not None
    assert captured["FP32"].speedup is not None
    assert captured["FP32"].speedup.value == pytest.approx(11, rel=0.01)
    assert result.seconds == {"predicting": 7.0, "capturing": 7.0}
    assert requests == [{"host": True, "profile": True}, {"host": False, "profile": False}]
    fails = True
    assert run(f"step {SMALL} --cuda-graphs --json {tmp_path}/again.json").code == 0
    result = written(tmp_path / "again.json")
    assert result.step.not_captured == {"FP32": "it synchronizes"}
    assert {"step-captured-alone", "step-not-captured"} <= codes(result)
    assert "variant-not-measured" not in codes(result)


def test_ctrl_c_while_capturing_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(StepCampaign, "run", lambda self: measured(self) if self.captured_depth is None else stop(self))
    monkeypatch.setattr("gemmscope.commands.step.CANNOT_CAPTURE", ())
    assert run(f"step {SMALL} --cuda-graphs --json {tmp_path}/step.json").code == 130
    result = written(tmp_path / "step.json")
    assert result.step.not_captured == {}
    assert not codes(result) & {"step-captured", "step-captured-alone", "step-not-captured"}


def test_a_real_model_that_fits_in_part(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real model is compared with the prediction for the same number of layers, whose time counts as prediction time."""

    def whole(self: StepCampaign) -> None:
        if self.real:
            self.results = self._empty(3)
        measured(self, lambda variant: ms(variant) * variant.depth)
        self.seconds = 7.0

    monkeypatch.setattr(StepCampaign, "run", whole)
    outcome = run(f"step {SMALL} --verify --json {tmp_path}/step.json")
    assert outcome.code == 0
    result = written(tmp_path / "step.json")
    assert result.seconds == {"predicting": 14.0, "verifying": 7.0}
    assert [time.verified.depth for time in result.step.recipes if time.verified] == [3, 3]
    assert "verified-shallower" in codes(result)


def test_what_the_stack_leaves_out_is_no_matter_of_a_hugging_face_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "xielu"}))
    monkeypatch.setattr(StepCampaign, "run", lambda self: measured(self, lambda variant: variant.depth))
    options = f"step --config {tmp_path}/config.json --micro-batch-size 1 --sequence-length 16 --device cpu"
    for more, said in (("", True), (" --hugging-face", False)):
        assert run(f"{options}{more} --json {tmp_path}/step.json").code == 0
        assert ("activation-replaced" in codes(written(tmp_path / "step.json"))) == said


def test_a_batch_too_odd_for_a_recipe_is_noted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: StepCampaign) -> None:
        measured(self)
        if self.plan.micro_batch_size == 1:
            (odd,) = self.results.of("FP32")
            self.results.take(Failed(odd.variant.name, "too odd", "unsupported"))

    monkeypatch.setattr(StepCampaign, "run", whole)
    outcome = run(f"step {SMALL.replace('--micro-batch-size 1', '--micro-batch-size 2')} --break-even --json -")
    findings = {finding.code: finding.facts for finding in StepResult.model_validate_json(outcome.out).findings}
    assert findings["break-even-at-smallest"] == {"recipe": "FP32", "batch": "2 x 16"}
    assert findings["batch-recipe-not-run"] == {"batch": "1 x 16", "recipe": "FP32", "reason": "too odd"}


def test_messages_of_the_worker_are_in_the_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: StepCampaign) -> None:
        measured(self)
        self.results.take(Noticed("launch-not-measured", {"variant": "FP32", "reason": "x"}))

    monkeypatch.setattr(StepCampaign, "run", whole)
    outcome = run(f"step {SMALL} --json -")
    assert "launch-not-measured" in codes(StepResult.model_validate_json(outcome.out))


def test_ctrl_c_before_anything_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(StepCampaign, "run", stop)
    outcome = run(f"step {SMALL} --json {tmp_path}/step.json")
    assert outcome.code == 130
    assert {"step-interrupted-early", "nothing-measured"} <= codes(written(tmp_path / "step.json"))
    assert "Step ms" not in outcome.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SMALL.replace("--device cpu", ""), "there is no NVIDIA GPU here"),
        (f"{SMALL} --recipes fp8current", "FP8Current cannot be measured here"),
        (f"{SMALL} --tokens 1e9", "the cost of a run needs --tokens and --gpus"),
        (f"{SMALL} --tokens 0 --gpus 8", "--tokens 0 is not a number of tokens"),
        (f"{SMALL} --tokens 1e9 --gpus 3 --tp 2", "3 GPUs do not divide into groups of 2"),
        (f"{SMALL} --observed-speedup 0", "--observed-speedup must be between 0 and 100"),
        (f"{SMALL} --precision 2", "must be a percentage such as 3%"),
        (f"{SMALL} --cuda-graphs", "--cuda-graphs needs a GPU"),
        (f"{SMALL} --pre-quantize", "a training step includes quantization"),
        (f"{SMALL} --longest nan", "--time-limit must be more than 0 seconds"),
        (f"{SMALL} -o step.txt", "is not a figure file"),
        (f"{SMALL} --json /no/such/folder/x.json", "cannot be written"),
        (f"{SMALL} --optimizer sgd", "--optimizer is for --module and --hugging-face"),
        (f"{SMALL} --compile some", "--compile must be whole, layers or none"),
        ("--module nothing.py:build --device cpu --break-even", "--module runs with its own inputs"),
        ("--module nothing.py:build --device cpu --verify", "nothing to verify"),
        ("--device cpu", "no model is named"),
    ],
)
def test_bad_input(run: Run, options: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.commands.step.environment", lambda: NOTHING)
    outcome = run(f"step {options}")
    assert outcome.code == 2
    assert message in outcome.err
