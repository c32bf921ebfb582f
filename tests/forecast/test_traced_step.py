"""The step of a traced module: parts, error bars, memory, and how it compares with the closed form of the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gemmscope.errors import UserError
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.traced import launches, traced_estimate, traced_memory
from gemmscope.gpu.specs import gpu
from gemmscope.job.load import ModelRun, load_model, model_run
from gemmscope.model import hf
from gemmscope.model.spec import RunSpec
from gemmscope.results.forecast import ForecastResult
from gemmscope.workload.derive import derive
from gemmscope.workload.trace import as_workload
from support.commands import forecast
from support.reading import codes
from support.traced_files import ATTENTION, LAYERS, TRACE


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ModelRun:
    monkeypatch.setattr("gemmscope.job.rank_workload.trace_module", lambda *_: TRACE)
    return model_run(load_model(module="tower.py:build"))


@pytest.fixture
def result(job: ModelRun) -> ForecastResult:
    return forecast(job, ["h200"])


def test_every_part_of_a_module(result: ForecastResult) -> None:
    step = result.gpus[0].step
    assert step is not None
    baseline = step.of("BF16")
    assert baseline is not None
    wanted = {"GEMMs", "convolutions", "norms and activations", "attention", "other", "head and loss", "optimizer"}
    assert set(baseline.parts_ms) == wanted
    assert (step.unit, step.global_batch) == ("samples", 64)
    assert baseline.tokens_per_s == pytest.approx(64 / baseline.step_ms.value * 1000)
    assert result.run is not None
    assert result.run.inputs == "64 x 3 x 224 x 224"
    assert "inputs: 64 x 3 x 224 x 224" in str(result)
    assert "Samples/s/GPU" in str(result)
    assert "okens/s" not in str(result)


def test_attention_that_no_fused_kernel_accepts() -> None:
    """The encoder of a T5 v1.1 large with 32 x 512 tokens. Its step took 254.8 ms on an H200. All other parts take
    98 ms according to the forecast, so attention took about 150 ms.
    """
    encoder = replace(ATTENTION, batch=32, queries=512, keys=512, pairs=512.0**2, mask_bytes=2**23, mask_gradient=True)
    fused, unfused = (traced_estimate(op, gpu("h200"), fused=True).value for op in (encoder, replace(encoder, unfused=("mask",))))
    assert 4 * fused < unfused
    assert 100 < unfused < 200
    assert launches([replace(encoder, unfused=("mask",))], fused=True) > launches([encoder], fused=True)


def test_linears_that_a_recipe_does_not_quantize(result: ForecastResult) -> None:
    """A bare parameter stays in BF16, and so does a head whose outputs no recipe can run; the others are quantized."""
    gpu_result = result.gpus[0]
    step = gpu_result.step
    assert step is not None
    assert not step.failures
    left = {(cell.op, cell.recipe) for cell in gpu_result.linears.ops if cell.left_in_baseline}
    assert ("blocks.*.mix", "FP8Delayed") in left
    assert ("head", "FP8Delayed") in left
    assert ("blocks.*.up", "FP8Delayed") not in left
    assert "linears-left-in-baseline" in codes(gpu_result)


def test_compiled_and_eager_are_both_told(result: ForecastResult) -> None:
    [about] = [finding for finding in result.gpus[0].findings if finding.code == "traced-step-compiled"]
    step = result.gpus[0].step
    assert step is not None
    assert about.facts["compiled_ms"] == pytest.approx(step.recipes[0].step_ms.value)
    assert float(str(about.facts["eager_ms"])) > 1.03 * float(str(about.facts["compiled_ms"]))


def test_layers_that_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 layers take the CPU as long as those of the ViT-L of docs/measured/checked.md did: 59.5 and 90.7 ms."""
    measured = {"BF16": 59.5, "FP8Tensorwise": 90.7}
    monkeypatch.setattr("gemmscope.job.rank_workload.trace_module", lambda *_: replace(TRACE, layers=LAYERS))
    job = model_run(load_model(module="tower.py:build"))
    one_by_one = forecast(job, ["h200"], recipes=("fp8tensorwise",))
    [about] = [finding for finding in one_by_one.gpus[0].findings if finding.code == "traced-step-layers"]
    times = about.facts["times"]
    assert isinstance(times, dict)
    assert times == {name: pytest.approx(time, rel=0.03) for name, time in measured.items()}
    step = one_by_one.gpus[0].step
    assert step is not None
    assert all(time.step_ms.value < times[time.recipe] for time in step.recipes)
    monkeypatch.setattr("gemmscope.job.rank_workload.trace_module", lambda *_: replace(TRACE, layers=2))
    assert "traced-step-layers" not in codes(forecast(job, ["h200"]).gpus[0])  # the CPU has time enough to call two


