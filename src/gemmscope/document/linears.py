"""The linears of a bench or a forecast as parts of a Document: the answer, tables and charts."""

from collections.abc import Sequence
from itertools import combinations

from gemmscope import units
from gemmscope.document.linear_charts import MODE_TITLES, bar_chart, by_op, curve_charts, rate
from gemmscope.document.model import Block, NamedSpeedup, NamedTime, Section
from gemmscope.document.table import (
    BASELINE_CELL,
    FALLBACK_CELL,
    NOTHING,
    Cell,
    Table,
    bytes_cell,
    called_cell,
    columns,
    number,
    share_cell,
    speedup_cell,
    time_cell,
)
from gemmscope.findings import Level
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import TaskResult
from gemmscope.results.linears import Linears, OpTime
from gemmscope.workload.cases import Case, Mode
from gemmscope.workload.ops import PASSES, Pass, gemm_size

WHAT: dict[Mode, str] = {"autocast": "linears, autocast", "pre-quantized": "GEMMs, pre-quantized"}
ALL = "all"  # the pass of a row for the whole op
VERDICT_LEVELS: dict[str, Level] = {"fallback": "error", "emulated": "warning", "unproven": "warning"}


def linears_answer(linears: Linears, where: str) -> tuple[str, tuple[str, ...]]:
    """The answer in one sentence, and the reasons for it."""
    if not linears.ops:
        return "Nothing was measured.", ()
    if linears.bare:
        return _answer_of_gemms(linears, where), ()
    mode: Mode = "autocast" if "autocast" in linears.modes else "pre-quantized"
    what, included = ("linears", "with quantization") if mode == "autocast" else ("GEMMs", "without quantization")
    winner = linears.winners.get(mode)
    gains = {name: gain for name in linears.columns(mode) if (gain := linears.speedup(name, mode)) is not None}
    if winner is None or not gains:
        return _nothing_to_compare(linears, mode, where), ()
    if winner.best != BASELINE and BASELINE not in winner.rivals and winner.speedup is not None:
        highest = units.speedup(winner.speedup)
        sentence = f"{winner.best} is fastest: {highest} over {BASELINE} for the {what} {included} on {where}."
        return sentence, tuple(_because(linears, winner.best, mode))
    name = max(gains, key=lambda name: gains[name].value)
    highest = units.speedup(gains[name])
    if winner.rivals:
        close = units.names(rival for rival in (winner.best, *winner.rivals) if rival != BASELINE)
        return f"Too close to call: {close} and {BASELINE} for the {what} {included} on {where} ({highest}).", ()
    return f"{BASELINE} is fastest for the {what} {included} on {where}: {name} comes closest with {highest}.", ()


def _nothing_to_compare(linears: Linears, mode: Mode, where: str) -> str:
    fallen = [name for name in linears.columns(mode) if linears.falls_back(name, mode)]
    if fallen:
        return f"No speedup on {where}: {units.names(fallen)} did not run in the requested precision (FALLBACK)."
    done = "was forecast" if linears.forecast else "was measured"
    return f"Only {units.names(cell.recipe for cell in linears.ops)} {done} on {where}: there is nothing to compare."


def _because(linears: Linears, name: str, mode: Mode) -> list[str]:
    lines = []
    upper = linears.winners.get("pre-quantized") if mode == "autocast" else None
    if upper is not None and upper.speedup is not None:
        share = linears.quantization_share(name)
        spent = f"; quantization takes {units.percent(share)} of the time in {name}" if share is not None else ""
        lines.append(
            f"Upper bound: the GEMMs alone, on inputs quantized beforehand, reach {units.speedup(upper.speedup)} "
            f"({upper.best}){spent}."
        )
    rivals = linears.winners[mode].rivals
    if rivals:
        lines.append(f"Too close to call: {name} and {units.names(rivals)}.")
    lines.append("A whole training step gains less, because attention, norms, loss and optimizer do not get faster.")
    return lines


def _answer_of_gemms(linears: Linears, where: str) -> str:
    mode, shapes = linears.modes[-1], units.counted(len(linears.cases), "shape")
    pairs = [(name, case.op) for name in linears.columns(mode) for case in linears.cases]
    gains = {pair: gain for pair in pairs if (gain := linears.speedup(pair[0], mode, pair[1])) is not None}
    if not gains:
        return f"{shapes} measured on {where}; there is no speedup to compute."
    name, op = max(gains, key=lambda pair: gains[pair].value)
    gain = gains[name, op]
    best = f"{op} in {name}, {units.speedup(gain)}, {mode}"
    if gain.includes_one or gain.below_one:
        return f"On {where}, no shape is certain to be faster than {BASELINE}; the highest speedup is that of {best}."
    return f"On {where}, the highest speedup over {BASELINE} among {shapes} is that of {best}."


