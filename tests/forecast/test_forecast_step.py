"""The forecast of training steps, compared with measured steps that were not fitted, and its dependence on the layout."""

from __future__ import annotations

import json
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.choices import MODES
from gemmscope.forecast.calibration import shipped
from gemmscope.forecast.estimate import Estimate, ratio, total
from gemmscope.forecast.linear_results import forecast_linears, misaligned
from gemmscope.forecast.linears import Forecaster, in_common
from gemmscope.forecast.step import StepForecast, forecast_step
from gemmscope.forecast.step_estimate import IDLE, StepEstimate, gpu_speedup
from gemmscope.forecast.sweep import forecast_sweep
from gemmscope.forecast.training import quantizing
from gemmscope.gpu.specs import gpu, gpus
from gemmscope.interval import Interval
from gemmscope.model import presets
from gemmscope.model.spec import ModelSpec, RunSpec, from_hyperparameters
from gemmscope.parts import STEP_PARTS, StepPart
from gemmscope.recipe.recipes import recipe
from gemmscope.recipe.support import support
from gemmscope.results.linears import Winner
from gemmscope.results.sweep import SweepPoint, break_even
from gemmscope.workload.cases import Case, cases_of
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Linear
from gemmscope.workload.summary import totals

MEASURED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "h200_training_steps.json").read_text())["models"]
TE = ("FP8Current", "FP8Delayed", "FP8Block")


def model_of(config: dict[str, Any]) -> tuple[ModelSpec, RunSpec]:
    sizes = dict(config)
    run = RunSpec(sizes.pop("micro_batch_size"), sizes.pop("sequence_length"))
    gated = sizes.pop("gated_mlp")
    return from_hyperparameters(**sizes, gated=gated), run


def steps(name: str, model: ModelSpec, run: RunSpec) -> StepForecast:
    return StepForecast(Forecaster(gpu(name), "sustained"), model, run, derive(model, run))


def test_speedups_of_real_steps_on_an_h200() -> None:
    """Twelve cases: 6% on average; and the error bar holds the truth in most of them."""
    errors, inside = [], 0
    for facts in MEASURED.values():
        forecast, real = steps("h200", *model_of(facts["config"])), facts["median_ms"]
        baseline = (real["BF16"] + real["BF16_again"]) / 2
        for name in TE:
            interval = gpu_speedup(forecast.step("BF16"), forecast.step(name), in_common()).interval()
            errors.append(abs(interval.value * real[name] / baseline - 1))
            inside += interval.low <= baseline / real[name] <= interval.high
    assert sum(errors) / len(errors) < 0.06
    assert max(errors) < 0.10
    assert inside >= 10


def test_times_of_real_steps_on_an_h200() -> None:
    for facts in MEASURED.values():
        forecast = steps("h200", *model_of(facts["config"]))
        for name in ("BF16", *TE):
            assert forecast.step(name).time_ms == pytest.approx(facts["median_ms"][name], rel=0.12)


def test_parts_are_those_of_a_measured_step() -> None:
    model = presets.load("mixtral-8x7b").model
    assert model is not None
    run = RunSpec(1, 4096, tp=2, sequence_parallel=True, ep=4, pp=2, dp=64, gradient_accumulation=4)
    forecast = steps("b200", model, run).step("MXFP8")
    assert set(forecast.parts) <= set(STEP_PARTS)
    assert {"GEMMs", "quantization", "attention", "routing", "exposed communication", "pipeline bubble"} <= set(forecast.parts)
    assert forecast.gpu.value == pytest.approx(sum(part.value for part in forecast.parts.values()))
    assert forecast.time_ms == pytest.approx(sum(forecast.parts_ms.values()))


def test_times_like_those_of_a_measured_step() -> None:
    model, run = model_of(MEASURED["llama8b_l8"]["config"])
    forecast = forecast_step(steps("h200", model, run), ["BF16", *TE])
    assert forecast.origin == "forecast"
    assert [time.recipe for time in forecast.recipes] == ["BF16", *TE]
    current = forecast.of("FP8Current")
    assert current is not None
    assert current.speedup is not None
    assert current.verdict is not None
    assert current.waterfall[-1].speedup == pytest.approx(current.speedup.value)
    assert current.waterfall[0].speedup > current.waterfall[-1].speedup
    assert sum(current.parts_ms.values()) == pytest.approx(current.step_ms.value)
    assert current.mfu == pytest.approx(current.model_tflops / gpu("h200").tflops["bf16"])


