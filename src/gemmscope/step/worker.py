"""The process that runs training steps: builds the stack in every variant, runs bursts of steps of all variants in random order
until its input ends, then profiles one step of each. Messages as in `measure/worker.py`.

A *variant* is a recipe, with the parts that stay in BF16, at a depth. All variants share the memory of the same weights.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch

from gemmscope.errors import in_a_line
from gemmscope.measure.device import Orders, device_facts, failure_kind, gpu_in_use
from gemmscope.measure.timer import busy_ms, kernel_run, segments
from gemmscope.process import without_jax
from gemmscope.recipe.recipes import recipe
from gemmscope.step.blocks import Kit
from gemmscope.step.huggingface import HuggingFaceStep
from gemmscope.step.kits import KITS
from gemmscope.step.marks import recording
from gemmscope.step.plan import StackPlan
from gemmscope.step.stack import Step, Weights

PROFILE_AFTER_MS = 1200.0  # of steps: the clock overshoots first, then falls too low, and has settled by then
HOST_BATCH = (1, 128)  # so small that launching takes longer than running
HOST_STEPS = 4
LONG_STEP_MS = 2000.0
Returned = TypeVar("Returned")


class StepWorker:
    """One request: a plan and its variants."""

    def __init__(self, request: dict[str, Any], out: Any) -> None:
        self.request, self.out = request, out
        self.plan = StackPlan.from_json(request["plan"])
        self.variants: list[dict[str, Any]] = request["variants"]
        self.on_gpu = request["backend"] != "cpu"
        self.device = "cuda" if self.on_gpu else "cpu"
        self.weights, self.real_weights = Weights(), Weights()
        self.steps: dict[str, Step | HuggingFaceStep] = {}
        self.once_ms: dict[str, float] = {}  # approximate time of a step
        self.gpu = gpu_in_use() if self.on_gpu else None

    def say(self, message_type: str, **content: Any) -> None:
        self.out.write(json.dumps({"type": message_type, **content}) + "\n")
        self.out.flush()

    def warn(self, code: str, **facts: Any) -> None:
        """A finding of the measurement itself."""
        self.say("finding", code=code, facts=facts)

    def main(self) -> None:
        """Build, measure, profile."""
        module, class_name = KITS[self.request["backend"]]
        try:
            with without_jax():
                self.kit = getattr(importlib.import_module(module), class_name)
        except Exception as error:
            self.say("fatal", why=f"the {self.request['backend']} backend does not load: {in_a_line(error)}")
            return
        self.say("hello", device=device_facts(self.gpu, on_gpu=self.on_gpu), versions=_versions(self.request["backend"]))
        if self.request["host"]:
            for variant in self.variants:
                if not self._kit_of(variant).why_not(self.plan):
                    self._host(variant)
        for variant in self.variants:
            self._build(variant)
        self._rounds()
        if self.request["profile"]:  # last: the GPU is in its steady state, and marks have not split compiled layers yet
            for name, step in self.steps.items():
                self._profile(name, step)
        self.say("done")

    def _kit_of(self, variant: dict[str, Any]) -> Kit:
        made: Kit = self.kit(recipe(variant["recipe"]), frozenset(variant["left_out"]), device=self.device)
        return made

    def _make(self, variant: dict[str, Any], plan: StackPlan) -> Step | HuggingFaceStep:
        kit = self._kit_of(variant)
        plan = plan.with_depth(variant["depth"]).padded(recipe(variant["recipe"]).multiple_of)
        if self.request["config"] is not None:
            return HuggingFaceStep(self.request["config"], plan, kit, self.device)
        if variant["real"]:
            return Step(plan.unrolled(), kit, self.real_weights, self.device, real=True)
        return Step(plan, kit, self.weights, self.device)

    def _build(self, variant: dict[str, Any]) -> None:
        name = variant["name"]
        self.say("begin", task=name, what="preparing")
        why_not = self._kit_of(variant).why_not(self.plan)
        if why_not:
            self.say("failed", task=name, why=why_not, kind="unsupported")
            return
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        step: Step | HuggingFaceStep | None = None
        try:
            step = self._make(variant, self.plan)
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            step.run()
            self.say("begin", task=name, what="preparing")  # repeated as a sign of life: a step may take a minute
            step.run()  # delayed scaling has its scales from the second step on
            self.say("begin", task=name, what="preparing")
            loss, self.once_ms[name] = step.loss(), self._time_once(step)
        except Exception as error:
            self._failed(name, error)
            step = None
        if step is None:
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
            return
        self.steps[name] = step
        held = torch.cuda.memory_allocated() - before if self.on_gpu else 0
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        self.say("ready", task=name, loss=loss, held_bytes=held, peak_bytes=peak)

    def _time_once(self, step: Step | HuggingFaceStep) -> float:
        self._synchronize()
        begin = time.perf_counter()
        step.run()
        self._synchronize()
        return (time.perf_counter() - begin) * 1000

    def _failed(self, name: str, error: Exception) -> None:
        kind = failure_kind(error, on_gpu=self.on_gpu)
        self.say("failed", task=name, why=in_a_line(error), kind=kind)
        if kind == "CUDA fault":
            os._exit(70)

    def _profile(self, name: str, step: Step | HuggingFaceStep) -> None:
        """The kernels of one step, part by part, in the state that the step brings the GPU to."""
        if not self.on_gpu:
            return
        self.say("begin", task=name, what="profiling")
        labels: list[tuple[str, str]] = []

        def work() -> None:
            for _ in range(max(2, round(PROFILE_AFTER_MS / self.once_ms[name]))):
                step.run()
                self._still(name, "profiling")
            torch.cuda.synchronize()
            with recording() as marks:
                step.run()
                torch.cuda.synchronize()
                marks.passed("end", "step")
            labels.extend(marks.labels)

        try:
            if self.kit.compiles:  # its layers are compiled again with marks in them
                with recording():
                    step.run()
            recorded = segments(work)
        except Exception as error:
            self.warn("variant-not-profiled", variant=name, reason=in_a_line(error))
            return
        if len(recorded) != len(labels):
            self.warn("marks-missing", variant=name, seen=len(recorded), marks=len(labels))
            return
        parts = [
            [part, way, [[run.name, round(run.duration_us, 3), run.stream] for run in map(kernel_run, events)]]
            for (part, way), events in zip(labels, recorded, strict=True)
        ]
        every = [event for events in recorded for event in events]
        self.say("profile", task=name, parts=parts, busy_ms=busy_ms(every))

    def _host(self, variant: dict[str, Any]) -> None:
        """The CPU time to launch a step: the same layers on a batch that keeps the GPU waiting."""
        name = variant["name"]
        self.say("begin", task=name, what="launching")
        batch, sequence = HOST_BATCH
        small = self.plan.with_batch(min(batch, self.plan.micro_batch_size), min(sequence, self.plan.sequence_length))
        try:
            step = self._make({**variant, "real": False}, small)
            for _ in range(2):
                step.run()
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_STEPS):
                step.run()
            self._synchronize()
            self.say("host", task=name, host_ms=(time.perf_counter() - begin) * 1000 / HOST_STEPS)
        except Exception as error:
            self.warn("launch-not-measured", variant=name, reason=in_a_line(error))

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _rounds(self) -> None:
        """A burst of every variant in random order, round after round, until told to stop.

        The next burst is launched before the last one is collected: after a moment without work the power control lets the GPU
        run too fast, and then too slow, for half a second.
        """
        rng, orders = random.Random(self.request["seed"]), Orders()
        gc.collect()
        gc.freeze()
        gc.disable()  # it would sometimes delay launches by tens of milliseconds; it runs between bursts instead
        waiting: _LaunchedSteps | None = None
        for number in range(self.request["max_rounds"]):
            order = rng.sample(list(self.steps), len(self.steps))
            for name in order:
                if orders.stop():
                    return
                if name not in self.steps:  # its last burst has failed
                    continue
                launched = self._guarded(name, partial(self._launch, number, name, ends_round=name == order[-1]))
                if waiting is not None:
                    self._guarded(waiting.name, partial(self._collect, waiting))
                waiting = launched
                gc.collect()
        if waiting is not None:
            self._guarded(waiting.name, partial(self._collect, waiting))

    def _guarded(self, name: str, work: Callable[[], Returned]) -> Returned | None:
        """Run `work`; a failure costs this variant only, and is reported as its."""
        self.say("begin", task=name, what="measuring")
        try:
            return work()
        except Exception as error:
            if self.steps.pop(name, None) is not None:  # otherwise an earlier burst of it has failed already
                self._failed(name, error)
            return None

    def _launch(self, number: int, name: str, *, ends_round: bool) -> _LaunchedSteps:
        """Run steps to reach the steady state, then those that count. If a step takes seconds, one is enough."""
        run, once_ms = self.steps[name].run, self.once_ms[name]
        least = 1 if once_ms > LONG_STEP_MS else self.request["least_steps"]
        for _ in range(max(1, round(self.request["drop_ms"] / once_ms))):
            run()
        self._still(name, "measuring")
        kept = max(least, round(self.request["keep_ms"] / once_ms))
        return _LaunchedSteps(
            number, name, self._timed_on_gpu(run, kept) if self.on_gpu else self._timed_here(run, kept), ends_round
        )

    def _still(self, name: str, what: str) -> None:
        """Between steps that take seconds: a sign of life."""
        if self.once_ms[name] > LONG_STEP_MS:
            self.say("begin", task=name, what=what)

    def _collect(self, launched: _LaunchedSteps) -> None:
        """Wait for a burst, and send the times of its steps."""
        times = launched.times_ms()
        state = asdict(self.gpu.read()) if self.gpu else {}
        self.say("samples", round=launched.number, times_ms={launched.name: times}, state=state)
        if launched.ends_round:
            self.say("round", round=launched.number)

    @staticmethod
    def _timed_on_gpu(run: Callable[[], None], kept: int) -> Callable[[], list[float]]:
        """Milliseconds from the start of a step to the start of the next."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(kept + 1)]
        for mark in marks[:-1]:
            mark.record()
            run()
        marks[-1].record()

        def times_ms() -> list[float]:
            marks[-1].synchronize()
            return [before.elapsed_time(after) for before, after in pairwise(marks)]

        return times_ms

    @staticmethod
    def _timed_here(run: Callable[[], None], kept: int) -> Callable[[], list[float]]:
        times = []
        for _ in range(kept):
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1000)
        return lambda: times


@dataclass(frozen=True)
class _LaunchedSteps:
    """A burst of steps that has been launched."""

    number: int
    name: str
    times_ms: Callable[[], list[float]]
    ends_round: bool


def _versions(backend: str) -> dict[str, str]:
    versions = {"torch": torch.__version__}
    if backend in ("transformer_engine", "torchao"):
        versions[backend] = importlib.import_module(backend).__version__
    return versions


def main() -> None:
    """Read the request, send messages to the descriptor."""
    request = json.loads(sys.stdin.readline())
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as out:
        StepWorker(request, out).main()


if __name__ == "__main__":
    main()
