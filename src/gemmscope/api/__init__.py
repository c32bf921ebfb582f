"""The Python API: every command as a function that takes Python values and returns the command's result.

>>> import gemmscope as gs
>>> job = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length=8192)
>>> forecast = job.forecast("b300", "h200")
>>> [gpu.gpu for gpu in forecast.gpus]
['b300', 'h200']

A result shows itself in a notebook, `print(result)` prints what the command prints, `result.to_frame()` gives its main table to
pandas, and `result.save(path)` writes it. Invalid arguments raise `UserError`. Numbers can be written as on the command line:
"8k", "2T", "5%".
"""

from gemmscope.api.functions import (
    bench_gemm_sweep,
    bench_gemms,
    calibrate,
    compare_runs,
    doctor,
    explain_trace,
    fleet_gemms,
    forecast_gemms,
    gather_fleet,
    quantization_errors,
    read,
    write_report,
)
from gemmscope.api.jobs import Job
from gemmscope.api.models import Model, load

__all__ = [
    "Job", "Model", "bench_gemm_sweep", "bench_gemms", "calibrate", "compare_runs", "doctor", "explain_trace", "fleet_gemms",
    "forecast_gemms", "gather_fleet", "load", "quantization_errors", "read", "write_report",
]  # fmt: skip
