"""The measuring process: takes a request, prepares, then runs rounds of bursts until its input ends, and reports what happens."""

from __future__ import annotations

import importlib
import json
import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any, NamedTuple

import torch

from gemmscope.engine.messages import Begin, Failed, Fatal, Group, Health, Message, Noticed, Round, Sampled, line
from gemmscope.engine.timer import Burst
from gemmscope.errors import in_a_line
from gemmscope.gpu.environment import cpu_name, node_name
from gemmscope.gpu.health import health_facts
from gemmscope.gpu.nvml import Gpu, open_nvml
from gemmscope.process import messages_to_parent, without_jax
from gemmscope.recipe.frameworks import frameworks

OUT_OF_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory")  # in messages of CUDA, cuBLAS and the CPU allocator
HEALTH_EVERY_S = 30.0
STICKY = ("CUDA error", "cudaError")  # after one of these, every later GPU call of the process fails too


def gpu_in_use() -> Gpu | None:
    """The GPU that torch uses, as the driver reports it; None where the driver cannot be asked, or does not know its UUID."""
    nvml = open_nvml()
    if nvml is None:
        return None
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    gpu = nvml.gpu_by_uuid(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    return gpu or (nvml.gpu(0) if nvml.count() == 1 else None)


def versions_of(backend: str) -> dict[str, str]:
    """The versions of the packages that a backend needs."""
    return {name: importlib.import_module(name).__version__ for name in frameworks()[backend].packages}


def failure_kind(error: Exception, *, on_gpu: bool) -> str:
    """The kind of failure: "out of memory" (less may fit), "CUDA fault" (the process cannot go on) or "error".

    >>> failure_kind(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), on_gpu=True)
    'out of memory'
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(phrase in text.lower() for phrase in OUT_OF_MEMORY):
        return "out of memory"
    return "CUDA fault" if on_gpu and any(phrase in text for phrase in STICKY) else "error"


class BurstGroup(NamedTuple):
    """Tasks that are measured in one burst. `group` is the name under which the parent asks for more of it."""

    group: Group
    tasks: list[str]


class _Launched(NamedTuple):
    number: int
    group: BurstGroup
    burst: Burst


class MeasuringProcess:
    """Takes one request, prepares, runs rounds of bursts and reports to the parent. Subclasses say what a burst runs."""

    def __init__(self, request: dict[str, Any], out: IO[str]) -> None:
        self.request, self.out = request, out
        self.device = frameworks()[request["backend"]].device
        self.on_gpu = self.device == "cuda"
        self.gpu = gpu_in_use() if self.on_gpu else None
        self.failed_groups: set[str] = set()  # by their first task
        self._health_due = 0.0

    @classmethod
    def serve(cls) -> None:
        """Take the request from standard input, and measure."""
        if request := sys.stdin.readline():  # else it was started ahead of time, and is not needed
            with messages_to_parent() as out:
                cls(json.loads(request), out).main()

    def main(self) -> None:
        """Measure what was requested."""
        raise NotImplementedError

    def launch(self, group: BurstGroup, number: int) -> Burst:
        """Launch the burst of round `number`, behind those that were launched before."""
        raise NotImplementedError

    def completed(self, times_ms: dict[str, list[float]]) -> dict[str, list[float]]:
        """The samples of a burst, with those that follow from them."""
        return times_ms

    def burst_failed(self, group: BurstGroup, error: Exception) -> None:  # noqa: ARG002
        """What an exception in a burst means. Here: the process ends, and the parent blames the task that was running."""
        raise error

    def rounds(self, groups: Sequence[BurstGroup]) -> None:
        """Bursts of every group in random order, round after round, until told to stop; in later rounds only of the groups that
        the parent still wants.

        The next burst is launched before the last one is collected, because after a moment without work the power control lets
        the GPU run too fast, and then too slow, for half a second. The GPU idles between bursts only where it should rest before
        each.
        """
        orders, rest_s = Orders(), self.request.get("rest_ms", 0.0) / 1000
        waiting: _Launched | None = None
        plan = plan_rounds(
            groups, self.request["max_rounds"], self.request["seed"], self.request["least_rounds"], orders.first_wanted
        )
        for number, group in plan:
            if orders.stop():
                return  # the last burst belongs to an incomplete round
            if number < self.request["had"].get(group.tasks[0], 0) or group.tasks[0] in self.failed_groups:
                continue
            if waiting is not None and rest_s:
                self._collect(waiting, ends_round=waiting.number != number)
                waiting = None
            time.sleep(rest_s)
            running = group if waiting is None or waiting.burst.over else waiting.group
            self.begin(running.tasks[0], "measuring")  # a fault shows while waiting for a burst, or when the next is launched
            launched: _Launched | None = None
            try:
                launched = _Launched(number, group, self.launch(group, number))
            except Exception as error:
                self._drop(group, error)
            if waiting is not None:
                self._collect(waiting, ends_round=waiting.number != number)
            waiting = launched
        if waiting is not None:
            self._collect(waiting, ends_round=True)

    def _collect(self, launched: _Launched, *, ends_round: bool) -> None:
        """Wait for a burst, and send its samples with the state of the GPU."""
        self.begin(launched.group.tasks[0], "measuring")
        try:
            launched.burst.nearly_done()
            state: dict[str, Any] = asdict(self.gpu.read()) if self.gpu else {}
            self._tell_health()
            times = dict(zip(launched.group.tasks, launched.burst.times_ms(), strict=True))
            state |= launched.burst.facts()
        except Exception as error:
            self._drop(launched.group, error)
        else:
            self.say(Sampled(self.completed(times), state, launched.number))
        if ends_round:
            self.say(Round(launched.number))

    def _tell_health(self) -> None:
        """Report the health of the GPU, now and then. It computes at this moment: an idle PCIe link is slower."""
        if self.gpu is not None and time.monotonic() >= self._health_due:
            self._health_due = time.monotonic() + HEALTH_EVERY_S
            self.say(Health(health_facts(self.gpu)))

    def _drop(self, group: BurstGroup, error: Exception) -> None:
        if group.tasks[0] not in self.failed_groups:  # else its burst before this one has failed, too
            self.burst_failed(group, error)
            self.failed_groups.add(group.tasks[0])

    def say(self, message: Message) -> None:
        """Send one message."""
        self.out.write(line(message) + "\n")
        self.out.flush()

    def begin(self, task: str, what: str) -> None:
        """Name the current task, so that a crash can be attributed; also a sign of life."""
        self.say(Begin(task, what))

    def warn(self, code: str, **facts: Any) -> None:
        """Report a finding of the measurement itself."""
        self.say(Noticed(code, facts))

    def failed(self, task: str, error: Exception) -> None:
        """Report the failure of one task. After a sticky CUDA error the process cannot go on."""
        kind = failure_kind(error, on_gpu=self.on_gpu)
        self.say(Failed(task, in_a_line(error), kind))
        if kind == "CUDA fault":
            os._exit(70)

    def load(self, classes: Mapping[str, tuple[str, str]]) -> Any:
        """The class of the requested backend; None, after a message that says why, if it does not load."""
        module, class_name = classes[self.request["backend"]]
        try:
            with without_jax():
                return getattr(importlib.import_module(module), class_name)
        except Exception as error:
            self.say(Fatal(f"the {self.request['backend']} backend does not load: {in_a_line(error)}"))
            return None

    def device_facts(self) -> dict[str, Any]:
        """The description of the device in a result."""
        if not self.on_gpu or not torch.cuda.is_available():
            return {"name": "CPU", "cpu": cpu_name(), "node": node_name()}
        properties = torch.cuda.get_device_properties(0)
        facts = {
            "name": properties.name,
            "node": node_name(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
        }
        return facts | (_driver_facts(self.gpu) if self.gpu else {})


def _driver_facts(gpu: Gpu) -> dict[str, Any]:
    """What the driver adds to the description of a GPU: its limits, and which one it is."""
    which = {"uuid": gpu.uuid(), "index": gpu.index(), "pci_bus": gpu.pci_bus(), "serial": gpu.serial()}
    known = {name: value for name, value in which.items() if value is not None}
    return {"power_limit_w": gpu.power_limit_w(), "max_sm_mhz": gpu.max_sm_mhz()} | known


def plan_rounds(
    groups: Sequence[BurstGroup],
    rounds: int,
    seed: int,
    least: int = 1,
    first_wanted: Callable[[Sequence[BurstGroup]], BurstGroup | None] = lambda groups: groups[0],
) -> Iterator[tuple[int, BurstGroup]]:
    """Every group once per round in random order: the round's number and the group. After `least` rounds only those that the
    parent wants, the most wanted first."""
    rng = random.Random(seed)
    for number in range(rounds):
        left = rng.sample(groups, len(groups))
        while left:
            group = left[0] if number < least else first_wanted(left)
            if group is None:
                break
            left.remove(group)
            yield number, group


class Orders:
    """The parent's orders on standard input: a line of JSON lists the groups to measure next, the most wanted first; the end of
    the input means stop."""

    def __init__(self) -> None:
        self._wanted: list[tuple[str, ...]] = []
        self._rest = b""

    def stop(self) -> bool:
        """Whether the parent has closed our standard input, or has ended. Reads its latest orders."""
        while select.select([sys.stdin], [], [], 0)[0]:
            piece = os.read(sys.stdin.fileno(), 1 << 16)
            if not piece:
                return True
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if lines:
                self._wanted = [tuple(group) for group in json.loads(lines[-1])]
        return False

    def first_wanted(self, groups: Sequence[BurstGroup]) -> BurstGroup | None:
        """The group that the parent wants most; None if it wants none of these. Without orders, all are wanted."""
        self.stop()
        if not self._wanted:
            return groups[0]
        wanted = [burst for burst in groups if burst.group in self._wanted]
        return min(wanted, key=lambda burst: self._wanted.index(burst.group), default=None)
