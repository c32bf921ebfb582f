"""`run_bench` as Python calls it: plain values in, a result out, and errors that name arguments."""

from __future__ import annotations

from typing import Any

import pytest

from gemmscope.bench.campaign import LinearCampaign
from gemmscope.bench.choose import choose
from gemmscope.bench.measurements import Measurements
from gemmscope.errors import UserError
from gemmscope.job.load import load_model, model_run
from gemmscope.options.measuring import MeasuringOptions
from support.bench_results import record
from support.campaigns import interrupt
from support.commands import run_bench
from support.fake_gpu import Pretend, own_state, pretend
from support.machines import machine

__all__ = ["own_state", "pretend"]  # the fixtures


def test_a_model_and_shapes(pretend: Pretend) -> None:
    pretend()
    job = model_run(load_model(preset="gpt2"), micro_batch_size=1, sequence_length=128)
    result = run_bench(job, recipes=["fp8current"], command="run_bench(...)")
    assert result.model is not None
    assert (result.linears.layers, result.linears.layer_counts["Attn Out"]) == (12, 1)
    assert result.linears.recipes == ("BF16", "FP8Current")
    assert result.command == "run_bench(...)"
    bare = run_bench(shapes=[(64, 32, 16)], modes=["pre-quantized"])
    assert [case.op for case in bare.linears.cases] == ["64x32x16"]
    assert bare.linears.modes == ("pre-quantized",)
    with pytest.raises(UserError, match="shapes measures bare GEMMs, but a model was given"):
        run_bench(job, shapes=[(64, 32, 16)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": [(0, 4, 4)]}, "0x4x4 is not a shape"),
        ({"shapes": [(4, 10**8, 4)]}, "is too large"),
        ({"precision": 2.0}, "precision must be between 0 and 1, got 2"),
        ({"recipes": []}, "recipes is empty"),
        ({"recipes": ["mxfp8"], "left_out": ["MXFP8"]}, "recipes includes MXFP8, which is also skipped"),
        ({"modes": ["quick"]}, "there is no mode 'quick'"),  # type: ignore[list-item]
    ],
)
def test_errors_name_arguments(pretend: Pretend, arguments: dict[str, Any], message: str) -> None:
    ran = pretend()
    with pytest.raises(UserError) as error:
        run_bench(**arguments)
    assert message in str(error.value)
    assert "--" not in str(error.value)
    assert ran == []


@pytest.mark.parametrize(("measured", "code"), [(True, "interrupted"), (False, "interrupted-early")])
def test_ctrl_c_returns_what_was_measured(pretend: Pretend, monkeypatch: pytest.MonkeyPatch, measured: bool, code: str) -> None:
    pretend()

    def interrupted(self: LinearCampaign) -> Measurements:
        if measured:
            record(self.results)
        interrupt()
        self.interrupted = True
        return self.results

    monkeypatch.setattr(LinearCampaign, "run", interrupted)
    result = run_bench(shapes=[(64, 64, 64)])
    assert result.interrupted
    assert result.has(code)
    assert bool(result.linears.ops) == measured


def test_choices_left_open_are_what_the_gpu_runs(pretend: Pretend) -> None:
    pretend()
    choice = choose(MeasuringOptions(left_out=("FP8Block",)), machine())
    assert (choice.backend, choice.recipes) == ("transformer_engine", ["BF16", "FP8Current", "FP8Delayed"])
