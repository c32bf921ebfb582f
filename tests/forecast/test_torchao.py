"""torchao's recipes: their own coefficients where they were measured, no forecast where they were not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gemmscope as gs
from support.command import Run, run

__all__ = ["run"]  # the fixture

MEASURED = Path(__file__).parents[2] / "docs" / "measured" / "h200_steps.json"
RECIPES = ["FP8Tensorwise", "FP8Rowwise", "FP8RowwiseGWHP"]
TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
"""


@pytest.mark.parametrize("model", ["gpt1b_l16", "llama8b_l8", "codon5b_l8"])
def test_real_steps_on_an_h200(model: str) -> None:
    """The steps that the coefficients were fitted to: three models, and one coefficient for each recipe."""
    kept = json.loads(MEASURED.read_text("utf-8"))["torchao"][model]
    sizes = {name: value for name, value in kept["config"].items() if name not in ("micro_batch_size", "sequence_length")}
    job = gs.load(**sizes).on(kept["config"]["micro_batch_size"], kept["config"]["sequence_length"])
    step = job.forecast("h200", recipes=RECIPES).gpus[0].step
    assert step is not None
    for name in RECIPES:
        forecasted, real = step.of(name), kept["recipes"][name]["real"]
        assert forecasted is not None
        assert forecasted.speedup is not None
        assert forecasted.speedup.value == pytest.approx(real, rel=0.02)
        assert forecasted.speedup.low is not None
        assert forecasted.speedup.high is not None
        assert forecasted.speedup.low < real < forecasted.speedup.high


@pytest.mark.parametrize("gpu", ["b200", "b300", "l40s", "rtx-pro-6000"])
def test_elsewhere_their_error_bar_is_wide(gpu: str) -> None:
    [there] = gs.load("llama-3.1-8b").on(1, 4096).forecast(gpu, recipes=["fp8rowwise", "fp8current"]).gpus
    gains = {name: there.step.of(name).speedup for name in ("FP8Rowwise", "FP8Current")}
    assert gains["FP8Rowwise"].half_width > 1.2 * gains["FP8Current"].half_width
    assert gpu == there.gpu
    [about] = [finding for finding in there.findings if finding.code == "torchao-not-measured"]
    assert about.facts == {"recipes": ["FP8Rowwise"]}


def test_a_torchtitan_config_on_blackwell(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TOML)
    out = json.loads(run(f"forecast --config {tmp_path / 'job.toml'} --gpu b200,h100 --json -").out)
    blackwell, hopper = out["gpus"]
    assert blackwell["linears"]["recipes"] == ["BF16", *RECIPES, "MXFP8", "NVFP4"]
    facts = {finding["code"]: finding["facts"] for finding in blackwell["findings"]}
    assert facts["torchao-not-measured"] == {"recipes": [*RECIPES, "MXFP8", "NVFP4"]}
    assert "recipe-left-out" not in facts
    assert hopper["linears"]["recipes"] == ["BF16", *RECIPES]
    assert not {"torchao-not-measured", "recipe-left-out"} & {finding["code"] for finding in hopper["findings"]}


def test_an_old_gpu_still_says_what_it_lacks(run: Run) -> None:
    outcome = run("forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 4k --gpu a100 --recipes fp8rowwise")
    assert outcome.code == 2
    assert "FP8Rowwise cannot run on a100: FP8 GEMMs need compute capability 8.9" in outcome.err.replace("\n  ", " ")
