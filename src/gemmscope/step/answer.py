"""What a run of steps says: per precision the step, its speedup, and why. Run files, tables and pages are made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, isfinite

from gemmscope.gpu.specs import spec_of
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.step.results import StepResults, VariantResult
from gemmscope.step.waterfall import NOT_RUNNING, Row, Side, Waterfall, place, verdict, waterfall
from gemmscope.workload.summary import Totals

BYTES_PER_PARAMETER = 8  # in training: the weight, its gradient and both moments, in bf16


@dataclass(frozen=True)
class Verified:
    """The real model's step beside the prediction of the same run."""

    depth: int
    predicted: Interval
    actual: Interval

    @property
    def error(self) -> float:
        return self.predicted.value / self.actual.value - 1

    @property
    def agrees(self) -> bool | None:
        """Whether the error is within what both are known to; None where one of them is not known at all."""
        doubt = hypot(self.predicted.half_width, self.actual.half_width)
        return abs(self.error) <= doubt if isfinite(doubt) else None


@dataclass(frozen=True)
class RecipeAnswer:
    """One precision. Times in milliseconds of one step on one rank; None where it was not measured."""

    recipe: str
    step: Interval
    speedup: Interval | None
    tokens_per_s: float
    model_tflops: float
    utilisation: float | None  # of the chip's dense BF16 rate, whatever the precision; None where that is not known
    busy_ms: float | None
    host_ms: float | None
    peak_bytes: float | None
    waterfall: Waterfall | None
    words: str
    verified: Verified | None = None
    rows: Mapping[Row, float] = field(default_factory=dict)  # of a forecast: milliseconds of each part

    @property
    def fell_back(self) -> bool:
        """Whether products ran in BF16 that were asked for in less."""
        return self.words.startswith(NOT_RUNNING)

    @property
    def host_bound(self) -> bool:
        """Launching takes longer than running: the step takes what the CPU takes."""
        return self.host_ms is not None and self.busy_ms is not None and self.host_ms > self.busy_ms


@dataclass(frozen=True)
class StepAnswer:
    """All precisions that were measured, the baseline first, and why the others were not."""

    recipes: tuple[RecipeAnswer, ...]
    failures: dict[str, str]
    depth: int
    layers: int

    def of(self, name: str) -> RecipeAnswer | None:
        return next((each for each in self.recipes if each.recipe == name), None)


def answer(
    results: StepResults,
    names: Sequence[str],
    totals: Totals,
    tokens_per_step: int,
    real: StepResults | None = None,
    as_deep: StepResults | None = None,
) -> StepAnswer:
    """Put it together. `real`: what `--verify` measured; `as_deep`: the prediction of as many layers, if it did not run all."""
    baseline = _deepest(results, BASELINE)
    chip = spec_of(str(results.hello.get("device", {}).get("name", "")))
    made, failures = [], {}
    for name in names:
        found, step = _deepest(results, name), results.step(name)
        if found is None or step is None:
            failures[name] = next((each.failure for each in results.of(name) if each.failure), "no step of it was timed")
            continue
        fall, words, side = None, "", _side(found)
        if name != BASELINE and baseline is not None and side is not None and (slow := _side(baseline)) is not None:
            fall = waterfall(slow, side)
            words = verdict(fall, recipe(name), side.placed)
        flops = totals.model_flops * totals.micro_batches_per_step
        made.append(
            RecipeAnswer(
                recipe=name,
                step=step,
                speedup=results.speedup(name) if name != BASELINE else None,
                tokens_per_s=tokens_per_step / step.value * 1000,
                model_tflops=flops / step.value / 1e9,
                utilisation=flops / step.value / 1e9 / chip.tflops["bf16"] if chip is not None else None,
                busy_ms=results.extrapolated(name, _busy),
                host_ms=results.extrapolated(name, lambda result: result.host_ms),
                peak_bytes=_peak(results, name, totals),
                waterfall=fall,
                words=words,
                verified=_verified(as_deep or results, real, name) if real is not None else None,
            )
        )
    depth = baseline.variant.depth if baseline is not None else 0
    return StepAnswer(tuple(made), failures, depth, results.layers)


def rows_of(results: StepResults, name: str) -> dict[Row, float] | None:
    """Milliseconds of each part of a measured step, at the depth it was run with; None where its kernels were not seen."""
    found = _deepest(results, name)
    side = _side(found) if found is not None else None
    return side.sums() if side is not None else None


def _deepest(results: StepResults, name: str) -> VariantResult | None:
    found = [result for result in results.of(name) if result.measured]
    return found[0] if found else None


def _side(result: VariantResult) -> Side | None:
    """What its waterfall is made of; None where its kernels were not seen."""
    if not result.parts:
        return None
    placed = place(result.parts, quantizes=recipe(result.variant.recipe).quantizes)
    return Side(placed, _wall(result), result.host_ms, result.busy_ms)


def _wall(result: VariantResult) -> float:
    """The measured step of this very variant, at its own depth."""
    flat = [piece for burst in result.pieces for piece in burst]
    return sum(flat) / len(flat)


def _busy(result: VariantResult) -> float | None:
    side = _side(result)
    return side.wall_ms - side.waiting_ms if side is not None else None


def _peak(results: StepResults, name: str, totals: Totals) -> float | None:
    """Of the real model: what the step held beyond its own weights, and weights, gradients and moments of all layers."""

    plain = {result.variant.depth: result.facts.get("held_bytes") for result in results.of(BASELINE)}

    def beyond(result: VariantResult) -> float | None:
        peak, held = result.facts.get("peak_bytes"), result.facts.get("held_bytes")
        if not peak or held is None:
            return None
        as_baseline = plain.get(result.variant.depth)  # weights quantized once per step are held beside those that BF16 has
        return float(peak - (min(held, as_baseline) if as_baseline is not None else held))

    activations = results.extrapolated(name, beyond)
    return activations + BYTES_PER_PARAMETER * totals.parameters_of_rank if activations is not None else None


def _verified(results: StepResults, real: StepResults, name: str) -> Verified | None:
    """The real step beside the prediction of as many layers; None if one of them is missing."""
    actual, predicted = real.speedup(name, real=True), results.speedup(name)
    if name == BASELINE:
        actual, predicted = real.step(name, real=True), results.step(name)
    deepest = real.of(name, real=True)
    if actual is None or predicted is None or not deepest or deepest[0].variant.depth != results.layers:
        return None  # a shallower real model is another one
    return Verified(deepest[0].variant.depth, predicted, actual)