def test_recipes_are_compared_with_each_other() -> None:
    """FP8Current and FP8Delayed run the same GEMMs: their common error cancels, and the winner is called."""
    model, run = model_of(MEASURED["llama8b_l8"]["config"])
    forecast = forecast_step(steps("h200", model, run), ["BF16", *TE])
    assert {(speedup.recipe, speedup.over) for speedup in forecast.speedups} == {
        (name, over) for name in TE for over in ("BF16", *TE) if name != over
    }
    ratio, back = forecast.speedup("FP8Delayed", "FP8Current"), forecast.speedup("FP8Current", "FP8Delayed")
    block, gain = forecast.speedup("FP8Delayed", "FP8Block"), forecast.speedup("FP8Delayed")
    assert ratio is not None
    assert back is not None
    assert block is not None
    assert gain is not None
    assert ratio.value == pytest.approx(1 / back.value)
    assert ratio.half_width < block.half_width
    assert forecast.winner is not None
    assert forecast.winner.best == "FP8Delayed"
    assert forecast.winner.speedup == gain
    assert ("FP8Current" in forecast.winner.rivals) == ratio.includes_one


def test_model_flops_leave_recomputation_out() -> None:
    """Recomputation takes time but does not count as model FLOPs."""
    model, run = model_of(MEASURED["llama8b_l8"]["config"])
    again = replace(run, recompute="full")
    plain, full = (totals(derive(model, spec), spec, model) for spec in (run, again))
    assert plain.model_flops == plain.gemm_flops + plain.attention_flops
    assert full.model_flops == plain.model_flops < full.gemm_flops + full.attention_flops
    times = [forecast_step(steps("h200", model, spec), ["BF16"]).recipes[0] for spec in (run, again)]
    assert times[1].model_tflops < times[0].model_tflops
    assert times[1].model_tflops * times[1].step_ms.value == pytest.approx(times[0].model_tflops * times[0].step_ms.value)


def test_sizes_that_do_not_fit_are_said() -> None:
    model = from_hyperparameters(hidden_size=4096, intermediate_size=16380, num_attention_heads=32, num_hidden_layers=2)
    forecast = steps("h200", model, RunSpec(1, 4096))
    assert "16384" in forecast.why_not("FP8Current")
    assert not forecast.why_not("BF16")


def test_routers_stay_in_bf16() -> None:
    model = presets.load("mixtral-8x7b").model
    assert model is not None
    workload = derive(model, RunSpec(1, 4096))
    cases = cases_of(op for op in workload.ops if isinstance(op, Linear))
    linears = forecast_linears(Forecaster(gpu("h200"), "sustained"), cases, ["BF16", "FP8Current"], MODES)
    router = linears.op_time("Router", "FP8Current", "autocast")
    assert router is not None
    assert router.left_in_baseline
    assert linears.speedup("FP8Current", "autocast", "Router") is None
    assert linears.speedup("FP8Current", "autocast") is not None
    assert not misaligned(cases, ["BF16", "FP8Current"])


@pytest.mark.parametrize(("name", "part"), [("deepseek-v3.2", "attention"), ("qwen3-next-80b-a3b", "linear attention")])
def test_what_was_not_measured_has_wide_error_bars(name: str, part: StepPart) -> None:
    model = presets.load(name).model
    assert model is not None
    time = steps("h200", model, RunSpec(1, 8192, ep=64)).step("FP8Current").parts[part]
    assert time.value > 0
    assert time.uncertainty > 0.15


@pytest.mark.parametrize("name", gpus())
def test_every_gpu_answers(name: str) -> None:
    model, run = model_of(MEASURED["gpt1b_l16"]["config"])
    time = steps(name, model, run).step("BF16").gpu
    assert time.value > 0
    assert 0.01 < time.uncertainty < 0.6


@pytest.mark.parametrize("name", gpus())
@pytest.mark.parametrize("tokens", [512, 8192])
def test_no_part_is_faster_sustained_than_in_a_burst(name: str, tokens: int) -> None:
    model = presets.load("llama-3.1-8b").model
    assert model is not None
    run, chip = RunSpec(1, tokens), gpu(name)
    workload = derive(model, run)
    sustained, burst = (StepForecast(Forecaster(chip, state), model, run, workload) for state in ("sustained", "burst"))  # type: ignore[arg-type]
    for recipe_name in ("BF16", *TE, "MXFP8", "NVFP4"):
        if support(recipe_name, chip.capability).runs:
            slow, fast = sustained.step(recipe_name), burst.step(recipe_name)
            parts = [part for part in slow.parts if part != IDLE]
            assert all(slow.parts[part].value >= fast.parts[part].value * (1 - 1e-9) for part in parts), recipe_name


