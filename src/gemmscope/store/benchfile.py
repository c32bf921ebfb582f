"""The run file of `gemmscope bench`: what was measured, sample by sample, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field

from gemmscope import __version__
from gemmscope.interval import Interval
from gemmscope.measure.breakdown import Breakdown
from gemmscope.measure.campaign import Settings
from gemmscope.measure.findings import Findings, known
from gemmscope.measure.results import TaskResult
from gemmscope.measure.sampler import StoppingRule
from gemmscope.recipe.recipes import BASELINE
from gemmscope.store.runfile import ModelRecord, Record, RunRecord


class IntervalRecord(Record):
    """An estimate with its 95% interval."""

    value: float
    low: float | None = Field(description="null: one round alone has no interval")
    high: float | None


class CountsRecord(Record):
    """Fixed numbers of runs, where they were asked for."""

    num_warmup: int
    num_iters: int
    gpu_warmup: float = Field(description="seconds")


class SettingsRecord(Record):
    """How it was measured."""

    backend: str
    timing: str
    counts: CountsRecord | None = Field(None, description="instead of a precision and a time limit")
    precision: float | None = Field(None, description="measured until every speedup was known this well")
    longest_s: float | None = Field(None, description="or until so much time had passed")
    cache_weights: bool = Field(description="quantizing weights is left out: it is done once per step")
    filter_layers: bool = Field(description="layers are left in BF16 that the framework's own filter would leave")
    drop_ms: float = Field(description="of each burst, before its steady state")
    keep_ms: float


class TaskRecord(Record):
    """One thing that was timed, with every sample. `failure` says why there are none."""

    op: str
    recipe: str
    mode: str
    pass_name: str = Field("", description="pre-quantized: which product")
    rounds_ms: list[list[float]] = Field(description="a list per burst")
    states: list[dict[str, Any]] = Field(description="clock, power, temperature and throttle reasons after each burst")
    kernels: list[list[Any]] = Field(description="name, microseconds and stream of each kernel of one run")
    facts: dict[str, Any] = Field(description="relative error against float64, host time, sets of buffers")
    failure: str = ""
    failure_kind: str = ""


class EvidenceRecord(Record):
    """Whether the precision asked for is the one that ran."""

    verdict: str
    words: str
    kernels: list[str]


class RowRecord(Record):
    """One op in one recipe and mode: milliseconds of one execution."""

    op: str
    recipe: str
    mode: str
    tokens: int
    inputs: int
    outputs: int
    groups: int
    count: int
    total_ms: IntervalRecord
    passes: list[str] = Field(description="those that were run: all three, or fprop alone for a bare product")
    pass_ms: dict[str, float]
    quantize_ms: dict[str, float]
    host_ms: float
    host_bound: bool
    evidence: dict[str, EvidenceRecord]
    note: str = Field("", description="what the framework did otherwise than asked, or why the time is not split into passes")


class SpeedupRecord(Record):
    """How many times faster than another recipe: one op, or the model's linears together."""

    recipe: str
    over: str = Field(description="the slower side: the baseline, or another recipe")
    mode: str
    op: str = Field("", description="empty: all linears of the model")
    speedup: IntervalRecord


class TotalRecord(Record):
    """A recipe's linears together: milliseconds of one micro-batch."""

    recipe: str
    mode: str
    total_ms: IntervalRecord
    quantize_ms: float
    layer_ms: float | None = Field(None, description="one layer, where all are alike")
    pass_ms: dict[str, float] = Field(description="one layer's passes; the whole model's where layers differ")


class MemoryRecord(Record):
    """Bytes of a recipe's linears on one rank: computed from sizes, not measured."""

    recipe: str
    weights_bytes: float
    copies_bytes: float
    kept_bytes: float = Field(description="of their inputs, from forward to backward of one micro-batch")


