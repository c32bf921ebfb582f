"""From the model that was named to the operations of one micro-batch: in closed form where there is one, else by tracing it.

Every command that needs a model's products gets them here, so that `bench` measures exactly what `shapes` lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gemmscope.cli.output import say
from gemmscope.errors import UserError, shown
from gemmscope.model.source import ModelSource
from gemmscope.model.spec import RunSpec

if TYPE_CHECKING:
    from gemmscope.measure.findings import Layer
    from gemmscope.workload.cases import Case
    from gemmscope.workload.derive import Workload
    from gemmscope.workload.ops import Linear
    from gemmscope.workload.trace import Trace

COMPUTED_AGAIN = "what is computed again in backward is not in the linears' tables: each pass counts once"


@dataclass(frozen=True)
class Subject:
    """A model, how it is run, and what one rank then computes. `trace` where the live model had to be run to know."""

    source: ModelSource
    run: RunSpec
    workload: Workload
    notes: tuple[str, ...]
    trace: Trace | None = None

    @property
    def name(self) -> str:
        if self.source.model is not None:
            return self.source.model.name
        return f"{self.trace.class_name if self.trace else 'model'} from {self.source.origin}"


def subject_of(source: ModelSource, run: RunSpec, notes: list[str]) -> Subject:
    """Derive where there is a closed form, trace where there is none."""
    from gemmscope.workload.derive import derive
    from gemmscope.workload.trace import as_workload

    trace = None
    if source.model is not None:
        workload = derive(source.model, run)
    else:
        trace = _trace(source, run)
        workload = as_workload(trace)
    return Subject(source, run, workload, (*source.notes, *notes, *workload.notes), trace)


def _trace(source: ModelSource, run: RunSpec) -> Trace:
    from gemmscope.workload.trace import trace_module

    plain = RunSpec(run.micro_batch_size, run.sequence_length, gradient_accumulation=run.gradient_accumulation)
    if replace(run, separate_projections=False) != plain:  # a trace shows projections as the module has them
        raise UserError(
            f"{source.origin} is traced as it runs in one process: it cannot be sharded or recomputed here",
            "keep --micro-batch-size, --sequence-length and --gradient-accumulation only",
        )
    say("tracing the live model on the meta device (importing torch takes a few seconds) …")
    return trace_module(source.module, run) if source.module is not None else _trace_unknown(source.config or {}, run)


def _trace_unknown(config: Mapping[str, Any], run: RunSpec) -> Trace:
    """Trace a model type without closed form; if that fails, say which known type it is probably built like."""
    from gemmscope.model.families import built_like, known_model_types
    from gemmscope.workload.trace import trace_huggingface

    try:
        return trace_huggingface(config, run)
    except UserError as error:
        given = str(config.get("model_type"))
        similar = built_like(config) if given not in known_model_types() else ""
        hint = f'if it is built alike, say "model_type": "{similar}"; ' if similar else ""
        message = f"model_type {shown(given)} has no closed form here, so it must be traced: {error.message}"
        raise UserError(message, hint + error.hint) from error


def linears_of(workload: Workload) -> tuple[list[Linear], list[str]]:
    """The linears to measure, and what is measured otherwise than the model runs it."""
    from gemmscope.workload.ops import Linear
    from gemmscope.workload.trace import TracedLinear

    linears, notes = [], []
    for op in workload.ops:
        if not isinstance(op, Linear):
            continue
        linears.append(_with_rows(op) if isinstance(op, TracedLinear) and op.groups > 1 else op)
        if linears[-1] is not op:
            notes.append(f"{op.name}: its rows are split evenly among {op.groups} weights")
        if isinstance(op, TracedLinear) and len({gemm.pass_name for gemm in op.seen}) < 3:
            notes.append(f"{op.name}: all three passes are measured, though the model runs fewer")
    if any(op.forward_runs > 1 for op in linears):
        notes.append(COMPUTED_AGAIN)
    return _told_apart(linears), notes


def _with_rows(op: Linear) -> Linear:
    """A traced linear of several weights: how its rows are split is not known from a trace."""
    from gemmscope.workload.ops import GroupedLinear

    rows = tuple((op.tokens + index) // op.groups for index in range(op.groups))
    return GroupedLinear(name=op.name, tokens=op.tokens, inputs=op.inputs, outputs=op.outputs, count=op.count, rows=rows)


def _told_apart(linears: list[Linear]) -> list[Linear]:
    """A name that stands for several sizes gets the size with it: results are kept by name."""
    sizes: dict[str, set[tuple[int, int, int, int]]] = {}
    for op in linears:
        sizes.setdefault(op.name, set()).add((op.tokens, op.inputs, op.outputs, op.groups))
    return [
        replace(op, name=f"{op.name} {op.tokens}x{op.inputs}x{op.outputs}") if len(sizes[op.name]) > 1 else op for op in linears
    ]


def layer_of(linears: list[Linear], cases: list[Case]) -> Layer | None:
    """One layer's share of the cases, where all have the same linears: what is no layer's (the head) has none."""
    from gemmscope.measure.findings import Layer
    from gemmscope.workload.cases import cases_of
    from gemmscope.workload.derive import EMBEDDING, HEAD, STEP

    kinds: dict[str, list[Linear]] = {}
    for op in linears:
        if op.section not in (EMBEDDING, HEAD, STEP, ""):
            kinds.setdefault(op.section, []).append(op)
    layers, shares = 0, []
    for inside in kinds.values():  # the output projection runs once a layer
        of_kind = next((op.count for op in inside if op.name == "Attn Out"), 0)
        if not of_kind:
            return None
        layers += of_kind
        shares.append({replace(case, count=1): case.count // of_kind for case in cases_of(inside)})
    if not shares or any(share != shares[0] for share in shares):
        return None
    known = {replace(case, count=1): case for case in cases}
    return Layer(layers, {known[case]: count for case, count in shares[0].items()})
