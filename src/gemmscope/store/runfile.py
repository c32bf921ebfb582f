"""The run file of `gemmscope shapes`: JSON with a schema version and a published JSON Schema (`docs/schema/`).

A GEMM is written the same way in every run file:
``{"op": "QKV Proj", "pass": "fprop", "m": 15872, "k": 4096, "n": 12288, "groups": 1, "count": 24}``, where `count` is how often
one micro-batch on one rank runs it, and a grouped GEMM's `m` (wgrad: `k`) is the sum over its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gemmscope import __version__
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.check import Difference
from gemmscope.workload.derive import Workload
from gemmscope.workload.ops import Attention, GroupedLinear, Op
from gemmscope.workload.summary import Totals
from gemmscope.workload.trace import Trace, TracedProduct

SCHEMA_VERSION: Literal[1] = 1


class Record(BaseModel):
    """A part of a run file: unknown keys are refused, so that a typo does not pass for data."""

    model_config = ConfigDict(extra="forbid")


class GemmRecord(Record):
    """One matrix product of a linear layer."""

    op: str
    pass_name: Literal["fprop", "dgrad", "wgrad"] = Field(alias="pass")
    m: int
    k: int
    n: int
    groups: int = Field(description="1, or how many weights the rows are split among")
    count: int = Field(description="executions per micro-batch on one rank")
    flops: int = Field(description="of one execution: 2 m k n")
    share: float = Field(description="of all GEMM FLOPs of the micro-batch")


class OpRecord(Record):
    """Any operation, GEMMs included, with its work forward and backward."""

    op: str
    kind: str
    section: str = Field(description="where in the model: embedding, a kind of layer, head, step")
    count: int = Field(description="executions per micro-batch (optimizer: per step)")
    forward_runs: int = Field(description="2 where the forward pass is recomputed")
    copies: int = Field(description="ranks of the tensor-parallel group that run the same op on the same data")
    forward_flops: float = Field(description="of one execution")
    forward_bytes: float
    backward_flops: float
    backward_bytes: float
    parameters: int = Field(description="of one instance, on this rank")
    rows_per_group: list[int] | None = Field(None, description="grouped linears: tokens of each expert")


class ProductRecord(Record):
    """A product without a weight: attention scores and their like, as unfused code would run them."""

    op: str
    direction: Literal["forward", "backward"]
    m: int
    k: int
    n: int
    batch: int
    count: int


class LayerRecord(Record):
    """GEMM FLOPs of one layer of a kind."""

    section: str
    layers: int
    gemm_flops: float


class TotalsRecord(Record):
    """What it adds up to on one rank."""

    layers: list[LayerRecord]
    gemm_flops_per_micro_batch: float
    gemm_flops_per_step: float
    attention_flops_per_micro_batch: float = Field(description="pairs let through by the mask only")
    attention_flops_per_step: float
    parameters: int = Field(description="of the whole model")
    active_parameters: int = Field(description="that one token meets")
    parameters_of_rank: int


class ModelRecord(Record):
    """Which model."""

    name: str
    model_type: str
    source: str
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    layers: str = Field(description="their kinds, in words")


class RunRecord(Record):
    """Batch and parallelism."""

    micro_batch_size: int
    sequence_length: int
    tp: int
    sequence_parallel: bool
    cp: int
    pp: int
    pp_stage: int
    pp_layers: list[int] | None = None
    ep: int
    etp: int
    imbalance: float
    gradient_accumulation: int
    recompute: str
    vocab_multiple: int
    separate_projections: bool
    sequence_parallel_linears: bool = Field(description="router and latent down-projections take part in sequence parallelism")


class DifferenceRecord(Record):
    """Where the closed form and the live model disagree."""

    what: str
    derived: int
    traced: int


class CheckRecord(Record):
    """The closed form held against a trace of the same model."""

    equal: bool
    differences: list[DifferenceRecord]
    model_class: str
    versions: dict[str, str]


class ShapesFile(Record):
    """The whole file."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["shapes"] = "shapes"
    gemmscope_version: str = __version__
    command: list[str]
    origin: str
    derived_by: Literal["closed form", "trace"]
    model: ModelRecord
    run: RunRecord
    gemms: list[GemmRecord]
    ops: list[OpRecord]
    products: list[ProductRecord]
    totals: TotalsRecord
    notes: list[str]
    check: CheckRecord | None = None

    def to_json(self) -> str:
        """As it is written to disk."""
        return self.model_dump_json(by_alias=True, indent=1, exclude_none=True) + "\n"


