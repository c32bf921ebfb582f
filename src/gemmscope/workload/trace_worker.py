"""The process that imports torch: runs a module on the meta device and records what it runs.

`trace.py` starts this file as ``gemmscope.workload.trace_worker REQUEST ANSWER`` (two JSON files). The module is built on
the meta device, where tensors have shapes but no storage, so a 405B model needs no memory. One forward and one backward pass
then dispatch every operation that training would dispatch, and `recorder.py` records each.
"""

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from gemmscope.workload.confine import limit_memory, offline
from gemmscope.workload.factory import Built, TraceError, load_factory, loss_of, move_to_meta, naming, outputs_of
from gemmscope.workload.huggingface import build_huggingface, causal, huggingface_model, windows
from gemmscope.workload.ops import with_counts
from gemmscope.workload.recorder import record
from gemmscope.workload.trace import ModuleTrace

__all__ = ["TraceError", "answer", "build_huggingface", "huggingface_model", "move_to_meta", "trace"]

RUNNING = "running the model on the meta device"


def trace(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleTrace:
    """Run forward and backward of `module` and return what was recorded."""
    return trace_built(Built(module, args, dict(kwargs)))


def trace_built(built: Built) -> ModuleTrace:
    """Run forward, loss and backward, and return what was recorded."""
    module = built.module
    with record(module) as recorder:
        output = module(*built.args, **built.kwargs)
        loss = loss_of(built, output)
        if loss is not None:
            loss.backward()
        else:
            torch.autograd.backward([tensor.sum() for tensor in outputs_of(output)])
    unique = {id(parameter): parameter.numel() for parameter in module.parameters()}
    return ModuleTrace(
        class_name=type(module).__name__,
        parameters=sum(unique.values()),
        gemms=with_counts(recorder.gemms),
        batched_gemms=with_counts(recorder.batched_gemms),
        remainder=with_counts(recorder.remainder),
        masks=recorder.masks,
    )


def answer(request: dict[str, Any]) -> ModuleTrace:
    """Trace the requested Hugging Face config or module factory."""
    result = _trace_config(request) if "config" in request else _trace_factory(request)
    libraries = [name for name in ("torch", "transformers") if name in sys.modules]
    return replace(result, versions={name: sys.modules[name].__version__ for name in libraries})


def _trace_config(request: dict[str, Any]) -> ModuleTrace:
    with offline():
        with naming("building the model from its config"):
            module, kwargs = build_huggingface(request["config"], request["micro_batch"], request["sequence"])
        with naming(RUNNING):
            result = trace(module, (), kwargs)
    return replace(result, windows=windows(module.config), causal=causal(module, result.masks))


def _trace_factory(request: dict[str, Any]) -> ModuleTrace:
    built = load_factory(request["module"], request["micro_batch"], request["sequence"], "meta")
    with naming(RUNNING, Path(request["module"].rpartition(":")[0]).resolve().parent):
        return trace_built(built)


def main() -> None:
    """Answer the request file. There is always an answer file, unless the process dies."""
    request_path, answer_path = sys.argv[1:3]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    if "config" in request:
        limit_memory()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # output of the user's module must not mix with ours
            result = TypeAdapter(ModuleTrace).dump_python(answer(request), mode="json", by_alias=True)
    except TraceError as failure:
        result = {"error": str(failure), "hint": failure.hint}
    Path(answer_path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)  # whatever threads the user's module has started
