"""The errors of one recorded linear in any recipe: `LinearErrors(linear).of("MXFP8")`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean

from gemmscope import units
from gemmscope.errors import UserError, shown
from gemmscope.grouping import grouped
from gemmscope.numerics.evaluation.gemm_errors import (
    GemmNoise,
    SampledGemm,
    operand_error,
    relative_error,
    sampled_error,
)
from gemmscope.numerics.quantizers import GemmOperand, operands
from gemmscope.numerics.recording import (
    ZERO_OUTPUT,
    LinearFacts,
    LinearStep,
    RecordedLinear,
    earlier_maxima,
    nonfinite_values,
    scale_maxima,
)
from gemmscope.recipe.recipes import Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.results.numerics import DroppedPass, LinearError, OperandError, PassError, StaleScale
from gemmscope.units import counted
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

LENGTHS = (2, 5)  # values of a probe: of the correlation of two operands, and of one operand


class LinearErrors:
    """One linear, its samples loaded once for all recipes."""

    def __init__(self, linear: RecordedLinear, device: str = "cpu", seed: int = 0) -> None:
        self.facts, self._seed = linear.facts, seed
        probes = ((key, len(values)) for step in linear.sampled_steps for key, values in step.facts.probes.items())
        if cut := next(((key, count) for key, count in probes if count < LENGTHS[key.count("/") > 1]), None):
            raise UserError(f"its probe {shown(cut[0])} is truncated: it has {counted(cut[1], 'value')}")
        self._steps = [_on_device(step, device) for step in linear.sampled_steps]
        self._gemms = {  # of the steps in which a pass has an error
            name: [SampledGemm(step, name, seed) for step in self._steps if name in step.passes and not step.problem(name)]
            for name in OPERANDS
        }

    def of(self, recipe: str, backend: str = "") -> LinearError:
        """The errors of the linear in a recipe, or why there are none."""
        known = recipe_named(recipe)
        about = without_errors(self.facts, known.name, self._failure(known, backend))
        if about.failure:
            return about
        if not self._has_gemms():
            weight = self._steps[0].sample("fprop", "W")
            quantizer = operands(known.name, "fprop", backend)[0].quantizer
            return about.model_copy(update={"weight": sampled_error(weight, quantizer, self._seed, weight.amax)})
        passes = tuple(self._pass(name, operands(known.name, name, backend)) for name in OPERANDS if self._gemms[name])
        dropped = tuple(self._dropped())
        if not passes:
            reason = f"{ZERO_OUTPUT} in all of its GEMMs, so there is no relative error"
            why = f"{dropped[0].reason} in {units.steps(dropped[0].steps)}" if dropped else reason
            return about.model_copy(update={"failure": why})
        return about.model_copy(update={"passes": passes, "dropped": dropped})

    def _failure(self, recipe: Recipe, backend: str) -> str:
        if self.facts.failure or not self._steps:
            return self.facts.failure or "no step of it was sampled"
        multiple = recipe.multiple_in(backend)  # tokens can be padded: zeros have no error
        for name, size in (("input features", self.facts.inputs), ("output features", self.facts.outputs)):
            if size % multiple:
                return f"{name} = {size} is not a multiple of {multiple}: pad it to {size + -size % multiple}"
        weight = self._steps[0].facts.tensors.get("W")
        if self._has_gemms() or weight is None:
            return ""
        return nonfinite_values("W") if weight.nonfinite else "" if weight.amax else "W is zero, so there is no relative error"

    def _has_gemms(self) -> bool:
        """Whether both operands of some GEMM are known; of a checkpoint only the weight is."""
        return any(len(step.facts.tensors) > 1 for step in self._steps)

    def _dropped(self) -> Iterator[DroppedPass]:
        """Passes that ran but cannot be computed, in all sampled steps or in some. An output of zeros has no error to compute."""
        ran = [(name, step) for name in OPERANDS for step in self._steps if name in step.passes]
        problems = grouped(((name, step.problem(name)), step.facts.step) for name, step in ran)
        for (name, reason), steps in problems.items():
            if reason not in ("", ZERO_OUTPUT):
                yield DroppedPass.model_validate({"pass": name, "steps": tuple(steps), "reason": reason})

    def _pass(self, name: Pass, pair: tuple[GemmOperand, GemmOperand]) -> PassError:
        noises: list[GemmNoise] = []
        errors: tuple[list[OperandError], list[OperandError]] = ([], [])
        for gemm in self._gemms[name]:
            noise, quantized = gemm.noise(pair, scale_maxima(self.facts.steps, gemm.step.facts))
            noises.append(noise)
            for own, sample, operand, values in zip(errors, gemm.sides, pair, quantized, strict=True):
                own.append(operand_error(sample, operand.quantizer, values))
        return PassError.model_validate(
            {
                "pass": name,
                "relative": relative_error(noises),
                "first_share": fmean(one.first_share for one in noises),
                "cosine": fmean(one.cosine for one in noises),
                "operands": tuple(map(averaged, errors)),
            }
        )


def without_errors(facts: LinearFacts, recipe: str, failure: str = "") -> LinearError:
    """What is known of a linear besides its errors, or why it has none."""
    counts = [step.tokens for step in facts.steps if step.tokens]
    return LinearError(
        name=facts.name, linear=facts.linear, layer=facts.layer, op=facts.op, inputs=facts.inputs, outputs=facts.outputs,
        experts=facts.experts, tokens=sum(counts) / len(counts) if counts else None, recipe=recipe, failure=failure,
    )  # fmt: skip


def averaged(errors: Sequence[OperandError]) -> OperandError:
    """One operand in several steps."""
    count = len(errors)
    spans = [one.octaves for one in errors if one.octaves is not None]
    return errors[0].model_copy(
        update={
            "relative": sqrt(sum(one.relative**2 for one in errors) / count),
            "underflow": sum(one.underflow for one in errors) / count,
            "saturated": sum(one.saturated for one in errors) / count,
            "octaves": max(spans) if spans else None,
        }
    )


def _on_device(step: LinearStep, device: str) -> LinearStep:
    return step if device == "cpu" else replace(step, load=lambda name: step.load(name).to(device))


DELAYED: Mapping[TensorName, Pass] = {"X": "fprop", "W": "fprop", "dY": "dgrad"}
"""A pass that reads each tensor."""


def stale_scales(linear: RecordedLinear, recipe: str, seed: int = 0) -> Iterator[StaleScale]:
    """Every tensor of the last sampled step that has earlier steps: its error with their scale and with its own, in a recipe with
    delayed scaling."""
    if linear.facts.failure or not linear.sampled_steps:
        return
    step = linear.sampled_steps[-1]
    history = earlier_maxima(linear.facts.steps, step.facts.step)
    for tensor, pass_name in DELAYED.items():
        facts = step.facts.tensors.get(tensor)
        if facts is None or facts.nonfinite or not facts.amax or tensor not in history or pass_name not in step.passes:
            continue
        sample, quantizer = (
            step.sample(pass_name, tensor),
            operands(recipe, pass_name)[OPERANDS[pass_name].index(tensor)].quantizer,
        )
        stale, fresh = (sampled_error(sample, quantizer, seed, amax) for amax in (history[tensor], facts.amax))
        yield StaleScale(
            name=linear.name, tensor=tensor, growth=facts.amax / history[tensor], saturated=stale.saturated,
            relative=stale.relative, fresh_relative=fresh.relative,
        )  # fmt: skip
