"""The GEMMs of a live module, recorded in a worker process that imports torch.

`trace_huggingface` and `trace_module` start the worker and return a `ModuleTrace`; `as_workload` turns it into a workload like a
derived one, so that all later stages treat both alike.
"""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from gemmscope.errors import UserError, option, shown
from gemmscope.findings import Notes, applicable
from gemmscope.folders import temporary_folder
from gemmscope.grouping import grouped
from gemmscope.model.limits import LARGEST
from gemmscope.process import run_worker
from gemmscope.workload.confine import module_seconds
from gemmscope.workload.derive import HEAD, STEP, Workload
from gemmscope.workload.ops import PASSES, BatchedGemm, Convolution, Gemm, Op, Optimizer, Pass, gemm_size, why_high_precision
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.traced_ops import OtherWork, TracedAttention, TracedLinear, between

MIXER = "mixer"
"""The section of traced GEMMs and convolutions inside a mixer: the PyTorch fallback for its kernel."""

MOST_COUNTED = {**dict.fromkeys(("layer", "layers", "blocks", "depth", "depths"), LARGEST["layers"]), "labels": 2**20}
COUNTS = re.compile(rf"(?:{'|'.join(MOST_COUNTED)})$")
LONGEST_LIST, LARGEST_REQUEST = 100_000, 4 * 2**20
LONGEST_S = 600.0  # to trace a config; the largest models take a minute
TRIES = 5  # of building and of running a module: on the meta device and on the CPU


@dataclass(frozen=True)
class ModuleTrace:
    """One forward and backward pass of one micro-batch, as the worker recorded it.

    `gemms` are the GEMMs with a weight; their `op` is the module's path, with layer numbers replaced by *. `batched_gemms` are
    those without a weight, and outside of `attentions`; `scans` and `causal_convolutions` are calls of mixers' kernels,
    `others` what runs between all these. `masks` counts the attentions by mask: none, causal, explicit (a mask tensor, whose
    values are not known). `linear_paths` are the modules whose GEMMs a recipe can quantize (nn.Linear, grouped GEMMs), `heads`
    output heads, `layers` how many layers can be compiled one by one. `saved_bytes` is what forward keeps for backward.
    `inputs` are the sizes of inputs that the module brought with it, and `samples` how many a batch has. Of a Hugging Face
    model, as far as it shows: the sliding `windows` of its layers (None: a layer without one) and whether its attention is
    `causal`. `with_values`: it reads values, and was run on the CPU. `recurrent` are classes that cuDNN has kernels for.
    `unreached` are parts of the module that no gradient reaches, and `unreached_share` is their share of the parameters.
    """

    class_name: str
    parameters: int
    gemms: tuple[Gemm, ...]
    batched_gemms: tuple[BatchedGemm, ...]
    convolutions: tuple[Convolution, ...]
    masks: Mapping[str, int]
    versions: Mapping[str, str] = field(default_factory=dict)
    windows: tuple[int | None, ...] | None = None
    causal: bool | None = None
    scans: tuple[Scan, ...] = ()
    causal_convolutions: tuple[CausalConv, ...] = ()
    attentions: tuple[TracedAttention, ...] = ()
    others: tuple[OtherWork, ...] = ()
    linear_paths: tuple[str, ...] | None = None  # None: all
    heads: tuple[str, ...] = ()
    layers: int = 0
    with_values: bool = False
    recurrent: tuple[str, ...] = ()
    trainable: int = 0
    unreached: tuple[str, ...] = ()
    unreached_share: float = 0.0
    saved_bytes: int = 0
    largest_saved_bytes: int = 0
    has_loss: bool = False
    inputs: str | None = None
    samples: int | None = None
    ignored: tuple[str, ...] = ()  # sizes that were given, and that the factory does not take


def trace_huggingface(
    config: Mapping[str, Any], micro_batch: int | None, sequence: int | None, *, as_trained: bool = False
) -> ModuleTrace:
    """Trace the model that transformers builds from a config; `as_trained`: in BF16 and with its loss, where it has one."""
    _require("transformers", "to build this model from its config")
    _check_counts(config)
    try:
        return _ask_worker({"config": dict(config), "as_trained": as_trained}, micro_batch, sequence, LONGEST_S)
    except UserError as error:
        hint = f"to use your own inputs: {option('module', 'FILE.py:FUNCTION')}, a function that returns (module, inputs)"
        raise UserError(error.message, error.hint or hint) from error


def _check_counts(config: Mapping[str, Any]) -> None:
    """A `UserError` where the config is so large, or has so many layers or labels at any depth, that building would not end."""
    inside: list[tuple[str, Any]] = list(config.items())
    while inside:
        match inside.pop():
            case _, Mapping() as table:
                inside.extend(table.items())
            case key, list() as items:
                if len(items) > LONGEST_LIST:
                    raise UserError(
                        f"{shown(key)} has {len(items)} entries, more than {LONGEST_LIST}", "correct it in the config"
                    )
                inside.extend((key, item) for item in items)
            case key, int() as value if (counted := COUNTS.search(key)) and value > (most := MOST_COUNTED[counted[0]]):
                raise UserError(f"{shown(key)} must be at most {most}, not {shown(value)}", "correct it in the config")