@pytest.mark.parametrize("name", ["h200", "b300", "l40s"])
def test_linears_do_not_beat_the_chip(name: str) -> None:
    chip, case = gpu(name), Case("wide", 20768, 52032, 688)
    for recipe_name in ("BF16", "FP8Current", "FP8Block"):
        if support(recipe_name, chip.capability).runs:
            rate = chip.tflops["bf16" if recipe_name == "BF16" else "fp8"] * 1e9
            gemms = Forecaster(chip, "burst").linear(case, recipe_name).gemms.values()
            assert all(part.value >= 2 * 20768 * 52032 * 688 / rate * (1 - 1e-9) for part in gemms)


def test_casts_reach_less_of_blackwells_bandwidth() -> None:
    """Casts reach a smaller share of bandwidth than on an H200, except for very long tensors. Time grows with length."""
    for name in ("b200", "b300"):
        h200, other = (quantizing(recipe("MXFP8"), gpu(gpu_name)) for gpu_name in ("h200", name))
        bandwidth = gpu(name).bandwidth_tbps / gpu("h200").bandwidth_tbps
        for elements, least, most in ((5e7, 1.15, 1.35), (1e10, 1.0, 1.02)):
            ratio = (other.time_ms(elements) - other.launch_ms) / (h200.time_ms(elements) - h200.launch_ms) * bandwidth
            assert least < ratio < most
        times = [other.time_ms(2.0**exponent) for exponent in range(40)]
        assert times == sorted(times)


def test_weights_are_quantized_once_per_step() -> None:
    """Four micro-batches quantize four times the activations, and the weights once."""
    model, run = model_of(MEASURED["llama8b_l8"]["config"])
    one = steps("h200", model, run).step("FP8Current").parts["quantization"].value
    four = steps("h200", model, replace(run, gradient_accumulation=4)).step("FP8Current").parts["quantization"].value
    forecaster = Forecaster(gpu("h200"), "sustained")
    _, casts = forecaster.software.low_precision("FP8Current")
    weights = forecaster.in_step(steps("h200", model, run).quantized, "FP8Current").weights.value * casts.factor
    assert weights > 0
    assert four == pytest.approx(4 * one - 3 * weights)
    again = replace(run, recompute="full")
    kept, plain = (
        StepForecast(Forecaster(gpu("h200"), "sustained", cache_weights=kept), model, again, derive(model, again))
        for kept in (True, False)
    )
    times = [forecast.step("FP8Current").parts["quantization"].value for forecast in (plain, kept)]
    assert times[0] - times[1] == pytest.approx(weights / 3)


# --- how uncertainties combine -----------------------------------------------------------------------------------------------

UNCERTAINTIES = st.floats(0.0, 0.5)
ESTIMATES = st.builds(Estimate, st.floats(0.001, 1e4), UNCERTAINTIES, UNCERTAINTIES)


@given(st.lists(ESTIMATES, min_size=1, max_size=8))
def test_a_sum_is_no_surer_than_what_its_parts_share(parts: list[Estimate]) -> None:
    summed = total(parts)
    assert summed.value == pytest.approx(sum(part.value for part in parts))
    assert min(part.shared for part in parts) - 1e-9 <= summed.shared <= max(part.shared for part in parts) + 1e-9
    assert summed.own <= max(part.own for part in parts) + 1e-9


@given(ESTIMATES, ESTIMATES)
def test_what_is_in_common_makes_a_ratio_surer(slow: Estimate, fast: Estimate) -> None:
    assert ratio(slow, fast, 0.5).uncertainty <= ratio(slow, fast, 0.0).uncertainty + 1e-9
    assert ratio(slow, fast, 0.0).interval().low <= slow.value / fast.value


def test_what_does_not_change_dilutes() -> None:
    slow = StepEstimate({"GEMMs": Estimate(100.0, 0.02, 0.05), "attention": Estimate(50.0, 0.0, 0.1)})
    fast = StepEstimate({"GEMMs": Estimate(50.0, 0.02, 0.05), "attention": Estimate(50.0, 0.0, 0.1)})
    alone = gpu_speedup(StepEstimate({"GEMMs": slow.parts["GEMMs"]}), StepEstimate({"GEMMs": fast.parts["GEMMs"]}), 0.5)
    assert gpu_speedup(slow, fast, 0.5).value == pytest.approx(1.5)
    assert gpu_speedup(slow, fast, 0.5).uncertainty < alone.uncertainty


