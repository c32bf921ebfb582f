"""The process that imports torch: runs a module on the meta device and records what it runs.

`trace.py` starts this file as ``gemmscope.workload.trace_worker REQUEST ANSWER`` (two JSON files). The module is built on
the meta device, where tensors have shapes but no storage, so a 405B model needs no memory. One forward and one backward pass
then dispatch every operation that training would dispatch, and `recorder.py` records each.
"""

import contextlib
import io
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from gemmscope.workload import stand_ins
from gemmscope.workload.confine import limited_memory, limited_time, offline
from gemmscope.workload.factory import SIZES, Built, load_factory, loss_of, outputs_of
from gemmscope.workload.failures import TraceError, fails_on_meta, naming
from gemmscope.workload.huggingface import (
    BUILDING,
    build_huggingface,
    built_huggingface,
    causal,
    huggingface_with_values,
    windows,
)
from gemmscope.workload.interception import record
from gemmscope.workload.module_parts import find_layers, output_head
from gemmscope.workload.ops import Direction, with_counts
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.trace import ModuleTrace
from gemmscope.workload.traced_ops import Moved, OtherWork, TracedAttention
from gemmscope.workload.traffic import WorkGroup

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
RUNNING = "running the model on the meta device"
LARGEST_WITH_VALUES = 2 * 2**30  # bytes of the parameters of a module that is run on the CPU
LONGEST_WITH_VALUES_S = 120.0
LEAST_UNREACHED = 0.01  # share of the parameters of a part that is worth a warning


