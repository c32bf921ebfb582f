"""Cost of a run on GPUs that this machine does not have."""

from __future__ import annotations

import pytest

from gemmscope.document import document
from gemmscope.job.load import load_model, model_run
from gemmscope.results.forecast import ForecastResult
from support.command import Run, run
from support.commands import forecast

__all__ = ["run"]  # the fixture

MODEL = "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --gradient-accumulation 4 --tp 2"
BUDGET = "--tokens 1e12 --gpus 64 --price h200=2.5"


def test_cost_is_the_step_times_the_steps(run: Run) -> None:
    file = ForecastResult.model_validate_json(run(f"{MODEL} --gpu h200,b300 {BUDGET} --json -").out)
    assert file.dp == 32
    tokens_per_step = 8192 * 4 * 32
    for gpu in file.gpus:
        assert gpu.step is not None
        for recipe in gpu.step.recipes:
            assert recipe.cost is not None
            days = recipe.step_ms.value / 1000 * 1e12 / tokens_per_step / 86400
            assert recipe.cost.days.value == pytest.approx(days)
            assert recipe.cost.gpu_hours.value == pytest.approx(days * 24 * 64)
            assert recipe.cost.days.low is not None
            assert recipe.cost.days.low < days
            if gpu.gpu == "h200":
                assert recipe.cost.money is not None
                assert recipe.cost.money.value == pytest.approx(days * 24 * 64 * 2.5)
            else:
                assert recipe.cost.money is None  # no price was given for it


def test_gradients_are_exchanged_among_as_many_as_are_paid_for(run: Run) -> None:
    """A thousand GPUs wait longer for each other than two, and the cost includes that."""
    steps = []
    for gpus in (2, 1024):
        small = "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 512 --tp 2"  # nothing hides the exchange
        out = run(f"{small} --gpu h200 --tokens 1e12 --gpus {gpus} --json -").out
        step = ForecastResult.model_validate_json(out).gpus[0].step
        assert step is not None
        steps.append(step.recipes[0].step_ms.value)
    assert steps[0] < steps[1]


def test_it_is_in_the_document(run: Run) -> None:
    shown = document(ForecastResult.model_validate_json(run(f"{MODEL} --gpu h200 {BUDGET} --json -").out))
    table = next(table for table in shown.tables() if table.title == "FORECAST: Cost of the full run")
    assert len(table.rows) == 4
    assert "Full run: " in table.note
    for text in (table.note, run(f"{MODEL} --gpu h200 {BUDGET}").out):
        assert "1T tokens on 64 GPUs" in text
        assert "per GPU-hour" in text
        assert "global batch" in text
    assert "Full run" not in run(f"{MODEL} --gpu h200").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpu h200 --tokens 1e12", "needs --tokens and --gpus"),
        ("--gpu h200 --price 2", "needs --tokens and --gpus"),
        ("--gpu h200 --tokens 1e12 --gpus 3", "do not divide into groups of 2"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --dp 3", "is not 3 data-parallel replicas of 2 GPUs"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price cheap", "--price 'cheap' is not a price"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price h200=", "is not a price"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price h200=nan", "is not a price"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price b300=4", "names b300, which is not among the GPUs"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --sweep tp=1,2", "--tokens applies to the cost of one run"),
    ],
)
def test_wrong(run: Run, options: str, message: str) -> None:
    outcome = run(f"{MODEL} {options}")
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.parametrize("what", ["--shapes 4096", "--gemms -"])
def test_gemms_have_no_price(run: Run, what: str) -> None:
    outcome = run(f"forecast {what} --gpu h200 --tokens 1e12 --gpus 8")
    assert outcome.code == 2
    assert "--tokens" in outcome.err


def test_from_python() -> None:
    job = model_run(load_model(preset="llama-3.1-8b"), micro_batch_size=1, sequence_length=8192)
    both = forecast(job, ["h200", "b300"], tokens=1e12, gpu_count=8, price={"h200": 2.5, "B300": 4})
    assert both.dp == 8
    costs = [time.cost for gpu in both.gpus if gpu.step is not None for time in gpu.step.recipes]
    assert all(cost is not None and cost.money is not None for cost in costs)
    flat = forecast(job, ["h200"], tokens=1e12, gpu_count=8, price=2.5).gpus[0].step
    assert flat is not None
    assert flat.recipes[0].cost == costs[0]
