"""A step as the CPU launches it. GPU time and launch time are two numbers; together they give the time of the step.

The CPU runs ahead of the GPU by at most `queue` launches: launch i waits for launch i-1, and until the GPU has finished launch
i-queue. In a step that repeats forward and backward, this comes down to two limits. The step takes at least its launch time. And
each phase takes at least its GPU time, and its launch time without what the CPU had launched of it before the GPU began it.
With experts, the CPU reads the size of every expert from the GPU in forward, so that nothing of it is launched in advance.

Both times are uncertain, and so is which of them limits the step. A step is therefore computed for many equally likely errors of
both times, and its error bar is the range of the results: it never lies below that of the GPU time, and moves without a jump.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import exp
from statistics import NormalDist
from typing import Any

import numpy as np

from gemmscope.forecast.communication import cluster
from gemmscope.forecast.estimate import Estimate
from gemmscope.forecast.physics import Array
from gemmscope.interval import Interval
from gemmscope.model.spec import RunSpec

PAIRS = 128  # of errors and their negatives
FURTHEST = 3.0  # standard deviations: a launch time that this does not make the limit does not matter
SIGMAS = NormalDist().inv_cdf(0.95)  # in the half-width of a 90% error bar
LOW, HIGH = round(0.05 * 2 * PAIRS) - 1, round(0.95 * 2 * PAIRS)  # the places of both ends among all errors
PRIMES = (2, 3, 5, 7)
NEAR = 0.2
TABLES = ("layer_ms", "moe_layer_ms", "layer_launches")


@dataclass(frozen=True)
class Phase:
    """Forward or backward: its share of the GPU time and of the launch time, and the share that is launched in advance."""

    gpu: float
    launch: float
    ahead: float


@dataclass(frozen=True)
class Launching:
    """What the CPU takes to launch one micro-batch, and how far ahead of the GPU it can be."""

    launch_ms: float = 0.0
    phases: tuple[Phase, ...] = (Phase(1.0, 1.0, 1.0),)

    def batch_ms(self, gpu_ms: Any, once_ms: Any = 0.0, slower: Any = 1.0) -> Any:
        """The time of a micro-batch, given its GPU time. `once_ms`: its share of what the GPU runs once per step, while the CPU
        goes on launching. `slower`: a factor on the launch time. Numbers or arrays.

        >>> Launching(5.0).batch_ms(10.0), Launching(15.0).batch_ms(10.0, 2.0)
        (10.0, 13.0)
        """
        launch_ms = self.launch_ms * slower
        longer = max if isinstance(gpu_ms, float) and isinstance(slower, float) else np.maximum
        phases = sum(longer(gpu_ms * phase.gpu, launch_ms * phase.launch * (1 - phase.ahead)) for phase in self.phases)
        return longer(phases, launch_ms - once_ms)


def of_layers(recipe: str, dense: float, experts: float, run: RunSpec, adapters: int = 0) -> tuple[float, float]:
    """Milliseconds to launch these layers in one micro-batch, and the number of launches; few with CUDA graphs. `adapters`:
    linears that have any."""
    known = cluster()["host"]
    layer_ms, expert_ms, count = (table.get(recipe, table["other"]) for table in map(known.get, TABLES))
    left = known["graphs"] if run.cuda_graphs else 1.0
    launch_ms = layer_ms * dense + expert_ms * experts + known["adapter_ms"] * adapters
    return launch_ms * left, (count * (dense + experts) + known["adapter_launches"] * adapters) * left


def in_phases(launch_ms: float, launches: float, forward_runs: float, *, waits: bool) -> Launching:
    """Forward and backward of one micro-batch, recomputation in backward. `waits`: in forward, the CPU waits for the GPU."""
    if not launch_ms:
        return Launching()
    known = cluster()["host"]
    gpu, launch = 1 / (forward_runs + 2), known["forward"] / (1 + known["forward"] * (forward_runs - 1))
    forward, backward = (min(known["queue"] / max(launches * share, 1.0), 1.0) for share in (launch, 1 - launch))
    return Launching(launch_ms, (Phase(gpu, launch, 0.0 if waits else forward), Phase(1 - gpu, 1 - launch, backward)))


@dataclass(frozen=True)
class LaunchedStep:
    """A whole step as launched. `batch_ms`: the GPU time of one micro-batch; `filling`: how many more fill the pipeline;
    `beside_ms`: what the GPU runs beside them; `once_ms`: as much of that as the CPU does not wait for, per micro-batch;
    `unsure`: the uncertainty of the launch time."""

    launching: Launching = Launching()
    batch_ms: float = 0.0
    micro_batches: int = 1
    filling: float = 0.0
    beside_ms: float = 0.0
    once_ms: float = 0.0
    unsure: float = 0.0

    @property
    def launch_ms(self) -> float:
        """What the CPU takes to launch the step."""
        return self.launching.launch_ms * self.micro_batches

    def step_ms(self, gpu: Any = 1.0, slower: Any = 1.0) -> Any:
        """The time of the step, where GPU time and launch time are longer by these factors."""
        batch_ms = self.launching.batch_ms(self.batch_ms * gpu, self.once_ms * gpu, slower)
        return batch_ms * (self.micro_batches + self.filling) + self.beside_ms * gpu

    @property
    def gpu_ms(self) -> float:
        """The step where launches are never late."""
        return self.batch_ms * (self.micro_batches + self.filling) + self.beside_ms

    def may_limit(self, uncertainty: float) -> bool:
        """Whether launches may be the limit, given the uncertainty of the GPU time."""
        if not self.launching.launch_ms:
            return False
        gpu, slower = (exp(FURTHEST * half_width / SIGMAS) for half_width in (-uncertainty, self.unsure))
        return bool(self.step_ms(gpu, slower) > self.gpu_ms * gpu * (1 + 1e-9))

    @cached_property
    def decided_by_launches(self) -> float:
        """By how much the step takes longer, relative to launches that take longer: from 0 to 1."""
        slow, fast = self.step_ms(slower=exp(NEAR)), self.step_ms(slower=exp(-NEAR))
        return float((slow - fast) / (2 * NEAR * self.step_ms()))


@cache
def _errors() -> Array:
    """Errors of the GPU time, its ratio between two recipes, the launch time, and its ratio, in half-widths of their error bars.

    They are normal, evenly spread (a Halton sequence), each with its negative, and fixed: equal forecasts have equal bars.
    """
    normal = NormalDist()
    half = np.array([[normal.inv_cdf(_radical_inverse(index, prime)) for index in range(1, PAIRS + 1)] for prime in PRIMES])
    every = np.concatenate([half, -half], axis=1)
    in_half_widths: Array = every / np.sort(every, axis=1)[:, [HIGH]]
    return in_half_widths


def _radical_inverse(index: int, base: int) -> float:
    """The digits of `index` in this base, mirrored at the point.

    >>> _radical_inverse(6, 2)
    0.375
    """
    value, scale = 0.0, 1.0
    while index:
        scale /= base
        index, digit = divmod(index, base)
        value += digit * scale
    return value


def _interval(values: Array) -> Interval:
    """The median of these values, and the range of 90% of them."""
    ordered = np.sort(values)
    return Interval(float(ordered[PAIRS - 1] + ordered[PAIRS]) / 2, float(ordered[LOW]), float(ordered[HIGH]))


def step_interval(step: LaunchedStep, gpu: Estimate) -> Interval:
    """The time of a step as launched, with its error bar. `gpu`: its GPU time."""
    if not step.may_limit(gpu.uncertainty):
        return gpu.interval()
    of_gpu, _, of_launches, _ = _errors()
    return _interval(step.step_ms(np.exp(of_gpu * gpu.uncertainty), np.exp(of_launches * step.unsure)))


def speedup_interval(
    slow: LaunchedStep, fast: LaunchedStep, slow_gpu: Estimate, gpu_speedup: Estimate, differ: float
) -> Interval:
    """The speedup of a step as launched. `slow_gpu`: the GPU time of the slow step; `gpu_speedup`: the ratio of both GPU times;
    `differ`: the share of the linears that both steps run in different recipes."""
    if not (slow.may_limit(slow_gpu.uncertainty) or fast.may_limit(slow_gpu.uncertainty)):
        return gpu_speedup.interval()
    of_gpu, of_ratio, of_launches, of_launch_ratio = _errors()
    longer, ratio = np.exp(of_gpu * slow_gpu.uncertainty), np.exp(of_ratio * gpu_speedup.uncertainty)
    launches = np.exp(of_launches * slow.unsure)
    apart = np.exp(of_launch_ratio * cluster()["host"]["uncertainty_of_ratio"] * differ / 2)
    return _interval(slow.step_ms(longer, launches * apart) / fast.step_ms(longer / ratio, launches / apart))
