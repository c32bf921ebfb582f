"""The application layer: one typed function per command, called by `cli/` and by `gemmscope.api`.

Modules are loaded when they are first used (`commands.bench.run_bench(...)`), so that `gemmscope --help` answers at once. So are
the types and functions of other folders that callers need for the arguments of commands (`commands.Choices`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmscope.commands import bench, calibrate, compare, doctor, explain, fleet, forecast, numerics

    # isort: split
    from gemmscope.commands import plan, read, report, result, shapes, step, sweep

    # isort: split
    from gemmscope.bench.choose import Choices, supported
    from gemmscope.bench.timing import DEFAULT_TIMING, BenchTiming
    from gemmscope.job.load import ModelRun, load_model, model_run
    from gemmscope.pool.gpus import Launched, launched, one_gpu
    from gemmscope.progress import Console
    from gemmscope.sweep.run import HERE, Places

__all__ = [
    "DEFAULT_TIMING", "HERE", "BenchTiming", "Choices", "Console", "Launched", "ModelRun", "Places", "bench", "calibrate",
    "compare", "doctor", "explain", "fleet", "forecast", "launched", "load_model", "model_run", "numerics", "one_gpu", "plan",
    "read", "report", "result", "shapes", "step", "supported", "sweep",
]  # fmt: skip

_ELSEWHERE = {
    **dict.fromkeys(("Choices", "supported"), "bench.choose"),
    **dict.fromkeys(("BenchTiming", "DEFAULT_TIMING"), "bench.timing"),
    **dict.fromkeys(("ModelRun", "load_model", "model_run"), "job.load"),
    **dict.fromkeys(("Launched", "launched"), "pool.gpus"),
    **dict.fromkeys(("HERE", "Places"), "sweep.run"),
    "one_gpu": "pool.gpus",
    "Console": "progress",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(f"gemmscope.{_ELSEWHERE[name]}"), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
