"""Linears counted as Transformer Engine's GEMM benchmark script does: every GEMM as a forward call with its own X and W."""

from __future__ import annotations

import pytest

import gemmscope as gs
from gemmscope.document import document
from gemmscope.errors import UserError
from gemmscope.forecast.linears import Forecaster
from gemmscope.gpu.specs import gpu
from gemmscope.job.rank_workload import LinearCases, as_forward_calls
from gemmscope.results.bench import BenchResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.workload.cases import Case, forward_calls, op_of
from gemmscope.writers import terminal
from support.command import Run, run
from support.workers import forked_workers

__all__ = ["forked_workers", "run"]  # the fixtures

SIZES = "--hidden-size 4096 --intermediate-size 16384 --num-attention-heads 32 --num-hidden-layers 24"
MODEL = f"{SIZES} --micro-batch-size 31 --sequence-length 512"


def test_twelve_calls_of_a_layer() -> None:
    """The sizes of the script: dgrad swaps inputs and outputs, wgrad contracts over the tokens."""
    [case] = [Case("QKV Proj", 15872, 4096, 12288, count=24)]
    calls = forward_calls([case])
    assert [(call.tokens, call.inputs, call.outputs) for call in calls] == [
        (15872, 4096, 12288),
        (15872, 12288, 4096),
        (4096, 15872, 12288),
    ]
    assert {call.flops for call in calls} == {case.flops}
    assert {op_of(call.op) for call in calls} == {"QKV Proj"}
    assert all(call.count == 24 and call.passes == ("fprop",) for call in calls)


def test_a_layer_runs_each_call_as_often_as_its_op() -> None:
    calls = as_forward_calls(LinearCases((Case("A", 8, 4, 2, count=6),), (), 3, {"A": 2}))
    assert calls.layer_counts == {"A": 2, "A (dgrad)": 2, "A (wgrad)": 2}
    assert [finding.code for finding in calls.findings] == ["counted-as-te-benchmark"]


def test_forecast(run: Run) -> None:
    usual = ForecastResult.model_validate_json(run(f"forecast {MODEL} --gpu h200 --json -").out).gpus[0]
    counted = ForecastResult.model_validate_json(run(f"forecast {MODEL} --gpu h200 --as-te-benchmark --json -").out)
    linears = counted.gpus[0].linears
    assert linears.as_te_benchmark
    assert not linears.bare
    assert len(linears.cases) == 12
    assert counted.gpus[0].step is None
    assert linears.memory == ()
    assert counted.has("counted-as-te-benchmark")
    baseline = {mode: linears.total("BF16", mode) for mode in linears.modes}
    assert baseline["autocast"] == baseline["pre-quantized"].model_copy(update={"mode": "autocast"})  # type: ignore[union-attr]
    for name in ("FP8Current", "FP8Delayed", "FP8Block"):
        here, there = linears.total(name, "autocast"), usual.linears.total(name, "autocast")
        assert here is not None
        assert there is not None
        assert here.quantize_ms > 1.5 * there.quantize_ms or name == "FP8Block"  # more tensors, and some of them in one direction
        assert here.layer_ms == pytest.approx(here.total_ms.value / 24)


def test_a_weight_is_quantized_for_one_direction() -> None:
    case = forward_calls([Case("MLP Up", 8192, 4096, 16384)])[0]
    both, one = (Forecaster(gpu("h200"), "sustained", forward_only=only).linear(case, "FP8Delayed") for only in (False, True))
    assert one.quantize_ms["W"] == pytest.approx(0.75 * both.quantize_ms["W"])
    assert one.quantize_ms["X"] == both.quantize_ms["X"]


@pytest.mark.usefixtures("forked_workers")
def test_bench_on_the_cpu(run: Run) -> None:
    small = "--hidden-size 64 --intermediate-size 128 --num-attention-heads 4 --num-hidden-layers 2"
    line = f"bench --device cpu {small} --micro-batch-size 1 --sequence-length 64 --as-te-benchmark --num-iters 3 --num-warmup 1"
    result = BenchResult.model_validate_json(run(f"{line} --gpu-warmup 0 --json -").out)
    assert result.settings.as_te_benchmark
    assert result.linears.as_te_benchmark
    assert len(result.linears.cases) == 12
    assert {total.mode for total in result.linears.totals} == {"autocast", "pre-quantized"}
    shown = terminal.text(document(result), detail=True)
    assert "Every GEMM is a forward call that quantizes its own X and W" in shown
    assert "MLP Down (wgrad)" in shown


@pytest.mark.parametrize("command", ["bench", "forecast --gpu h200"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{MODEL} --cache-weights", "quantizes the weight in every call, but --cache-weights never does"),
        ("--shapes 4096", "--as-te-benchmark applies to"),
        ("--preset qwen3-30b-a3b --micro-batch-size 1 --sequence-length 512", "no counterpart of experts"),
    ],
)
def test_what_does_not_go_together(run: Run, command: str, options: str, message: str) -> None:
    outcome = run(f"{command} {options} --as-te-benchmark {'--device cpu' if command == 'bench' else ''}")
    assert outcome.code == 2
    assert message in outcome.err


def test_it_is_not_about_a_step(run: Run) -> None:
    outcome = run(f"forecast {MODEL} --gpu h200 --as-te-benchmark --gpus 8 --tokens 1T")
    assert outcome.code == 2
    assert "apply to a training step, but there is none" in outcome.err
    with pytest.raises(UserError, match="applies to the linears of a model"):
        gs.forecast_gemms("h200", shapes=[(512, 512, 512)], as_te_benchmark=True)
