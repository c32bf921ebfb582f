"""A run file of `gemmscope forecast` as parts of a report, one for each GPU. Each says that nothing was measured there."""

from __future__ import annotations

from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.page.doubts import findings
from gemmscope.report.page.facts import batch_facts, command_facts, subject
from gemmscope.report.page.from_bench import answer_of, memory_table
from gemmscope.report.page.from_step import costs_table, step_bars, waterfall
from gemmscope.report.page.parts import Cell, Curve, Estimate, Finding, Gain, Point, RunPart, Subject, Table, noted
from gemmscope.report.page.rows import Rows, bars, curves, gains, modes_table, ops_table
from gemmscope.store.forecastfile import ForecastFile, GpuForecastRecord, PointRecord, StepForecastRecord, SweepRecord

WITHOUT_RESTARTS = "FORECAST. Every GPU computes all the time, or waits for the others; restarts are not in it."
NOT_MEASURED = "FORECAST: nothing here was measured on this GPU; intervals are 90% error bars"


def from_forecast(file: ForecastFile, name: str) -> list[RunPart]:
    """One part for each GPU, and one for each GPU of a sweep."""
    return [*(_part(file, gpu, name) for gpu in file.gpus), *(_sweep(file, sweep, name) for sweep in file.sweeps if sweep.points)]


def _part(file: ForecastFile, gpu: GpuForecastRecord, name: str) -> RunPart:
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
        tables=(*costs_table({each.recipe: each.cost for each in gpu.step}, WITHOUT_RESTARTS), *memory_table(gpu.memory)),
        gains=(
            *(Gain("training step", each.recipe, Estimate.of(each.speedup)) for each in gpu.step if each.speedup),
            *gains(found),
        ),
        findings=(
            Finding("warning", NOT_MEASURED),
            *(Finding("warning", f"not possible: {recipe}: {why}") for recipe, why in gpu.not_possible.items()),
            *findings(found),
            *map(noted, file.notes),
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


def _answer(gpu: GpuForecastRecord, found: Rows) -> tuple[str, list[str]]:
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


def _steps(steps: list[StepForecastRecord]) -> tuple[Table, ...]:
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


# --- sweeps ----------------------------------------------------------------------------------------------------------------


def _sweep(file: ForecastFile, sweep: SweepRecord, name: str) -> RunPart:
    """One GPU over one size or two: the speedups as a curve (over one), and as a table."""
    swept = " and ".join(words.replace("_", " ") for words in sweep.points[0].values)
    certain = [point for point in sweep.points if _gains(point)]
    best = max(certain, key=lambda point: point.speedups[str(point.best)].value, default=None)
    where = sweep.gpu.upper()
    if best is None:
        answer = f"FORECAST: on {where} no precision is sure to beat {BASELINE} at any {swept} of the sweep."
    else:
        gain = Estimate.of(best.speedups[str(best.best)])
        answer = f"FORECAST: on {where} {best.best} gains most at {_at(best)}: {gain.times} as fast as {BASELINE}."
    return RunPart(
        kind="forecast",
        name=name,
        subject=Subject(f"A sweep over {swept}"),
        where=f"{where}, FORECAST",
        answer=answer,
        because=(f"{len(certain)} of {len(sweep.points)} points have a precision that is faster beyond its error bar.",),
        curves=_sweep_curve(sweep, swept),
        ops=(_sweep_table(sweep),),
        findings=(Finding("warning", NOT_MEASURED), *map(noted, file.notes)),
        method=(
            ("state", file.state),
            ("fitted on", file.coefficients),
            *command_facts(file.command, file.gemmscope_version),
        ),
        forecast=True,
    )


def _gains(point: PointRecord) -> bool:
    """Whether its best precision is faster than the baseline beyond doubt, and the host lets it be."""
    return point.certain and point.best in point.speedups and point.best not in point.host_bound


def _at(point: PointRecord) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in point.values.items())


def _sweep_curve(sweep: SweepRecord, swept: str) -> tuple[Curve, ...]:
    if len(sweep.points[0].values) != 1:
        return ()
    series: dict[str, list[Point]] = {}
    for point in sweep.points:
        [at] = point.values.values()
        for name, found in point.speedups.items():
            gain = Estimate.of(found)
            series.setdefault(name, []).append(Point(str(at), gain, ((swept, str(at)), ("speedup", gain.times))))
    made = {name: tuple(points) for name, points in series.items()}
    return (Curve("The training step", f"Times faster than {BASELINE}, with 90% error bars", swept, made),) if made else ()


def _sweep_table(sweep: SweepRecord) -> Table:
    names = list(dict.fromkeys(name for point in sweep.points for name in point.speedups))
    keys = list(sweep.points[0].values)
    rows = []
    for point in sweep.points:
        sizes = [Cell(str(point.values.get(key, "")), float(point.values.get(key, 0))) for key in keys]
        gains = [Estimate.of(point.speedups[name]) if name in point.speedups else None for name in names]
        doubts = [*([] if point.certain else ["too close to call"]), *(["HOST-BOUND"] if point.best in point.host_bound else [])]
        doubt = f" ({', '.join(doubts)})" if doubts else ""
        best = point.why_not or (f"{point.best}{doubt}" if point.best else "-")
        rows.append(
            (*sizes, _step_ms(point), *(Cell(gain.times, gain.value) if gain else Cell("-") for gain in gains), Cell(best))
        )
    columns = {**dict.fromkeys(keys, True), f"{BASELINE} step ms": True, **dict.fromkeys(names, True), "Best": False}
    return Table("Every point of the sweep, FORECAST", columns, tuple(rows))


def _step_ms(point: PointRecord) -> Cell:
    return Cell(f"{point.baseline_step_ms:.2f}", point.baseline_step_ms) if point.baseline_step_ms is not None else Cell("-")
