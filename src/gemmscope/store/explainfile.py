"""The file of `gemmscope explain --json`: the account of a step and its diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from gemmscope import __version__
from gemmscope.explain.diagnose import Diagnosis
from gemmscope.explain.pair import Pair
from gemmscope.store.runfile import Record


class CauseRecord(Record):
    """One cause, with what shows it."""

    cause: str
    title: str
    cost_ms: float = Field(description="what a step would save without it, as far as can be told")
    speedup_without: float
    evidence: list[str]
    kernels: list[str]
    where: str
    advice: list[str]


class CensusRecord(Record):
    """Products of one precision, per step."""

    precision: str
    count: float
    time_ms: float
    flops: float = Field(description="0: the trace has no shapes")


class UnknownRecord(Record):
    """A kernel that is in no class."""

    name: str
    time_ms: float
    count: float


class HeldRecord(Record):
    """One row against a twin or a prediction."""

    row: str
    expected_ms: float | None
    found_ms: float


class PairRecord(Record):
    """What the step was held against."""

    title: str
    expected: str
    rows: list[HeldRecord]
    words: list[str]


class ExplainFile(Record):
    """The whole file."""

    schema_version: Literal[1] = 1
    kind: Literal["explain"] = "explain"
    gemmscope_version: str = __version__
    command: list[str]
    trace: str
    gpu: str
    rank: int | None
    world_size: int
    steps: int
    steps_found_by: str
    step_ms: float
    busy_ms: float
    classes_ms: dict[str, float] = Field(description="sum to step_ms")
    idle_ms: dict[str, float] = Field(description="why the GPU was idle")
    communication_hidden_ms: float
    products: list[CensusRecord]
    low_share: float = Field(description="of the linears' FLOPs (of their time, where shapes are not known), the head left out")
    low_share_counted_in: str
    micro_batches: int
    kernels: float
    launches: float
    quantization_kernels: float
    named_share: float
    unknown: list[UnknownRecord]
    verdict: str
    causes: list[CauseRecord]
    held: list[PairRecord]
    notes: list[str]

    def to_json(self) -> str:
        """As it is written to disk."""
        return self.model_dump_json(indent=1) + "\n"


def explain_file(command: Sequence[str], found: Diagnosis, pairs: Sequence[Pair], notes: Sequence[str]) -> ExplainFile:
    """Put together what was found."""
    account, trace = found.account, found.trace
    return ExplainFile(
        command=list(command),
        trace=str(trace.path),
        gpu=trace.gpu_name,
        rank=trace.rank,
        world_size=trace.world_size,
        steps=len(found.seen.steps.chosen),
        steps_found_by=found.seen.steps.found_by,
        step_ms=account.step_ms,
        busy_ms=account.busy_ms,
        classes_ms=account.classes,
        idle_ms=account.idle,
        communication_hidden_ms=account.hidden_ms,
        products=[
            CensusRecord(precision=row.precision, count=row.count, time_ms=row.time_ms, flops=row.flops) for row in account.census
        ],
        low_share=found.evidence.low_share,
        low_share_counted_in="FLOPs" if found.evidence.flops_known else "time",
        micro_batches=account.micro_batches,
        kernels=account.kernels,
        launches=account.launches,
        quantization_kernels=account.casts,
        named_share=account.named_share,
        unknown=[UnknownRecord(name=name, time_ms=time, count=count) for name, time, count in account.unknown],
        verdict=found.words,
        causes=[
            CauseRecord(
                cause=cause.key,
                title=cause.title,
                cost_ms=cause.cost_ms,
                speedup_without=cause.speedup(account.step_ms),
                evidence=list(cause.evidence),
                kernels=list(cause.kernels),
                where=cause.where,
                advice=cause.advice(found.evidence.framework),
            )
            for cause in found.causes
        ],
        held=[
            PairRecord(
                title=pair.title,
                expected=pair.expected,
                rows=[HeldRecord(row=held.row, expected_ms=held.expected_ms, found_ms=held.found_ms) for held in pair.rows],
                words=list(pair.words),
            )
            for pair in pairs
        ],
        notes=[*account.notes, *notes],
    )