class BenchFile(Record):
    """The whole file."""

    schema_version: Literal[1] = 1
    kind: Literal["bench"] = "bench"
    gemmscope_version: str = __version__
    command: list[str]
    origin: str
    model: ModelRecord | None = Field(None, description="none: bare products were measured")
    run: RunRecord | None = None
    layers: int | None = Field(None, description="how many the rank holds, where all are alike")
    settings: SettingsRecord
    environment: dict[str, Any]
    device: dict[str, Any]
    versions: dict[str, str]
    rounds: int
    ended: str = Field(description="why measuring stopped")
    rows: list[RowRecord]
    speedups: list[SpeedupRecord]
    totals: list[TotalRecord]
    memory: list[MemoryRecord]
    tasks: list[TaskRecord]
    warnings: list[str]
    notes: list[str]

    def to_json(self) -> str:
        """As it is written to disk."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def bench_file(
    *,
    command: Sequence[str],
    origin: str,
    model: ModelRecord | None,
    run: RunRecord | None,
    settings: Settings,
    rule: StoppingRule,
    environment: dict[str, Any],
    findings: Findings,
    ended: str,
    notes: Sequence[str],
) -> BenchFile:
    """Put together what a campaign found."""
    results = findings.results
    return BenchFile(
        command=list(command),
        origin=origin,
        model=model,
        run=run,
        layers=findings.layer.layers if findings.layer else None,
        settings=_settings(settings, rule),
        environment=environment,
        device=results.hello.get("device", {}),
        versions=results.hello.get("versions", {}),
        rounds=results.complete_rounds,
        ended=ended,
        rows=[row_record(cell) for cell in findings.cells()],
        speedups=list(speedup_records(findings)),
        totals=[] if findings.bare else list(total_records(findings)),
        memory=memory_records(findings),
        tasks=[_task(result) for result in results.tasks.values()],
        warnings=list(results.warnings),
        notes=list(notes),
    )


def _settings(settings: Settings, rule: StoppingRule) -> SettingsRecord:
    counts = settings.counts
    return SettingsRecord(
        backend=settings.backend,
        timing=settings.timing,
        counts=CountsRecord(**asdict(counts)) if counts else None,
        precision=None if counts else rule.target,
        longest_s=rule.longest_s if math.isfinite(rule.longest_s) else None,
        cache_weights=settings.cache_weights,
        filter_layers=settings.filter_layers,
        drop_ms=settings.drop_ms,
        keep_ms=settings.keep_ms,
    )


def row_record(cell: Breakdown) -> RowRecord:
    """One cell."""
    case = cell.case
    return RowRecord(
        op=case.op,
        recipe=cell.recipe,
        mode=cell.mode,
        tokens=case.tokens,
        inputs=case.inputs,
        outputs=case.outputs,
        groups=max(len(case.rows), 1),
        count=case.count,
        total_ms=interval_record(cell.total),
        passes=list(case.passes),
        pass_ms=cell.pass_ms,
        quantize_ms=cell.quantize_ms,
        host_ms=cell.host_ms,
        host_bound=cell.host_bound,
        evidence={
            name: EvidenceRecord(verdict=found.verdict, words=found.words, kernels=list(found.kernels))
            for name, found in cell.evidence.items()
        },
        note=cell.note,
    )


def speedup_records(findings: Findings) -> Iterator[SpeedupRecord]:
    """Of every op over the baseline, and of all together over the baseline and over each other low precision."""
    for mode in findings.modes:
        names = findings.columns(mode)
        for index, name in enumerate(names):
            for case in findings.cases:
                if (found := findings.speedup(name, mode, case)) is not None:
                    yield SpeedupRecord(recipe=name, over=BASELINE, mode=mode, op=case.op, speedup=interval_record(found))
            for over in [] if findings.bare else names[:index]:
                if (found := findings.speedup(name, mode, over=over)) is not None:
                    yield SpeedupRecord(recipe=name, over=over, mode=mode, op="", speedup=interval_record(found))


def total_records(findings: Findings) -> Iterator[TotalRecord]:
    """Of every mode and recipe that has all its parts."""
    for mode in findings.modes:
        for name in findings.columns(mode):
            total = findings.total(name, mode)
            if total is not None:
                yield TotalRecord(
                    recipe=name,
                    mode=mode,
                    total_ms=interval_record(total),
                    quantize_ms=findings.quantizing_ms(name, mode),
                    layer_ms=findings.layer_ms(name, mode),
                    pass_ms={each: time for each, time in findings.pass_ms(name, mode).items() if time is not None},
                )


def memory_records(findings: Findings) -> list[MemoryRecord]:
    """A record for each recipe."""
    return [
        MemoryRecord(recipe=name, weights_bytes=found.weights, copies_bytes=found.copies, kept_bytes=found.kept)
        for name, found in findings.memory().items()
    ]


def interval_record(found: Interval) -> IntervalRecord:
    """An interval as it is written; one that is not known has no ends."""
    return IntervalRecord(value=found.value, low=found.low if known(found) else None, high=found.high if known(found) else None)


def _task(result: TaskResult) -> TaskRecord:
    task = result.task
    return TaskRecord(
        op=task.case.op,
        recipe=task.recipe,
        mode=task.mode,
        pass_name=task.pass_name,
        rounds_ms=result.rounds,
        states=result.states,
        kernels=result.kernels,
        facts=result.facts,
        failure=result.failure,
        failure_kind=result.failure_kind,
    )
