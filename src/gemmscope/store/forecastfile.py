"""The run file of `gemmscope forecast`: every forecast number with its error bar, and what it stands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from gemmscope import __version__
from gemmscope.forecast.findings import ForecastFindings
from gemmscope.forecast.gemm import model as gemm_model
from gemmscope.forecast.sweep import Point
from gemmscope.forecast.training import product_format
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import recipe
from gemmscope.step.answer import StepAnswer
from gemmscope.step.cost import Cost
from gemmscope.store.benchfile import (
    IntervalRecord,
    MemoryRecord,
    RowRecord,
    SpeedupRecord,
    TotalRecord,
    interval_record,
    memory_records,
    row_record,
    speedup_records,
    total_records,
)
from gemmscope.store.runfile import ModelRecord, Record, RunRecord
from gemmscope.store.stepfile import CostRecord, LevelRecord, cost_record


class StepForecastRecord(Record):
    """One recipe's training step on one rank. Intervals are 90% error bars."""

    recipe: str
    step_ms: IntervalRecord
    speedup: IntervalRecord | None = Field(description="over BF16 on the same GPU")
    tokens_per_s: float
    model_tflops: float
    parts_ms: dict[str, float] = Field(default={}, description="milliseconds of each part of the step")
    waterfall: list[LevelRecord]
    verdict: str
    cost: CostRecord | None = None


class GpuForecastRecord(Record):
    """One GPU."""

    gpu: str
    title: str
    capability: str
    basis: list[str] = Field(description="what each format's products were measured on, or borrowed from")
    rows: list[RowRecord]
    speedups: list[SpeedupRecord]
    totals: list[TotalRecord]
    memory: list[MemoryRecord]
    step: list[StepForecastRecord]
    not_possible: dict[str, str] = Field(description="recipe → why its step cannot run")


class PointRecord(Record):
    """One configuration of a sweep."""

    values: dict[str, int]
    baseline_step_ms: float | None
    speedups: dict[str, IntervalRecord]
    best: str | None
    certain: bool = Field(description="whether no other recipe's error bar, nor 1, overlaps its own")
    host_bound: list[str] = Field(default=[], description="recipes whose step takes a CPU longer to launch than the GPU to run")
    not_possible: dict[str, str] = Field(default={}, description="recipe → why its step cannot run")
    why_not: str = ""


class SweepRecord(Record):
    """One GPU's sweep."""

    gpu: str
    points: list[PointRecord]


class ForecastFile(Record):
    """The whole file. Nothing in it was measured on the GPU it names: all times are FORECAST."""

    schema_version: Literal[1] = 1
    kind: Literal["forecast"] = "forecast"
    gemmscope_version: str = __version__
    command: list[str]
    origin: str
    coefficients: str = Field(description="which data the forecast was fitted on")
    state: str
    model: ModelRecord | None = None
    run: RunRecord | None = None
    dp: int = 1
    layers: int | None = Field(None, description="how many the rank holds, where all are alike")
    gpus: list[GpuForecastRecord]
    sweeps: list[SweepRecord]
    notes: list[str]

    def to_json(self) -> str:
        """As it is written to disk."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def coefficients_source() -> str:
    """Where the fitted numbers come from."""
    about = gemm_model().coefficients.about
    return f"{about['source']}; {about['fitted']}"


def basis_of(report: ForecastFindings) -> list[str]:
    """What every format of this GPU stands on, each once."""
    chip, state = report.chip, report.forecaster.state
    formats = [product_format(recipe(name), each, chip) for name in report.recipes for each in ("fprop", "wgrad")]
    return [gemm_model().basis(chip, fmt, state, in_training=True).words for fmt in dict.fromkeys(formats)]


def gpu_record(report: ForecastFindings, answer: StepAnswer | None, costs: Mapping[str, Cost]) -> GpuForecastRecord:
    """One GPU's tables."""
    return GpuForecastRecord(
        gpu=report.chip.name,
        title=report.chip.title,
        capability=report.chip.architecture,
        basis=basis_of(report),
        rows=[row_record(cell) for cell in report.cells()],
        speedups=list(speedup_records(report)),
        totals=[] if report.bare else list(total_records(report)),
        memory=memory_records(report),
        step=_steps(answer, costs) if answer is not None else [],
        not_possible=dict(answer.failures) if answer is not None else {},
    )


def _steps(answer: StepAnswer, costs: Mapping[str, Cost]) -> list[StepForecastRecord]:
    return [
        StepForecastRecord(
            recipe=each.recipe,
            step_ms=interval_record(each.step),
            speedup=_maybe(each.speedup),
            tokens_per_s=each.tokens_per_s,
            model_tflops=each.model_tflops,
            parts_ms={str(row): time_ms for row, time_ms in each.rows.items()},
            waterfall=[
                LevelRecord(row=level.row, baseline_ms=level.slow_ms, recipe_ms=level.fast_ms, speedup=level.speedup)
                for level in (each.waterfall.levels if each.waterfall is not None else ())
            ],
            verdict=each.words,
            cost=cost_record(costs[each.recipe]) if each.recipe in costs else None,
        )
        for each in answer.recipes
    ]


def _maybe(found: Interval | None) -> IntervalRecord | None:
    return interval_record(found) if found is not None else None


def sweep_records(sweeps: Mapping[str, Sequence[Point]], names: Sequence[str]) -> list[SweepRecord]:
    """Every point of every GPU."""
    return [
        SweepRecord(
            gpu=gpu,
            points=[
                PointRecord(
                    values=dict(zip(names, point.values, strict=True)),
                    baseline_step_ms=point.step_ms or None,
                    speedups={name: interval_record(found) for name, found in point.speedups},
                    best=None if point.why_not else point.best[0],
                    certain=point.certain and not point.why_not,
                    host_bound=list(point.host_bound),
                    not_possible=dict(point.cannot),
                    why_not=point.why_not,
                )
                for point in points
            ],
        )
        for gpu, points in sweeps.items()
    ]
