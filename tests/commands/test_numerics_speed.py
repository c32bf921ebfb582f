"""Where speeds come from: run files and forecasts, and one message for everything that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemmscope.commands.numerics import speed_result
from gemmscope.errors import UserError
from gemmscope.job.load import load_model, model_run
from support.forecast_files import several_gpus, sweep
from support.numerics_files import linear_errors, numerics_result, recipes_and_mix
from support.run_files import recorded_bench, squares
from support.step_files import recorded_step


def test_results_and_their_files(tmp_path: Path) -> None:
    several_gpus().save(tmp_path / "forecast.json")
    result, gpu = speed_result(tmp_path / "forecast.json", "H200")
    assert result is not None
    assert (result.kind, gpu) == ("forecast", "h200")
    assert speed_result(recorded_step("llama8b"), None)[1] == ""
    assert speed_result(None, None) == (None, "")


def test_a_gpu_is_forecast_in_the_recipes_that_it_runs() -> None:
    job = model_run(load_model(preset="llama-3.2-1b"), micro_batch_size=1, sequence_length=4096)
    result, gpu = speed_result(None, "h200", job, ["fp8current", "nvfp4"])
    assert result is not None
    assert result.kind == "forecast"
    assert result.gpus[0].linears.recipes == ("BF16", "FP8Current")  # type: ignore[union-attr]
    assert gpu == "h200"


@pytest.mark.parametrize(
    ("speed", "gpu", "message"),
    [
        (several_gpus, None, "has several GPUs: b300, h200, l40s, a100"),
        (several_gpus, "b200", "does not have 'b200'"),
        (sweep, None, "is a sweep"),
        (squares, None, "has times of bare GEMMs"),
        (lambda: recorded_bench("first"), "h200", "was measured on NVIDIA H200"),
        (lambda: numerics_result(2, gpu="", bound=None), None, "is a result of gemmscope numerics"),
        (lambda: "nowhere.json", None, "nowhere.json"),
        (lambda: None, "h200", "needs the model and its batch"),
    ],
)
def test_what_has_no_speeds_is_one_message(speed: Any, gpu: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        speed_result(speed(), gpu)


def test_speeds_of_another_model_are_noticed() -> None:
    """Llama 3.1 8B has a hidden size of 4096: so do these linears, and those of half the size do not."""
    codes = [finding.code for finding in recipes_and_mix(linear_errors(2), several_gpus(), None, "b300").findings]
    assert "numerics-other-model" not in codes
    smaller = [one.model_copy(update={"inputs": one.inputs // 3, "outputs": one.outputs // 3}) for one in linear_errors(2)]
    experts = [one.model_copy(update={"op": "Expert Down"}) if "down" in one.linear else one for one in linear_errors(2)]
    for linears, reason in (
        (smaller, "with hidden size 4096, but none of the linears with errors has that size"),
        (linear_errors(40), "with 32 layers, but the errors are those of 40 layers"),
        (experts, "which has no experts, but some errors are those of experts"),
    ):
        [finding] = [
            one for one in recipes_and_mix(linears, several_gpus(), None, "b300").findings if one.code == "numerics-other-model"
        ]
        assert finding.text == f"The speeds may belong to another model: they are for llama-3.1-8b, {reason}."


def test_speeds_of_a_host_bound_step_say_so() -> None:
    job = model_run(load_model(preset="llama-3.2-1b"), micro_batch_size=1, sequence_length=4096)
    result, gpu = speed_result(None, "b200", job, ["bf16", "mxfp8"])
    assert "step-host-bound" in [finding.code for finding in recipes_and_mix(linear_errors(2), result, None, gpu).findings]
