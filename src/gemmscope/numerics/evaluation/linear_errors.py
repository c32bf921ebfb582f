"""The errors of one linear in any recipe, from the numbers that were measured with its tensors: `linear_error(facts,
"MXFP8")`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, hypot, sqrt
from statistics import fmean

from gemmscope import units
from gemmscope.choices import Switch
from gemmscope.engine.stats import student
from gemmscope.grouping import grouped
from gemmscope.interval import Interval
from gemmscope.numerics.quantizers import library_of, operands, switches_of
from gemmscope.numerics.recording import (
    GROUPS,
    ZERO_OUTPUT,
    GemmNumbers,
    LinearFacts,
    OperandNumbers,
    StepFacts,
    earlier_maxima,
    variant_name,
)
from gemmscope.recipe.recipes import Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.results.numerics import DroppedPass, GradientError, LinearError, OperandError, PassError, StaleScale
from gemmscope.workload.ops import OPERANDS, Pass, TensorName

FREEDOM = 30.0  # degrees of freedom of the intervals: tokens weigh unequally
NO_ERROR = OperandNumbers(relative=0.0, underflow=0.0, saturated=0.0)
EXACT = GemmNumbers(squared=0.0, variance=0.0, first_share=0.5, parallel=0.0, operands=(NO_ERROR, NO_ERROR))


def linear_error(facts: LinearFacts, recipe: str, backend: str = "", without: Sequence[Switch] = ()) -> LinearError:
    """The errors of the linear in a recipe, or why there are none. `without`: what is switched off, in recipes that have it."""
    known = recipe_named(recipe)
    about = without_errors(facts, known.name, _failure(facts, known, backend))
    if about.failure:
        return about
    library = library_of(known, backend) if known.quantizes else ""
    if weight := facts.weights.get(variant_name(known.name, library)):
        return about.model_copy(update={"weight": _operand("W", known.operands["fprop"][0], [weight], [])})
    off = max((one for one in switches_of(known.name, library) if {*one} <= {*without}), key=len)
    variant = variant_name(known.name, library, off)
    usable = {name: [step for step in facts.measured if name in step.outputs and not step.problem(name)] for name in OPERANDS}
    passes = tuple(_pass(name, steps, variant, known.name, backend) for name, steps in usable.items() if steps)
    dropped = tuple(_dropped(facts))
    if not passes:
        reason = f"{ZERO_OUTPUT} in all of its GEMMs, so there is no relative error"
        why = f"{dropped[0].reason} in {units.steps(dropped[0].steps)}" if dropped else reason
        return about.model_copy(update={"failure": why})
    with_gradient = [step for step in usable["fprop"] if "dY" in step.tensors and not step.tensors["dY"].nonfinite]
    damages = [_gemm(step, "fprop", variant).damage for step in with_gradient]
    return about.model_copy(
        update={
            "passes": passes,
            "dropped": dropped,
            "damage": fmean(damages) if damages else None,
            "gradient": _gradient(usable["wgrad"], variant),
            "rerouted": fmean(_gemm(step, "fprop", variant).rerouted or 0.0 for step in usable["fprop"]) if facts.top_k else None,
        }
    )


def _failure(facts: LinearFacts, recipe: Recipe, backend: str) -> str:
    if facts.failure or not (facts.measured or facts.weights):
        return facts.failure or "it was not measured in any step"
    multiple = recipe.multiple_in(backend)  # tokens can be padded: zeros have no error
    for name, size in (("input features", facts.inputs), ("output features", facts.outputs)):
        if size % multiple and not facts.top_k:
            return f"{name} = {size} is not a multiple of {multiple}: pad it to {size + -size % multiple}"
    return ""


def _gemm(step: StepFacts, pass_name: Pass, variant: str) -> GemmNumbers:
    """The numbers of a variant; without any, it changes no value."""
    return step.gemms.get(variant, {}).get(pass_name, EXACT)


def _dropped(facts: LinearFacts) -> Iterator[DroppedPass]:
    """Passes that ran but cannot be computed, in all measured steps or in some. An output of zeros has no error to compute."""
    ran = [(name, step) for name in OPERANDS for step in facts.measured if name in step.outputs]
    problems = grouped(((name, step.problem(name)), step.step) for name, step in ran)
    for (name, reason), steps in problems.items():
        if reason not in ("", ZERO_OUTPUT):
            yield DroppedPass.model_validate({"pass": name, "steps": tuple(steps), "reason": reason})


def _pass(name: Pass, steps: Sequence[StepFacts], variant: str, recipe: str, backend: str) -> PassError:
    gemms = [_gemm(step, name, variant) for step in steps]
    pair = operands(recipe, name, backend)
    parallel = fmean(one.parallel for one in gemms)
    squared = fmean(one.squared for one in gemms)
    whole = sqrt(max(1 + 2 * parallel + squared, 0.0))
    return PassError.model_validate(
        {
            "pass": name,
            "relative": _relative(gemms),
            "first_share": fmean(one.first_share for one in gemms),
            "cosine": (1 + parallel) / whole if whole else 0.0,
            "operands": tuple(
                _operand(one.tensor, one.quantizer.format, [gemm.operands[place] for gemm in gemms], steps)
                for place, one in enumerate(pair)
            ),
        }
    )


def _relative(gemms: Sequence[GemmNumbers]) -> Interval:
    """The relative error with its 95% interval; of several steps, the root mean square."""
    squared = fmean(one.squared for one in gemms)
    if squared <= 0:
        return Interval(0.0, 0.0, 0.0)
    deviation = sqrt(sum(one.variance for one in gemms)) / len(gemms) / squared / 2
    value, reach = sqrt(squared), exp(min(student(FREEDOM) * deviation, 50.0))
    return Interval(value, value / reach, value * reach)


def _operand(tensor: TensorName, form: str, numbers: Sequence[OperandNumbers], steps: Sequence[StepFacts]) -> OperandError:
    """One operand in several steps."""
    spans = [one for step in steps if (one := step.tensors[tensor].octaves) is not None]
    return OperandError(
        tensor=tensor,
        format=form,
        relative=sqrt(fmean(one.relative**2 for one in numbers)),
        underflow=fmean(one.underflow for one in numbers),
        saturated=fmean(one.saturated for one in numbers),
        octaves=max(spans, default=None),
    )


def _gradient(steps: Sequence[StepFacts], variant: str) -> GradientError | None:
    """Bias and noise of the weight's gradient, relative to its own noise from micro-batch to micro-batch."""
    known = [(step.gradient, _gemm(step, "wgrad", variant)) for step in steps if step.gradient is not None]
    if not known:
        return None
    own = fmean(gradient.noise for gradient, _ in known)
    squared = fmean(gradient.squared for gradient, _ in known)
    bias, noise = (fmean(getattr(gemm, name) * gradient.squared for gradient, gemm in known) for name in ("bias", "noise"))
    error = hypot(*(gemm.bias_error * gradient.squared for gradient, gemm in known)) / len(known)
    certain = bias - student(len(known) * (GROUPS - 1)) * error  # less cannot be told from chance
    return GradientError(bias=max(certain, 0.0), noise=max(noise, 0.0), own_noise=max(own, 0.0), squared=squared,
                         energy=fmean(gradient.energy for gradient, _ in known),
                         arriving=fmean((step.tensors["dY"].norm or 0.0) ** 2 for step in steps))  # fmt: skip


def without_errors(facts: LinearFacts, recipe: str, failure: str = "") -> LinearError:
    """What is known of a linear besides its errors, or why it has none."""
    counts = [step.tokens for step in facts.steps if step.tokens]
    return LinearError(
        name=facts.name, linear=facts.linear, layer=None if facts.top_k else facts.layer, op=facts.op, inputs=facts.inputs,
        outputs=facts.outputs, experts=facts.experts, recipe=recipe, failure=failure,
        tokens=sum(counts) / len(counts) if counts else None,
    )  # fmt: skip


def growth_of_maxima(facts: LinearFacts) -> Iterator[StaleScale]:
    """Every tensor of the last measured step that has earlier steps: how far it exceeds the scale of delayed scaling."""
    if facts.failure or not facts.measured:
        return
    step = facts.measured[-1]
    history = earlier_maxima(facts.steps, step.step)
    for tensor, own in step.tensors.items():
        if not own.nonfinite and own.amax and tensor in history:
            yield StaleScale(name=facts.name, tensor=tensor, growth=own.amax / history[tensor])