def _what(linears: Linears, mode: Mode) -> str:
    """The name of the numbers of this mode, beside those of other runs."""
    return f"{WHAT[mode]}, as Transformer Engine's script counts" if linears.as_te_benchmark else WHAT[mode]


def linears_speedups(linears: Linears, where: str) -> tuple[NamedSpeedup, ...]:
    """Speedups to show beside those of other runs."""
    return tuple(
        NamedSpeedup(where, f"{op}, {mode}" if op else _what(linears, mode), name, speedup)
        for mode in linears.modes
        for op in ([case.op for case in linears.cases] if linears.bare else [""])
        for name in linears.columns(mode)
        if (speedup := linears.speedup(name, mode, op)) is not None
    )


def linears_times(linears: Linears, where: str) -> tuple[NamedTime, ...]:
    """Times to compare with those of other GPUs and runs; none for bare GEMMs, of which only speedups are compared."""
    return tuple(
        NamedTime(where, _what(linears, mode), name, total.total_ms)
        for mode in (() if linears.bare else linears.modes)
        for name in linears.columns(mode)
        if (total := linears.total(name, mode)) is not None and not linears.falls_back(name, mode)
    )


def linears_sections(linears: Linears, *, prefix: str = "", tasks: Sequence[TaskResult] = ()) -> tuple[Section, ...]:
    """Every table and chart. `prefix` goes before each title."""
    if not linears.ops:
        return ()
    start, results = prefix + ("FORECAST " if linears.forecast else ""), by_op(tasks)
    details: list[Block] = [_times(linears, mode, start) for mode in linears.modes]
    if linears.bare:
        first: list[Block] = [chart for mode in linears.modes for chart in curve_charts(linears, mode, start, results)]
    else:
        first = [_summary(linears, start), *(bar_chart(linears, mode, start, results) for mode in linears.modes)]
        first += [_pairs(linears, start)] if len(linears.recipes) > 2 else []
        details += [_speedups(linears, mode, start) for mode in linears.modes if len(linears.columns(mode)) > 1]
    if any(cell.quantization_ms for cell in linears.ops):
        details.append(_quantization(linears, start))
    sections = [
        Section(f"{prefix}{'GEMMs' if linears.bare else 'Linears'} in every precision", tuple(first)),
        Section(f"{prefix}Every {'GEMM' if linears.bare else 'op and pass'}", tuple(details)),
    ]
    if linears.memory:
        sections.append(Section(f"{prefix}Memory of the linears", (_memory(linears, start),)))
    if any(cell.evidence for cell in linears.ops):
        sections.append(Section(f"{prefix}Precision that ran", (_evidence(linears, start),)))
    return tuple(sections)


def _summary(linears: Linears, start: str) -> Table:
    """Every recipe in both modes: the short view."""
    heads = [f"{MODE_TITLES[mode]} {what}" for mode in linears.modes for what in ("ms", "speedup")]
    both = len(linears.modes) > 1
    shares = {name: linears.quantization_share(name) for name in linears.recipes}
    quantizes = any(share is not None for share in shares.values())
    heads += (["Quantization"] if quantizes else []) + (["Speedup kept"] if both and quantizes else [])
    rows = []
    for name in linears.recipes:
        cells = [cell for mode in linears.modes for cell in _total_cells(linears, name, mode)]
        cells += [share_cell(shares[name])] if quantizes else []
        cells += [_kept(linears, name)] if both and quantizes else []
        rows.append((Cell(name), *cells))
    note = _what_is_timed(linears, linears.modes[0])
    if both and not linears.as_te_benchmark:
        note = "Autocast: forward and backward with quantization. Pre-quantized: only the GEMMs, on inputs quantized beforehand."
        note += " Speedup kept: the autocast gain as a share of the pre-quantized gain." if quantizes else ""
    bar = "90% error bar" if linears.forecast else "95% interval"
    title = f"{start}All linears of one micro-batch, speedup over {BASELINE} [{bar}]"
    return Table(title, columns(("Recipe",), heads), tuple(rows), note)


def _total_cells(linears: Linears, name: str, mode: Mode) -> tuple[Cell, Cell]:
    total, other = linears.total(name, mode), linears.measured_as(name, mode)
    if total is None:
        return NOTHING, NOTHING
    if name == BASELINE:
        return time_cell(total.total_ms), BASELINE_CELL
    if linears.falls_back(name, mode):
        return time_cell(total.total_ms), FALLBACK_CELL
    speedup = linears.speedup(name, mode)
    if other != name:
        return time_cell(total.total_ms), Cell(f"as {other}", *((speedup.value, speedup.low, speedup.high) if speedup else ()))
    return time_cell(total.total_ms), called_cell(speedup)


