"""The process that runs training steps: builds the stack, or the live module, in every variant, runs bursts of steps, variant
after variant in random order, until its input ends, then profiles one step of each.

A *variant* is a recipe, with the parts that are left in BF16, at a depth. All variants live in the memory of the same weights.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from pydantic import TypeAdapter
from torch._dynamo.exc import TorchDynamoException

from gemmscope.engine.messages import Done, Failed, Fatal, Hello, Launch, Profile, Ready
from gemmscope.engine.timer import Burst, busy_ms, done_burst, elapsed_ms, kernel_run, segments
from gemmscope.engine.worker import BurstGroup, MeasuringProcess, failure_kind, versions_of
from gemmscope.errors import in_a_line
from gemmscope.recipe.frameworks import measuring_classes
from gemmscope.recipe.recipes import recipe
from gemmscope.step.kits.plain import Kit
from gemmscope.step.live_module import LiveModule, ModuleStep, built_notes, linear_notes
from gemmscope.step.marks import mark_step, recording
from gemmscope.step.mixer_kernels import TRANSFORMERS
from gemmscope.step.module_plan import ModulePlan
from gemmscope.step.stack import CapturedStep, GraphMemory, Step, Weights
from gemmscope.step.stack_plan import StackPlan, too_shallow
from gemmscope.workload.failures import TraceError

PROFILE_AFTER_MS = 1200.0  # of steps: the clock overshoots first, then falls too low, and has settled then
HOST_BATCH = (1, 128)  # so small that launching takes longer than running
HOST_STEPS = 8
PROFILED_STEPS = 3
LONG_STEP_MS = 2000.0
NOT_AHEAD_MS = 1.0  # of the GPU: it has nothing left to run, or will have before the CPU launches more
ENDED = 71  # exit status after a capture that failed
AnyStep = Step | ModuleStep | CapturedStep


class ClockOfBoth:
    """The time of the GPU on the clock of the CPU."""

    def __init__(self) -> None:
        self._zero = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def late_share(self, launched_s: Sequence[float], marks: Sequence[torch.cuda.Event]) -> float:
        """The share of these marks that the GPU reached as soon as the CPU had launched them: it had nothing left to run."""
        reached_s = [self._zero_s + float(self._zero.elapsed_time(mark)) / 1000 for mark in marks]
        ahead_s = [reached - launched for reached, launched in zip(reached_s, launched_s, strict=True)]
        drift_s = max(-min(ahead_s), 0.0)  # no mark is reached before it was launched: the clocks have drifted apart
        self._zero_s += drift_s
        return sum(1000.0 * (ahead + drift_s) < NOT_AHEAD_MS for ahead in ahead_s) / len(ahead_s)


def waiting_s() -> float:
    """How long the threads of this process have waited for a core while they could have run; 0 where Linux does not tell."""
    total_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            total_ns += int(path.read_text().split()[1])
    return total_ns / 1e9


class StepWorker(MeasuringProcess):
    """One request: a plan and its variants."""

    def __init__(self, request: dict[str, Any], out: IO[str]) -> None:
        super().__init__(request, out)
        self.plan: StackPlan | ModulePlan = TypeAdapter(ModulePlan if request["live"] else StackPlan).validate_python(
            request["plan"]
        )
        self.variants: list[dict[str, Any]] = request["variants"]
        self.weights, self.real_weights = Weights(), Weights()
        self.modules: dict[tuple[int, torch.dtype], LiveModule] = {}  # by depth and precision
        self.steps: dict[str, AnyStep] = {}
        self.once_ms: dict[str, float] = {}  # about what a step takes
        self.clock: ClockOfBoth | None = None

    def main(self) -> None:
        """Build, measure, profile."""
        self.kit = self.load(measuring_classes("step"))
        if self.kit is None:
            return
        if isinstance(self.plan, ModulePlan) and not self._tried(self.plan):
            return
        self.say(Hello(versions_of(self.request["backend"]), self.device_facts()))
        in_phases = self.request["live"] or self.request["compile"] in (
            "layers",
            "whole",
        )  # another batch would be compiled again
        if self.request["host"] and not in_phases:
            for variant in self.variants:
                if not self._kit_of(variant).why_not(self.plan):
                    self._launch_small(variant)
        for variant in self.variants:
            self._build(variant)
        if self.request["host"] and in_phases and self.on_gpu:
            for name, step in self.steps.items():
                self._say_launch(name, step)
        for code, facts in linear_notes(self.steps.values()):
            self.warn(code, **facts)
        self._name_kernels()
        self._measure()
        if (
            self.request["profile"] and self.on_gpu
        ):  # last: the GPU is in its steady state, and marks have not split compiled layers yet
            for name, step in self.steps.items():
                self._profile(name, step)
        self.say(Done())

    def _kit_of(self, variant: dict[str, Any]) -> Kit:
        how = {"device": self.device, "compiled": self.request["compile"]}
        kit: Kit = self.kit(recipe(variant["recipe"]), frozenset(variant["left_out"]), **how)
        return kit

    def _tried(self, plan: ModulePlan) -> bool:
        """Whether the module can be built and called at all; if not, the parent is told why, before anything is measured."""
        variant, live = self.variants[0], None
        try:
            live = self._live(plan.with_depth(variant["depth"]), self._kit_of(variant).precision)
        except Exception as error:
            if failure_kind(error, on_gpu=self.on_gpu) != "out of memory":  # out of memory only reduces the depth
                known = isinstance(error, TraceError)
                self.say(Fatal(str(error) if known else in_a_line(error), getattr(error, "hint", "")))
                return False
        if live is None:  # outside of `except`, where the exception would keep its memory alive
            self._free()
            return True
        for code, facts in built_notes(live, self.request["compile"]):
            self.warn(code, **facts)
        return True

    def _free(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _live(self, plan: ModulePlan, precision: torch.dtype) -> LiveModule:
        key = plan.depth, precision
        if key not in self.modules:
            self.modules[key] = LiveModule.build(plan, self.device, precision, self.request["optimizer"])
        return self.modules[key]

    def _make(self, variant: dict[str, Any], plan: StackPlan | ModulePlan) -> AnyStep:
        kit = self._kit_of(variant)
        if isinstance(plan, ModulePlan):
            live = self._live(plan.with_depth(variant["depth"]), kit.precision)
            return self._captured(ModuleStep(live, kit, plan.accumulation), variant)
        chosen = recipe(variant["recipe"])
        multiples = [
            recipe(name).multiple_of for name in (chosen.base or chosen.name, *([chosen.kept.recipe] if chosen.kept else []))
        ]
        plan = plan.with_depth(variant["depth"]).padded(max(multiples))
        if variant["real"]:
            return Step(plan.unrolled(), kit, self.real_weights, self.device, real=True)
        return self._captured(Step(plan, kit, self.weights, self.device), variant)

    def _captured(self, step: Step | ModuleStep, variant: dict[str, Any]) -> AnyStep:
        return CapturedStep(step, self.graph_memory) if variant["captured"] else step

    @cached_property
    def graph_memory(self) -> GraphMemory:
        """What all captured steps share."""
        return GraphMemory()

    def _build(self, variant: dict[str, Any]) -> None:
        name = variant["name"]
        self.begin(name, "preparing")
        why_not = self._kit_of(variant).why_not(self.plan) or too_shallow(
            self.plan, variant["depth"], recipe(variant["recipe"]).kept
        )
        if why_not:
            self.say(Failed(name, why_not, "unsupported"))
            return
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        step: AnyStep | None = None
        try:
            step = self._make(variant, self.plan)
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            step.run()
            self.begin(name, "preparing")  # again and again: a step may take a minute
            step.run()  # delayed scaling knows its scales from the second step on
            self.begin(name, "preparing")
            loss, self.once_ms[name] = step.loss(), self._once_ms(step)
        except Exception as error:
            self.failed(name, error)
            if variant["captured"]:
                os._exit(ENDED)  # the next process captures the others
            step = None
        if step is None:  # outside of `except`, as above
            self._free()
            return
        self.steps[name] = step
        allocated = torch.cuda.memory_allocated() - before if self.on_gpu else 0
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        facts = {"loss": loss, "held_bytes": allocated, "peak_bytes": peak}
        if isinstance(step, ModuleStep) and self.on_gpu:  # a real model: its peak is not composed of others
            facts["real_peak_bytes"] = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() + step.live.held_bytes()
        self.say(Ready(name, facts))

    def _name_kernels(self) -> None:
        """Report which packages run the mixers, and which parts run as plain PyTorch code on a GPU."""
        mixers = [step.mixer_kernels for step in self.steps.values() if step.mixer_kernels is not None]
        sources = {what: package for kernels in mixers for what, package in kernels.sources.items()}
        if sources:
            self.warn("mixer-kernels", kernels=[f"{what} ({package})" for what, package in sources.items()])
        plain = [what for what, package in sources.items() if package.startswith(TRANSFORMERS)]
        if plain and self.on_gpu:
            reasons = [reason for kernels in mixers for what, reason in kernels.refused.items() if what in plain]
            self.warn("mixer-kernels-slow", parts=plain, advice=reasons[0] if reasons else "install flash-linear-attention")

    def _once_ms(self, step: AnyStep) -> float:
        """Milliseconds of one step, launched on an idle GPU."""

        def work() -> None:
            step.run()
            self._synchronize()

        self._synchronize()
        return elapsed_ms(work)

    def _profile(self, name: str, step: AnyStep) -> None:
        """The kernels of one step, part by part, in the state that the step brings the GPU to."""
        self.begin(name, "profiling")
        labels: list[list[tuple[str, str]]] = []
        compiled = self.request["compile"]
        inner = compiled != "whole" and isinstance(step, Step)

        def work() -> None:
            for _ in range(max(2, round(PROFILE_AFTER_MS / self.once_ms[name]))):
                step.run()
                self._still(name, "profiling")
            for _ in range(PROFILED_STEPS):
                torch.cuda.synchronize()
                with recording(inner=inner) as marks:
                    step.run()
                    torch.cuda.synchronize()
                    mark_step("end")
                labels.append(list(marks))

        try:
            if compiled == "layers" and inner:  # they are compiled again with marks in them
                with recording():
                    step.run()
            recorded = segments(work)
        except Exception as error:
            self.warn("variant-not-profiled", variant=name, reason=in_a_line(error))
            return
        if len(recorded) != sum(map(len, labels)):
            self.warn("marks-missing", variant=name, seen=len(recorded), marks=sum(map(len, labels)))
            return
        following = iter(recorded)
        steps = [[next(following) for _ in marks] for marks in labels]
        each_ms = [busy_ms([event for events in one for event in events]) for one in steps]
        middle = sorted(range(PROFILED_STEPS), key=lambda number: each_ms[number])[PROFILED_STEPS // 2]
        parts = [
            (part, way, [(run.name, round(run.duration_us, 3), run.stream) for run in map(kernel_run, events)])
            for (part, way), events in zip(labels[middle], steps[middle], strict=True)
        ]
        self.say(Profile(name, parts, each_ms[middle], each_ms))

    def _say_launch(self, name: str, step: AnyStep) -> None:
        """Report the CPU time to launch a step. Each phase begins with an idle GPU, so that the CPU waits for nothing."""

        def launched_ms() -> float:
            total_ms = 0.0
            for phase in step.phases():
                self._synchronize()
                total_ms += elapsed_ms(phase)
            return total_ms

        steps_ms = [launched_ms() for _ in range(HOST_STEPS)]
        self._synchronize()
        self.say(Launch(name, median(steps_ms), steps_ms))

    def _launch_small(self, variant: dict[str, Any]) -> None:
        """The CPU time to launch a step: the same layers on a batch that keeps the GPU waiting."""
        name = variant["name"]
        self.begin(name, "launching")
        batch, sequence = HOST_BATCH
        small = self.plan.with_batch(min(batch, self.plan.micro_batch_size), min(sequence, self.plan.sequence_length))
        try:
            step = self._make({**variant, "real": False}, small)
            for _ in range(2):
                step.run()
            self._say_launch(name, step)
        except Exception as error:
            self.warn("launch-not-measured", variant=name, reason=in_a_line(error))

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _measure(self) -> None:
        """A burst of every variant in turn; the garbage collector would stop the launching now and then, so it runs between."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self.rounds([BurstGroup((name,), [name]) for name in self.steps])

    def launch(self, group: BurstGroup, number: int) -> Burst:  # noqa: ARG002
        """Steps that reach the steady state, then those that count; of steps that take seconds, one is enough."""
        gc.collect()
        if self.on_gpu:
            self.clock = self.clock or ClockOfBoth()
        [name] = group.tasks
        run, once_ms = self.steps[name].run, self.once_ms[name]
        least = 1 if once_ms > LONG_STEP_MS else self.request["least_steps"]
        for _ in range(max(1, round(self.request["drop_ms"] / once_ms))):
            run()
        self._still(name, "measuring")
        kept = max(least, round(self.request["keep_ms"] / once_ms))
        if not self.on_gpu:
            return done_burst([[elapsed_ms(run) for _ in range(kept)]])
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(kept + 1)]  # steps are timed from start to start
        recorded_s, waited_s = [], waiting_s()
        for mark in marks:
            mark.record()
            recorded_s.append(time.perf_counter())
            if mark is not marks[-1]:
                run()
        waited = min((waiting_s() - waited_s) / (recorded_s[-1] - recorded_s[0]), 1.0)

        def facts() -> dict[str, float]:
            late = self.clock.late_share(recorded_s[1:], marks[1:]) if self.clock is not None else 0.0
            return {"late": late, "run_delay": waited}

        def times_ms() -> list[list[float]]:
            return [[before.elapsed_time(after) for before, after in pairwise(marks)]]

        return Burst(times_ms, marks[-1].synchronize, facts=facts)

    def failed(self, task: str, error: Exception) -> None:
        """As for every process; a module that cannot be compiled can still be run."""
        if isinstance(error, TraceError):
            self.say(Failed(task, str(error), failure_kind(error, on_gpu=self.on_gpu)))
        elif isinstance(error, TorchDynamoException):
            self.say(Failed(task, f"it cannot be compiled ({in_a_line(error)}); ‹compile› none runs it as it is", "error"))
        else:
            super().failed(task, error)

    def burst_failed(self, group: BurstGroup, error: Exception) -> None:
        """It costs only this variant."""
        self.failed(group.tasks[0], error)
        self.steps.pop(group.tasks[0], None)

    def _still(self, name: str, what: str) -> None:
        """Between steps that take seconds: a sign of life."""
        if self.once_ms[name] > LONG_STEP_MS:
            self.begin(name, what)


if __name__ == "__main__":
    StepWorker.serve()