def trace_built(built: Built, *, between_gemms: bool = True, longest_s: float = math.inf) -> ModuleTrace:
    """Run forward, loss and backward, and return what was recorded. Without `between_gemms`: what the closed form is checked
    with."""
    module = built.module
    with record(module, between_gemms=between_gemms, longest_s=longest_s) as recorder:
        output = module(*built.args, **built.kwargs)
        with recorder.in_loss():
            loss = loss_of(built, output)
        targets = [loss] if loss is not None else outputs_of(output)
        _backward(targets, [torch.empty_like(target) for target in targets])
    kernels = with_counts(
        {replace(op, forward_runs=1 + recorder.recomputed[op] // ran): ran for op, ran in recorder.scans.items()}
    )
    unreached, unreached_share = _unreached(module)
    head = output_head(module, {}, ())  # as a Hugging Face model names it
    parameters = list(module.parameters())
    return ModuleTrace(
        class_name=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        gemms=with_counts(recorder.gemms),
        batched_gemms=with_counts(recorder.batched_gemms),
        attentions=tuple(_attention(op, ran) for op, ran in recorder.attentions.items()),
        convolutions=with_counts(recorder.convolutions),
        others=tuple(_others(recorder.traffic.sums())),
        masks=recorder.masks,
        scans=tuple(op for op in kernels if isinstance(op, Scan)),
        causal_convolutions=tuple(op for op in kernels if isinstance(op, CausalConv)),
        linear_paths=tuple(sorted(recorder.linear_paths)),
        heads=(head,) if head else (),
        layers=len(find_layers(module)),
        recurrent=tuple(sorted({type(part).__name__ for part in module.modules() if isinstance(part, torch.nn.RNNBase)})),
        unreached=unreached,
        unreached_share=unreached_share,
        saved_bytes=sum(recorder.saved.values()),
        largest_saved_bytes=max(recorder.saved.values(), default=0),
        has_loss=loss is not None,
        inputs=built.described_inputs() if built.own_inputs and built.taken != {*SIZES} else None,
        samples=built.samples,
        ignored=built.ignored,
    )


def _unreached(module: torch.nn.Module) -> tuple[tuple[str, ...], float]:
    """The outermost parts whose parameters all lack the gradient that they require, and their share of all parameters.

    Parts that have less than `LEAST_UNREACHED` of the parameters are left out."""
    total = sum(parameter.numel() for parameter in module.parameters())
    sizes: dict[str, int] = {}
    for name, part in module.named_modules():
        parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
        size = sum(parameter.numel() for parameter in parameters)
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if name and not inside and size > LEAST_UNREACHED * total and all(parameter.grad is None for parameter in parameters):
            sizes[name] = size
    return tuple(sizes), sum(sizes.values()) / max(total, 1)


def _backward(targets: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Run backward without `Tensor.backward`, inside which the replaced functions would not be seen: layers that are recomputed
    call them again."""
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:  # versions of PyTorch without this internal function: all but such layers are traced
        torch.autograd.backward(targets, gradients)
        return
    keep_graph = create_graph = False
    run(tuple(targets), tuple(gradients), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)


def _attention(op: TracedAttention, ran: Mapping[Direction, int]) -> TracedAttention:
    """Equal calls of one module as an op. One that ran forward several times as often as backward was recomputed."""
    forward, backward = ran.get("forward", 0), ran.get("backward", 0)
    count = backward if backward and forward % backward == 0 else max(forward, 1)
    return replace(op, count=count, forward_runs=max(forward // count, 1), backward_runs=int(backward > 0))


def _others(sums: Mapping[WorkGroup, Moved]) -> Iterator[OtherWork]:
    """The recorded work between GEMMs, with both directions of a module in one item."""
    for path, kind in dict.fromkeys((group.path, group.kind) for group in sums):
        forward, backward = (sums.get(WorkGroup(path, kind, direction), Moved()) for direction in DIRECTIONS)
        yield OtherWork(path, kind, forward, backward)


def answer(request: dict[str, Any]) -> ModuleTrace:
    """Trace the requested Hugging Face config or module factory."""
    stand_ins.install_flex()
    result = _trace_config(request) if "config" in request else _trace_factory(request)
    libraries = [name for name in ("torch", "transformers") if name in sys.modules]
    return replace(result, versions={name: sys.modules[name].__version__ for name in libraries})


def _trace_config(request: dict[str, Any]) -> ModuleTrace:
    with offline():
        if request.get("as_trained"):
            return _trace_as_trained(request)
        with naming(BUILDING):
            module, kwargs = build_huggingface(request["config"], request["micro_batch"], request["sequence"])
        with naming(RUNNING):
            result = trace_built(Built(module, (), kwargs), between_gemms=False)
    return replace(result, windows=windows(module.config), causal=causal(module, result.masks))


def _trace_as_trained(request: dict[str, Any]) -> ModuleTrace:
    """Trace the model in the first way that works: on the meta device, or, if it reads values and is small, on the CPU. If none
    does, raise the error of the last one, the least demanding."""
    sizes = (request["config"], request["micro_batch"], request["sequence"])
    failure = TraceError("the model cannot be run")
    for with_values, ways in ((False, built_huggingface(*sizes)), (True, huggingface_with_values(*sizes))):
        can_have_values = False
        for built in ways:
            try:
                return _run(built, with_values=with_values)
            except TraceError as error:  # advice on how to change a module does not help with a config
                failure = TraceError(str(error)) if fails_on_meta(error) else error
                can_have_values = fails_on_meta(error) and _is_small(built)
        if not can_have_values:
            break
    raise failure


def _run(built: Built, folder: Path | None = None, *, with_values: bool = False) -> ModuleTrace:
    """Trace on the meta device, or with values on the CPU."""
    longest_s = LONGEST_WITH_VALUES_S if with_values else math.inf
    limited = limited_time() if folder is not None else contextlib.nullcontext()
    with naming("running the model on the CPU" if with_values else RUNNING, folder), limited:
        return replace(trace_built(built, longest_s=longest_s), with_values=with_values)


def _is_small(built: Built) -> bool:
    """Whether its parameters are small enough for the CPU."""
    size: int = sum(parameter.nbytes for parameter in built.module.parameters())
    return size <= LARGEST_WITH_VALUES


def _trace_factory(request: dict[str, Any]) -> ModuleTrace:
    """Trace a module on the meta device. One that reads values is run on the CPU, where its inputs have some; if that fails too,
    raise the first error."""
    arguments = (request["module"], request["micro_batch"], request["sequence"])
    folder = Path(request["module"].rpartition(":")[0]).resolve().parent
    built = _built_on_meta(arguments)
    try:
        return _run(built, folder)
    except TraceError as error:
        if not fails_on_meta(error) or not _is_small(built):
            raise
        without = error
    torch.manual_seed(0)
    try:
        with limited_memory():
            return _run(load_factory(*arguments, "cpu"), folder, with_values=True)
    except TraceError as error:  # one without a cause is about what the module returned
        raise (error if error.__cause__ is None else without) from None


def _built_on_meta(arguments: tuple[str, int | None, int | None]) -> Built:
    """What the factory returns, on the meta device. A factory that reads values, such as the rates of `torch.linspace`, is called
    on the CPU. If that fails too, the first error is raised."""
    try:
        return load_factory(*arguments, "meta")
    except TraceError as error:
        if not fails_on_meta(error):
            raise
        try:
            with limited_memory():
                return load_factory(*arguments, "meta", built_on="cpu")
        except TraceError:
            raise error from error.__cause__


def main() -> None:
    """Answer the request file. There is always an answer file, unless the process dies."""
    request_path, answer_path = sys.argv[1:3]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    limited = limited_memory() if "config" in request else contextlib.nullcontext()
    try:
        with limited, contextlib.redirect_stdout(io.StringIO()):  # output of the user's module must not mix with ours
            result = TypeAdapter(ModuleTrace).dump_python(answer(request), mode="json", by_alias=True)
    except TraceError as failure:
        result = {"error": str(failure), "hint": failure.hint}
    Path(answer_path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)  # even if the user's module has started threads