def shapes_file(
    *,
    command: Sequence[str],
    origin: str,
    model: ModelSpec | None,
    run: RunSpec,
    workload: Workload,
    totals: Totals,
    notes: Sequence[str],
    trace: Trace | None,
    found: Sequence[Difference] | None,
) -> ShapesFile:
    """Put together what `gemmscope shapes` found."""
    return ShapesFile(
        command=list(command),
        origin=origin,
        derived_by="closed form" if model else "trace",
        model=model_record(model, trace, origin),
        run=run_record(run, workload),
        gemms=_gemm_records(workload, totals),
        ops=[_op_record(op) for op in workload.ops],
        products=[product for op in workload.ops for product in _product_records(op)],
        totals=TotalsRecord(
            layers=[LayerRecord(**vars(layer)) for layer in totals.layers],
            gemm_flops_per_micro_batch=totals.gemm_flops,
            gemm_flops_per_step=totals.gemm_flops_per_step,
            attention_flops_per_micro_batch=totals.attention_flops,
            attention_flops_per_step=totals.attention_flops * totals.micro_batches_per_step,
            parameters=totals.parameters,
            active_parameters=totals.active_parameters,
            parameters_of_rank=totals.parameters_of_rank,
        ),
        notes=list(notes),
        check=_check_record(trace, found) if trace and found is not None else None,
    )


def model_record(model: ModelSpec | None, trace: Trace | None, origin: str) -> ModelRecord:
    """Which model, for any run file."""
    if model is None:
        name = trace.class_name if trace else origin
        return ModelRecord(name=name, model_type="", source=origin, hidden_size=None, num_hidden_layers=None, layers="traced")
    return ModelRecord(
        name=model.name,
        model_type=model.model_type,
        source=model.source,
        hidden_size=model.hidden_size,
        num_hidden_layers=len(model.layers),
        layers=model.pattern(),
    )


def run_record(run: RunSpec, workload: Workload) -> RunRecord:
    """Batch and parallelism, for any run file."""
    values = {name: getattr(run, name) for name in RunRecord.model_fields if name not in ("pp_stage", "pp_layers", "etp")}
    layers = list(run.pp_layers) if run.pp_layers else None
    return RunRecord(**values, pp_stage=workload.stage, pp_layers=layers, etp=run.expert_tp)


def _gemm_records(workload: Workload, totals: Totals) -> list[GemmRecord]:
    return [
        GemmRecord(
            op=gemm.op, m=gemm.m, k=gemm.k, n=gemm.n, groups=gemm.groups, count=gemm.count,
            flops=gemm.flops, share=gemm.flops * gemm.count / totals.gemm_flops, **{"pass": gemm.pass_name},
        )
        for gemm in workload.gemms()
    ]  # fmt: skip


def _op_record(op: Op) -> OpRecord:
    forward, backward = op.forward(), op.backward()
    return OpRecord(
        op=op.name, kind=op.kind, section=op.section, count=op.count, forward_runs=op.forward_runs, copies=op.copies,
        forward_flops=forward.flops, forward_bytes=forward.bytes_moved,
        backward_flops=backward.flops, backward_bytes=backward.bytes_moved,
        parameters=op.parameters, rows_per_group=list(op.rows) if isinstance(op, GroupedLinear) else None,
    )  # fmt: skip


def _product_records(op: Op) -> list[ProductRecord]:
    if isinstance(op, Attention):
        return [
            ProductRecord(op=op.name, direction=direction, m=m, k=k, n=n, batch=batch, count=op.count)
            for direction, m, k, n, batch in op.products()
        ]
    if isinstance(op, TracedProduct):
        return [ProductRecord(op=op.name, direction=op.direction, m=op.m, k=op.k, n=op.n, batch=op.batch, count=op.count)]
    return []


def _check_record(trace: Trace, found: Sequence[Difference]) -> CheckRecord:
    return CheckRecord(
        equal=not found,
        differences=[DifferenceRecord(**vars(difference)) for difference in found],
        model_class=trace.class_name,
        versions=dict(trace.versions),
    )
