"""gemmscope: how much FP8, MXFP8 and NVFP4 will speed up training of your model on your GPU, before you pay for the run."""

from __future__ import annotations

try:
    from gemmscope._version import __version__
except ImportError:  # not installed: run from its sources
    __version__ = "0.1.dev0"

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this, and Ctrl-C meanwhile would show a traceback
if TYPE_CHECKING:
    from gemmscope.api import (
        Job,
        Model,
        bench_gemm_sweep,
        bench_gemms,
        calibrate,
        compare_runs,
        doctor,
        explain_trace,
        fleet_gemms,
        forecast_gemms,
        gather_fleet,
        load,
        quantization_errors,
        read,
        write_report,
    )
    from gemmscope.errors import UserError
    from gemmscope.explain.record_trace import trace_me
    from gemmscope.numerics.in_training.record_tensors import record_tensors

__all__ = [
    "Job", "Model", "UserError", "__version__", "bench_gemm_sweep", "bench_gemms", "calibrate", "compare_runs", "doctor",
    "explain_trace", "fleet_gemms", "forecast_gemms", "gather_fleet", "load", "quantization_errors", "read", "record_tensors",
    "trace_me", "write_report",
]  # fmt: skip


ELSEWHERE = {
    "trace_me": "explain.record_trace",
    "record_tensors": "numerics.in_training.record_tensors",
    "UserError": "errors",
}
"""Names that are not in `gemmscope.api`."""

if not TYPE_CHECKING:  # or a wrong name would be no error of types

    def __getattr__(name):
        """Names of the Python API, loaded when they are first used: the command line needs none of them."""
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module 'gemmscope' has no attribute {name!r}")
        return getattr(import_module(f"gemmscope.{ELSEWHERE.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    """The names of the Python API, for `dir(gemmscope)` and tab completion."""
    return sorted(__all__)
