"""Records a trace from a training loop, with the settings that `gemmscope explain` needs: three lines in the user's own code.

    import gemmscope

    with gemmscope.trace_me("step.json.gz") as trace:      # 1
        for batch in loader:
            train(batch)
            trace.step()                                   # 2: after every optimizer step

It waits until the run is warm, records a few steps with the shapes of all operators, and writes one small gzipped file, with the
times of the steps before, which the profiler does not slow down. Before and after that it costs nothing. torch is the user's own,
imported only when the recording begins. Whatever goes wrong is said on standard error, as early as it can be known, and the
training goes on: nothing here raises once the training runs. PyTorch has one profiler per process: where the training uses it at
the same time, this recording steps aside.

What is written is small (`slim_file`): GPU work, the calls that launched it, the operators of those calls (with the shapes of
their inputs), functions of frameworks, step marks and annotations. Python frames, allocator events, arrows and PyTorch operators
that launched nothing are dropped.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from gemmscope.errors import UserError
from gemmscope.explain.recorded_trace import ATTENTION_FORWARD, CONCRETE, as_table
from gemmscope.explain.trace_file import EventStream, write_trace
from gemmscope.folders import temporary_folder
from gemmscope.say import say
from gemmscope.training import Guard, known_keywords, own_rank, package_versions, why_not_writable, with_rank

CLOCK_SECONDS = 0.02  # between two readings of the GPU clock
PROFILER_CALLS = {
    "profiler": ("_prepare_profiler", "_enable_profiler", "_disable_profiler"),
    "profiler_legacy": ("_enable_profiler_legacy", "_disable_profiler_legacy"),
}
"""The calls of torch's C++ code by which its profilers begin and end, by their module in `torch.autograd`."""
PLAIN_STEPS = 5  # times of steps without the profiler that are kept: the last ones before the recording
MOST_STEPS = 1000  # the profiler keeps all of them in memory


GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
LAUNCH_NAMES = ("Launch", "Memcpy", "Memset", "Synchronize", "StreamWaitEvent", "Malloc", "Free", "HostAlloc")
KEPT_ARGUMENTS = (
    "External id", "correlation", "stream", "device", "Input Dims", "Input type", "Sequence number", "Fwd thread id",
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name", "Process Group Ranks",
    "Process Group Description",
)  # fmt: skip


