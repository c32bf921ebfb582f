"""A run file of `gemmscope forecast` as parts of a report, one for each GPU. Each says that nothing was measured there."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.page.doubts import findings
from gemmscope.report.page.facts import batch_facts, command_facts, subject
from gemmscope.report.page.from_bench import answer_of, memory_table
from gemmscope.report.page.from_step import step_bars, waterfall
from gemmscope.report.page.parts import Cell, Estimate, Finding, Gain, RunPart, Table
from gemmscope.report.page.rows import Rows, bars, curves, gains, modes_table, ops_table
from gemmscope.store.benchfile import IntervalRecord, MemoryRecord, RowRecord, SpeedupRecord, TotalRecord
from gemmscope.store.runfile import ModelRecord, RunRecord
from gemmscope.store.stepfile import LevelRecord


class View(BaseModel):
    """What a report needs of a file; whatever else stands in it is left alone."""

    model_config = ConfigDict(extra="ignore")


class StepView(View):
    """One recipe's step."""

    recipe: str
    step_ms: IntervalRecord
    speedup: IntervalRecord | None
    tokens_per_s: float
    model_tflops: float
    waterfall: list[LevelRecord]
    verdict: str = ""


class GpuView(View):
    """One GPU."""

    gpu: str
    title: str
    basis: list[str] = Field(default=[])
    rows: list[RowRecord]
    speedups: list[SpeedupRecord]
    totals: list[TotalRecord]
    memory: list[MemoryRecord] = Field(default=[])
    step: list[StepView] = Field(default=[])
    not_possible: dict[str, str] = Field(default={})


class ForecastView(View):
    """The file."""

    gemmscope_version: str = ""
    command: list[str] = Field(default=[])
    coefficients: str = ""
    state: str = Field("", description="cool, or held by its power limit")
    model: ModelRecord | None = None
    run: RunRecord | None = None
    gpus: list[GpuView]
    notes: list[str] = Field(default=[])


def from_forecast(file: ForecastView, name: str) -> list[RunPart]:
    """One part for each GPU."""
    return [_part(file, gpu, name) for gpu in file.gpus]


def _part(file: ForecastView, gpu: GpuView, name: str) -> RunPart:
    found = Rows(gpu.rows, gpu.speedups, gpu.totals, doubt="90% error bar")
    steps = [(each.recipe, each.waterfall, each.step_ms, each.speedup) for each in gpu.step]
    answer, because = _answer(gpu, found)
    return RunPart(
        kind="forecast",
        name=name,
        subject=subject(file.model, file.run, gpu.rows),
        where=f"{gpu.title}, FORECAST",
        answer=answer,
        because=tuple(because),
        bars=(*step_bars(steps, {}), *(() if found.bare else bars(found))),
        waterfalls=tuple(
            waterfall(each.recipe, each.waterfall, each.verdict) for each in gpu.step if each.waterfall and each.speedup
        ),
        curves=curves(found),
        modes=modes_table(found),
        ops=(*_steps(gpu.step), *((ops_table(found),) if gpu.rows else ())),
        tables=memory_table(gpu.memory),
        gains=(
            *(Gain("training step", each.recipe, Estimate.of(each.speedup)) for each in gpu.step if each.speedup),
            *gains(found),
        ),
        findings=(
            Finding("warning", "FORECAST: nothing here was measured on this GPU; intervals are its 90% error bars"),
            *(Finding("warning", f"not possible: {recipe}: {why}") for recipe, why in gpu.not_possible.items()),
            *findings(found),
            *(Finding("note", words) for words in file.notes),
        ),
        method=(
            *batch_facts(file.model, file.run),
            *(("stands on", words) for words in gpu.basis),
            *((("state", file.state),) if file.state else ()),
            *((("fitted on", file.coefficients),) if file.coefficients else ()),
            *command_facts(file.command, file.gemmscope_version),
        ),
        forecast=True,
    )


def _answer(gpu: GpuView, found: Rows) -> tuple[str, list[str]]:
    """From the step where there is one, else from the linears."""
    gains = {each.recipe: each for each in gpu.step if each.speedup is not None}
    where = gpu.title
    if not gains:
        sentence, because = answer_of(found, where, forecast=True)
        return f"FORECAST: {sentence}", because
    best = max(gains.values(), key=lambda each: each.speedup.value if each.speedup else 0.0)
    assert best.speedup is not None
    gain = Estimate.of(best.speedup)
    others = [f"{name} {Estimate.of(each.speedup).times}" for name, each in gains.items() if each is not best and each.speedup]
    because = [
        *([best.verdict[0].upper() + best.verdict[1:] + "."] if best.verdict else []),
        *([f"Others: {', '.join(others)}."] if others else []),
    ]
    if gain.too_close or gain.value <= 1:
        return f"FORECAST: on {where} no precision is sure to train faster than {BASELINE}; {best.recipe}: {gain.times}.", because
    return f"FORECAST: on {where} a training step in {best.recipe} would be {gain.times} as fast as in {BASELINE}.", because


def _steps(steps: list[StepView]) -> tuple[Table, ...]:
    rows = []
    for each in steps:
        gain = Estimate.of(each.speedup) if each.speedup else None
        rows.append(
            (
                Cell(each.recipe),
                Cell(f"{each.step_ms.value:.2f}", each.step_ms.value),
                Cell(f"{each.tokens_per_s:,.0f}", each.tokens_per_s),
                Cell(f"{each.model_tflops:.3g}", each.model_tflops),
                Cell(gain.times, gain.value) if gain else Cell("1", 1.0),
            )
        )
    columns = {"Recipe": False, "Step ms": True, "Tokens/s": True, "Model TFLOP/s": True, "Speedup [90% error bar]": True}
    return (Table("The training step of one rank, FORECAST", columns, tuple(rows)),) if rows else ()
