"""The result of `gemmscope bench` for a spreadsheet: one line per op, recipe, mode and pass, plain numbers, nothing rounded."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from gemmscope.interval import Interval
from gemmscope.measure.breakdown import Breakdown
from gemmscope.measure.findings import Findings, known
from gemmscope.measure.results import TaskResult
from gemmscope.measure.stats import ratio_interval, time_interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.bench import gemm_sizes
from gemmscope.workload.cases import Case, Mode

COLUMNS = (
    *("op", "recipe", "mode", "pass", "m", "k", "n", "groups", "count", "time_ms", "low_ms", "high_ms", "tflops"),
    *("quantize_ms", "speedup", "speedup_low", "speedup_high", "verdict"),
)
WHOLE = "all"  # the pass of a line that stands for the whole op


def bench_csv(report: Findings) -> str:
    """Every pass, then the whole op. What is not known is empty; what was not measured says so as its verdict."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    for case in report.cases:
        for mode in report.modes:
            for name in report.columns(mode):
                writer.writerows(_lines(report, case, name, mode))
    return out.getvalue()


def _lines(report: Findings, case: Case, name: str, mode: Mode) -> Iterator[dict[str, Any]]:
    cell = report.cell(case, name, mode)
    for pass_name in (*case.passes, WHOLE):
        m, k, n = gemm_sizes(case, pass_name)
        line: dict[str, Any] = {
            "op": case.op, "recipe": name, "mode": mode, "pass": pass_name, "m": m, "k": k, "n": n,
            "groups": max(len(case.rows), 1), "count": case.count, "verdict": _verdict(report, cell, pass_name),
        }  # fmt: skip
        if cell is not None:
            whole = pass_name == WHOLE or len(case.passes) == 1
            line |= _whole(report, cell) if whole else _pass(report, cell, pass_name)
        yield line


def _verdict(report: Findings, cell: Breakdown | None, pass_name: str) -> str:
    """What the kernels prove of this pass; of a whole op, what they prove of its weakest."""
    if cell is None:
        return "not possible" if report.kind else "not measured"
    if report.kind:
        return report.kind
    if cell.left_as_is:
        return "left as is"
    verdicts = [proof.verdict for each, proof in cell.evidence.items() if pass_name in (each, WHOLE)]
    return next((verdict for verdict in ("fallback", "unproven", "emulated", "as asked") if verdict in verdicts), "unproven")


def _whole(report: Findings, cell: Breakdown) -> dict[str, Any]:
    passes = len(cell.case.passes)
    return {
        **_time(cell.total, passes * cell.case.flops),
        "quantize_ms": sum(cell.quantize_ms.values()) if cell.mode == "autocast" and cell.pass_ms else "",
        **_speedup(report.speedup(cell.recipe, cell.mode, cell.case)),
    }


def _pass(report: Findings, cell: Breakdown, pass_name: str) -> dict[str, Any]:
    """Pre-quantized passes were timed one by one and have intervals; autocast ones are shares of the whole's time."""
    if pass_name not in cell.pass_ms:
        return {}
    timed = _timed(report, cell, cell.recipe, pass_name)
    if timed is not None:
        baseline = _timed(report, cell, BASELINE, pass_name)
        compared = baseline is not None and report.speedup(cell.recipe, cell.mode, cell.case) is not None
        gain = ratio_interval(baseline.pieces, timed.pieces) if baseline is not None and compared else None
        return {**_time(time_interval(timed.pieces), cell.case.flops), **_speedup(gain)}
    time_ms = cell.pass_ms[pass_name]
    return {
        "time_ms": time_ms,
        "tflops": cell.case.flops / time_ms / 1e9,
        "quantize_ms": time_ms - cell.product_ms()[pass_name],
    }


def _timed(report: Findings, cell: Breakdown, name: str, pass_name: str) -> TaskResult | None:
    """The task that timed this pass alone, if there is one."""
    found = report.results.of(report.measured_as(name, cell.mode), cell.mode, cell.case)
    return next((result for result in found if result.task.pass_name == pass_name and result.measured), None)


def _time(found: Interval, flops: int) -> dict[str, Any]:
    limits = {"low_ms": found.low, "high_ms": found.high} if known(found) else {}
    return {"time_ms": found.value, **limits, "tflops": flops / found.value / 1e9}


def _speedup(found: Interval | None) -> dict[str, Any]:
    if found is None:
        return {}
    limits = {"speedup_low": found.low, "speedup_high": found.high} if known(found) else {}
    return {"speedup": found.value, **limits}