class trace_me:  # noqa: N801 (it reads as a verb where it is used)
    """Skip `after` training steps, then record `steps` of them.

    `ranks`: the processes of a distributed job that write a file; the others run at no cost. With more than one, each file name
    includes the rank.
    """

    @known_keywords
    def __init__(self, path: str | Path, *, steps: int = 3, after: int = 10, ranks: tuple[int, ...] = (0,)) -> None:
        if not 1 <= steps <= MOST_STEPS or after < 0:
            raise ValueError(f"steps must be between 1 and {MOST_STEPS}, and after at least 0, got {steps=}, {after=}")
        rank = own_rank()
        self.path = Path(path) if len(ranks) < 2 else with_rank(Path(path), rank)
        self.steps, self.after = steps, after
        self.recorded = False
        self._finished = False
        self._guard = Guard("no trace is recorded", self._stop)
        self._wanted = rank in ranks
        self._passed = 0
        self._profiler: Any = None
        self._others: Any = None
        self._clock: _Clock | None = None
        self._ends: list[float] = []  # of steps before the recording

    def __enter__(self) -> trace_me:
        if self._wanted:
            self._guard.run(self._start)
        return self

    def step(self) -> None:
        """Count one training step: call it after `optimizer.step()`."""
        self._passed += 1
        if self._profiler is not None:
            self._guard.run(self._step)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._guard.run(self._stop)
        if self._wanted and not self._finished and not self._guard.failed and kind is None:
            needed = self.after + self.steps
            say(
                f"gemmscope: nothing was recorded: the loop ran {self._passed} steps, {needed} are needed; "
                f"call trace.step() after every step, or use an after= smaller than {self.after}"
            )

    def _start(self) -> None:
        if problem := why_not_writable(self.path):
            say(f"gemmscope: {problem}: the trace cannot be written, unless this changes before step {self.after + self.steps}")
        from torch import cuda
        from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

        if not cuda.is_available() or ProfilerActivity.CUDA not in supported_activities():
            say("gemmscope: PyTorch finds no GPU to profile: the trace will have no kernels, and gemmscope explain needs them")
        activities = [ProfilerActivity.CPU, *({ProfilerActivity.CUDA} & supported_activities())]
        planned = schedule(wait=max(self.after - 1, 0), warmup=min(self.after, 1), active=self.steps, repeat=1)
        self._others = _OtherProfilers(self._other_began)
        self._profiler = profile(activities=activities, schedule=planned, on_trace_ready=self._write, record_shapes=True)
        self._call(self._profiler.__enter__)

    def _call(self, method: Callable[..., object], *arguments: object) -> None:
        """Call our profiler, unless it would begin while another one runs."""
        if self._others.running and self._passed in (self.after - 1, self.after):
            raise UserError("another profiler is running")
        self._others.ours(method, *arguments)
        if self._passed == self.after:
            self._clock = _Clock()  # from the first recorded step on, until the trace is written

    def _other_began(self) -> None:
        """Step aside before another profiler begins, if ours has begun."""
        if self._passed >= self.after - 1:
            self._guard.give_up("another profiler began")

    def _step(self) -> None:
        if self._passed < self.after:  # the profiler does nothing until the last one of these
            self._ends.append(time.perf_counter())
        self._call(self._profiler.step)
        if self._finished:
            self._stop()

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
        profiler, self._profiler = self._profiler, None
        others, self._others = self._others, None
        if profiler is not None:
            profiler.on_trace_ready = None  # what is complete was written before
        if others is not None:
            others.forget(profiler)

    def _write(self, profiler: Any) -> None:
        self._finished = True
        if self._clock is not None:
            self._clock.stop()
        try:
            with temporary_folder() as folder:
                raw = folder / "trace.json"
                profiler.export_chrome_trace(str(raw))
                plain_ms = [1000 * (end - begin) for begin, end in pairwise(self._ends)]
                slim_file(raw, self.path, {**_facts(self._clock), "plain_steps_ms": plain_ms[-PLAIN_STEPS:]})
        except Exception as error:  # the training goes on
            say(f"gemmscope: {error if isinstance(error, UserError) else f'{self.path} was not written: {error}'}")
            return
        self.recorded = True
        say(f"gemmscope: wrote {self.path}; now: gemmscope explain {self.path}")


class _OtherProfilers:
    """Knows whether another profiler of this process runs. Two at once end in a segmentation fault of PyTorch."""

    def __init__(self, began: Callable[[], None]) -> None:
        """`began`: called before another one begins."""
        from torch.autograd import _profiler_enabled as profiler_enabled
        from torch.autograd import profiler

        self._began, self._ours = began, False
        # a profiler with a schedule may be prepared, and not run yet
        scheduled = "ProfilerStep" in profiler.KinetoStepTracker._step_dict
        known = (one for one in (gc.get_objects() if scheduled else ()) if issubclass(type(one), profiler.profile))
        self.running = profiler_enabled() or any(one.entered and one.kineto_results is None for one in known)
        self._calls: list[tuple[dict[str, Any], str, Callable[..., Any], Callable[..., Any]]] = []
        for kind, names in PROFILER_CALLS.items():
            with suppress(ImportError):  # not every version of torch has both
                module = vars(import_module(f"torch.autograd.{kind}"))
                self._calls += [(module, name, call := module[name], partial(self._called, name, call)) for name in names]
        for module, name, _, watched in self._calls:
            module[name] = watched

    def ours(self, method: Callable[..., object], *arguments: object) -> None:
        """Call our own profiler."""
        self._ours = True
        try:
            method(*arguments)
        finally:
            self._ours = False

    def forget(self, own: Any) -> None:
        """End our own profiler, and watch no longer, unless someone else has replaced the calls since."""
        try:
            if own is not None:
                self.ours(own.__exit__, None, None, None)
        finally:
            for module, name, call, watched in self._calls:
                module[name] = call if module[name] is watched else module[name]

    def _called(self, name: str, call: Callable[..., object], *arguments: Any, **settings: Any) -> Any:
        if not self._ours:
            self.running = not name.startswith("_disable")
            if self.running:
                self._began()
        return call(*arguments, **settings)


