"""The process that computes errors: reads a request, then sends one message per linear."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch

from gemmscope.errors import UserError, in_a_line
from gemmscope.findings import finding
from gemmscope.numerics.evaluation.checkpoint import read_checkpoint
from gemmscope.numerics.evaluation.linear_errors import growth_of_maxima, linear_error, without_errors
from gemmscope.numerics.evaluation.requests import (
    MESSAGE,
    REQUEST,
    AllComputed,
    ErrorsMessage,
    ErrorsRequest,
    LinearComputed,
    NotComputed,
    TensorsOpened,
    from_line,
    to_line,
)
from gemmscope.numerics.evaluation.synthetic import TOKENS, synthetic_recording
from gemmscope.numerics.quantizers import operands
from gemmscope.numerics.recording import LinearFacts, RecordingFacts, read_recording
from gemmscope.process import messages_to_parent
from gemmscope.reading import called
from gemmscope.recipe.recipes import recipe
from gemmscope.results.numerics import NumericsResult, ProbedDamage
from gemmscope.workload.ops import OPERANDS

THREADS = 8  # on any machine: sums over threads depend on how many there are


def main() -> None:
    """Compute what the request asks for."""
    request = from_line(REQUEST, sys.stdin.readline())
    with messages_to_parent() as out:
        try:
            for message in compute(request):
                print(to_line(MESSAGE, message), file=out, flush=True)
        except UserError as error:
            print(to_line(MESSAGE, NotComputed(error.message, error.hint)), file=out)


def compute(request: ErrorsRequest) -> Iterator[ErrorsMessage]:
    """The facts of the recording, then the errors of every linear in every recipe."""
    torch.set_num_threads(THREADS)
    if request.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {request.device} is not available: PyTorch sees no GPU", "use the CPU, which is fast enough")
    for name in request.recipes:  # a fact that is missing is one error, not one for every linear
        for pass_name in OPERANDS:
            operands(name, pass_name, request.backend)
    facts, linears = opened(request)
    yield TensorsOpened(about(facts, request), len(facts.linears))
    for linear in linears:
        yield errors_of(linear, request)
    if request.depth is None:
        yield AllComputed()
    else:
        from gemmscope.numerics.evaluation.depth import depth_report  # imports more than the errors need

        torch.set_num_threads(THREADS)
        yield AllComputed(depth_report(request, request.depth))


def opened(request: ErrorsRequest) -> tuple[RecordingFacts, Iterable[LinearFacts]]:
    """What the request names: its facts, and its linears, which may be measured one by one."""
    source = request.source
    if source.kind == "recording":
        facts = read_recording(source.origin)
        return facts.model_copy(update={"origin": called(source.origin)}), facts.linears
    if source.kind == "checkpoint":
        return read_checkpoint(source.origin, seed=request.seed, model=source.expected, device=request.device)
    return synthetic_recording(source.origin, source.sizes, seed=request.seed, model=source.model, device=request.device)


def about(facts: RecordingFacts, request: ErrorsRequest) -> NumericsResult:
    """The facts that the result repeats."""
    plain = [linear for linear in facts.linears if linear.expert is None]
    inside = [linear for linear in plain if linear.layer is not None]  # a head may read one token of each sequence
    tokens = {step.tokens for linear in inside or plain for step in linear.measured}
    return NumericsResult(
        command="",
        findings=tuple(finding("numerics-recording-note", text=note) for note in facts.notes),
        source=facts.source,
        origin=facts.origin,
        model_name=facts.model,
        steps=facts.steps,
        without=request.without,
        probed=tuple(ProbedDamage(recipe=one.recipe, layer=one.layer, measured=one.divergence) for one in facts.probes),
        tokens=tokens.pop() if len(tokens) == 1 else TOKENS if facts.source == "synthetic" else None,
        layers=len({linear.layer for linear in facts.linears if linear.layer is not None}),
        device=torch.cuda.get_device_name(request.device) if request.device.startswith("cuda") else request.device,
        versions={**facts.packages, "torch": torch.__version__},
    )


def errors_of(facts: LinearFacts, request: ErrorsRequest) -> LinearComputed:
    """One linear in every recipe, and how its maxima grew. An error in it does not affect other linears."""
    try:
        stale = growth_of_maxima(facts) if any(recipe(name).delayed for name in request.recipes) else ()
        errors = (linear_error(facts, name, request.backend, request.without) for name in request.recipes)
        return LinearComputed(tuple(errors), tuple(stale))
    except Exception as error:  # of values that no measurement gives
        reason = error.message if isinstance(error, UserError) else in_a_line(error)[:200]
        failure = f"its errors cannot be computed: {reason}"
        return LinearComputed(tuple(without_errors(facts, name, failure) for name in request.recipes))


if __name__ == "__main__":
    main()