@pytest.mark.parametrize(
    ("paths", "reason"),
    [((), "the model has no linears to quantize"), (("head",), "head: output features = 1000 is not a multiple of 16")],
)
def test_a_recipe_that_quantizes_nothing_says_why(monkeypatch: pytest.MonkeyPatch, paths: tuple[str, ...], reason: str) -> None:
    """The message neither claims the speed of BF16 nor names a linear that no framework would quantize."""
    bare = replace(TRACE, linear_paths=paths)
    monkeypatch.setattr("gemmscope.job.rank_workload.trace_module", lambda *_: bare)
    step = forecast(model_run(load_model(module="tower.py:build")), ["h200"]).gpus[0].step
    assert step is not None
    assert [time.recipe for time in step.recipes] == ["BF16"]
    assert all(failure.startswith(reason) for failure in step.failures.values())


def test_data_parallelism_exchanges_gradients(job: ModelRun) -> None:
    alone, shared = (
        StepForecast(Forecaster(gpu("h200"), "sustained"), None, run, as_workload(TRACE)).step("BF16")
        for run in (job.run, replace(job.run, dp=8))
    )
    assert not alone.exchanged
    assert {exchange.kind for exchange in shared.exchanged} == {"gradients", "weights"}
    assert shared.parts["optimizer"].value < alone.parts["optimizer"].value
    one, eight = (traced_memory(TRACE, run, "BF16", gpu("h200")) for run in (job.run, replace(job.run, dp=8, zero=3)))
    assert eight.weights_bytes + eight.moments_bytes < one.weights_bytes + one.moments_bytes
    assert one.least_bytes < one.total_bytes < one.most_bytes


def test_a_module_cannot_be_sharded_or_priced_by_tokens(job: ModelRun) -> None:
    with pytest.raises(UserError, match="cannot be sharded"):
        forecast(replace(job, run=replace(job.run, tp=2)), ["h200"])
    with pytest.raises(UserError, match="counts tokens"):
        forecast(job, ["h200"], tokens=1e9, gpu_count=8)


def test_a_module_without_linears(job: ModelRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmscope.job.rank_workload.trace_module", lambda *_: replace(TRACE, gemms=()))
    with pytest.raises(UserError, match="has no linear layers"):
        forecast(job, ["h200"])


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_the_trace_of_a_known_model_agrees_with_its_closed_form(tmp_path: Path) -> None:
    """Llama's layers, traced and in closed form: the same step within a few percent, each part within its error bar."""
    transformers = pytest.importorskip("transformers", reason="tracing needs torch and transformers")
    trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_key_value_heads": 8}
    config = json.loads(json.dumps(transformers.LlamaConfig(**sizes, vocab_size=32000).to_dict()))
    trace = trace_worker.answer({"config": config, "micro_batch": 1, "sequence": 8192, "as_trained": True})
    model, run = hf.from_config(config, str(tmp_path)).model, RunSpec(1, 8192, separate_projections=True)
    assert model is not None
    forecaster = Forecaster(gpu("h200"), "sustained")
    closed = StepForecast(forecaster, model, run, derive(model, run)).step("BF16")
    traced = StepForecast(forecaster, None, run, as_workload(trace)).step("BF16")
    assert traced.time_ms == pytest.approx(closed.time_ms, rel=0.03)
    assert traced.gpu.uncertainty > closed.gpu.uncertainty
    assert trace.heads == ("lm_head",)
    for part in ("GEMMs", "attention", "optimizer"):
        assert traced.parts_ms[part] == pytest.approx(closed.parts_ms[part], rel=0.05)  # type: ignore[index]
