"""Which mix is priced: as it was typed or chosen by numerics, with the names that frameworks give to linears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmscope.job.load import load_model, model_run
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.numerics.evaluation.requested_mix import Mixes, MixRequest, priced_mixes, quantized_ops, requested_mix
from gemmscope.recipe.kept import KeptHigher
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.numerics import Mix, MixedPrecision, NumericsResult
from gemmscope.results.read import read_result
from gemmscope.workload.derive import derive
from support.command import Run, run
from support.commands import forecast
from support.numerics_files import numerics_result
from support.refusals import refused, refused_with_hint
from support.results import RESULTS

__all__ = ["run"]  # the fixture
LLAMA = "--preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8k"


def mixes(preset: str, text: str, recipes: tuple[str, ...] = ("BF16", "FP8Current"), **settings: Any) -> Mixes:
    model = presets.load(preset).model
    assert model is not None
    run = RunSpec(1, 4096, **settings)
    request = requested_mix(None, text)
    assert request is not None
    return priced_mixes(request, recipes, quantized_ops(model, run, derive(model, run)), model)


@pytest.mark.parametrize(
    ("preset", "text", "kept"),
    [
        ("llama-3.1-8b", "mlp.down_proj", "MLP Down"),
        ("llama-3.1-8b", "model.layers.3.mlp.down_proj", "MLP Down"),
        ("llama-3.1-8b", "first=1, last=2, MLP Down, attn out", "first 1, last 2, Attn Out, MLP Down"),
        ("llama-3.1-8b", "self_attn.o_proj, mlp.gate_proj, mlp.up_proj", "Attn Out, MLP Gate+Up"),
        ("gpt2", "mlp.c_proj, attn.c_attn", "QKV Proj, MLP Down"),
        ("qwen3-30b-a3b", "mlp.experts.down_proj", "Expert Down"),
        ("deepseek-v3", "self_attn.q_a_proj, mlp.shared_experts.up_proj", "Q Down Proj, Shared Expert Gate+Up"),
    ],
)
def test_linears_by_the_names_of_modules(preset: str, text: str, kept: str) -> None:
    assert mixes(preset, text).names == (f"FP8Current (in BF16: {kept})",)


def test_projections_of_their_own() -> None:
    assert mixes("llama-3.1-8b", "v_proj, mlp.gate_proj", separate_projections=True) == Mixes(
        ("FP8Current (in BF16: V Proj, MLP Gate)",)
    )


def test_a_part_of_a_gemm_keeps_all_of_it() -> None:
    [about] = mixes("llama-3.1-8b", "self_attn.v_proj").findings
    assert about.code == "mix-whole-gemm"
    assert "self_attn.v_proj" in about.text
    assert "QKV Proj" in about.text
    assert mixes("llama-3.1-8b", "q_proj, k_proj, v_proj").findings == ()
    assert mixes("llama-3.1-8b", "linear_qkv").findings == ()


def test_of_every_recipe_that_quantizes() -> None:
    names = mixes("llama-3.1-8b", "first=1", ("BF16", "FP8Current", "FP8Block")).names
    assert names == ("FP8Current (in BF16: first 1)", "FP8Block (in BF16: first 1)")


def test_linears_of_other_pipeline_stages() -> None:
    """Only the first stage of DeepSeek-V3 has dense layers."""
    assert mixes("deepseek-v3", "mlp.down_proj", pp=61).names == ("FP8Current (in BF16: MLP Down)",)


@pytest.mark.parametrize(
    ("text", "facts", "hint"),
    [
        ("", ("keep_higher",), "first=1,last=2,mlp.down_proj"),
        ("first=0", ("keep_higher",), "first=1"),
        ("middle=2", ("keep_higher", "middle=2"), "first=1"),
        ("first=x", ("keep_higher", "first=x"), "first=1"),
        ("mlp.experts.down_proj", ("mlp.experts.down_proj",), "Attn Out"),
        ("lm_head", ("lm_head",), "MLP Down"),
        ("first=20,last=20", (40, 32), "fewer"),
        (",".join(f"x{number}" for number in range(300)), (300, 200), "fewer"),
    ],
)
def test_wrong_input(text: str, facts: tuple[object, ...], hint: str) -> None:
    with refused_with_hint(*facts, hint=(hint,)):
        mixes("llama-3.1-8b", text)


def numerics(folder: Path, mixed: MixedPrecision | None) -> str:
    result = NumericsResult(command="gemmscope numerics", source="recording", origin="tensors.safetensors", mixed=mixed)
    path = folder / "numerics.json"
    path.write_text(result.to_json())
    return str(path)


CHOSEN = Mix(recipe="FP8Current", higher="BF16", first_layers=1, linears=("mlp.down_proj",), error=0.02)


def test_the_mix_that_numerics_chose(tmp_path: Path) -> None:
    path = numerics(tmp_path, MixedPrecision(bound=0.03, chosen=CHOSEN))
    requested = requested_mix(path, None)
    assert requested is not None
    assert requested == MixRequest(requested.given, KeptHigher("BF16", 1, 0, ("mlp.down_proj",)), "FP8Current")


def test_files_without_a_mix(tmp_path: Path) -> None:
    for mixed, fact in ((None, "no bound"), (MixedPrecision(bound=0.03), "its bound")):
        with refused_with_hint("mix", fact, hint=("bound",)):
            requested_mix(numerics(tmp_path, mixed), None)
    with refused("mix", "keep_higher"):
        requested_mix("x.json", "first=1")
    with refused("mix", "gemmscope bench"):
        requested_mix(RESULTS["bench"](), None)
    (tmp_path / "bench.json").write_text(json.dumps({"kind": "bench"}))
    with refused("bench.json", "numerics"):
        requested_mix(tmp_path / "bench.json", None)


def forecast_of(**options: Any) -> ForecastResult:
    job = model_run(load_model(preset="llama-3.1-8b"), micro_batch_size=1, sequence_length=8192)
    return forecast(job, ["h200"], **options)


def test_a_mix_is_a_row_of_the_forecast(run: Run, tmp_path: Path) -> None:
    name, path = "FP8Current (in BF16: first 1, MLP Down)", numerics(tmp_path, MixedPrecision(bound=0.03, chosen=CHOSEN))
    outcome = run(f"forecast {LLAMA} --gpu h200,b200 --mix {path} --json {tmp_path}/out.json")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count(name) >= 2
    result = read_result(tmp_path / "out.json")
    assert isinstance(result, ForecastResult)
    for gpu in result.gpus:
        assert gpu.step is not None
        mixed, low, high = (gpu.step.of(recipe) for recipe in (name, "FP8Current", "BF16"))
        assert mixed is not None
        assert low is not None
        assert high is not None
        assert low.step_ms.value < mixed.step_ms.value < high.step_ms.value
        assert low.peak_bytes is not None
        assert high.peak_bytes is not None
        assert mixed.peak_bytes is not None
        assert high.peak_bytes < mixed.peak_bytes < low.peak_bytes
        assert mixed.waterfall
        assert name not in gpu.linears.recipes
    again = forecast_of(mix=path)
    assert again.gpus[0].step == result.gpus[0].step
    assert run(f"report {tmp_path}/out.json -o {tmp_path}/page.html").code == 0
    assert name in (tmp_path / "page.html").read_text()


def test_gpus_without_the_recipe_leave_the_mix_out(tmp_path: Path) -> None:
    other = CHOSEN.model_copy(update={"recipe": "MXFP8"})
    result = forecast_of(mix=numerics(tmp_path, MixedPrecision(bound=0.03, chosen=other)))
    assert result.gpus[0].findings[0].code == "mix-left-out"  # what was asked for comes first
    assert result.gpus[0].step is not None
    assert not any("(in " in time.recipe for time in result.gpus[0].step.recipes)


def test_a_mix_of_another_model_is_noticed() -> None:
    """Llama 3.1 8B has 32 layers and a hidden size of 4096."""
    chosen = numerics_result(40).model_copy(update={"mixed": MixedPrecision(bound=0.03, chosen=CHOSEN)})
    [text] = [finding.text for finding in forecast_of(mix=chosen).gpus[0].findings if finding.code == "mix-other-model"]
    assert text == (
        "The mix may belong to another model: this is llama-3.1-8b, with 32 layers, but the errors are those of 40 layers."
    )
    same = chosen.model_copy(update={"linears": tuple(numerics_result(2).linears)})
    assert "mix-other-model" not in {finding.code for finding in forecast_of(mix=same).gpus[0].findings}


def test_a_mix_that_keeps_nothing_is_its_recipe(tmp_path: Path) -> None:
    plain = CHOSEN.model_copy(update={"first_layers": 0, "linears": ()})
    result = forecast_of(mix=numerics(tmp_path, MixedPrecision(bound=0.3, chosen=plain)))
    assert result.gpus[0].step == forecast_of().gpus[0].step
    assert "mix-keeps-nothing" in {finding.code for finding in result.gpus[0].findings}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("forecast --shapes 1024 --gpu h200 --keep-higher first=1", "applies to a model"),
        (f"forecast {LLAMA} --gpu h200 --keep-higher first=1 --sweep tp=1,2", "--keep-higher applies to one run"),
        (f"forecast {LLAMA} --gpu h200 --keep-higher first=1 --as-te-benchmark", "there is none"),
        (f"step {LLAMA} --device cpu --keep-higher first=1", "no recipe here has a lower precision"),
        (f"step {LLAMA} --device cpu --keep-higher first=1 --mix x.json", "both set what to keep in a higher precision"),
    ],
)
def test_where_no_mix_can_be_priced(run: Run, line: str, message: str) -> None:
    outcome = run(line)
    assert outcome.code == 2
    assert message in outcome.err
