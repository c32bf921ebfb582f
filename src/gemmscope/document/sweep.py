"""The parts of the Document of a sweep, forecast or measured: the best recipe over one size (curves) or two (a heat map), and
every point. `sweep_document` builds that of a forecast, `measured_sweep.py` that of a measured sweep."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from gemmscope import units
from gemmscope.document.charts import CurveChart, HeatCell, HeatMap, Point
from gemmscope.document.common import command_facts
from gemmscope.document.model import Document, KeyFigure, Message, Section, Subject
from gemmscope.document.sweep_summary import speedup_of, sweep_summary
from gemmscope.document.sweep_words import point_name, time_name, wording
from gemmscope.document.table import NOTHING, Cell, Column, Table, columns, number, speedup_cell, time_cell, without_empty
from gemmscope.findings import Finding
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.sweep import BreakEven, GpuSweep, MeasuredPoint, MeasuredSweep, SweepPoint

SUSTAINED, BURST = "limited by power, as in training", "before the GPU reaches its power limit; training is slower"
STATES = {"sustained": SUSTAINED, "burst": BURST}
HOST_BOUND = "HOST-BOUND"
WIDEST_WITH_NAMES = 8  # columns of a heat map that have room for the names of recipes
LETTERS = "ABCDEFGHIJKL"
MOST_ACROSS = 10  # values of the second size that are columns


def sweep_document(result: ForecastResult, name: str) -> Document:
    """Build the Document of the result."""
    sizes = " and ".join(result.sweeps[0].sizes)
    model = f" of {result.name}" if result.model is not None else ""
    gpus = ", ".join(sweep.gpu for sweep in result.sweeps)
    count = sum(len(sweep.points) for sweep in result.sweeps)
    answers = [sweep_answer(sweep) for sweep in result.sweeps]
    answer, because = answers[0]
    if len(answers) > 1:
        answer = f"FORECAST: {count:,} configurations on {len(answers)} GPUs."
        because = [sentence.removeprefix("FORECAST: ") for sentence, _ in answers]
    replicas = f", {result.dp} data-parallel replicas" if result.dp > 1 else ""
    return Document(
        kind="forecast",
        title=f"FORECAST, not measured: {sizes}{model} varied on {gpus}",
        subject=Subject(f"A sweep over {sizes}{model}"),
        where=f"{gpus}, FORECAST",
        answer=answer,
        because=tuple(because),
        key_figures=sweep_figures(result.sweeps[0]) if len(result.sweeps) == 1 else (),
        summary=sweep_summary(result.sweeps),
        context=(
            *([result.model.description] if result.model is not None and result.model.description else []),
            f"{count:,} configurations, the training step{replicas}",
            f"{result.state} clocks: {STATES[result.state]}; intervals are 90% error bars",
        ),
        sections=tuple(sweep_section(sweep, several=len(result.sweeps) > 1) for sweep in result.sweeps),
        messages=gpu_messages(result.findings, {sweep.gpu: sweep.findings for sweep in result.sweeps}),
        facts={"Method": (("state", result.state), ("fitted on", result.coefficients), *command_facts(result))},
        forecast=True,
        next_purpose="see one of these points in detail: run the same command without --sweep, and with its sizes",
        name=name,
    )


def gpu_messages(common: Sequence[Finding], by_gpu: Mapping[str, Sequence[Finding]]) -> tuple[Message, ...]:
    """Findings of several GPUs: those that all GPUs share once, the others after the name of their GPU."""
    first, *others = by_gpu.values()
    common_texts = [{finding.text for finding in findings} for findings in others]
    shared = [finding for finding in first if all(finding.text in texts for texts in common_texts)]
    said = {finding.text for finding in shared}
    own = [Message.of(finding, gpu) for gpu, findings in by_gpu.items() for finding in findings if finding.text not in said]
    return (*map(Message.of, common), *map(Message.of, shared), *own)


def sweep_answer(sweep: GpuSweep) -> tuple[str, list[str]]:
    """The largest speedup, how many points have one, and at how many the best recipe is not certain."""
    phrases, measured = wording(sweep), isinstance(sweep, MeasuredSweep)
    possible = [point for point in sweep.points if point.winner is not None]
    if not possible:
        if measured:
            return f"No point of the sweep could be measured on {sweep.gpu}.", []
        unfit = [point for point in sweep.points if point.unfit]
        least = f": at least {min(point.memory_gb or 0.0 for point in unfit):.0f} GB are needed" if unfit else ""
        return f"FORECAST: on {sweep.gpu}, {'nothing fits in memory' if unfit else 'no point is possible'}{least}.", []
    gaining = [point for point in possible if point.gains]
    count = f"{len(gaining):,} of {units.counted(len(possible), phrases.possible)}"
    line = f"{phrases.line} {count}, the best recipe is faster than {BASELINE} beyond its {phrases.beyond}"
    close = [point for point in gaining if point.winner and point.winner.rivals]
    because = [f"{line}; at {len(close):,} of these it is too close to call against another recipe." if close else f"{line}."]
    if len(sweep.sizes) == 1 and sweep.break_even:
        because.append(f"{phrases.faster}: {_begins(sweep)}.")
    best = max(gaining, key=speedup_of, default=None)
    if best is None or best.winner is None or best.winner.speedup is None:
        none = f"no recipe is faster than {BASELINE} beyond its {phrases.beyond}"
        return (f"On {sweep.gpu}, {none}." if measured else f"FORECAST: on {sweep.gpu}, {none}."), because
    gain = units.speedup(best.winner.speedup)
    where = f"{best.winner.best} at {point_name(best)}"
    if measured:
        return f"On {sweep.gpu}, the largest speedup of {phrases.of} over {BASELINE} is {gain}, in {where}.", because
    return f"FORECAST: on {sweep.gpu}, the largest speedup over {BASELINE} is {gain}, in {where}.", because


def sweep_figures(sweep: GpuSweep) -> tuple[KeyFigure, ...]:
    """The point with the largest speedup, and how many points have one."""
    possible = [point for point in sweep.points if point.winner is not None]
    gaining = [point for point in possible if point.gains]
    count = KeyFigure(f"Faster than {BASELINE}", f"{len(gaining):,} of {len(possible):,}", f"{wording(sweep).possible}s")
    best = max(gaining, key=speedup_of, default=None)
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
    groups: dict[str, list[str]] = {}
    for edge in sweep.break_even:
        groups.setdefault(_faster_at(sweep, edge), []).append(edge.recipe)
    every = len(sweep.break_even)
    return "; ".join(
        f"{'every recipe' if len(names) == every > 1 else units.names(names)} {where}" for where, names in groups.items()
    )


def _faster_at(sweep: GpuSweep, edge: BreakEven) -> str:
    size = sweep.sizes[0]
    if edge.since is not None:
        smallest = min(point.values[size] for point in sweep.points)
        return "at every size" if edge.since == smallest else f"from {size} {edge.since}"
    gains = [(point, gain) for point in sweep.points if not point.reason and (gain := point.speedups.get(edge.recipe))]
    single = [str(point.values[size]) for point, gain in gains if gain.above_one]
    return f"only at {size} {units.names(single)}" if single else "at no size"


def sweep_section(sweep: GpuSweep, *, several: bool = False) -> Section:
    """The section of a sweep: its chart, the break-even, and every point."""
    one = len(sweep.sizes) == 1
    chart = _curve(sweep) if one else _heat_map(sweep)
    begins = [_break_even(sweep, one=one)] if sweep.break_even else []
    blocks = (chart, *begins, _points(sweep, one=one))
    return Section(wording(sweep).section, blocks, gpu=sweep.gpu if several else "")


def _low(sweep: GpuSweep) -> tuple[str, ...]:
    return tuple(name for name in sweep.recipes if name != BASELINE)


def _curve(sweep: GpuSweep) -> CurveChart:
    series: dict[str, list[Point]] = {}
    for name in _low(sweep):
        for point in sweep.points:
            if (gain := point.speedups.get(name)) is not None:
                tooltip = ((sweep.sizes[0], point.place), ("speedup", units.speedup(gain)))
                mark = HOST_BOUND if name in point.host_bound else ""
                series.setdefault(name, []).append(Point(point.place, gain, tooltip, mark))
    note = f"x: {HOST_BOUND}, launching takes longer than running" if any(point.host_bound for point in sweep.points) else ""
    curves = {name: tuple(points) for name, points in series.items()}
    return CurveChart(wording(sweep).curve, sweep.sizes[0], curves, note=note, main=True)


def _heat_map(sweep: GpuSweep) -> HeatMap:
    """The best recipe over the plane."""
    rows, across = (sorted({point.values[size] for point in sweep.points}) for size in sweep.sizes)
    by_values = {tuple(point.values.values()): point for point in sweep.points}
    used = dict.fromkeys(point.winner.best for point in sweep.points if point.winner is not None)
    short = dict(zip(sweep.recipes, cycle(LETTERS), strict=False)) if len(across) > WIDEST_WITH_NAMES else {}
    legend = [("?", "too close to call")] if any(point.winner and point.winner.rivals for point in sweep.points) else []
    host = any(point.winner and point.winner.best in point.host_bound for point in sweep.points)
    legend += [("host", "host-bound")] if host else []
    legend += [(short[name], name) for name in used if name in short]
    return HeatMap(
        wording(sweep).heat,
        row_name=sweep.sizes[0],
        column_name=sweep.sizes[1],
        rows=tuple(map(str, rows)),
        columns=tuple(map(str, across)),
        cells=tuple(tuple(_heat_cell(by_values.get((first, second)), short) for second in across) for first in rows),
        note=f"? = too close to call against {BASELINE} or another recipe; {HOST_BOUND} = launching takes longer than running",
        main=True,
        legend=tuple(legend),
        blank=wording(sweep).blank,
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
    return HeatCell(
        label=f"{short.get(best, best)}\n{gain:.2f}{mark}" + ("\nhost" if host else ""),
        value=gain,
        certain=point.gains,
        text=best + ("" if best == BASELINE else f" {gain:.2f}x") + mark + (f" {HOST_BOUND}" if host else ""),
    )


def _points(sweep: GpuSweep, *, one: bool) -> Table:
    """A row for each point: the best recipe, its rivals, its limits. For one size, the curves have the speedups."""
    low, phrases = () if one else _low(sweep), wording(sweep)
    rows = []
    for point in sweep.points:
        sizes = [number(value, str(value)) for value in point.values.values()]
        speedups = [speedup_cell(point.speedups.get(name)) for name in low]
        rate, needed = point.tokens_per_s, point.memory_gb
        figures = [number(rate, f"{rate:,.0f}" if rate else None), number(needed, f"{needed:.0f}" if needed else None)]
        rows.append((*sizes, time_cell(point.baseline_ms), *speedups, *figures, *_verdict(point), *_measured_on(point)))
    numbers = (*sweep.sizes, time_name(sweep), *low, "Tokens/s/GPU, best", "Memory GB, best", "Largest speedup")
    heads = (*columns((), numbers), *columns((*VERDICT, phrases.not_ranked), ()))
    if not isinstance(sweep, MeasuredSweep):
        return Table(phrases.points, heads, tuple(rows))
    rates = columns((), ("TFLOP/s, best",))
    return without_empty(Table(phrases.points, (*heads, *rates, *columns(("GPU", "GPU UUID"), ())), tuple(rows)))


VERDICT = ("Best", f"Faster than {BASELINE}", "Too close to call against", "Host-bound", "Does not fit")


def _verdict(point: SweepPoint) -> tuple[Cell, ...]:
    if point.winner is None:
        unfit = Cell("all recipes", level="warning") if point.unfit else NOTHING
        return (NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, unfit, Cell(point.reason))
    every, bound = [BASELINE, *point.speedups], list(point.host_bound)
    who = "all recipes" if bound == every else f"all but {BASELINE}" if bound and bound == every[1:] else ", ".join(bound) or "-"
    return (
        speedup_cell(point.winner.speedup),
        Cell(point.winner.best),
        Cell("yes" if point.gains else "no"),
        Cell(", ".join(point.winner.rivals) or "-"),
        Cell(who),
        Cell(", ".join(point.unfit) or "-", level="warning" if point.unfit else ""),
        Cell(", ".join(point.not_possible) or "-"),
    )


def _measured_on(point: SweepPoint) -> tuple[Cell, ...]:
    """The rate of a GEMM, and the GPU that measured the point."""
    if not isinstance(point, MeasuredPoint):
        return ()
    rate = number(point.tflops, units.tflops(point.tflops) if point.tflops is not None else None)
    return (rate, Cell(point.gpu or "-"), Cell(point.uuid or "-"))


def _break_even(sweep: GpuSweep, *, one: bool) -> Table:
    """Where each recipe becomes faster than BF16. For two sizes, a column for each value of the second one, if there is room."""
    title = wording(sweep).break_even
    begins: dict[str, dict[int | None, int | None]] = {}
    for edge in sweep.break_even:
        begins.setdefault(edge.recipe, {})[edge.at] = edge.since
    places = list(dict.fromkeys(edge.at for edge in sweep.break_even))
    if one or len(places) > MOST_ACROSS:
        return Table(title, *_break_even_lines(sweep, one=one))
    rows = tuple((Cell(name), *(_since(by_place.get(at)) for at in places)) for name, by_place in begins.items())
    heads = columns(("Recipe",), [str(at) for at in places])
    return Table(title, heads, rows, f"Smallest {sweep.sizes[0]} at which the recipe is faster; columns: {sweep.sizes[1]}.")


def _since(value: int | None) -> Cell:
    return Cell("nowhere") if value is None else number(value, str(value))


def _break_even_lines(sweep: GpuSweep, *, one: bool) -> tuple[tuple[Column, ...], tuple[tuple[Cell, ...], ...]]:
    """A row for each recipe; for two sizes, values of the second one with the same answer share a row."""
    groups: dict[tuple[str, int | None], list[str]] = {}
    for edge in sweep.break_even:
        groups.setdefault((edge.recipe, edge.since), []).append(str(edge.at))
    rows = [(Cell(name), _since(since), *([] if one else [Cell(", ".join(at))])) for (name, since), at in groups.items()]
    heads = (*columns(("Recipe",), (f"From {sweep.sizes[0]}",)), *columns(() if one else (f"At {sweep.sizes[1]}",), ()))
    return heads, tuple(rows)