def trace_module(reference: str, micro_batch: int | None, sequence: int | None) -> ModuleTrace:
    """Trace the module that `file.py:factory` returns. Sizes that are not given are the factory's to choose."""
    path, colon, name = reference.rpartition(":")
    if not colon or not path or not name.isidentifier():
        example = f"for example {option('module', 'my_model.py:build')}"
        raise UserError(f"{option('module')} must be FILE.py:FUNCTION, not {reference!r}", example)
    if not os.path.isfile(path):  # noqa: PTH113 (no exception for any name); said at once: importing torch takes seconds
        raise UserError(f"{option('module')}: there is no file {shown(path)}", f"give the file that defines {name}")
    return _ask_worker({"module": reference}, micro_batch, sequence, LONGEST_S + TRIES * module_seconds())


def _require(package: str, why: str) -> None:
    for name in ("torch", package):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is needed {why}, but it is not installed", f"pip install {name}, in gemmscope's environment")


def _ask_worker(request: dict[str, Any], micro_batch: int | None, sequence: int | None, time_limit_s: float) -> ModuleTrace:
    _require("torch", "to trace a module")
    request |= {"micro_batch": micro_batch, "sequence": sequence}
    text = json.dumps(request)
    if len(text) > LARGEST_REQUEST:
        raise UserError(f"it is too large to be traced: it has more than {LARGEST_REQUEST >> 20} MiB")
    try:
        with temporary_folder() as folder:
            request_path, answer_path = folder / "request.json", folder / "answer.json"
            request_path.write_text(text, encoding="utf-8")
            files = (str(request_path), str(answer_path))
            worker = run_worker("gemmscope.workload.trace_worker", *files, time_limit_s=time_limit_s)
            if worker.ending.code is None:
                raise UserError(f"tracing it took longer than {time_limit_s:.0f} s")
            if not answer_path.is_file():
                raise UserError(f"the tracing process ended without an answer: {worker.reason}")
            answer = json.loads(answer_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"a temporary file cannot be written or read: {error.strerror or error}") from error
    except ValueError as error:  # where the disk is full
        raise UserError(f"the tracing process ended in the middle of its answer: {worker.reason}") from error
    if "error" in answer:
        raise UserError(answer["error"], answer.get("hint", ""))
    return TypeAdapter(ModuleTrace).validate_python(answer)


def as_workload(trace: ModuleTrace) -> Workload:
    """The trace as a workload: linears by module, each with the passes that ran, then everything else and the optimizer."""
    by_layer = grouped(
        ((gemm.op, *gemm_size(gemm.m, gemm.k, gemm.n, gemm.pass_name), gemm.groups), gemm)
        for gemm in trace.gemms
        if gemm.flops  # else of an empty tensor
    )
    ops: list[Op] = [_linear(*sizes, seen, trace) for sizes, seen in by_layer.items()]
    ops += [*trace.attentions, *trace.batched_gemms, *trace.scans, *trace.causal_convolutions, *trace.convolutions]
    ops += [between(work, head=work.path in trace.heads) for work in trace.others]
    if trace.trainable:
        ops.append(Optimizer(role="optimizer", section=STEP, updated=trace.trainable))
    # no fused kernel accepts these attentions: because of sizes, or of tensors that are strided
    sizes = dict.fromkeys(op.name for op in trace.attentions if op.unfused == ("sizes",))
    strided = [(op.name, tensor) for op in trace.attentions for tensor in op.unfused if tensor != "sizes"]
    names, tensors = (list(dict.fromkeys(pair[place] for pair in strided)) for place in (0, 1))
    convolutions = sum(op.count for op in trace.convolutions if op.direction == "forward")
    notes: Notes = {
        "traced-with-values": (trace.with_values, {}),
        "traced": (not trace.with_values, {}),
        "convolutions": (trace.convolutions, {"count": convolutions}),
        "recurrent-steps": (trace.recurrent, {"names": list(trace.recurrent)}),
        "explicit-masks": (trace.masks.get("explicit"), {}),
        "attention-unfused": (strided, {"names": names, "tensors": tensors}),
        "attention-unfused-sizes": (sizes, {"names": list(sizes)}),
        "parts-without-gradient": (trace.unreached, {"names": list(trace.unreached), "share": trace.unreached_share}),
        "sizes-ignored": (trace.ignored, {"names": list(map(option, trace.ignored)), "inputs": trace.inputs or ""}),
        "no-loss-traced": (trace.others and not trace.has_loss, {}),
    }
    return Workload(tuple(ops), stage=0, findings=tuple(applicable(notes)))


def _linear(path: str, tokens: int, inputs: int, outputs: int, groups: int, seen: list[Gemm], trace: ModuleTrace) -> TracedLinear:
    """One linear with its passes. One that ran forward several times as often as backward was recomputed."""
    ran: dict[Pass, int] = {which: sum(gemm.count for gemm in seen if gemm.pass_name == which) for which in PASSES}
    count = max(ran["dgrad"], ran["wgrad"])
    if not count or ran["fprop"] % count:
        count = ran["fprop"]
    in_order = tuple(sorted(seen, key=lambda gemm: PASSES.index(gemm.pass_name)))
    return TracedLinear(
        label=path, tokens=tokens, inputs=inputs, outputs=outputs, weights=groups, seen=in_order,
        count=count, forward_runs=ran["fprop"] // count, role="head-linear" if path in trace.heads else "traced-linear",
        section=HEAD if path in trace.heads else "",
        convertible=(trace.linear_paths is None or path in trace.linear_paths) and not why_high_precision(path, inputs, outputs),
    )  # fmt: skip
