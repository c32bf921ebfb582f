"""The software that runs a step: multipliers on its parts, the mixture of an unnamed stack, and which one is assumed."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import mean, pvariance

import pytest

from gemmscope.errors import UserError
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.stacks import MIXTURE, Learned, Multiplier, Software, mixture, software_on, stacks, stacks_on
from gemmscope.forecast.stacks import _facts as table
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.step_estimate import StepEstimate
from gemmscope.forecast.step_findings import power_findings, software_finding
from gemmscope.gpu.specs import gpu, gpus
from gemmscope.job.load import load_model
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.parts import STEP_PARTS
from gemmscope.recipe.recipes import recipes
from gemmscope.toml import load_data
from gemmscope.workload.derive import derive

RUN = RunSpec(1, 8192, tp=2, sequence_parallel=True, dp=8)
FURTHER = {
    "step",
    "launches",
    "runs",
    "experts",
    "biases of experts",
    "GEMMs in low precision",
    "GEMMs by torchao",
    "quantization by torchao",
}


def forecast(name: str | None, chip: str = "h100", preset: str = "llama-3.1-8b", run: RunSpec = RUN) -> StepForecast:
    model = presets.load(preset).model
    assert model is not None
    software = software_on(gpu(chip), name, gpus=run.gpus)
    return StepForecast(Forecaster(gpu(chip), "sustained", software=software), model, run, derive(model, run))


def step(name: str | None, chip: str = "h100", recipe: str = "BF16") -> StepEstimate:
    return forecast(name, chip).step(recipe)


def test_every_multiplier_names_what_exists_and_its_evidence() -> None:
    known, used = table()["multipliers"], {*table()["all"]}
    for stack in stacks().values():
        used |= {*stack.uses}
    assert used == set(known)
    for name, facts in known.items():
        assert facts["part"] in {*STEP_PARTS, *FURTHER, *(f"quantization of {recipe}" for recipe in recipes())}, name
        assert facts["evidence"].split(":")[0].split(";")[0].split(",")[0].split(" ")[0] in ("measured", "fitted", "assumed")


def test_every_gpu_has_stacks_and_each_of_them_gives_a_step() -> None:
    for chip in ("a100", "h100", "b300", "rtx-5090"):
        for stack in stacks_on(gpu(chip)):
            assert step(stack.name, chip).time_ms > 0
    assert all(stacks_on(chip) for chip in gpus().values())


def test_the_software_of_a_file_is_assumed_unless_another_one_is_named() -> None:
    chip = gpu("h100")
    named = ((None, ""), (None, "torchtitan"), (None, "unknown"), ("jax", "torchtitan"))
    names = [software_on(chip, *asked, gpus=8).name for asked in named]
    assert names == [MIXTURE, "torchtitan", MIXTURE, "jax"]
    assert software_on(chip).name == "nvidia"  # what `gemmscope step` would run on one GPU
    with pytest.raises(UserError, match="torchtitn") as refused:
        software_on(chip, "torchtitn")
    assert "torchtitan" in str(refused.value.hint)


def test_a_stack_that_cannot_run_there_is_refused_with_those_that_can() -> None:
    with pytest.raises(UserError, match="does not run on b200") as elsewhere:
        software_on(gpu("b200"), "mosaic")
    with pytest.raises(UserError, match="has no FP8Tensorwise") as other_library:
        software_on(gpu("h100"), "nvidia", recipes=["BF16", "FP8Tensorwise"])
    assert all("torchtitan" in str(refused.value.hint) for refused in (elsewhere, other_library))


def test_multipliers_apply_to_their_parts_and_widen_the_bar() -> None:
    usual, eager, software = step("nvidia"), step("pytorch"), software_on(gpu("h100"), "pytorch")
    for part in ("GEMMs", "norms and activations", "head and loss", "attention"):
        expected = usual.parts[part].value * software.of(part).factor * software.slower(RUN.gpus)
        assert eager.parts[part].value == pytest.approx(expected)
    assert eager.parts["idle, other"].value == software.once_ms > 0
    assert eager.parts["exposed communication"].value < usual.parts["exposed communication"].value
    assert eager.interval.half_width > usual.interval.half_width


def test_the_mixture_has_the_mean_of_all_stacks_and_the_spread_between_them() -> None:
    chip = gpu("h100")
    members, mixed = [stack.on(chip) for stack in stacks_on(chip)], mixture(chip)
    logs = [one.of("attention").log for one in members]
    variance = mean(one.of("attention").variance for one in members) + pvariance(logs)
    assert (mixed.of("attention").log, mixed.of("attention").variance) == pytest.approx((mean(logs), variance))
    casts = [one for stack, one in zip(stacks_on(chip), members, strict=True) if "torchao" in stack.backends]
    assert mixed.of("quantization by torchao").log == pytest.approx(mean(one.of("quantization by torchao").log for one in casts))
    times = [step(one.name).time_ms for one in members]
    assert min(times) < step(None).time_ms < max(times)
    assert step(None).interval.half_width > max(step(one.name).interval.half_width for one in members) * 0.9


def test_a_measurement_moves_a_multiplier_and_narrows_it() -> None:
    before = Multiplier(log(1.5), 0.04)
    after = before.updated(Multiplier(log(2.0), 0.0004))
    assert 1.98 < after.factor < 2.0
    assert after.variance < 0.0004
    assert Multiplier(0.3).updated(Multiplier(0.5, 0.0001)) == Multiplier(0.3)  # what is certain is not changed
    software = Software("mine", "mine", {"attention": before}).after({"attention": Learned(0.1, 0.25)}, "H100")
    assert software.of("attention") == Multiplier(log(1.5) + 0.1, 0.01)
    assert exp(software.of("step").log) == 1.0


def test_low_precision_depends_on_the_software_and_not_on_its_progress() -> None:
    """GPT-OSS: unfused biases of experts cost the same time in every precision."""
    run = RunSpec(4, 4096, ep=64, dp=64, etp=1)
    for name in ("nvidia", "nvidia-26.04"):
        one = forecast(name, "gb200", "gpt-oss-120b", run)
        assert one.step("BF16").parts["norms and activations"] == one.step("MXFP8").parts["norms and activations"]
    old, new = (forecast(name, "gb200", "gpt-oss-120b", run).step("BF16").time_ms for name in ("nvidia-26.04", "nvidia"))
    assert old > 1.3 * new


def test_torchao_casts_a_tensor_once_for_all_that_read_it_and_a_shard_before_it_is_gathered() -> None:
    alone = RunSpec(1, 8192, dp=8, zero=3)
    split = RunSpec(4, 8192, tp=8, sequence_parallel=True, dp=1)
    for run, recipe, less in ((alone, "FP8Rowwise", 0.8), (split, "FP8Tensorwise", 0.5)):
        joined, apart = (
            forecast("torchtitan", run=replace(run, separate_projections=separate)).step(recipe).parts["quantization"].value
            for separate in (False, True)
        )
        assert apart == pytest.approx(joined, rel=0.12)
        reference = forecast("torchtitan", run=run)
        cases = reference.forecaster.in_step(reference.quantized, recipe)
        assert reference._gemms(recipe).activations.value / cases.activations.value < (1.4 if recipe == "FP8Rowwise" else less)


def test_the_software_that_changes_most_is_named() -> None:
    told = software_finding(forecast("nvidia")).facts
    times = {stack.name: step(stack.name).time_ms for stack in stacks_on(gpu("h100"))}
    furthest = max(times, key=lambda name: abs(times[name] / times["nvidia"] - 1))
    assert (told["name"], told["title"]) == (furthest, f"{stacks()['nvidia'].title}, attention by cuDNN")
    assert told["changed"] == pytest.approx(times[furthest] / times["nvidia"] - 1)


def test_attention_has_the_names_that_step_and_explain_give_it() -> None:
    names = {rule["name"] for rule in load_data("gemmscope.engine", "kernel_names.toml")["attention"]}
    known = table()
    of_attention = [facts for facts in known["multipliers"].values() if facts["part"] == "attention"]
    assert {facts["implementation"] for facts in of_attention} | {known["attention"]} <= names
    assert {stack.on(gpu("h100")).attention for stack in stacks().values()} == {"cuDNN", "FlashAttention", "Triton"}
    rates = load_data("gemmscope.explain", "attention.toml")["rate"]
    assert {rate["name"] for rate in rates} <= names


def test_every_multiplier_says_what_it_is_known_from() -> None:
    known = table()
    for name, facts in known["multipliers"].items():
        assert facts["evidence"].startswith(("measured", "fitted", "published", "assumed")), name


def test_a_known_power_limit_takes_the_place_of_what_published_runs_had() -> None:
    """The published H100s of torchtitan have 500 W and 2.4 TB/s; a power limit says which card is meant."""
    unknown, usual, other = (
        stacks()["torchtitan"].on(chip) for chip in (gpu("h100"), gpu("h100").limited_to(700, ""), gpu("h200"))
    )
    assert (unknown.variant, usual.variant, other.variant) == ("500 W and 2.4 TB/s", "", "")
    assert unknown.of("step").log > usual.of("step").log == other.of("step").log
    [about] = power_findings(gpu("h100"), unknown)
    assert (about.code, power_findings(gpu("h100"), usual)) == ("published-on-variant", [])


@pytest.mark.parametrize(("more", "stack"), [("", "torchtitan"), ("[compile]\nenable = false", "pytorch")])
def test_a_file_that_says_how_it_is_compiled_names_its_stack(tmp_path: Path, more: str, stack: str) -> None:
    (tmp_path / "job.toml").write_text(f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n{more}')
    assert load_model(config=str(tmp_path / "job.toml")).stack == stack
