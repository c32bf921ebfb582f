"""Forecasts of LoRA: what is not computed, stored, exchanged or quantized because weights are frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gemmscope as gs
from gemmscope.document.common import batch_lines
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.memory import rank_memory
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import gpu
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.kept import KeptHigher, mixed_name
from gemmscope.results.forecast import RecipeMemory
from gemmscope.workload.derive import derive

known = presets.load("llama-3.1-8b").model
assert known is not None
LLAMA = known
RUN = RunSpec(1, 4096, dp=8)
LORA = replace(RUN, lora=16)


def step(run: RunSpec, chip: str = "h200") -> StepForecast:
    return StepForecast(Forecaster(gpu(chip), "sustained"), LLAMA, run, derive(LLAMA, run))


def memory(run: RunSpec, name: str = "BF16") -> RecipeMemory:
    return rank_memory(LLAMA, run, name, gpu("h200"))


def test_frozen_weights_have_no_gradients_and_no_optimizer_states() -> None:
    whole, adapters = memory(RUN), memory(LORA)
    trained = step(LORA).rank_share.trained
    assert trained == 32 * 16 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)
    assert adapters.weights_bytes == whole.weights_bytes + 2 * trained
    assert adapters.gradients_bytes == 4 * trained
    assert adapters.master_weights_bytes + adapters.moments_bytes == pytest.approx(12 * trained / 8)
    sharded = memory(replace(LORA, zero=3))
    assert sharded.weights_bytes == pytest.approx((whole.weights_bytes + 4 * trained) / 8), "frozen weights stay in BF16"


def test_frozen_linears_keep_no_input_unless_an_adapter_reads_it() -> None:
    """Gate and up, attention's projections and MLP down have adapters by default; without those of the MLP, its inputs go."""
    assert memory(LORA).activations_bytes >= memory(RUN).activations_bytes
    assert memory(replace(LORA, lora_linears=("attention",))).activations_bytes < 0.8 * memory(RUN).activations_bytes
    low, plain = memory(LORA, "FP8Current"), memory(LORA)
    assert low.activations_bytes == pytest.approx(plain.activations_bytes), "adapters read BF16"


def test_weights_in_the_recipes_format_alone() -> None:
    both, alone = memory(LORA, "FP8Current"), memory(replace(LORA, quantized_weights=True), "FP8Current")
    quantized = both.weights_bytes - alone.weights_bytes
    assert 0.8 * both.weights_bytes < quantized < both.weights_bytes
    assert both.least_bytes < both.total_bytes - quantized, "the lower bound has no BF16 copy"


def test_the_step_without_gradients_of_weights() -> None:
    full, adapters = step(RUN).step("BF16"), step(LORA).step("BF16")
    assert 0.64 < adapters.parts["GEMMs"].value / full.parts["GEMMs"].value < 0.76
    assert adapters.parts["optimizer"].value < 0.02 * full.parts["optimizer"].value
    assert adapters.parts["norms and activations"].value > full.parts["norms and activations"].value
    assert adapters.launched.launch_ms > full.launched.launch_ms


def test_frozen_weights_are_quantized_once_before_training() -> None:
    linears = step(LORA)._gemms("FP8Delayed")
    assert linears.weights.value == 0.0
    assert 0 < linears.activations.value < step(RUN)._gemms("FP8Delayed").activations.value


def test_only_gradients_of_adapters_are_exchanged() -> None:
    times = {
        run: {exchange.kind: exchange.time_ms for exchange in step(run).exchanged}
        for run in (RUN, LORA, replace(RUN, zero=3), replace(LORA, zero=3))
    }
    assert times[LORA]["gradients"] < 0.05 * times[RUN]["gradients"]
    fsdp, lora_fsdp = times[replace(RUN, zero=3)], times[replace(LORA, zero=3)]
    assert lora_fsdp["gradients"] < 0.05 * fsdp["gradients"]
    assert lora_fsdp["weights"] == pytest.approx(fsdp["weights"], rel=0.05), "frozen weights are gathered like others"


@pytest.mark.parametrize(("rank", "recipes"), [(8, "fp8current"), (4, "mxfp8")])
def test_small_adapters_do_not_keep_a_recipe_from_running(rank: int, recipes: str) -> None:
    result = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length=4096, lora=rank).forecast("b200", recipes=recipes)
    assert result.gpus[0].step is not None
    assert not result.gpus[0].step.failures
    assert "adapters stay in BF16" in next(entry.text for entry in result.findings if entry.code == "lora")
    low = result.gpus[0].linears.recipes[-1]
    left = {op.op for op in result.gpus[0].linears.ops if op.recipe == low and op.left_in_baseline}
    assert {"QKV Proj LoRA A", "MLP Down LoRA B"} <= left
    assert all(set(op.pass_ms) == {"fprop", "dgrad"} for op in result.gpus[0].linears.ops if op.op == "MLP Down")


def test_the_table_of_linears_counts_the_input_of_an_adapter_once() -> None:
    tables = [
        {one.recipe: one.kept_bytes for one in gs.load("llama-3.2-1b").on(lora=lora).forecast("h200").gpus[0].linears.memory}
        for lora in (None, 16)
    ]
    assert 0.95 < tables[1]["BF16"] / tables[0]["BF16"] < 1.05
    assert tables[1]["FP8Current"] == tables[1]["BF16"], "adapters read BF16"


def test_a_plan_with_lora_needs_less_memory() -> None:
    model, searched = gs.load("llama-3.2-1b"), {"gpus": 8, "global_batch": 8, "tp": 1, "recompute": "none", "recipes": "bf16"}
    whole, lora = (model.plan("h200", **searched, **more) for more in ({}, {"lora": 8, "lora_linears": ["mlp"]}))
    smallest = [min(layout.memory_gb for layout in result.points[0].layouts) for result in (whole, lora)]
    assert smallest[1] < smallest[0]
    assert "lora" in lora.command


def test_a_mix_keeps_as_many_layers_as_without_lora() -> None:
    name = mixed_name("FP8Current", KeptHigher("BF16", 1, 1))
    assert step(LORA).kept_share(name) == pytest.approx(step(RUN).kept_share(name), rel=0.01)


def test_the_answer_says_that_weights_are_frozen() -> None:
    assert "LoRA of rank 16, all other weights frozen" in batch_lines(LORA, 0)[1]
    assert "LoRA" not in " ".join(batch_lines(RUN, 0))
