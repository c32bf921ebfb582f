"""The run file of `gemmscope bench`: what was measured, sample by sample, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from gemmscope import __version__
from gemmscope.measure.breakdown import Breakdown, breakdown
from gemmscope.measure.results import Results, TaskResult
from gemmscope.measure.stats import Interval
from gemmscope.measure.task import Mode
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.store.runfile import ModelRecord, Record, RunRecord, model_record, run_record
from gemmscope.workload.derive import Workload


class IntervalRecord(Record):
    """An estimate with its 95% interval."""

    value: float
    low: float
    high: float


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
    pass_ms: dict[str, float]
    quantize_ms: dict[str, float]
    host_ms: float
    host_bound: bool
    evidence: dict[str, EvidenceRecord]


class SpeedupRecord(Record):
    """How many times faster than the baseline: one op, or the model's linears together."""

    recipe: str
    mode: str
    op: str = Field("", description="empty: all linears of the model")
    speedup: IntervalRecord


class BenchFile(Record):
    """The whole file."""

    schema_version: Literal[1] = 1
    kind: Literal["bench"] = "bench"
    gemmscope_version: str = __version__
    command: list[str]
    origin: str
    model: ModelRecord
    run: RunRecord
    environment: dict[str, Any]
    device: dict[str, Any]
    versions: dict[str, str]
    rounds: int
    ended: str = Field(description="why measuring stopped")
    rows: list[RowRecord]
    speedups: list[SpeedupRecord]
    tasks: list[TaskRecord]
    notes: list[str]

    def to_json(self) -> str:
        """As it is written to disk."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def bench_file(
    *,
    command: Sequence[str],
    origin: str,
    model: ModelSpec,
    run: RunSpec,
    workload: Workload,
    environment: dict[str, Any],
    results: Results,
    recipes: Sequence[str],
    modes: Sequence[Mode],
    ended: str,
    notes: Sequence[str],
) -> BenchFile:
    """Put together what a campaign found."""
    cells = [breakdown(results, case, name, mode) for case in results.cases() for name in recipes for mode in modes]
    return BenchFile(
        command=list(command),
        origin=origin,
        model=model_record(model, None, origin),
        run=run_record(run, workload),
        environment=environment,
        device=results.hello.get("device", {}),
        versions=results.hello.get("versions", {}),
        rounds=results.complete_rounds,
        ended=ended,
        rows=[_row(cell) for cell in cells if cell is not None],
        speedups=list(_speedups(results, recipes, modes, cells)),
        tasks=[_task(result) for result in results.tasks.values()],
        notes=list(notes),
    )


def _row(cell: Breakdown) -> RowRecord:
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
        total_ms=_interval(cell.total),
        pass_ms=cell.pass_ms,
        quantize_ms=cell.quantize_ms,
        host_ms=cell.host_ms,
        host_bound=cell.host_bound,
        evidence={
            name: EvidenceRecord(verdict=found.verdict, words=found.words, kernels=list(found.kernels))
            for name, found in cell.evidence.items()
        },
    )


def _speedups(
    results: Results, recipes: Sequence[str], modes: Sequence[Mode], cells: Sequence[Breakdown | None]
) -> list[SpeedupRecord]:
    """Of every op and of all together; none for what fell back to another precision."""
    fallen = {(cell.recipe, cell.mode, cell.case.op) for cell in cells if cell is not None and cell.fallback}
    records = []
    for name in recipes:
        for mode in modes:
            if name == BASELINE:
                continue
            for case in results.cases():
                found = results.speedup(name, mode, [case])
                if found is not None and (name, mode, case.op) not in fallen:
                    records.append(SpeedupRecord(recipe=name, mode=mode, op=case.op, speedup=_interval(found)))
            whole = results.speedup(name, mode)
            if whole is not None and not any(each[:2] == (name, mode) for each in fallen):
                records.append(SpeedupRecord(recipe=name, mode=mode, op="", speedup=_interval(whole)))
    return records


def _interval(found: Interval) -> IntervalRecord:
    return IntervalRecord(value=found.value, low=found.low, high=found.high)


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