def _kept(linears: Linears, name: str) -> Cell:
    """The share of the GEMMs' gain that is left with quantization."""
    autocast, upper = linears.speedup(name, "autocast"), linears.speedup(name, "pre-quantized")
    if autocast is None or upper is None or upper.value <= 1:
        return NOTHING
    return share_cell((autocast.value - 1) / (upper.value - 1))


def _pairs(linears: Linears, start: str) -> Table:
    rows = tuple(
        (Cell(later), Cell(earlier), *(_pair(linears, later, earlier, mode) for mode in linears.modes))
        for earlier, later in combinations([name for name in linears.recipes if name != BASELINE], 2)
    )
    title = f"{start}Recipes compared with each other: speedup of all linears"
    return Table(title, columns(("Recipe", "Over"), [MODE_TITLES[mode] for mode in linears.modes]), rows)


def _pair(linears: Linears, name: str, over: str, mode: Mode) -> Cell:
    """A speedup, or why there is none."""
    if linears.falls_back(name, mode) or linears.falls_back(over, mode):
        return FALLBACK_CELL
    if linears.measured_as(name, mode) == linears.measured_as(over, mode):
        return Cell("same kernels")
    return called_cell(linears.speedup(name, mode, over=over))


def _what_is_timed(linears: Linears, mode: Mode) -> str:
    """What a time of this mode includes."""
    if mode == "pre-quantized":
        return "Each GEMM by itself, on inputs quantized beforehand."
    if linears.as_te_benchmark:
        return "Every GEMM is a forward call that quantizes its own X and W, as in Transformer Engine's GEMM benchmark script."
    if linears.bare:
        return "X and W are quantized once each, then multiplied."
    if linears.cache_weights:
        once = "X and dY are quantized once each. Quantization of W is excluded, because it happens once per step."
    else:
        once = "X, W and dY are quantized once each."
    return f"Forward and backward; {once} Each pass includes its share of the quantization."


def _times(linears: Linears, mode: Mode, start: str) -> Table:
    """Milliseconds and TFLOP/s of every pass and op, then the sums."""
    names, rows = linears.columns(mode), []
    title, note = f"{start}{MODE_TITLES[mode]}: time of every", _what_is_timed(linears, mode)
    if linears.bare:
        for case in linears.cases:
            times = (_time(case, linears.op_time(case.op, name, mode), case.passes[0]) for name in names)
            rows.append((Cell(case.op), *times))
        return Table(f"{title} GEMM (ms, TFLOP/s in brackets)", columns(("M x K x N",), names), tuple(rows), note)
    for case in linears.cases:
        for pass_name in case.passes if len(case.passes) == 1 else (*case.passes, None):
            times = (_time(case, linears.op_time(case.op, name, mode), pass_name) for name in names)
            rows.append((Cell(case.op), Cell(pass_name or ALL), _shape(case, pass_name), number(case.count), *times))
    rows += _sums(linears, mode, names)
    heads = columns(("Op", "Pass", "M x K x N"), ("Count", *names))
    return Table(f"{title} pass (ms, TFLOP/s in brackets)", heads, tuple(rows), note)


def _shape(case: Case, pass_name: Pass | None) -> Cell:
    if pass_name is None:
        return Cell("")
    sizes = gemm_size(case.tokens, case.inputs, case.outputs, pass_name)
    return Cell("x".join(map(str, sizes)) + (f", {len(case.rows)} groups" if len(case.rows) > 1 else ""))


def _time(case: Case, cell: OpTime | None, pass_name: Pass | None) -> Cell:
    """One pass, or the whole op. A bare GEMM is its whole op."""
    whole = pass_name is None or len(case.passes) == 1
    time = None if cell is None else cell.total_ms if whole else cell.pass_ms.get(pass_name or "fprop")
    if cell is None or time is None:
        return NOTHING
    flops = rate(case, cell).value if whole else case.flops / time.value / 1e9
    fell_back = bool(cell.fallbacks) if pass_name is None else pass_name in cell.fallbacks
    text = f"{units.milliseconds(time)} ({units.tflops(flops)})"
    return Cell(f"{text} FALLBACK" if fell_back else text, time.value, time.low, time.high, "error" if fell_back else "")


def _sums(linears: Linears, mode: Mode, names: Sequence[str]) -> list[tuple[Cell, ...]]:
    """The sums of every pass, of one layer and of all linears; if layers differ, only of all linears."""
    totals = [linears.total(name, mode) for name in names]
    of_what = Cell("One layer" if linears.layer_counts else "All linears")
    rows = []
    for pass_name in PASSES if not linears.as_te_benchmark else ():
        times = (time_cell(total.pass_ms.get(pass_name) if total else None) for total in totals)
        rows.append((of_what, Cell(pass_name), Cell(""), NOTHING, *times))
    if linears.layer_counts:
        layer = (time_cell(total.layer_ms if total else None) for total in totals)
        rows.append((of_what, Cell(ALL), Cell(""), number(linears.layers), *layer))
    model = (time_cell(total.total_ms if total else None) for total in totals)
    return [*rows, (Cell("All linears"), Cell(ALL), Cell(""), NOTHING, *model)]


