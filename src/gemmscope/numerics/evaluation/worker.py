"""The process that computes errors: reads a request, then sends one line of JSON per linear, so that finished linears are not
lost.

`python -m gemmscope.numerics.evaluation.worker REQUEST DESCRIPTOR`: the request is a JSON file, messages go to the descriptor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import TypeAdapter

from gemmscope.errors import UserError, in_a_line
from gemmscope.numerics.evaluation.checkpoint import read_checkpoint
from gemmscope.numerics.evaluation.linear_errors import LinearErrors, stale_scales
from gemmscope.numerics.evaluation.requests import KnownLinears
from gemmscope.numerics.evaluation.synthetic import synthetic_recording
from gemmscope.numerics.recording import RecordedLinear, TensorRecording, read_recording
from gemmscope.results.numerics import LinearError, StaleScale
from gemmscope.signals import leave_to_parent
from gemmscope.workload.derive import Workload
from gemmscope.workload.ops import Linear


def main() -> None:
    """Compute what the request asks for."""
    leave_to_parent()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as out:
        try:
            compute(request, out)
        except UserError as error:
            send(out, error=error.message, hint=error.hint)


def send(out: IO[str], **message: Any) -> None:
    """Send one message immediately."""
    out.write(json.dumps(message) + "\n")
    out.flush()


def compute(request: Mapping[str, Any], out: IO[str]) -> None:
    """Send the facts of the recording, then the errors of every linear in every recipe."""
    device, threads = request["device"], torch.get_num_threads()
    if "recording" in request:
        torch.set_num_threads(1)  # the tensors are small: more threads would not be faster
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device} is not available: PyTorch sees no GPU", "use the CPU, which is fast enough")
    recording = opened(request)
    send(out, about=about(recording, device), linears=len(recording.linears))
    for linear in recording.linears:
        errors, stale = errors_of(linear, request, device)
        send(
            out,
            errors=[one.model_dump(mode="json", by_alias=True) for one in errors],
            stale=[one.model_dump(mode="json") for one in stale],
        )
    if request.get("depth"):
        from gemmscope.numerics.evaluation.depth import depth_message  # imports more than the errors need

        torch.set_num_threads(threads)
        send(out, **depth_message(request))
    send(out, done=True)


def opened(request: Mapping[str, Any]) -> TensorRecording:
    """The tensors that the request names."""
    if "recording" in request:
        return read_recording(request["recording"])
    if "checkpoint" in request:
        model = TypeAdapter(KnownLinears).validate_python(request["known"]) if request.get("known") else None
        return read_checkpoint(request["checkpoint"], seed=request["seed"], model=model)
    sizes = ("tokens", "inputs", "outputs", "count")
    ops = tuple(
        Linear(role="traced-linear", label=case["op"], **{size: case[size] for size in sizes}) for case in request["cases"]
    )
    return synthetic_recording(request["synthetic"], Workload(ops, stage=0), seed=request["seed"], model=request["model"])


def about(recording: TensorRecording, device: str) -> dict[str, Any]:
    """The facts that the result repeats."""
    plain = [linear for linear in recording.linears if linear.facts.expert is None]
    inside = [linear for linear in plain if linear.facts.layer is not None]  # a head may read one token of each sequence
    tokens = {step.facts.tokens for linear in inside or plain for step in linear.sampled_steps}
    return {
        "source": recording.source,
        "origin": recording.origin,
        "model_name": recording.facts.model,
        "steps": list(recording.facts.steps),
        "tokens": tokens.pop() if len(tokens) == 1 else None,
        "sampled_bytes": recording.sampled_bytes,
        "layers": recording.layers,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "versions": {**recording.facts.packages, "torch": torch.__version__},
        "notes": list(recording.facts.notes),
        "probed": all(
            step.facts.probes
            for linear in recording.linears
            for step in linear.sampled_steps
            if not all(map(step.problem, step.passes))
        ),
    }


def errors_of(linear: RecordedLinear, request: Mapping[str, Any], device: str) -> tuple[list[LinearError], list[StaleScale]]:
    """One linear in every recipe, and its stale scales. An error in it does not affect other linears."""
    recipes: list[str] = request["recipes"]
    try:
        errors = LinearErrors(linear, device, request["seed"])
        stale = list(stale_scales(linear, request["seed"])) if "FP8Delayed" in recipes else []
        return [errors.of(recipe, request["backend"]) for recipe in recipes], stale
    except (RuntimeError, ValueError, ArithmeticError, KeyError, OSError, UserError) as error:
        facts = linear.facts
        reason = error.message if isinstance(error, UserError) else in_a_line(error)[:200]
        return [
            LinearError(
                name=facts.name, linear=facts.linear, layer=facts.layer, op=facts.op, inputs=facts.inputs,
                outputs=facts.outputs, recipe=recipe, failure=f"its errors cannot be computed: {reason}",
            )
            for recipe in recipes
        ], []  # fmt: skip


if __name__ == "__main__":
    main()