class _Clock:
    """Reads clock and power of the GPU in use at intervals, in a thread of its own, until stopped."""

    def __init__(self) -> None:
        self.readings: list[dict[str, Any]] = []
        self._done = threading.Event()
        self.gpu: Any = None
        with suppress(Exception):  # the trace is useful without it
            import torch

            from gemmscope.gpu.nvml import open_nvml

            nvml = open_nvml() if torch.cuda.is_available() else None
            if nvml is not None:
                uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
                self.gpu = nvml.gpu_by_uuid(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
                threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(Exception):  # the trace is useful without it
            while not self._done.wait(CLOCK_SECONDS):
                self.readings.append(asdict(self.gpu.read()))

    def stop(self) -> None:
        self._done.set()


def _facts(clock: _Clock | None) -> dict[str, Any]:
    """What the trace itself does not contain."""
    import torch

    facts: dict[str, Any] = {"recorded_with": "trace_me", "versions": {"torch": torch.__version__} | package_versions()}
    if clock is not None and clock.readings:
        facts["clock"] = {"max_sm_mhz": clock.gpu.max_sm_mhz(), "readings": clock.readings[-200:]}
    return facts


def slim_file(raw_path: Path, target: Path, facts: dict[str, Any]) -> None:
    """Write the small, gzipped form of a trace file, with facts about the run. Memory use is limited."""
    first = EventStream(raw_path)
    wanted = {_external_id(event) for event in first if event.get("cat") in GPU_CATEGORIES} - {None}
    events = (_trimmed(event) for event in EventStream(raw_path) if _explains(event, wanted))
    write_trace(target, events, {**first.head, "gemmscope": facts}, packed=True)


def _explains(event: dict[str, Any], wanted: Iterable[Any]) -> bool:
    category, name = event.get("cat"), str(event.get("name", ""))
    if event.get("ph") == "M":
        return name in ("process_name", "process_labels") and "Spans" not in str(event.get("args"))
    if event.get("ph") != "X":
        return False
    if category in (*GPU_CATEGORIES, "user_annotation"):
        return True
    if category in ("cuda_runtime", "cuda_driver", "hip_runtime"):
        return any(part in name for part in LAUNCH_NAMES)
    forward = name.startswith(("aten::linear", "aten::conv"))  # which show that backward recomputes a layer
    return category == "cpu_op" and (not name.startswith("aten::") or forward or _external_id(event) in wanted)


def _external_id(event: dict[str, Any]) -> int | str | None:
    identifier = as_table(event.get("args")).get("External id")
    return identifier if isinstance(identifier, (int, str)) else None


def _trimmed(event: dict[str, Any]) -> dict[str, Any]:
    if event.get("ph") == "M":
        return event
    small: dict[str, Any] = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid") if key in event}
    times = {key: event[key] for key in ("ts", "dur") if key in event}
    small |= {key: round(time, 3) if isinstance(time, float) else time for key, time in times.items()}
    kept = (*KEPT_ARGUMENTS, CONCRETE) if ATTENTION_FORWARD.match(str(event.get("name"))) else KEPT_ARGUMENTS
    arguments = {key: value for key, value in as_table(event.get("args")).items() if key in kept and value not in ([], "", None)}
    return {**small, "args": arguments} if arguments else small
