"""The result of `gemmscope bench` as tables: each pass of each op, sums and speedups, pairs of precisions, memory."""

from __future__ import annotations

from itertools import combinations

from gemmscope.interval import Interval
from gemmscope.measure.breakdown import Breakdown
from gemmscope.measure.findings import Findings, known, too_close
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.shapes import Table
from gemmscope.report.units import si
from gemmscope.workload.cases import Case, Mode
from gemmscope.workload.ops import PASSES

TITLES: dict[Mode, str] = {"autocast": "Autocast", "pre-quantized": "Pre-quantized"}
SUMS = {"fprop": "Fprop sum", "dgrad": "Dgrad sum", "wgrad": "Wgrad sum"}


def tables(report: Findings) -> list[Table]:
    """All of them, in the order of reading."""
    if report.bare:
        return [table for mode in report.modes for table in _bare(report, mode)]
    per_mode = [table for mode in report.modes for table in (_passes(report, mode), _sums(report, mode))]
    pairs = [_pairs(report)] if len(report.recipes) > 1 else []
    return [*per_mode, *pairs, *([_memory(report)] if report.memory() else [])]


def heading(report: Findings, mode: Mode) -> str:
    """The mode, and what the numbers are where nothing was measured."""
    return _kind(report) + TITLES[mode]


def _kind(report: Findings) -> str:
    return f"{report.kind} " if report.kind else ""


def what_is_timed(report: Findings, mode: Mode) -> str:
    """What one number of this mode stands for, in words."""
    if mode == "pre-quantized":
        return "each product alone, on quantized operands" if report.bare else "the products alone"
    if report.bare:
        return "X and W quantized once each, then the product"
    if report.cache_weights:
        return "forward and backward, X and dY quantized once each; quantizing W is left out, as it is done once per step"
    return "forward and backward, X, W and dY quantized once each"


def _passes(report: Findings, mode: Mode) -> Table:
    """Milliseconds and TFLOP/s of every pass."""
    names = report.columns(mode)
    charged = "; quantization charged to its passes" if mode == "autocast" else ""
    title = f"{heading(report, mode)}: {what_is_timed(report, mode)} (ms, TFLOP/s in brackets{charged})"
    rows = []
    for case in report.cases:
        for index, pass_name in enumerate(case.passes):
            times = (_time(report, case, name, mode, pass_name) for name in names)
            rows.append((case.op if index == 0 else "", pass_name, _shape(case, pass_name), *times))
    return Table(title, ("Op", "Pass", "M x K x N", *names), tuple(rows))


def _sums(report: Findings, mode: Mode) -> Table:
    """Each op with its speedup; then the passes summed, one layer, and the model."""
    names = report.columns(mode)
    rows = [
        (case.op, str(case.count), *(_op(report.cell(case, name, mode), report, name, mode) for name in names))
        for case in report.cases
    ]
    sums = {name: report.pass_ms(name, mode) for name in names}
    of_what = "1 layer" if report.layer else "model"
    rows += [(SUMS[each], of_what, *(_ms(sums[name][each]) for name in names)) for each in PASSES]
    if report.layer:
        rows.append(("One layer", of_what, *(_ms(report.layer_ms(name, mode)) for name in names)))
    layers = f"{report.layer.layers} layers" if report.layer else "model"
    rows.append(("Full model", layers, *(_model(report, name, mode) for name in names)))
    what = "each op once, one layer, the model" if report.layer else "each op once, the model"
    title = f"{heading(report, mode)}: {what} in one micro-batch (ms; times faster than {BASELINE}, {report.interval_name})"
    return Table(title, ("Op", "Count", *names), tuple(rows))


def _pairs(report: Findings) -> Table:
    """Every recipe over the baseline, then every low precision over every other."""
    low = [name for name in report.recipes if name != BASELINE]
    pairs = [(name, BASELINE) for name in low] + [(later, earlier) for earlier, later in combinations(low, 2)]
    rows = [(name, over, *(_verdict(report, name, mode, over) for mode in report.modes)) for name, over in pairs]
    title = f"{_kind(report)}Times faster, all linears together ({report.interval_name})"
    return Table(title, ("Recipe", "Over", *report.modes), tuple(rows))


def _bare(report: Findings, mode: Mode) -> list[Table]:
    """A row for each shape: times, then speedups."""
    names = report.columns(mode)
    title = f"{heading(report, mode)}: {what_is_timed(report, mode)} (ms, TFLOP/s in brackets)"
    times = [(case.op, *(_time(report, case, name, mode, PASSES[0]) for name in names)) for case in report.cases]
    made = [Table(title, ("M x K x N", *names), tuple(times))]
    low = [name for name in names if name != BASELINE]
    if low:
        rows = [(case.op, *(_verdict(report, name, mode, BASELINE, case) for name in low)) for case in report.cases]
        title = f"{heading(report, mode)}: times faster than {BASELINE} ({report.interval_name})"
        made.append(Table(title, ("M x K x N", *low), tuple(rows)))
    return made


