"""The application layer: one typed function per command, called by `cli/` and by `gemmscope.api`.

Modules are loaded when they are first used (`commands.bench.run_bench(...)`), so that `gemmscope --help` answers at once. So are
the types and functions of other folders that callers need for the arguments of commands (`commands.RunContext`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmscope.bench.choose import supported
    from gemmscope.commands import bench, calibrate, compare, doctor, explain, explore, fleet, forecast, known, numerics

    # isort: split
    from gemmscope.commands import plan, report, shapes, step, sweep

    # isort: split
    from gemmscope.document import document
    from gemmscope.job.load import ModelRun, load_model, model_run
    from gemmscope.pool.gpus import Launched, launched, one_gpu
    from gemmscope.progress import Console
    from gemmscope.results.keep import Keeper
    from gemmscope.results.read import read_result
    from gemmscope.run_context import RunContext

__all__ = [
    "Console", "Keeper", "Launched", "ModelRun", "RunContext", "bench", "calibrate", "compare", "doctor", "document",
    "explain", "explore", "fleet", "forecast", "known", "launched", "load_model", "model_run", "numerics", "one_gpu", "plan",
    "read_result", "report", "shapes", "step", "supported", "sweep",
]  # fmt: skip

_ELSEWHERE = {
    **dict.fromkeys(("ModelRun", "load_model", "model_run"), "job.load"),
    **dict.fromkeys(("Launched", "launched", "one_gpu"), "pool.gpus"),
    "Console": "progress",
    "Keeper": "results.keep",
    "RunContext": "run_context",
    "document": "document",
    "read_result": "results.read",
    "supported": "bench.choose",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(import_module(f"gemmscope.{_ELSEWHERE[name]}"), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
