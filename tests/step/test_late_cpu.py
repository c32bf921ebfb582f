"""A CPU that launches too late: what is said of the GPU, and what of the step as launched."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gemmscope.document.step_parts import step_answer
from gemmscope.engine.messages import Hello, Launch, Profile, Sampled
from gemmscope.model.spec import RunSpec, from_hyperparameters
from gemmscope.results.step import StepTime, StepTimes, Variant
from gemmscope.step.answer import step_times, wants_graphs
from gemmscope.step.step_measurements import StepMeasurements
from gemmscope.step.waterfall import step_findings
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import totals

LAYERS = 33
ESM2 = from_hyperparameters(
    hidden_size=1280, intermediate_size=5120, num_attention_heads=20, num_hidden_layers=LAYERS, vocab_size=33
)
RUN = RunSpec(micro_batch_size=16, sequence_length=1024)
GEMM, FP8_GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT"
NORM, CAST = "transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "cast_transpose_optimized_kernel(…)"
LATE, TIMELY = {"late": 0.6, "run_delay": 0.0}, {"late": 0.0, "run_delay": 0.0}
Rounds = Sequence[tuple[float, dict[str, float]]]


def take(measurements: StepMeasurements, variant: Variant, rounds: Rounds, kernels: Sequence[tuple[str, float]] = ()) -> None:
    for step_ms, state in rounds:
        burst = {variant.name: [step_ms * (1 + 0.001 * number) for number in range(-3, 4)]}
        measurements.take(Sampled(burst, state))
    if kernels:
        parts = [("mlp", "forward", [(name, time_ms * 1000, 7) for name, time_ms in kernels])]
        busy_ms = sum(time_ms for _, time_ms in kernels)
        measurements.take(Profile(variant.name, parts, busy_ms, [busy_ms * 0.99, busy_ms, busy_ms * 1.01]))


def store(rounds: dict[str, Rounds], *, captured: bool = False, **kernels: Sequence[tuple[str, float]]) -> StepMeasurements:
    """Steps of all layers, with the launch times that were measured for ESM-2's sizes."""
    variants = {name: Variant(name, LAYERS, captured=captured) for name in rounds}
    measurements = StepMeasurements(variants.values(), LAYERS)
    measurements.take(Hello({}, {"name": "NVIDIA H200"}))
    for name, variant in variants.items():
        take(measurements, variant, rounds[name], kernels.get(name, ()))
        if not captured:
            launch_ms = 60.0 if name == "BF16" else 112.0
            measurements.take(Launch(variant.name, launch_ms, [launch_ms * 0.97, launch_ms, launch_ms * 1.04]))
    return measurements


def steady(step_ms: float, state: dict[str, float] = TIMELY) -> Rounds:
    return [(step_ms * (1 + 0.0005 * number), state) for number in range(-2, 3)]


def answer(launched: StepMeasurements, captured: StepMeasurements | None = None, **more: Any) -> StepTimes:
    names = list(dict.fromkeys(result.variant.recipe for result in launched.tasks.values()))
    return step_times(launched, names, totals(derive(ESM2, RUN), RUN, ESM2), RUN.tokens, captured=captured, **more)


def time_of(times: StepTimes, name: str) -> StepTime:
    time = times.of(name)
    assert time is not None
    return time


DISTURBED: Rounds = [(120.0, TIMELY), (204.0, LATE), (149.0, LATE), (121.0, TIMELY), (165.0, LATE)]
BF16_KERNELS = [(GEMM, 121.0), (NORM, 21.9)]
FP8_KERNELS = [(FP8_GEMM, 70.0), (CAST, 21.6), (NORM, 21.9)]


def esm2() -> tuple[StepMeasurements, StepMeasurements]:
    """As recorded on an H200 whose CPU was late in three of five rounds of FP8Current."""
    launched = store({"BF16": steady(143.4), "FP8Current": DISTURBED}, BF16=BF16_KERNELS, FP8Current=FP8_KERNELS)
    return launched, store({"BF16": steady(143.0), "FP8Current": steady(118.8)}, captured=True)


def test_rounds_in_which_the_cpu_was_late_are_not_averaged() -> None:
    launched, graphs = esm2()
    assert wants_graphs(launched, ["BF16", "FP8Current"])
    times = answer(launched, graphs)
    low = time_of(times, "FP8Current")
    assert low.gpu_speedup is not None
    assert low.gpu_speedup.value == pytest.approx(1.204, abs=0.002)
    assert low.gpu_speedup.half_width < 0.01
    assert low.gpu_ms is not None
    assert (low.gpu_ms.value, low.gpu_time_from) == (pytest.approx(118.8, rel=0.002), "graph")
    assert (low.step_ms.value, low.step_ms.low, low.step_ms.high) == (149.0, 120.0, 204.0)
    assert low.speedup is not None
    assert low.speedup.low == pytest.approx(143.4 / 204, rel=0.002)
    assert low.speedup.high == pytest.approx(143.4 / 120, rel=0.002)
    assert (low.late_rounds, low.rounds) == (3, 5)
    assert low.launch_ms is not None
    assert low.launch_ms.low == pytest.approx(112 * 0.97)


