"""Units for tests of pools: requests to sites, and the summaries of their results."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmscope.errors import DoesNotFitError, UserError
from gemmscope.gpu.environment import Environment
from gemmscope.options.measuring import BenchOptions
from gemmscope.pool.measure_unit import MeasureUnit
from gemmscope.pool.pool import Unit
from gemmscope.progress import Reporter
from gemmscope.results.bench import BenchResult


def tiny_bench(key: str, *, side: int = 64, iterations: int = 2) -> Unit:
    """A real measurement of one small GEMM on the CPU."""
    measured = {"device": "cpu", "recipes": ["BF16"], "autocast_only": True, "num_iters": iterations, "num_warmup": 0}
    options = BenchOptions(shapes=[(side, side, side)], **measured)  # type: ignore[arg-type]
    return Unit(key, MeasureUnit(options, reduce="support.pools:times"))


def times(result: BenchResult) -> dict[str, Any]:
    """How many times were measured, and by which site."""
    return {"rounds": result.rounds, "tasks": [task.task.key for task in result.tasks if task.measured], "pid": os.getpid()}


@dataclass(frozen=True)
class Script:
    """A unit that measures nothing: a site runs what `what` says, so that tests need no torch."""

    what: str
    value: Any = None

    def check_place(self, _: Environment) -> None:
        if self.what == "refuse":
            raise UserError("no torch here", "install it")

    def run(self, reporter: Reporter, state: Path) -> Any:
        reporter.say(f"doing {self.what}")
        if self.what == "folder":
            return str(state)
        return getattr(self, f"_{self.what}")()

    def _answer(self) -> Any:
        os.write(1, b"frameworks print to standard output\n")
        return self.value

    def _nap(self) -> int:
        time.sleep(self.value)
        return os.getpid()

    def _visible(self) -> list[Any]:
        return [os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0))]

    def _wrong(self) -> None:
        raise DoesNotFitError("8192 does not fit", "use less")

    def _bug(self) -> None:
        raise KeyError("a bug")

    def _die_first(self) -> str:
        """Die unless this was done before: `value` is a file that says so."""
        try:
            with Path(self.value).open("x"):
                os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            return "the second time"
        return ""

    def _stop_first(self) -> str:
        """Fall silent unless this was done before."""
        try:
            with Path(self.value).open("x"):
                os.kill(os.getpid(), signal.SIGSTOP)
        except FileExistsError:
            return "the second time"
        return ""

    def _exit(self) -> None:
        os.write(2, b"out of luck\n")
        os._exit(3)

    def _sleep(self) -> None:
        """With a child that has a process group of its own, as measuring processes have. `value`: a file for its number."""
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(self.value).write_text(str(child.pid))
        time.sleep(1000)