def _memory(report: Findings) -> Table:
    """A row for each recipe."""
    rows = []
    for name, found in report.memory().items():
        rows.append((name, *(si(size, "B") for size in (found.weights, found.copies, found.weights + found.copies, found.kept))))
    columns = ("Recipe", "BF16 weights", "Quantized copies", "Weights in all", "X kept for backward")
    return Table("Memory of the linears on one rank, one micro-batch (computed, not measured)", columns, tuple(rows))


def _shape(case: Case, pass_name: str) -> str:
    return "x".join(map(str, gemm_sizes(case, pass_name)))


def gemm_sizes(case: Case, pass_name: str) -> tuple[int, int, int]:
    """M, K and N of one pass's product.

    >>> gemm_sizes(Case("Attn Out", 512, 64, 32), "wgrad")
    (64, 512, 32)
    """
    tokens, inputs, outputs = case.tokens, case.inputs, case.outputs
    return {
        "dgrad": (tokens, outputs, inputs),
        "wgrad": (inputs, tokens, outputs),
    }.get(pass_name, (tokens, inputs, outputs))


def _time(report: Findings, case: Case, name: str, mode: Mode, pass_name: str) -> str:
    """Milliseconds and TFLOP/s of one pass. A bare product that could not be split is its whole time."""
    cell = report.cell(case, name, mode)
    if cell is None:
        return "-"
    time_ms = cell.total.value if case.passes == PASSES[:1] else cell.pass_ms.get(pass_name)
    if time_ms is None:
        return "-"
    shown = f"{digits(time_ms)} ({_rate(case.flops / time_ms / 1e9)})"
    proof = cell.evidence.get(pass_name)
    fell_back = proof is not None and proof.verdict == "fallback" and report.fallback(case, name, mode)
    return f"{shown} FALLBACK" if fell_back else shown


def _op(cell: Breakdown | None, report: Findings, name: str, mode: Mode) -> str:
    """One op's time and speedup."""
    if cell is None:
        return "-"
    time_ms = digits(cell.total.value)
    if report.fallback(cell.case, name, mode):
        return f"{time_ms} FALLBACK"
    found = report.speedup(name, mode, cell.case)
    return time_ms if found is None else f"{time_ms} {times_faster(found)}"


def _model(report: Findings, name: str, mode: Mode) -> str:
    found = report.total(name, mode)
    if found is None:
        return "-"
    gain = report.speedup(name, mode)
    words = "FALLBACK" if report.falls_back(name, mode) else times_faster(gain) if gain else ""
    return f"{digits(found.value)} {words}".rstrip()


def _verdict(report: Findings, name: str, mode: Mode, over: str, case: Case | None = None) -> str:
    """A speedup, or why there is none."""
    if any(report.falls_back(report.measured_as(each, mode), mode, case) for each in (name, over)):
        return "FALLBACK"
    if report.measured_as(name, mode) == report.measured_as(over, mode):
        return "same kernels"
    stand_ins = [report.measured_as(each, mode) for each in (name, over) if report.measured_as(each, mode) != each]
    if stand_ins:  # no number of its own: it stands where it was measured
        return f"as {stand_ins[0]}"
    found = report.speedup(name, mode, case, over)
    return times_faster(found) + (" too close to call" if found and too_close(found) else "")


def _ms(time_ms: float | None) -> str:
    return "-" if time_ms is None else digits(time_ms)


def digits(time_ms: float) -> str:
    """Milliseconds with enough digits for a speedup to be checked by hand.

    >>> digits(0.012345), digits(1.2345), digits(674.881)
    ('0.01235', '1.234', '674.88')
    """
    return f"{time_ms:.5f}" if time_ms < 0.1 else f"{time_ms:.3f}" if time_ms < 100 else f"{time_ms:.2f}"


def _rate(tflops: float) -> str:
    """TFLOP/s to three digits or so.

    >>> _rate(1223.4), _rate(5.07), _rate(0.0213)
    ('1223', '5.1', '0.021')
    """
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.1f}" if tflops >= 1 else f"{tflops:.3f}"


def times_faster(found: Interval | None) -> str:
    """A speedup with its 95% interval.

    >>> times_faster(Interval(1.6543, 1.6421, 1.6668)), times_faster(None), times_faster(Interval(2.0, 0.0, float("inf")))
    ('1.654x [1.642, 1.667]', '-', '2.000x [?]')
    """
    if found is None:
        return "-"
    return f"{found.value:.3f}x " + (f"[{max(found.low, 0.0):.3f}, {found.high:.3f}]" if known(found) else "[?]")
