"""The process that computes errors: reads a request, then sends one message per linear."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from gemmscope.errors import UserError, in_a_line
from gemmscope.findings import finding
from gemmscope.numerics.evaluation.checkpoint import read_checkpoint
from gemmscope.numerics.evaluation.linear_errors import LinearErrors, stale_scales, without_errors
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
from gemmscope.numerics.evaluation.synthetic import synthetic_recording
from gemmscope.numerics.quantizers import operands
from gemmscope.numerics.recording import RecordedLinear, TensorRecording, read_recording
from gemmscope.process import messages_to_parent
from gemmscope.recipe.recipes import recipe
from gemmscope.results.numerics import NumericsResult
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
    torch.set_num_threads(1 if request.source.kind == "recording" else THREADS)  # the tensors of a recording are small
    if request.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {request.device} is not available: PyTorch sees no GPU", "use the CPU, which is fast enough")
    for name in request.recipes:  # a fact that is missing is one error, not one for every linear
        for pass_name in OPERANDS:
            operands(name, pass_name, request.backend)
    recording = opened(request)
    yield about(recording, request.device)
    for linear in recording.linears:
        yield errors_of(linear, request)
    if request.depth is None:
        yield AllComputed()
    else:
        from gemmscope.numerics.evaluation.depth import depth_report  # imports more than the errors need

        torch.set_num_threads(THREADS)
        yield AllComputed(depth_report(request, request.depth))


def opened(request: ErrorsRequest) -> TensorRecording:
    """The tensors that the request names."""
    source = request.source
    if source.kind == "recording":
        return read_recording(source.origin)
    if source.kind == "checkpoint":
        return read_checkpoint(source.origin, seed=request.seed, model=source.expected)
    return synthetic_recording(source.origin, source.sizes, seed=request.seed, model=source.model)


def about(recording: TensorRecording, device: str) -> TensorsOpened:
    """The facts that the result repeats."""
    plain = [linear for linear in recording.linears if linear.facts.expert is None]
    inside = [linear for linear in plain if linear.facts.layer is not None]  # a head may read one token of each sequence
    tokens = {step.facts.tokens for linear in inside or plain for step in linear.sampled_steps}
    sampled = [step for linear in recording.linears for step in linear.sampled_steps]
    probed = all(step.facts.probes for step in sampled if not all(map(step.problem, step.passes)))
    findings = [finding("numerics-recording-note", text=note) for note in recording.facts.notes]
    if recording.facts.source != "checkpoint" and not probed:
        findings.append(finding("numerics-no-probes"))
    result = NumericsResult(
        command="",
        findings=tuple(findings),
        source=recording.facts.source,
        origin=recording.origin,
        model_name=recording.facts.model,
        steps=recording.facts.steps,
        tokens=tokens.pop() if len(tokens) == 1 else None,
        sampled_bytes=recording.sampled_bytes,
        layers=len({linear.facts.layer for linear in recording.linears if linear.facts.layer is not None}),
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        versions={**recording.facts.packages, "torch": torch.__version__},
    )
    return TensorsOpened(result, len(recording.linears))


def errors_of(linear: RecordedLinear, request: ErrorsRequest) -> LinearComputed:
    """One linear in every recipe, and its stale scales. An error in it does not affect other linears."""
    try:
        errors = LinearErrors(linear, request.device, request.seed)
        stale = [one for name in request.recipes if recipe(name).delayed for one in stale_scales(linear, name, request.seed)]
        return LinearComputed(tuple(errors.of(name, request.backend) for name in request.recipes), tuple(stale))
    except Exception as error:  # of values that are no sample of tensors
        reason = error.message if isinstance(error, UserError) else in_a_line(error)[:200]
        failure = f"its errors cannot be computed: {reason}"
        return LinearComputed(tuple(without_errors(linear.facts, name, failure) for name in request.recipes))


if __name__ == "__main__":
    main()