def _speedups(linears: Linears, mode: Mode, start: str) -> Table:
    """The speedup of every op, and of every pass that was timed by itself."""
    names, rows = [name for name in linears.columns(mode) if name != BASELINE], []
    for case in linears.cases:
        for pass_name in (*PASSES, ALL):
            cells = [_op_speedup(linears, case.op, name, mode, pass_name) for name in names]
            if pass_name == ALL or any(cell != NOTHING for cell in cells):
                rows.append((Cell(case.op), Cell(pass_name), *cells))
    title = f"{start}{MODE_TITLES[mode]}: speedup of every op over {BASELINE}"
    return Table(title, columns(("Op", "Pass"), names), tuple(rows))


def _op_speedup(linears: Linears, op: str, name: str, mode: Mode, pass_name: str) -> Cell:
    if pass_name != ALL:
        return speedup_cell(linears.speedup(name, mode, op, pass_name=pass_name))
    cell = linears.op_time(op, name, mode)
    if cell is not None and cell.fallbacks:
        return FALLBACK_CELL
    if cell is not None and cell.left_in_baseline:
        return Cell(f"left in {BASELINE}", level="note")
    return called_cell(linears.speedup(name, mode, op))


def _quantization(linears: Linears, start: str) -> Table:
    """Milliseconds of one execution by what is quantized, and their share of the op's time."""
    names = [name for name in linears.recipes if any(cell.quantization_ms for cell in linears.ops if cell.recipe == name)]
    rows = []
    for case in linears.cases:
        cells = [linears.op_time(case.op, name, "autocast") for name in names]
        labels = dict.fromkeys(label for cell in cells if cell is not None for label in cell.quantize_ms)
        rows += [(Cell(case.op), Cell(label), *(_quantized(cell, label) for cell in cells)) for label in (*labels, ALL)]
    title = f"{start}Autocast: quantization in one execution (ms, share of the op's time in brackets)"
    return Table(title, columns(("Op", "Quantized"), names), tuple(rows))


def _quantized(cell: OpTime | None, label: str) -> Cell:
    if cell is None or not cell.quantize_ms:
        return NOTHING
    time = cell.quantization_ms if label == ALL else cell.quantize_ms.get(label)
    if time is None:
        return NOTHING
    share = f" ({units.percent(time / cell.total_ms.value)})" if label == ALL else ""
    return Cell(f"{units.milliseconds(time)}{share}", time)


def _memory(linears: Linears, start: str) -> Table:
    rows = []
    for memory in linears.memory:
        weights, copies = memory.weights_bytes, memory.copies_bytes
        rows.append((Cell(memory.recipe), *map(bytes_cell, (weights, copies, weights + copies, memory.kept_bytes))))
    heads = columns(("Recipe",), ("BF16 weights", "Quantized copies", "Weights in total", "X kept for backward"))
    note = "On one rank, for one micro-batch; computed from sizes, not measured."
    return Table(f"{start}Weights and kept inputs", heads, tuple(rows), note)


def _evidence(linears: Linears, start: str) -> Table:
    """What kernel names prove. Ops, then passes, then modes with the same evidence share a row."""
    proofs: list[tuple[str, ...]] = [
        (cell.recipe, f"left in {BASELINE}" if cell.left_in_baseline else proof.verdict, proof.requested, proof.ran or "-",
         cell.mode, pass_name, cell.op)
        for cell in linears.ops
        for pass_name, proof in cell.evidence.items()
    ]  # fmt: skip
    for place in (6, 5, 4):
        proofs = _merged(proofs, place)
    rows = tuple(
        (*map(Cell, (name, mode, passes, ops, requested, ran)), Cell(verdict, level=VERDICT_LEVELS.get(verdict, "")))
        for name, verdict, requested, ran, mode, passes, ops in proofs
    )
    heads = columns(("Recipe", "Mode", "Pass", "Ops", "Requested", "Ran", "Verdict"), ())
    return Table(f"{start}Precision of every pass, proven by kernel names", heads, rows)


def _merged(rows: Sequence[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """Rows that differ only at this place become one, with the values there listed."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault((*row[:place], *row[place + 1 :]), []).append(row[place])
    return [(*key[:place], units.names(values), *key[place:]) for key, values in groups.items()]
