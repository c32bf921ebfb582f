"""The Documents of sweeps, forecast or measured: the best recipe over one size (curves) or two (a heat map), and every point."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from gemmscope import units
from gemmscope.document.charts import CurveChart, HeatCell, HeatMap, Point
from gemmscope.document.common import (
    SPLIT,
    command_facts,
    described,
    facts,
    gpu_messages,
    one_point,
    phrase,
    sections,
    versions_text,
)
from gemmscope.document.model import Document, KeyFigure, Message, Section, Subject
from gemmscope.document.sweep_tables import (
    about_sweep,
    break_even_table,
    mode_of,
    points_table,
    speedup_of,
    sweep_summary,
    unsure,
)
from gemmscope.document.table import Column, Table, grouped, table
from gemmscope.model.spec import RunSpec
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.sweep import BreakEven, GpuSweep, MeasuredPoint, MeasuredSweep, SweepGpu, SweepPoint, SweepResult

HOST_BOUND, MAY_NOT_FIT = "HOST-BOUND", "MAY NOT FIT"
WIDEST_WITH_NAMES = 8  # columns of a heat map that have room for the names of recipes
LETTERS = "ABCDEFGHIJKL"
BATCH = ("micro_batch_size", "sequence_length")


def forecast_sweep_document(result: ForecastResult, name: str) -> Document:
    """Build the Document of a forecast sweep."""
    sizes = " and ".join(result.sweeps[0].sizes)
    model = f" of {result.name}" if result.model is not None else ""
    gpus = ", ".join(sweep.gpu for sweep in result.sweeps)
    count = sum(len(sweep.points) for sweep in result.sweeps)
    ordered = sorted(result.sweeps, key=lambda sweep: -max(map(speedup_of, sweep.points), default=0.0))
    (answer, because), *others = map(sweep_answer, ordered)
    several = bool(others)
    if several:
        because = [
            sentence[:1].upper() + sentence[1:]
            for sentence in [sentence.removeprefix(phrase("forecast")) for sentence, _ in others]
        ]
    replicas = phrase("sweep-replicas", dp=result.dp) if result.dp > 1 else ""
    return Document(
        kind="forecast",
        title=f"FORECAST, not measured: {sizes}{model} varied on {gpus}",
        subject=Subject(f"A sweep over {sizes}{model}"),
        where=f"{gpus}, FORECAST",
        answer=answer,
        because=tuple(because),
        key_figures=() if several else sweep_figures(result.sweeps[0]),
        summary=sweep_summary(result.sweeps),
        context=(
            *described(result.model),
            *filter(None, [_fixed(result.run, result.sweeps[0].sizes)]),
            phrase("sweep-configurations", points=count, replicas=replicas),
            phrase(f"clocks-{result.state}"),
        ),
        sections=tuple(_section(sweep, several=several) for sweep in result.sweeps),
        messages=gpu_messages(result.findings, {sweep.gpu: sweep.findings for sweep in result.sweeps}),
        facts={"Method": (("state", result.state), ("fitted on", result.coefficients), *command_facts(result))},
        forecast=True,
        next_purpose=phrase("next-point"),
        next_command=_next(result, ordered[0], "forecast", f"--gpu {ordered[0].gpu}"),
        name=name,
    )


def sweep_document(result: SweepResult, name: str = "") -> Document:
    """Build the Document of a measured sweep."""
    sizes = " and ".join(result.sweeps[0].sizes)
    model = f" of {result.name}" if result.model is not None else " of a GEMM"
    answers = [sweep_answer(sweep) for sweep in result.sweeps]
    until, sizes_of = _until(result), dict(zip("mkn", result.shape or (), strict=False))
    fixed = _fixed(result.run, varied := result.sweeps[0].sizes)
    fixed = fixed or ", ".join(f"{name} {size}" for name, size in sizes_of.items() if name not in varied)
    of_one = until if result.sample_count != 1 else until.removeprefix("each ")
    return Document(
        kind="sweep",
        title=f"Measured sweep over {sizes}{model} on {result.where}",
        subject=Subject(f"A measured sweep over {sizes}{model}"),
        where=result.where,
        answer=answers[0][0],
        because=tuple(reason for _, because in answers for reason in because),
        key_figures=sweep_figures(result.sweeps[0]),
        summary=sweep_summary(result.sweeps),
        context=(
            *described(result.model),
            *([fixed] if fixed else []),
            phrase("sweep-measured", points=result.sample_count, command=result.of, until=of_one),
            phrase("sweep-backend", backend=result.backend),
        ),
        sections=(*map(_section, result.sweeps), *sections({"GPUs": [_gpus(result.gpus)]})),
        messages=tuple(map(Message.of, result.findings)),
        facts={
            "Method": facts(
                ("model", result.model.name if result.model is not None else ""),
                ("varied", sizes),
                ("not varied", fixed),
                ("measured", phrase("sweep-same-gpu", until=until)),
                ("backend", result.backend),
                ("GPUs", str(len(result.gpus))),
                *command_facts(result),
            )
        },
        next_purpose=phrase("next-point"),
        next_command=_next(result, result.sweeps[0], result.of),
        name=name,
    )


def _next(result: ForecastResult | SweepResult, sweep: GpuSweep, command: str, more: str = "") -> str:
    """The command for the best point of a sweep."""
    best = best_point(sweep.points)
    return one_point(command, result, best.values, more) if best is not None and result.model is not None else ""


def best_point(points: Sequence[SweepPoint]) -> SweepPoint | None:
    """The point with the largest speedup of those that gain; one that may not fit only if there is no other."""
    return max((point for point in points if point.gains), key=lambda point: (not unsure(point), speedup_of(point)), default=None)


def _fixed(run: RunSpec | None, varied: Sequence[str]) -> str:
    """The sizes that do not vary; empty for a module, whose inputs say it."""
    if run is None:
        return ""
    sizes = [f"{name} {getattr(run, name)}" for name in BATCH if name not in varied]
    split = [f"{name} {value}" for name in SPLIT if name not in varied and (value := getattr(run, name)) > 1]
    return ", ".join([*sizes, *split, *([f"recompute {run.recompute}"] if run.recompute != "none" else [])])


def _until(result: SweepResult) -> str:
    if result.precision is None:
        return phrase("sweep-until-counts")
    return phrase("sweep-until-precision", precision=result.precision, seconds=result.time_limit_s)


def _gpus(gpus: Sequence[SweepGpu]) -> Table:
    """Which GPUs measured the points."""
    return table(
        "gpus",
        "GPUs that measured the points",
        gpus,
        Column("GPU", lambda gpu: gpu.place),
        Column("Type", lambda gpu: gpu.name or None),
        Column("Points", lambda gpu: gpu.points, "d"),
        Column("Versions", lambda gpu: versions_text(gpu.versions) or None),
        Column("UUID", lambda gpu: gpu.uuid or None, drop=1),
    )


def sweep_answer(sweep: GpuSweep) -> tuple[str, list[str]]:
    """The largest speedup, how many points have one, and at how many the best recipe is not certain."""
    measured = isinstance(sweep, MeasuredSweep)
    possible = [point for point in sweep.points if point.winner is not None]
    about = {"gpu": sweep.gpu, "baseline": BASELINE, "beyond": about_sweep(sweep, "beyond")}
    if not possible:
        return _nothing_possible(sweep), []
    start = "" if measured else phrase("forecast")
    gaining = [point for point in possible if point.gains]
    close = sum(bool(point.winner and point.winner.rivals) for point in gaining)
    at_some = phrase("sweep-close", points=close) if close else ""
    count = units.counted(len(possible), about_sweep(sweep, "possible"))
    every = "both" if len(possible) == 2 else f"all {len(possible):,}"
    count = f"{every} {about_sweep(sweep, 'possible')}s" if len(gaining) == len(possible) > 1 else f"{len(gaining):,} of {count}"
    because = [phrase("sweep-gaining", line=about_sweep(sweep, "line"), count=count, close=at_some, **about)]
    if len(sweep.sizes) == 1 and sweep.break_even:
        because.append(phrase("sweep-begins", faster=about_sweep(sweep, "faster"), begins=_begins(sweep)))
    best = best_point(possible)
    on = "On" if measured else f"{start}on"
    if all(point.unfit and not point.speedups for point in possible):
        return phrase(
            "sweep-only-baseline", on=on, count=f"{len(possible):,} of {units.counted(len(sweep.points), 'point')}", **about
        ), []
    if best is None or best.winner is None or best.winner.speedup is None:
        return phrase("sweep-without-gain", on=on, **about), because
    at = f"{best.winner.best} at {units.names(f'{name} {value}' for name, value in best.values.items())}"
    at += phrase("forecast-may-not-fit") if unsure(best) else ""
    if any(map(unsure, possible)) and not unsure(best):
        because.append(
            phrase("sweep-unsure", size=" x ".join(sweep.sizes), places=[point.place for point in possible if unsure(point)])
        )
    of = f" of {about_sweep(sweep, 'of')}" if measured else ""
    return phrase("sweep-largest", on=on, of=of, speedup=best.winner.speedup, point=at, **about), because


def _nothing_possible(sweep: GpuSweep) -> str:
    if isinstance(sweep, MeasuredSweep):
        return phrase("sweep-not-measured", gpu=sweep.gpu)
    if unfit := [point.memory_gb or 0.0 for point in sweep.points if point.unfit]:
        return phrase("sweep-unfit", gpu=sweep.gpu, least=min(unfit))
    return phrase("sweep-not-possible", gpu=sweep.gpu)


def sweep_figures(sweep: GpuSweep) -> tuple[KeyFigure, ...]:
    """The point with the largest speedup, and how many points have one."""
    possible = [point for point in sweep.points if point.winner is not None]
    gaining = [point for point in possible if point.gains]
    count = KeyFigure(f"Faster than {BASELINE}", f"{len(gaining):,} of {len(possible):,}", f"{about_sweep(sweep, 'possible')}s")
    best = best_point(possible)
    if best is None or best.winner is None or best.winner.speedup is None:
        return (count,)
    gain = best.winner.speedup
    return (
        KeyFigure("Best point", best.place, " x ".join(best.values)),
        KeyFigure("Its recipe", best.winner.best),
        KeyFigure(f"Speedup over {BASELINE}", f"{gain.value:.2f}x", units.ends(gain)),
        count,
    )


def _begins(sweep: GpuSweep) -> str:
    """The sizes at which recipes are faster than BF16; those that are faster at the same sizes are named together."""
    groups = grouped((_faster_at(sweep, edge), edge.recipe) for edge in sweep.break_even)
    every = len(sweep.break_even)
    return "; ".join(
        f"{'every recipe' if len(names) == every > 1 else units.names(names)} {where}" for where, names in groups.items()
    )


def _faster_at(sweep: GpuSweep, edge: BreakEven) -> str:
    size = sweep.sizes[0]
    if edge.since is not None:
        return "at every size" if edge.since == min(point.values[size] for point in sweep.points) else f"from {size} {edge.since}"
    gains = [(point, gain) for point in sweep.points if not point.reason and (gain := point.speedups.get(edge.recipe))]
    single = [str(point.values[size]) for point, gain in gains if gain.above_one]
    return f"only at {size} {units.names(single)}" if single else "at no size"


def _section(sweep: GpuSweep, *, several: bool = False) -> Section:
    """The section of a sweep: its chart, the break-even, and every point."""
    chart = _curve(sweep) if len(sweep.sizes) == 1 else _heat_map(sweep)
    begins = [break_even_table(sweep)] if sweep.break_even else []
    return Section(about_sweep(sweep, "section"), (chart, *begins, points_table(sweep)), gpu=sweep.gpu if several else "")


def _curve(sweep: GpuSweep) -> CurveChart:
    size = sweep.sizes[0]
    curves = grouped(
        (
            name,
            Point(
                point.place,
                gain,
                ((size, point.place), ("speedup", units.speedup(gain))),
                MAY_NOT_FIT if name in point.may_not_fit else HOST_BOUND if name in point.host_bound else "",
            ),
        )
        for name in sweep.recipes
        for point in sweep.points
        if name != BASELINE and (gain := point.speedups.get(name)) is not None
    )
    note = phrase("sweep-host-bound", mark=HOST_BOUND) if any(point.host_bound for point in sweep.points) else ""
    if missing := [point.place for point in sweep.points if not point.speedups]:
        note = f"{phrase('sweep-not-drawn', size=size, places=missing, why=about_sweep(sweep, 'blank'))} {note}".strip()
    return CurveChart(f"curve {mode_of(sweep)}", about_sweep(sweep, "curve"), size, curves, note=note, main=True)


def _heat_map(sweep: GpuSweep) -> HeatMap:
    """The best recipe over the plane."""
    rows, across = (sorted({point.values[size] for point in sweep.points}) for size in sweep.sizes)
    by_values = {tuple(point.values.values()): point for point in sweep.points}
    winners = [(point.winner, point.host_bound) for point in sweep.points if point.winner is not None]
    short = dict(zip(sweep.recipes, cycle(LETTERS), strict=False)) if len(across) > WIDEST_WITH_NAMES else {}
    legend = [("?", "too close to call")] if any(winner.rivals for winner, _ in winners) else []
    legend += [("m", "may not fit in memory")] if any(map(unsure, sweep.points)) else []
    legend += [("host", "host-bound")] if any(winner.best in bound for winner, bound in winners) else []
    legend += [(short[name], name) for name in dict.fromkeys(winner.best for winner, _ in winners) if name in short]
    return HeatMap(
        f"map {mode_of(sweep)}",
        about_sweep(sweep, "heat"),
        row_name=sweep.sizes[0],
        column_name=sweep.sizes[1],
        rows=tuple(map(str, rows)),
        columns=tuple(map(str, across)),
        cells=tuple(tuple(_heat_cell(by_values.get((first, second)), short) for second in across) for first in rows),
        note=phrase("sweep-marks", baseline=BASELINE, mark=HOST_BOUND),
        main=True,
        legend=tuple(legend),
        blank=about_sweep(sweep, "blank"),
    )


def _heat_cell(point: SweepPoint | None, short: Mapping[str, str]) -> HeatCell:
    if point is None or point.winner is None:  # interrupted before it was computed, or not possible
        unfit = point is not None and bool(point.unfit)
        failed = isinstance(point, MeasuredPoint) and bool(point.failure)
        text = "does not fit in memory" if unfit else "not measured" if failed else ""
        return HeatCell(certain=False, label="no fit" if unfit else "failed" if failed else "", text=text)
    best, gain = point.winner.best, speedup_of(point)
    mark = " ?" if point.winner.rivals else ""
    host = best in point.host_bound
    mark += " m" if unsure(point) else ""
    return HeatCell(
        label=f"{short.get(best, best)}\n{gain:.2f}{mark}" + ("\nhost" if host else ""),
        value=gain,
        certain=point.gains,
        text=best + ("" if best == BASELINE else f" {gain:.2f}x") + mark + (f" {HOST_BOUND}" if host else ""),
        may_not_fit=unsure(point),
    )