def test_parts_are_parts_of_gpu_time_and_waiting_is_one_of_its_own() -> None:
    times = answer(*esm2())
    parts = time_of(times, "FP8Current").parts_ms
    norms = {name: time_of(times, name).parts_ms["norms and activations"] for name in ("BF16", "FP8Current")}
    assert norms["FP8Current"] == pytest.approx(norms["BF16"], rel=0.05)
    assert parts["idle, host-bound"] == pytest.approx(149 - 118.8, rel=0.02)
    assert sum(parts.values()) == pytest.approx(149.0)
    assert time_of(times, "BF16").parts_ms.get("idle, host-bound", 0.0) < 0.005 * 143
    verdict = time_of(times, "FP8Current").verdict
    assert verdict is not None
    assert verdict.code == "step-host-bound"


def test_both_limits_are_said_in_one_breath() -> None:
    _, because = step_answer(answer(*esm2()), "H200")
    assert any("where the GPU is the limit" in line and "late in 3 of 5 rounds" in line for line in because)


def test_graphs_decide_if_they_were_asked_for() -> None:
    launched, graphs = esm2()
    by_launches, by_graphs = answer(launched, graphs), answer(launched, graphs, by_graphs=True)
    assert by_launches.winner is not None
    assert (by_launches.decided_by, by_launches.winner.best) == ("launched", "BF16")
    assert by_graphs.winner is not None
    assert (by_graphs.decided_by, by_graphs.winner.best) == ("graphs", "FP8Current")
    said, _ = step_answer(by_graphs, "H200")
    assert "in CUDA graphs" in said
    assert "1.20" in said
    nothing = answer(launched, store({"BF16": [], "FP8Current": []}, captured=True), by_graphs=True)
    assert nothing.decided_by == "launched"


def test_both_clocks_are_said_where_they_differ() -> None:
    """A step that waits for launches runs at a higher clock."""
    fast, slow = ({"late": late, "sm_mhz": clock} for late, clock in ((0.6, 1950.0), (0.0, 1710.0)))
    launched = store({"BF16": steady(150.0, fast), "FP8Current": steady(140.0, fast)})
    graphs = store({"BF16": steady(143.0, slow), "FP8Current": steady(118.8, slow)}, captured=True)
    [said] = [entry for entry in step_findings(answer(launched, graphs)) if entry.code == "launched-at-higher-clock"]
    assert (said.facts["launched_mhz"], said.facts["captured_mhz"]) == (1950.0, 1710.0)
    assert "launched-at-higher-clock" not in {entry.code for entry in step_findings(answer(*esm2()))}


def test_without_graphs_kernels_tell_the_gpu_time() -> None:
    """Where a step cannot be captured, and launches may be the limit."""
    times = answer(esm2()[0])
    assert [entry.facts["recipes"] for entry in step_findings(times) if entry.code == "gpu-time-of-kernels"] == [["FP8Current"]]
    low = time_of(times, "FP8Current")
    assert low.gpu_ms is not None
    assert (low.gpu_ms.value, low.gpu_time_from) == (pytest.approx(113.5), "kernels")
    assert low.gpu_ms.low == pytest.approx(113.5 * 0.99)
    assert low.gpu_speedup is not None
    assert low.gpu_speedup.low is not None
    assert low.gpu_speedup.low < 143.4 / 113.5


def test_one_late_round_of_a_gpu_bound_step_costs_nothing_else() -> None:
    launched = store({"BF16": steady(1000.0), "FP8Current": [*steady(700.0), (760.0, LATE)]})
    times = answer(launched)
    low = time_of(times, "FP8Current")
    assert not wants_graphs(launched, ["BF16", "FP8Current"])
    assert low.gpu_ms is not None
    assert (low.gpu_ms.value, low.gpu_time_from) == (pytest.approx(700.0, rel=1e-3), "timely rounds")
    assert low.gpu_speedup is not None
    assert low.gpu_speedup.value == pytest.approx(1000 / 700, rel=1e-3)
    assert low.step_ms.high == pytest.approx(760)


def test_a_gpu_bound_step_has_one_speedup() -> None:
    times = answer(store({"BF16": steady(1000.0), "FP8Current": steady(700.0)}))
    low = time_of(times, "FP8Current")
    assert (low.gpu_ms, low.gpu_speedup, low.late_rounds) == (low.step_ms, low.speedup, 0)
    _, because = step_answer(times, "H200")
    assert not any("where the GPU is the limit" in line for line in because)


class Mark:
    """A CUDA event of a GPU whose clock is ahead of the CPU's by `offset_s`."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_time(self, other: Mark) -> float:
        return (other.at_s - self.at_s) * 1000


def test_a_mark_that_is_reached_at_once_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="steps need torch")
    from gemmscope.step.worker import ClockOfBoth

    zero = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=Mark(500.0).elapsed_time)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: zero)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("gemmscope.step.worker.time.perf_counter", lambda: 20.0)  # the GPU's 500 s are the CPU's 20 s
    clock = ClockOfBoth()
    launched_s = [21.0, 22.0, 23.0, 24.0]
    reached_s = [21.0001, 22.1, 23.1, 24.0002]
    assert clock.late_share(launched_s, [Mark(480 + at) for at in reached_s]) == 0.5
    assert clock.late_share(launched_s, [Mark(480 + at + 0.05) for at in launched_s]) == 0.0
    drifted = [Mark(480 + at - 0.003) for at in [21.0, 22.1, 23.1, 24.1]]  # the first is reached 3 ms before it was launched
    assert clock.late_share(launched_s, drifted) == 0.25
    assert clock.late_share(launched_s, drifted) == 0.25
