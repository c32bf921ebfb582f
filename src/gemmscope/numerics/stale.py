"""Delayed scaling over recorded steps: scales come from the maxima of earlier steps, so values that have grown saturate."""

from __future__ import annotations

from collections.abc import Iterator

from gemmscope.numerics.errors import sampled_error
from gemmscope.numerics.operands import operands
from gemmscope.numerics.recording import RecordedLinear, earlier_maxima
from gemmscope.results.numerics import Pass, StaleScale, TensorName

PLACES: tuple[tuple[Pass, int, TensorName], ...] = (("fprop", 1, "X"), ("fprop", 0, "W"), ("dgrad", 1, "dY"))


def stale_scales(linear: RecordedLinear, seed: int = 0) -> Iterator[StaleScale]:
    """Every tensor of the last sampled step that has earlier steps: its error with their scale and with its own."""
    if linear.facts.failure or not linear.sampled_steps:
        return
    step = linear.sampled_steps[-1]
    history = earlier_maxima(linear.facts.steps, step.facts.step)
    for pass_name, place, tensor in PLACES:
        if tensor not in history or pass_name not in step.passes or step.facts.tensors[tensor].nonfinite:
            continue
        sample = step.sample(pass_name)
        side = (sample.first, sample.second)[place]
        if side is None or not side.amax:
            continue
        operand = operands("FP8Delayed", pass_name)[place]
        stale, fresh = (
            sampled_error(step, side, operand, sample.column_weights, seed, amax) for amax in (history[tensor], side.amax)
        )
        yield StaleScale(
            name=linear.name, tensor=tensor, growth=side.amax / history[tensor], saturated=stale.saturated,
            relative=stale.relative, fresh_relative=fresh.relative,
        )  # fmt: skip
