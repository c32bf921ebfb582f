"""The process that runs training steps: builds the stack in every variant, runs bursts of steps, variant after variant in random
order, until its input ends, then profiles one step of each. Messages as in `measure/worker.py`.

A *variant* is a recipe, with the parts that are left in BF16, at a depth. All variants live in the memory of the same weights.
"""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from gemmscope.errors import in_a_line
from gemmscope.measure.device import MeasuringProcess, Orders
from gemmscope.measure.timer import busy_ms, elapsed_ms, kernel_run, segments
from gemmscope.recipe.recipes import recipe
from gemmscope.step.huggingface import HuggingFaceStep
from gemmscope.step.kits import KITS
from gemmscope.step.kits.plain import Kit
from gemmscope.step.marks import recording
from gemmscope.step.plan import StackPlan
from gemmscope.step.stack import Step, Weights

PROFILE_AFTER_MS = 1200.0  # of steps: the clock overshoots first, then falls too low, and has settled then
HOST_BATCH = (1, 128)  # so small that launching takes longer than running
HOST_STEPS = 4
LONG_STEP_MS = 2000.0
Result = TypeVar("Result")


class StepWorker(MeasuringProcess):
    """One request: a plan and its variants."""

    def __init__(self, request: dict[str, Any], out: Any) -> None:
        super().__init__(request, out)
        self.plan = StackPlan.from_json(request["plan"])
        self.variants: list[dict[str, Any]] = request["variants"]
        self.weights, self.real_weights = Weights(), Weights()
        self.steps: dict[str, Step | HuggingFaceStep] = {}
        self.once_ms: dict[str, float] = {}  # about what a step takes

    def main(self) -> None:
        """Build, measure, profile."""
        self.kit = self.load(KITS)
        if self.kit is None:
            return
        versions = {"torch": torch.__version__}
        if self.on_gpu:
            versions[self.kit.name] = importlib.import_module(self.kit.name).__version__
        self.say("hello", device=self.device_facts(), versions=versions)
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
        kit: Kit = self.kit(recipe(variant["recipe"]), frozenset(variant["left_out"]), device=self.device)
        return kit

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
        self.begin(name, "preparing")
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
            self.begin(name, "preparing")  # again and again: a step may take a minute
            step.run()  # delayed scaling knows its scales from the second step on
            self.begin(name, "preparing")
            loss, self.once_ms[name] = step.loss(), self._mean_ms(step)
        except Exception as error:
            self.failed(name, error)
            step = None
        if step is None:  # outside of `except`, where the exception would keep its memory alive
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
            return
        self.steps[name] = step
        held = torch.cuda.memory_allocated() - before if self.on_gpu else 0
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        self.say("ready", task=name, loss=loss, held_bytes=held, peak_bytes=peak)

    def _mean_ms(self, step: Step | HuggingFaceStep, count: int = 1) -> float:
        """Milliseconds per step, launched back to back on an idle GPU."""

        def work() -> None:
            for _ in range(count):
                step.run()
            self._synchronize()

        self._synchronize()
        return elapsed_ms(work) / count

    def _profile(self, name: str, step: Step | HuggingFaceStep) -> None:
        """The kernels of one step, part by part, in the state that the step brings the GPU to."""
        if not self.on_gpu:
            return
        self.begin(name, "profiling")
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
        self.begin(name, "launching")
        batch, sequence = HOST_BATCH
        small = self.plan.with_batch(min(batch, self.plan.micro_batch_size), min(sequence, self.plan.sequence_length))
        try:
            step = self._make({**variant, "real": False}, small)
            for _ in range(2):
                step.run()
            self.say("host", task=name, host_ms=self._mean_ms(step, HOST_STEPS))
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
        gc.disable()  # it would stop the launching for tens of milliseconds now and then; between bursts it may
        waiting: _Launched | None = None
        for number in range(self.request["max_rounds"]):
            order = rng.sample(list(self.steps), len(self.steps))
            for name in order:
                if orders.stop():
                    return
                if name not in self.steps:  # its last burst failed since
                    continue
                launched = self._guarded(name, partial(self._launch, number, name, ends_round=name == order[-1]))
                if waiting is not None:
                    self._guarded(waiting.name, partial(self._collect, waiting))
                waiting = launched
                gc.collect()
        if waiting is not None:
            self._guarded(waiting.name, partial(self._collect, waiting))

    def _guarded(self, name: str, work: Callable[[], Result]) -> Result | None:
        """Run `work`; a failure costs only this variant."""
        self.begin(name, "measuring")
        try:
            return work()
        except Exception as error:
            if self.steps.pop(name, None) is not None:  # else its burst before this one has failed, too
                self.failed(name, error)
            return None

    def _launch(self, number: int, name: str, *, ends_round: bool) -> _Launched:
        """Steps that reach the steady state, then those that count; of steps that take seconds, one is enough."""
        run, once_ms = self.steps[name].run, self.once_ms[name]
        least = 1 if once_ms > LONG_STEP_MS else self.request["least_steps"]
        for _ in range(max(1, round(self.request["drop_ms"] / once_ms))):
            run()
        self._still(name, "measuring")
        kept = max(least, round(self.request["keep_ms"] / once_ms))
        return _Launched(number, name, self._timed_on_gpu(run, kept) if self.on_gpu else self._timed_here(run, kept), ends_round)

    def _still(self, name: str, what: str) -> None:
        """Between steps that take seconds: a sign of life."""
        if self.once_ms[name] > LONG_STEP_MS:
            self.begin(name, what)

    def _collect(self, launched: _Launched) -> None:
        """Wait for a burst, and send the times of its steps."""
        times = launched.times_ms()
        self.send_samples(launched.number, {launched.name: times}, self.gpu_state(), ends_round=launched.ends_round)

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
        times = [elapsed_ms(run) for _ in range(kept)]
        return lambda: times


class _Launched(NamedTuple):
    number: int
    name: str
    times_ms: Callable[[], list[float]]
    ends_round: bool


if __name__ == "__main__":
    StepWorker.serve()
