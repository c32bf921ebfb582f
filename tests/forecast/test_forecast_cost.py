"""What a run would cost on GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

import gemmscope as gs
from gemmscope.report.page.from_forecast import from_forecast
from gemmscope.store.forecastfile import ForecastFile
from test_cli import Run, run

__all__ = ["run"]  # the fixture

MODEL = "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --gradient-accumulation 4 --tp 2"
BUDGET = "--tokens 1e12 --gpus 64 --price h200=2.5"


def test_cost_is_the_step_times_the_steps(run: Run) -> None:
    file = ForecastFile.model_validate_json(run(f"{MODEL} --gpu h200,b300 {BUDGET} --json -").out)
    assert file.dp == 32
    tokens_per_step = 8192 * 4 * 32
    for gpu in file.gpus:
        for each in gpu.step:
            assert each.cost is not None
            days = each.step_ms.value / 1000 * 1e12 / tokens_per_step / 86400
            assert each.cost.days.value == pytest.approx(days)
            assert each.cost.gpu_hours.value == pytest.approx(days * 24 * 64)
            assert each.cost.days.low is not None
            assert each.cost.days.low < days
            if gpu.gpu == "h200":
                assert each.cost.money is not None
                assert each.cost.money.value == pytest.approx(days * 24 * 64 * 2.5)
            else:
                assert each.cost.money is None  # no price was given for it


def test_gradients_are_exchanged_among_as_many_as_are_paid_for(run: Run) -> None:
    """A thousand GPUs wait longer for each other than two; that is in the price."""
    steps = []
    for gpus in (2, 1024):
        small = "forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 512 --tp 2"  # nothing hides the exchange
        out = run(f"{small} --gpu h200 --tokens 1e12 --gpus {gpus} --json -").out
        steps.append(ForecastFile.model_validate_json(out).gpus[0].step[0].step_ms.value)
    assert steps[0] < steps[1]


def test_it_is_in_the_tables_and_on_the_page(run: Run, tmp_path: Path) -> None:
    out = run(f"{MODEL} --gpu h200 {BUDGET} --json {tmp_path}/run.json").out
    assert "The whole run, without restarts" in out
    part = from_forecast(ForecastFile.model_validate_json((tmp_path / "run.json").read_text()), "run")[0]
    table = next(table for table in part.tables if table.title == "The whole run")
    assert len(table.rows) == 4
    assert "The whole run" not in run(f"{MODEL} --gpu h200").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--gpu h200 --tokens 1e12", "needs --tokens and --gpus"),
        ("--gpu h200 --price 2", "needs --tokens and --gpus"),
        ("--gpu h200 --tokens 1e12 --gpus 3", "do not divide into groups of 2"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --dp 3", "are 32 data-parallel replicas in this layout, not 3"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price cheap", "--price 'cheap' is no price"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price h200=", "is no price"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price h200=nan", "is no price"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --price b300=4", "names b300, which is not among the GPUs"),
        ("--gpu h200 --tokens 1e12 --gpus 64 --sweep tp=1,2", "price one run"),
    ],
)
def test_wrong(run: Run, options: str, words: str) -> None:
    outcome = run(f"{MODEL} {options}")
    assert outcome.code == 2
    assert words in outcome.err


@pytest.mark.parametrize("what", ["--shapes 4096", "--gemms -"])
def test_products_have_no_price(run: Run, what: str) -> None:
    outcome = run(f"forecast {what} --gpu h200 --tokens 1e12 --gpus 8")
    assert outcome.code == 2
    assert "--tokens" in outcome.err


def test_from_python() -> None:
    job = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length=8192)
    file = job.forecast("h200", "b300", tokens=1e12, gpu_count=8, price={"h200": 2.5, "b300": 4.0}).file
    assert file.dp == 8
    assert all(each.cost is not None and each.cost.money is not None for gpu in file.gpus for each in gpu.step)
    flat = job.forecast("h200", tokens=1e12, gpu_count=8, price=2.5).file.gpus[0].step[0].cost
    assert flat == file.gpus[0].step[0].cost
