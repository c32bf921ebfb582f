"""Findings about the errors of linears: what is missing, what was left out, and what the user should know about the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gemmscope.findings import Finding, finding
from gemmscope.grouping import grouped
from gemmscope.numerics.evaluation.requests import ComputedErrors
from gemmscope.numerics.recording import HISTORY
from gemmscope.recipe.recipes import recipe
from gemmscope.results.numerics import LinearError, counted_linears
from gemmscope.units import steps
from gemmscope.workload.ops import OPERANDS


def error_findings(computed: ComputedErrors, backend: str) -> Iterator[Finding]:
    """What there is to know about the errors of linears. `backend`: whose variants of the recipes."""
    tensors, counted = computed.tensors.result, counted_linears(computed.linears)
    yield from tensors.findings
    if not computed.complete:
        facts = {"done": computed.done, "count": computed.tensors.count}
        ended = computed.ended
        yield finding("numerics-worker-ended", reason=ended, **facts) if ended else finding("numerics-interrupted", **facts)
    if computed.depth.failure:
        yield finding("numerics-no-depth", reason=computed.depth.failure)
    if computed.depth.notes:
        yield finding("numerics-depth", notes=list(computed.depth.notes))
    with_errors = dict.fromkeys(linear.recipe for linear in computed.linears if linear.passes)
    yield from padded_tokens(tensors.tokens or 0, with_errors, backend)
    if tensors.source == "recording":
        earlier = max(len(tensors.steps) - 1, 0)
        delayed = any(recipe(name).delayed for name in with_errors)
        if delayed and not computed.stale:
            yield finding("numerics-no-history")
        elif delayed and earlier < HISTORY:
            yield finding("numerics-short-history", steps=earlier, history=HISTORY)
        passes = {one.pass_name for linear in counted for one in linear.passes}
        if passes == {"fprop"} and not any(linear.dropped for linear in counted):
            yield finding("numerics-forward-only")
    yield from (*failures(counted), *dropped_passes(counted))


def padded_tokens(tokens: int, names: Iterable[str], backend: str) -> Iterator[Finding]:
    """One finding for every number that recipes want tokens to be a multiple of, where they are not."""
    needs = grouped((recipe(name).multiple_in(backend), name) for name in names if recipe(name).quantizes)
    for multiple, recipes in needs.items():
        if tokens % multiple:
            padded = -(-tokens // multiple) * multiple
            yield finding("numerics-padded", tokens=tokens, multiple_of=multiple, recipes=recipes, padded=padded)


def failures(linears: Sequence[LinearError]) -> list[Finding]:
    """One finding for every reason: the linears, and the recipes, that it applies to."""
    return [
        finding(
            "numerics-failed",
            linears=list(dict.fromkeys(one.name for one in failed)),
            recipes=list(dict.fromkeys(one.recipe for one in failed)),
            reason=reason,
        )
        for reason, failed in grouped((linear.failure, linear) for linear in linears if linear.failure).items()
    ]


def dropped_passes(linears: Sequence[LinearError]) -> list[Finding]:
    """One finding for every reason, with the passes and the linears that have no errors, or only those of other steps."""
    known = {one.pass_name for linear in linears for one in linear.passes}
    every = [(linear, one, {other.pass_name for other in linear.passes}) for linear in linears for one in linear.dropped]
    groups = grouped(
        ((one.pass_name in computed, one.reason, steps(one.steps), one.pass_name in known), (one.pass_name, linear.name))
        for linear, one, computed in every
    )
    return [
        finding(
            "numerics-dropped-steps" if in_other_steps else "numerics-dropped-passes",
            passes=[name for name in OPERANDS if name in dict(places)],
            linears=list(dict.fromkeys(name for _, name in places)),
            reason=reason,
            steps=where,
            counted="count as the mean of the other linears" if others else "do not count",
        )
        for (in_other_steps, reason, where, others), places in groups.items()
    ]
