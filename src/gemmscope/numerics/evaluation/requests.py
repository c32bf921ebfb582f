"""Runs the worker that computes errors, and collects its messages as they come. Ctrl-C keeps what has arrived."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gemmscope.engine.pipes import last_line
from gemmscope.errors import UserError
from gemmscope.folders import temporary_folder
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.process import worker_command, worker_environment
from gemmscope.results.numerics import DepthError, LinearError, StaleScale
from gemmscope.signals import DeferredSignals, blocked, defer_signals
from gemmscope.workload.derive import HEAD, derive
from gemmscope.workload.ops import Linear

WORKER = "gemmscope.numerics.evaluation.worker"
POLL_S = 0.5


@dataclass
class ComputedErrors:
    """The messages of the worker so far, as one result."""

    about: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    """Linears in the recording."""
    done: int = 0
    """Linears that were computed."""
    linears: list[LinearError] = field(default_factory=list)
    stale: list[StaleScale] = field(default_factory=list)
    depth: list[DepthError] = field(default_factory=list)
    depth_notes: list[str] = field(default_factory=list)
    depth_failure: str = ""
    """Why there are no errors along depth, where they were asked for."""
    complete: bool = False
    ended: str = ""
    """How the worker ended, if that was before the last linear."""


def compute_errors(request: Mapping[str, Any], progress: Callable[[int, int], None]) -> ComputedErrors:
    """Compute errors in a worker. `progress` is called with the number of linears that are done, and of all linears.

    An interruption, or a worker that dies, ends it early: the result then holds what was computed, if anything was.
    """
    result = ComputedErrors()
    with temporary_folder() as folder, defer_signals() as signals:
        path = folder / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        for message in _messages(str(path), signals, result):
            take_message(message, result)
            progress(result.done, result.count)
        if not result.complete and signals.first is not None and result.linears:
            signals.answered = True
            signals.outcome = f"{result.done} of {result.count} linears are computed"
        elif not result.complete and signals.first is not None:
            raise signals.interruption()
    if not result.complete and not result.linears:
        raise UserError(f"the process that computes errors {result.ended or 'ended without a result'}")
    return result


def take_message(message: Mapping[str, Any], result: ComputedErrors) -> None:
    """Add a message of the worker to the result."""
    if "error" in message:
        raise UserError(message["error"], message.get("hint", ""))
    if "about" in message:
        result.about, result.count = message["about"], message["linears"]
    elif "errors" in message:
        result.linears += [LinearError.model_validate(one) for one in message["errors"]]
        result.stale += [StaleScale.model_validate(one) for one in message["stale"]]
        result.done += 1
    elif "depth" in message:
        result.depth = [DepthError.model_validate(one) for one in message["depth"]]
        result.depth_notes, result.depth_failure = message["notes"], message["failure"]
    result.complete |= "done" in message


def _messages(request: str, signals: DeferredSignals, result: ComputedErrors) -> Iterator[dict[str, Any]]:
    """The worker's messages until it ends, or a signal arrives."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        with blocked():
            worker = subprocess.Popen(
                worker_command(WORKER, request, str(writing)),
                pass_fds=(writing,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the worker
            )
        os.close(writing)
        try:
            pending = b""
            while signals.first is None:
                ready, _, _ = select.select([reading, signals.fileno()], [], [], POLL_S)
                if reading not in ready:
                    continue
                piece = os.read(reading, 1 << 20)
                if not piece:
                    worker.wait()
                    result.ended = _reason(worker.returncode, errors)
                    return
                *lines, pending = (pending + piece).split(b"\n")
                yield from map(json.loads, lines)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            os.close(reading)


def _reason(code: int, errors: Any) -> str:
    if code == -signal.SIGKILL:
        return "was killed, perhaps because memory ran out"
    return f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{last_line(errors)}"


USUAL_SEQUENCE = 512


@dataclass(frozen=True)
class KnownLinears:
    """The number of layers, and by role the sizes that its linears may have: (inputs, outputs). The head is left out:
    vocabularies may be padded."""

    layers: int
    sizes: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)


def known_linears(model: ModelSpec) -> KnownLinears:
    """What a checkpoint of this model contains."""
    sizes: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for op in derive(model, RunSpec(micro_batch_size=1, sequence_length=model.positions or USUAL_SEQUENCE)).ops:
        if isinstance(op, Linear) and op.section != HEAD:
            sizes[op.role].add((op.inputs, op.outputs))
    return KnownLinears(len(model.layers), {op: tuple(sorted(known)) for op, known in sizes.items()})
