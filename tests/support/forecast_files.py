"""Results of `gemmscope forecast`: the worked example on one GPU and on several, and sweeps over one size and two."""

from __future__ import annotations

from functools import cache

from gemmscope.job.load import load_model, model_run
from gemmscope.results.forecast import ForecastResult
from support.commands import forecast, forecast_sweep

SIZES = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 24}
OPTIONS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SIZES.items())


@cache
def forecast_result() -> ForecastResult:
    """The worked example on a B300."""
    job = model_run(load_model(**SIZES), micro_batch_size=31, sequence_length=512)
    command = f"gemmscope forecast {OPTIONS} --micro-batch-size 31 --sequence-length 512 --gpu b300 --json forecast.json"
    return forecast(job, ["b300"], command=command)


@cache
def several_gpus() -> ForecastResult:
    """Llama 3.1 8B on GPUs that run different recipes; it does not fit into one of them. With the cost of a run."""
    job = model_run(load_model(preset="llama-3.1-8b"), micro_batch_size=1, sequence_length=8192)
    return forecast(
        job,
        ["b300", "h200", "l40s", "a100"],
        tokens=1e12,
        gpu_count=64,
        price={"h200": 2.5, "b300": 4.0},
        command="gemmscope forecast --preset llama-3.1-8b --micro-batch-size 1 --sequence-length 8192 --gpu b300,h200,l40s,a100",
    )


@cache
def sweep() -> ForecastResult:
    """Over one size. Short sequences are host-bound; at 2045 no low precision is possible."""
    lengths = [128, 256, 512, 1024, 2045, 2046, 2048]
    command = f"gemmscope forecast {OPTIONS} --micro-batch-size 8 --gpu b200,h200 --sweep sequence_length=128,256"
    return forecast_sweep(SIZES, {"micro_batch_size": 8}, {"sequence_length": lengths}, ["b200", "h200"], command=command)


@cache
def plane() -> ForecastResult:
    """Over two sizes; a hidden size of 0 is not possible."""
    axes = {"hidden_size": [0, *range(1024, 8193, 1024)], "micro_batch_size": [1, 2, 4, 8]}
    command = f"gemmscope forecast {OPTIONS} --sequence-length 2048 --gpu b300 --sweep hidden_size=0,1024"
    return forecast_sweep(SIZES, {"sequence_length": 2048}, axes, ["b300"], command=command)
