"""The compact table of a model's linears, or of bare GEMMs: the speedup of every op in every recipe."""

from gemmscope import units
from gemmscope.document.table import FALLBACK_CELL, Cell, Table, columns, speedup_cell, time_cell
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.linears import Linears
from gemmscope.workload.cases import Case, Mode

MOST_ROWS = 14


def linears_summary(linears: Linears) -> Table | None:
    """A row for each op in the mode that training runs, then the sums in both modes; for bare GEMMs, a row for each shape."""
    if not linears.ops:
        return None
    mode: Mode = "autocast" if "autocast" in linears.modes and not linears.bare else linears.modes[-1]
    names = [name for name in linears.recipes if name != BASELINE]
    shown = _largest(linears)
    rows = [_row(linears, case, names, mode) for case in linears.cases if case.op in shown]
    if not linears.bare:
        rows += [_sum(linears, names, summed_mode) for summed_mode in linears.modes]
    interval = "90% error bar" if linears.forecast else "95% interval"
    what = "GEMM" if linears.bare else "forward call" if linears.as_te_benchmark else "linear"
    left_out = len(linears.cases) - len(shown)
    note = f"{units.counted(left_out, f'smaller {what}')} not shown." if left_out else ""
    heads = columns(("M x K x N" if linears.bare else "Op",), (f"{BASELINE} ms", *names), {f"{BASELINE} ms": 1})
    title = f"Speedup of every {what} over {BASELINE}, {mode} (± {interval})" if names else f"Time of every {what}, {mode}"
    return Table(title, heads, tuple(rows), note)


def _largest(linears: Linears) -> set[str]:
    """The ops with the most FLOPs."""
    work = {case.op: case.flops * case.count for case in linears.cases}
    return set(sorted(work, key=lambda op: -work[op])[:MOST_ROWS])


def _row(linears: Linears, case: Case, names: list[str], mode: Mode) -> tuple[Cell, ...]:
    baseline = linears.op_time(case.op, BASELINE, mode)
    cells = [_speedup(linears, case.op, name, mode) for name in names]
    return (Cell(case.op), time_cell(baseline.total_ms.times(case.count) if baseline is not None else None), *cells)


def _speedup(linears: Linears, op: str, name: str, mode: Mode) -> Cell:
    cell = linears.op_time(op, name, mode)
    if cell is not None and cell.fallbacks:
        return FALLBACK_CELL
    if cell is not None and cell.left_in_baseline:
        return Cell(f"in {BASELINE}", level="note")
    return speedup_cell(linears.speedup(name, mode, op), units.short_speedup)


def _sum(linears: Linears, names: list[str], mode: Mode) -> tuple[Cell, ...]:
    """All linears of a micro-batch in one mode."""
    total = linears.total(BASELINE, mode)
    gains = {name: speedup_cell(linears.speedup(name, mode), units.short_speedup) for name in names}
    cells = [FALLBACK_CELL if linears.falls_back(name, mode) else gains[name] for name in names]
    label = "All linears, autocast" if mode == "autocast" else "GEMMs alone, pre-quantized"
    return (Cell(label), time_cell(total.total_ms if total is not None else None), *cells)
