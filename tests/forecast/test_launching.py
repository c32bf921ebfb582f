"""GPU time and launch time: a step between both limits, its error bar, and what changes along a sweep."""

from __future__ import annotations

import random
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.forecast.estimate import Estimate
from gemmscope.forecast.launching import LaunchedStep, Launching, in_phases, speedup_interval, step_interval
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast, forecast_step
from gemmscope.gpu.specs import gpu
from gemmscope.interval import Interval
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.results.step import StepTime, StepTimes
from gemmscope.workload.derive import derive

QUEUE = 1000


def queued_ms(phases: list[tuple[int, float, float]], periods: int = 6) -> float:
    """One period of launches, each of which waits for the one before and for the GPU to be at most a queue behind."""
    launched = finished = before = 0.0
    ends: list[float] = []
    for _ in range(periods):
        before = finished
        for count, launch_ms, gpu_ms in phases:
            for _ in range(count):
                launched = max(launched + launch_ms / count, ends[-QUEUE] if len(ends) >= QUEUE else 0.0)
                finished = max(finished, launched) + gpu_ms / count
                ends.append(finished)
    return finished - before


def test_the_closed_form_is_that_of_the_queue() -> None:
    draw = random.Random(0)
    for _ in range(25):
        launches, launch_ms = draw.randint(1000, 6000), draw.uniform(0.4, 1.6)
        launching = in_phases(launch_ms, launches, forward_runs=1, waits=False)
        counts = [round(launches * phase.launch) for phase in launching.phases]
        phases = [(count, launch_ms * phase.launch, phase.gpu) for count, phase in zip(counts, launching.phases, strict=True)]
        assert launching.batch_ms(1.0) == pytest.approx(queued_ms(phases), rel=0.03)


def test_the_cpu_that_waits_in_forward_is_never_ahead_there() -> None:
    """Forward takes a third of the GPU time and 45% of the launch time: equal times do not hide each other."""
    ahead, waiting = (in_phases(10.0, 500, forward_runs=1, waits=waits) for waits in (False, True))
    assert ahead.batch_ms(10.0) == pytest.approx(10.0)
    assert waiting.batch_ms(10.0) == pytest.approx(4.5 + 20 / 3)


TIMES = st.floats(1.0, 1000.0)


@given(TIMES, TIMES, st.floats(0.01, 0.5), st.integers(10, 10_000), st.booleans())
def test_no_error_bar_reaches_below_the_gpu_time(
    gpu_ms: float, launch_ms: float, uncertainty: float, launches: int, waits: bool
) -> None:
    known = Estimate(gpu_ms, uncertainty)
    step = LaunchedStep(in_phases(launch_ms, launches, 1, waits=waits), gpu_ms, unsure=0.4)
    result, alone = step_interval(step, known), known.interval()
    for end, least in ((result.low, alone.low), (result.value, alone.value), (result.high, alone.high)):
        assert end is not None
        assert least is not None
        assert end >= least * (1 - 1e-9)


@given(TIMES, TIMES, st.floats(1.0, 2.0), st.floats(0.01, 0.2))
def test_without_launches_a_speedup_is_that_of_the_gpu(slow: float, launch_ms: float, gain: float, uncertainty: float) -> None:
    ratio = Estimate(gain, uncertainty)
    alone = speedup_interval(LaunchedStep(batch_ms=slow), LaunchedStep(batch_ms=slow / gain), Estimate(slow, 0.1), ratio, 1.0)
    assert alone == ratio.interval()
    fast = LaunchedStep(Launching(slow / 100), slow, unsure=0.4)
    assert speedup_interval(fast, fast, Estimate(slow, 0.1), ratio, 1.0) == ratio.interval()


# --- whole forecasts ----------------------------------------------------------------------------------------------------------


def forecast(preset: str, chip: str, run: RunSpec, recipes: tuple[str, ...] = ("BF16", "FP8Delayed")) -> StepTimes:
    model = presets.load(preset).model
    assert model is not None
    return forecast_step(StepForecast(Forecaster(gpu(chip), "sustained"), model, run, derive(model, run)), recipes)


def time_of(times: StepTimes, name: str) -> StepTime:
    time = times.of(name)
    assert time is not None
    return time


def ends(interval: Interval | None) -> tuple[float, float]:
    assert interval is not None
    assert interval.low is not None
    assert interval.high is not None
    return interval.low, interval.high


def test_a_step_near_the_limit_of_its_host_has_a_possible_bar() -> None:
    times = forecast("gpt2-xl", "h100", RunSpec(10, 1024), ("BF16", "FP8Current", "FP8Delayed", "FP8Block"))
    for time in times.recipes:
        assert ends(time.step_ms)[0] >= ends(time.gpu_ms)[0] * (1 - 1e-9)
    assert times.winner is not None
    speedup = time_of(times, "FP8Delayed")
    assert ends(speedup.gpu_speedup)[0] > 1.1


def test_more_micro_batches_do_not_change_what_the_gpu_gains() -> None:
    """The speedup of the GPU time is stated beside that of the step, which more micro-batches make host-bound."""
    one, many = (
        time_of(forecast("llama-3.1-8b", "h200", RunSpec(1, 1536, gradient_accumulation=n)), "FP8Delayed") for n in (1, 16)
    )
    assert one.gpu_speedup is not None
    assert many.gpu_speedup is not None
    assert many.gpu_speedup.value > one.gpu_speedup.value > 1.2
    assert ends(many.speedup)[1] <= ends(many.gpu_speedup)[1] * 1.01


SWEEPS = {
    "micro-batch": [RunSpec(batch, 512) for batch in (5, 6, 7, 8, 9, 10, 11, 12)],
    "sequence": [RunSpec(1, length) for length in range(1024, 4097, 256)],
    "accumulation": [RunSpec(1, 1536, gradient_accumulation=count) for count in (4, 5, 6, 7, 8, 9, 10)],
}


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize(("preset", "chip"), [("llama-3.1-8b", "h200"), ("llama-3.2-1b", "h100")])
def test_neighbours_have_neighbouring_times_and_bars(sweep: str, preset: str, chip: str) -> None:
    """Along a sweep across the host's limit, every point lies near the interpolation of its neighbours."""
    runs = SWEEPS[sweep]
    times = [time_of(forecast(preset, chip, run), "FP8Delayed") for run in runs]
    sizes = [run.micro_batch_size * run.sequence_length * run.gradient_accumulation for run in runs]
    for index in range(1, len(runs) - 1):
        before, at, after = (log(sizes[near]) for near in (index - 1, index, index + 1))
        share = (at - before) / (after - before)
        for value, within in (
            (lambda time: log(time.tokens_per_s), 0.03),
            (lambda time: log(time.speedup.value), 0.03),
            (lambda time: time.speedup.half_width, 0.03),
            (lambda time: time.step_ms.half_width, 0.03),
        ):
            near = [value(times[position]) for position in (index - 1, index, index + 1)]
            assert near[1] == pytest.approx(near[0] * (1 - share) + near[2] * share, abs=within), (sweep, runs[index])
