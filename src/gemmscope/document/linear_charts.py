"""The charts of linears: stacked bars of a model, curves of bare GEMMs. Tooltips list the kernels, clocks and samples."""

from collections.abc import Mapping, Sequence

from gemmscope import units
from gemmscope.choices import Mode
from gemmscope.document.charts import Bar, BarChart, CurveChart, Point, Segment, Shade
from gemmscope.document.common import clock_facts, sample_text
from gemmscope.document.palette import REST, op_keys, part_key
from gemmscope.document.table import Facts, grouped
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import TaskResult
from gemmscope.results.linears import Linears, OpTime
from gemmscope.workload.cases import Case
from gemmscope.workload.ops import Pass

MODE_TITLES: dict[Mode, str] = {"autocast": "Autocast", "pre-quantized": "Pre-quantized"}
CHART_TITLES: dict[Mode, str] = {"autocast": "Autocast: with quantization", "pre-quantized": "Pre-quantized: GEMMs only"}
UNIT = "ms per micro-batch"
MOST_KERNELS = 3  # of one pass in a tooltip
LONGEST_KERNEL = 96  # characters
Tasks = Mapping[tuple[str, str, str], Sequence[TaskResult]]


def by_op(tasks: Sequence[TaskResult]) -> Tasks:
    """The tasks of every op, recipe and mode."""
    return grouped(((result.task.case.op, result.task.recipe, result.task.mode), result) for result in tasks)


def bar_chart(linears: Linears, mode: Mode, start: str, tasks: Tasks) -> BarChart:
    """A bar for each recipe: every op in its color, wgrad lighter, quantization on top."""
    work = {case.op: case.flops * case.count for case in linears.cases}
    colors = op_keys(sorted(work, key=lambda op: -work[op]))
    return BarChart(
        f"bars {mode}",
        start + CHART_TITLES[mode],
        UNIT,
        tuple(_bar(linears, name, mode, colors, tasks) for name in linears.recipes),
        figure=True,
    )


def _bar(linears: Linears, name: str, mode: Mode, colors: dict[str, str], tasks: Tasks) -> Bar:
    other = linears.measured_as(name, mode)
    if other != name:
        return Bar(name, note=f"same kernels as {other}")
    if linears.total(name, mode) is None:
        return Bar(name, note="not possible" if linears.forecast else "not measured")
    cells = [(case, cell) for case in linears.cases if (cell := linears.op_time(case.op, name, mode)) is not None]
    ordered = sorted(cells, key=lambda pair: colors[pair[0].op] == REST)  # the smaller ops on top
    segments = [segment for case, cell in ordered for segment in _segments(linears, case, cell, colors[case.op], tasks)]
    quantization = {case.op: cell.quantization_ms * case.count for case, cell in cells}
    spent = sum(quantization.values())
    if spent:
        per_op = tuple((op, _ms(time)) for op, time in quantization.items() if time)
        segments.append(Segment("quantization", spent, part_key("quantization"), "hatched", (("total", _ms(spent)), *per_op)))
    fell_back = linears.falls_back(name, mode)
    speedup = None if fell_back else linears.speedup(name, mode)
    alarm, total = "FALLBACK" if fell_back else "", linears.total(name, mode)
    return Bar(name, tuple(segments), speedup, name == BASELINE, alarm, total=total.total_ms if total is not None else None)


def _segments(linears: Linears, case: Case, cell: OpTime, color: str, tasks: Tasks) -> list[Segment]:
    """The GEMMs of one op in all its runs: fprop and dgrad in one segment, wgrad lighter; one segment if time is not split."""
    label = case.op if color != REST else "smaller ops"
    gemms = cell.gemm_ms
    if not gemms:
        time_ms = cell.total_ms.value * case.count
        return [Segment(label, time_ms, color, "plain", op_facts(linears, case, cell, "GEMMs", time_ms, (), tasks))]
    segments = []
    parts: tuple[tuple[str, tuple[Pass, ...], Shade], ...] = (
        ("fprop + dgrad", ("fprop", "dgrad"), "plain"),
        ("wgrad", ("wgrad",), "light"),
    )
    for part, passes, shade in parts:
        if any(name in gemms for name in passes):
            time_ms = sum(gemms.get(name, 0.0) for name in passes) * case.count
            segments.append(Segment(label, time_ms, color, shade, op_facts(linears, case, cell, part, time_ms, passes, tasks)))
    return segments


def curve_charts(linears: Linears, mode: Mode, start: str, tasks: Tasks) -> list[CurveChart]:
    """Speedup and TFLOP/s of bare GEMMs against their size."""
    square = all(case.tokens == case.inputs == case.outputs for case in linears.cases)
    axis = "side of square matrices" if square else "M x K x N"
    speedups, rates = list[tuple[str, Point]](), list[tuple[str, Point]]()
    for name in linears.columns(mode):
        for case in linears.cases:
            if (cell := linears.op_time(case.op, name, mode)) is None:
                continue
            at = str(case.tokens) if square else case.op
            facts = op_facts(linears, case, cell, name, cell.total_ms.value, ("fprop",), tasks)
            rates.append((name, Point(at, rate(case, cell), facts, "FALLBACK" if cell.fallbacks else "")))
            if (speedup := linears.speedup(name, mode, case.op)) is not None:
                speedups.append((name, Point(at, speedup, facts)))
    title = start + MODE_TITLES[mode]
    charts = []
    if speedups:
        charts.append(CurveChart(f"speedups {mode}", f"{title}: speedup over {BASELINE}", axis, grouped(speedups), main=True))
    if rates:
        charts.append(
            CurveChart(f"rates {mode}", f"{title}: rate", axis, grouped(rates), "TFLOP/s", main=not speedups, figure=True)
        )
    return charts


def rate(case: Case, cell: OpTime) -> Interval:
    """TFLOP/s of a whole op; a shorter time is a higher rate."""
    rate = cell.total_ms.inverse(case.flops * len(case.passes) / 1e9)
    return rate if rate.known else Interval(rate.value)


def op_facts(
    linears: Linears, case: Case, cell: OpTime, part: str, time_ms: float, passes: Sequence[Pass], tasks: Tasks
) -> Facts:
    """The time, the size, the speedup, the kernels that prove the precision, the samples and the clocks."""
    per_run = f" = {case.count} x {_ms(time_ms / case.count)}" if case.count > 1 else ""
    speedup = linears.speedup(cell.recipe, cell.mode, case.op)
    groups = f", {len(case.rows)} groups" if len(case.rows) > 1 else ""
    lines = [
        (part, _ms(time_ms) + per_run),
        ("tokens x in x out", f"{case.tokens}x{case.inputs}x{case.outputs}{groups}"),
        ("speedup of the op", units.speedup(speedup) if speedup is not None else "FALLBACK" if cell.fallbacks else ""),
    ]
    for name in passes:
        if (proof := cell.evidence.get(name)) is not None:
            lines += [(f"{name} ran", proof.ran or proof.verdict)]
            lines += [(f"{name} kernel", units.kernel_name(kernel, LONGEST_KERNEL)) for kernel in proof.kernels[:MOST_KERNELS]]
    results = tasks.get((case.op, cell.recipe, cell.mode), ())
    lines += [("samples", sample_text([result.rounds_ms for result in results]))]
    lines += clock_facts([state for result in results for state in result.states])
    return tuple((name, text) for name, text in lines if text)


def _ms(time_ms: float) -> str:
    return f"{units.milliseconds(time_ms)} ms"