# --- sweeps, and steps that the host limits ---------------------------------------------------------------------------------


def test_a_point_gains_where_its_best_recipe_does() -> None:
    """A point gains if the speedup of its best recipe is beyond the error bar."""
    high = Interval(1.3, 1.2, 1.4)
    certain, close = Winner(best="A", speedup=high), Winner(best="A", speedup=Interval(1.1, 0.9, 1.3), rivals=("BF16",))
    assert SweepPoint(values={"tp": 1}, winner=certain).gains
    assert SweepPoint(values={"tp": 1}, winner=certain.model_copy(update={"rivals": ("B",)})).gains  # only rivals in BF16 matter
    assert not SweepPoint(values={"tp": 1}, winner=close).gains
    assert not SweepPoint(values={"tp": 1}, winner=Winner(best="BF16", speedup=None)).gains
    points = [
        SweepPoint(values={"tp": 1}, speedups={"A": Interval(1.1, 0.9, 1.3)}),
        SweepPoint(values={"tp": 2}, speedups={"A": high}),
        SweepPoint(values={"tp": 3}, why_not="not possible"),
    ]
    assert break_even(points, "A") == 2


def test_a_step_takes_at_least_as_long_as_launching_it() -> None:
    """Where launching takes much longer than running, the step takes the launch time."""
    model = presets.load("llama-3.1-8b").model
    assert model is not None
    small, large = (steps("b200", model, RunSpec(1, tokens)) for tokens in (256, 8192))
    bound = small.step("FP8Delayed")
    assert bound.host_bound
    assert bound.time_ms == pytest.approx(bound.launched.launch_ms, rel=0.01)
    assert bound.time_ms <= small.step("FP8Current").time_ms
    assert not large.step("FP8Delayed").host_bound


def test_rates_are_those_of_one_gpu_on_average() -> None:
    """Tokens/s, TFLOP/s and MFU agree, whichever stage of the pipeline is the busiest."""
    model = presets.load("llama-3.1-8b").model
    assert model is not None
    alone, split = (
        forecast_step(steps("h100", model, run), ["BF16"]) for run in (RunSpec(1, 8192), RunSpec(1, 8192, tp=2, pp=4))
    )
    per_token = [times.recipes[0].model_tflops / times.recipes[0].tokens_per_s for times in (alone, split)]
    assert per_token[0] == pytest.approx(per_token[1], rel=1e-3)


def test_cores_share_what_one_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without calibration, other processes get the measured factors. If they die, one process computes everything."""
    model, run = model_of(MEASURED["gpt1b_l16"]["config"])
    wanted = [({"micro_batch_size": batch}, model, replace(run, micro_batch_size=batch)) for batch in (1, 2, 4)]
    calibrated = shipped("h200")
    assert calibrated is not None
    forecaster = Forecaster(gpu("h200"), "burst", measured=calibrated)
    alone = forecast_sweep(forecaster, wanted, [], ["FP8Current"])
    assert alone != forecast_sweep(Forecaster(gpu("h200"), "burst"), wanted, [], ["FP8Current"])
    monkeypatch.setattr("gemmscope.forecast.sweep.WORTH_SHARING", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert forecast_sweep(forecaster, wanted, [], ["FP8Current"]) == alone

    def broken(*_: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", broken)
    assert forecast_sweep(forecaster, wanted, [], ["FP8Current"]) == alone


def test_points_of_a_sweep_are_single_forecasts() -> None:
    model, run = model_of(MEASURED["llama8b_l8"]["config"])
    names = ["BF16", *TE]
    [sweep] = forecast_sweep(Forecaster(gpu("h200"), "sustained"), [({"tp": 1}, model, run)], [], names)
    [point] = sweep.points
    alone = forecast_step(steps("h200", model, run), names)
    assert point.baseline_step_ms == alone.recipes[0].step_ms
    for name in TE:
        gain, single = point.speedups[name], alone.speedup(name)
        assert single is not None
        assert (gain.low, gain.value, gain.high) == pytest.approx((single.low, single.value, single.high), rel=1e-5)
    assert point.winner is not None
    assert alone.winner is not None
    assert (point.winner.best, point.winner.rivals) == (alone.winner.best, alone.winner.rivals)
