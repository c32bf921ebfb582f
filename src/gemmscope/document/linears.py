"""The linears of a bench or a forecast as parts of a Document: the answer, tables and charts."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, combinations

from gemmscope import units
from gemmscope.choices import Mode
from gemmscope.document.common import phrase, sections
from gemmscope.document.linear_charts import MODE_TITLES, bar_chart, by_op, curve_charts, rate
from gemmscope.document.model import Block, NamedSpeedup, NamedTime, Section
from gemmscope.document.table import (
    BASELINE_CELL,
    FALLBACK_CELL,
    NOTHING,
    Cell,
    Column,
    Table,
    Value,
    across,
    called_cell,
    grouped,
    speedup_cell,
    table,
)
from gemmscope.findings import Level
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import TaskResult
from gemmscope.results.linears import Linears
from gemmscope.workload.cases import Case
from gemmscope.workload.ops import PASSES, Pass, gemm_size

WHAT: dict[Mode, str] = {"autocast": "linears, autocast", "pre-quantized": "GEMMs, pre-quantized"}
MOST_ROWS = 14  # of the short view
ALL = "all"  # the pass of a row for the whole op
VERDICT_LEVELS: dict[str, Level] = {"fallback": "error", "emulated": "warning", "unproven": "warning"}


def linears_answer(linears: Linears, where: str) -> tuple[str, tuple[str, ...]]:
    """The answer in one sentence, and the reasons for it."""
    if not linears.ops:
        return phrase("nothing-measured"), ()
    if linears.bare:
        return _answer_of_gemms(linears, where)
    mode: Mode = "autocast" if "autocast" in linears.modes else "pre-quantized"
    about = {"baseline": BASELINE, "what": phrase(f"linears-of-{mode}"), "where": where}
    winner = linears.winners.get(mode)
    gains = {name: gain for name in linears.columns(mode) if (gain := linears.speedup(name, mode)) is not None}
    if winner is None or not gains:
        return _nothing_to_compare(linears, mode, where), ()
    if winner.best != BASELINE and BASELINE not in winner.rivals and winner.speedup is not None:
        return phrase("linears-fastest", recipe=winner.best, speedup=winner.speedup, **about), tuple(
            _because(linears, winner.best, mode)
        )
    name = max(gains, key=lambda name: gains[name].value)
    if winner.rivals:
        close = [rival for rival in (winner.best, *winner.rivals) if rival != BASELINE]
        return phrase("linears-close", recipes=close, speedup=gains[name], **about), ()
    return phrase("linears-baseline", recipe=name, speedup=gains[name], **about), ()


def _nothing_to_compare(linears: Linears, mode: Mode, where: str) -> str:
    fallen = [name for name in linears.columns(mode) if linears.falls_back(name, mode)]
    if fallen:
        return phrase("linears-fallback", recipes=fallen, where=where)
    return phrase(
        "linears-alone",
        recipes=[cell.recipe for cell in linears.ops],
        done=("forecast" if linears.forecast else "measured"),
        where=where,
    )


def _because(linears: Linears, name: str, mode: Mode) -> list[str]:
    lines = []
    upper = linears.winners.get("pre-quantized") if mode == "autocast" else None
    if upper is not None and upper.speedup is not None:
        share = linears.quantization_share(name)
        spent = phrase("linears-quantization", share=share, recipe=name) if share is not None else ""
        lines.append(phrase("linears-upper-bound", speedup=upper.speedup, recipe=upper.best, spent=spent))
    if rivals := linears.winners[mode].rivals:
        lines.append(phrase("close-to-rivals", recipe=name, rivals=rivals))
    return [*lines, phrase("linears-not-a-step")]


def _answer_of_gemms(linears: Linears, where: str) -> tuple[str, tuple[str, ...]]:
    """The bare GEMM that gains most, as training runs it if that is known, and those that are slower in every recipe."""
    mode: Mode = "autocast" if "autocast" in linears.modes else "pre-quantized"
    gains = _best_gains(linears, mode)
    if not gains:
        return phrase("gemms-without-speedup", shapes=len(linears.cases), where=where), ()
    slower = [shape for shape, (gain, _) in gains.items() if gain.below_one]
    best = max(gains, key=lambda shape: gains[shape][0].value)
    gain, name = gains[best]
    sentence = phrase(
        "gemms-fastest" if gain.above_one else "gemms-slowest" if len(slower) == len(gains) else "gemms-uncertain",
        where=where,
        how=phrase(f"gemms-in-{mode}"),
        baseline=BASELINE,
        shape=best,
        speedup=gain,
        recipe=name,
        slower=phrase("gemms-slower", baseline=BASELINE, shapes=slower) if slower else "",
    )
    bounds = {} if mode == linears.modes[-1] else _best_gains(linears, linears.modes[-1])
    shape = max(bounds, key=lambda shape: bounds[shape][0].value, default="")
    bound = [phrase("gemms-upper-bound", shape=shape, speedup=bounds[shape][0], recipe=bounds[shape][1])] if shape else []
    return sentence, tuple(bound)


def _best_gains(linears: Linears, mode: Mode) -> dict[str, tuple[Interval, str]]:
    """The largest speedup of every bare GEMM, and its recipe."""
    gains = grouped(
        (case.op, (gain, name))
        for case in linears.cases
        for name in linears.columns(mode)
        if (gain := linears.speedup(name, mode, case.op)) is not None
    )
    return {shape: max(pairs, key=lambda pair: pair[0].value) for shape, pairs in gains.items()}


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
    named: dict[str, list[Block]] = {
        f"{prefix}{'GEMMs' if linears.bare else 'Linears'} in every precision": first,
        f"{prefix}Every {'GEMM' if linears.bare else 'op and pass'}": [*details, _quantization(linears, start)],
        f"{prefix}Memory of the linears": [_memory(linears, start)],
        f"{prefix}Precision that ran": [_evidence(linears, start)],
    }
    return sections(named)


def linears_summary(linears: Linears, others: Mapping[str, Linears] = {}) -> Table | None:
    """The compact table: a row for each op in the mode that training runs, then the sums in both modes; for bare GEMMs, a row for
    each shape and mode, on each of several GPUs (`others`: all of them)."""
    if not linears.ops:
        return None
    named = others or {"": linears}
    mode: Mode = "autocast" if "autocast" in linears.modes else linears.modes[-1]
    shown = linears.modes if linears.bare else (mode,)
    names = [name for name in dict.fromkeys(chain(*(one.recipes for one in named.values()))) if name != BASELINE]
    work = {case.op: case.flops * case.count for case in linears.cases}
    largest = sorted(work, key=lambda op: -work[op])[: max(MOST_ROWS // len(shown) // len(named), 1)]

    def baseline(row: tuple[Case, Mode, str]) -> Interval | None:
        time = named[row[2]].op_time(row[0].op, BASELINE, row[1])
        return time.total_ms.times(row[0].count) if time is not None else None

    first, times = "M x K x N" if linears.bare else "Op", f"{BASELINE} ms"

    sums = [
        {
            first: phrase(f"linears-all-{mode}"),
            times: total_ms(linears, mode, BASELINE),
            **{
                name: FALLBACK_CELL
                if linears.falls_back(name, mode)
                else speedup_cell(linears.speedup(name, mode), units.short_speedup)
                for name in names
            },
        }
        for mode in (() if linears.bare else linears.modes)
    ]
    bar = "90% error bar" if linears.forecast else "95% interval"
    what = "GEMM" if linears.bare else "forward call" if linears.as_te_benchmark else "linear"
    left_out, in_mode = len(linears.cases) - len(largest), "" if len(shown) > 1 else f", {mode}"
    return table(
        "summary",
        f"Speedup of every {what} over {BASELINE}{in_mode} (± {bar})" if names else f"Time of every {what}{in_mode}",
        [(case, one, gpu) for case in linears.cases if case.op in largest for gpu in named for one in shown],
        Column("GPU", lambda row: row[2], when=len(named) > 1),
        Column(first, lambda row: row[0].op),
        Column("Mode", lambda row: row[1], when=len(shown) > 1),
        Column(times, baseline, "ms", drop=1),
        *across(names, lambda row, name: _short_speedup(named[row[2]], row[1], name, row[0].op), "x"),
        note=phrase("not-shown", rows=units.counted(left_out, f"smaller {what}")) if left_out else "",
        more=sums,
    )


def _summary(linears: Linears, start: str) -> Table:
    """Every recipe in both modes."""
    both = len(linears.modes) > 1
    shares = {name: linears.quantization_share(name) for name in linears.recipes}
    quantizes = any(share is not None for share in shares.values())
    of_modes = [
        (
            Column[str](f"{MODE_TITLES[mode]} ms", partial(total_ms, linears, mode), "ms"),
            Column[str](f"{MODE_TITLES[mode]} speedup", partial(_total_speedup, linears, mode), "x"),
        )
        for mode in linears.modes
    ]

    note = _what_is_timed(linears, linears.modes[0])
    if both and not linears.as_te_benchmark:
        note = phrase("linears-both-modes") + (f" {phrase('linears-speedup-kept')}" if quantizes else "")
    bar = "90% error bar" if linears.forecast else "95% interval"
    return table(
        "linears",
        f"{start}All linears of one micro-batch, speedup over {BASELINE} [{bar}]",
        linears.recipes,
        Column("Recipe", str),
        *chain(*of_modes),
        Column("Quantization", shares.get, "%", when=quantizes),
        Column("Speedup kept", partial(_kept, linears), "%", when=both and quantizes),
        note=note,
    )


def total_ms(linears: Linears, mode: Mode, name: str) -> Interval | None:
    """The time of all linears in one recipe, if it is known."""
    total = linears.total(name, mode)
    return total.total_ms if total is not None else None


def _total_speedup(linears: Linears, mode: Mode, name: str) -> Cell:
    if linears.total(name, mode) is None:
        return NOTHING
    if name == BASELINE:
        return BASELINE_CELL
    if linears.falls_back(name, mode):
        return FALLBACK_CELL
    speedup, other = linears.speedup(name, mode), linears.measured_as(name, mode)
    if other != name:
        return Cell(f"as {other}", *((speedup.value, speedup.low, speedup.high) if speedup else ()))
    return called_cell(speedup)


def _kept(linears: Linears, name: str) -> float | None:
    """The share of the GEMMs' gain that is left with quantization."""
    autocast, upper = linears.speedup(name, "autocast"), linears.speedup(name, "pre-quantized")
    if autocast is None or upper is None or upper.value <= 1:
        return None
    return (autocast.value - 1) / (upper.value - 1)


def _pairs(linears: Linears, start: str) -> Table:

    return table(
        "linears_compared",
        f"{start}Recipes compared with each other: speedup of all linears",
        combinations([name for name in linears.recipes if name != BASELINE], 2),
        Column("Recipe", lambda pair: pair[1]),
        Column("Over", lambda pair: pair[0]),
        *across(linears.modes, lambda pair, mode: _pair(linears, mode, pair), "x", head=MODE_TITLES.__getitem__),
    )


def _pair(linears: Linears, mode: Mode, pair: tuple[str, str]) -> Cell:
    """A speedup, or why there is none."""
    over, name = pair
    if linears.falls_back(name, mode) or linears.falls_back(over, mode):
        return FALLBACK_CELL
    if linears.measured_as(name, mode) == linears.measured_as(over, mode):
        return Cell("same kernels")
    return called_cell(linears.speedup(name, mode, over=over))


def _what_is_timed(linears: Linears, mode: Mode) -> str:
    """What a time of this mode includes."""
    if mode == "pre-quantized":
        return phrase("timed-pre-quantized")
    if linears.as_te_benchmark:
        return phrase("timed-as-te-benchmark")
    if linears.bare:
        return phrase("timed-bare")
    return phrase("timed-with-cached-weights" if linears.cache_weights else "timed-linears")


def _times(linears: Linears, mode: Mode, start: str) -> Table:
    """Milliseconds and TFLOP/s of every pass and op, then the sums."""
    bare, names = linears.bare, linears.columns(mode)

    return table(
        f"times_{mode}",
        f"{start}{MODE_TITLES[mode]}: time of every {'GEMM' if bare else 'pass'} (ms, TFLOP/s in brackets)",
        [(case, one) for case in linears.cases for one in (case.passes if len(case.passes) == 1 else (*case.passes, None))],
        Column("Op", lambda row: row[0].op, when=not bare),
        Column("Pass", lambda row: row[1] or ALL, when=not bare),
        Column("M x K x N", lambda row: row[0].op if bare else _shape(*row)),
        Column("Count", lambda row: row[0].count, "g", when=not bare),
        *across(names, lambda row, name: _time(linears, mode, name, row), "ms"),
        note=_what_is_timed(linears, mode),
        more=[] if bare else _sums(linears, mode, names),
    )


def _shape(case: Case, pass_name: Pass | None) -> str:
    if pass_name is None:
        return ""
    sizes = gemm_size(case.tokens, case.inputs, case.outputs, pass_name)
    return "x".join(map(str, sizes)) + (f", {len(case.rows)} groups" if len(case.rows) > 1 else "")


def _time(linears: Linears, mode: Mode, name: str, row: tuple[Case, Pass | None]) -> Cell:
    """One pass, or the whole op. A bare GEMM is its whole op."""
    case, pass_name = row
    cell = linears.op_time(case.op, name, mode)
    whole = pass_name is None or len(case.passes) == 1
    time = None if cell is None else cell.total_ms if whole else cell.pass_ms.get(pass_name or "fprop")
    if cell is None or time is None:
        return NOTHING
    flops = rate(case, cell).value if whole else case.flops / time.value / 1e9
    fell_back = bool(cell.fallbacks) if pass_name is None else pass_name in cell.fallbacks
    text = f"{units.milliseconds(time)} ({units.tflops(flops)})"
    return Cell(f"{text} FALLBACK" if fell_back else text, time.value, time.low, time.high, "error" if fell_back else "")


def _sums(linears: Linears, mode: Mode, names: Sequence[str]) -> list[dict[str, Value]]:
    """The sums of every pass, of one layer and of all linears; if layers differ, only of all linears."""
    totals = {name: total for name in names if (total := linears.total(name, mode)) is not None}

    whole: dict[str, Value] = {"Op": "All linears", "Pass": ALL, "M x K x N": ""}
    one = {**whole, "Op": "One layer"} if linears.layer_counts else whole
    rows = [
        {**one, "Pass": pass_name, **{name: total.pass_ms.get(pass_name) for name, total in totals.items()}}
        for pass_name in (() if linears.as_te_benchmark else PASSES)
    ]
    if linears.layer_counts:
        rows.append({**one, "Count": linears.layers, **{name: total.layer_ms for name, total in totals.items()}})
    return [*rows, {**whole, **{name: total.total_ms for name, total in totals.items()}}]


def _speedups(linears: Linears, mode: Mode, start: str) -> Table:
    """The speedup of every op, and of every pass that was timed by itself."""

    def speedup(row: tuple[str, str], name: str) -> Cell:
        op, pass_name = row
        if pass_name != ALL:
            return speedup_cell(linears.speedup(name, mode, op, pass_name=pass_name))
        return _whole_op(linears, mode, name, op) or called_cell(linears.speedup(name, mode, op))

    names = [name for name in linears.columns(mode) if name != BASELINE]
    rows = [(case.op, one) for case in linears.cases for one in (*PASSES, ALL)]
    return table(
        f"speedups_{mode}",
        f"{start}{MODE_TITLES[mode]}: speedup of every op over {BASELINE}",
        [row for row in rows if row[1] == ALL or any(speedup(row, name) != NOTHING for name in names)],
        Column("Op", lambda row: row[0]),
        Column("Pass", lambda row: row[1]),
        *across(names, speedup, "x"),
    )


def _short_speedup(linears: Linears, mode: Mode, name: str, op: str) -> Cell:
    return _whole_op(linears, mode, name, op, f"in {BASELINE}") or speedup_cell(
        linears.speedup(name, mode, op), units.short_speedup
    )


def _whole_op(linears: Linears, mode: Mode, name: str, op: str, left: str = f"left in {BASELINE}") -> Cell | None:
    """Why an op has no speedup of its own: it fell back, or was left in BF16."""
    cell = linears.op_time(op, name, mode)
    if cell is not None and cell.fallbacks:
        return FALLBACK_CELL
    return Cell(left, level="note") if cell is not None and cell.left_in_baseline else None


def _quantization(linears: Linears, start: str) -> Table:
    """Milliseconds of one execution by what is quantized, and their share of the op's time."""
    names = [name for name in linears.recipes if any(cell.quantization_ms for cell in linears.ops if cell.recipe == name)]

    cells = [linears.op_time(case.op, name, "autocast") for case in linears.cases for name in names]
    labels = grouped((cell.op, label) for cell in cells if cell is not None for label in cell.quantize_ms)
    return table(
        "quantization",
        f"{start}Autocast: quantization in one execution (ms, share of the op's time in brackets)",
        [(case.op, label) for case in linears.cases if names for label in dict.fromkeys((*labels.get(case.op, ()), ALL))],
        Column("Op", lambda row: row[0]),
        Column("Quantized", lambda row: row[1]),
        *across(names, lambda row, name: _quantized(linears, name, row), "ms"),
    )


def _quantized(linears: Linears, name: str, row: tuple[str, str]) -> Value:
    op, label = row
    cell = linears.op_time(op, name, "autocast")
    if cell is None or not cell.quantize_ms:
        return None
    if label != ALL:
        return cell.quantize_ms.get(label)
    time = cell.quantization_ms
    return Cell(f"{units.milliseconds(time)} ({units.percent(time / cell.total_ms.value)})", time)


def _memory(linears: Linears, start: str) -> Table:
    return table(
        "kept",
        f"{start}Weights and kept inputs",
        linears.memory,
        Column("Recipe", lambda memory: memory.recipe),
        Column("BF16 weights", lambda memory: memory.weights_bytes, "B"),
        Column("Quantized copies", lambda memory: memory.copies_bytes, "B"),
        Column("Weights in total", lambda memory: memory.weights_bytes + memory.copies_bytes, "B"),
        Column("X kept for backward", lambda memory: memory.kept_bytes, "B"),
        note=phrase("linears-memory"),
    )


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
    return table(
        "evidence",
        f"{start}Precision of every pass, proven by kernel names",
        proofs,
        Column("Recipe", lambda row: row[0]),
        Column("Mode", lambda row: row[4]),
        Column("Pass", lambda row: row[5]),
        Column("Ops", lambda row: row[6]),
        Column("Requested", lambda row: row[2]),
        Column("Ran", lambda row: row[3]),
        Column("Verdict", lambda row: Cell(row[1], level=VERDICT_LEVELS.get(row[1], ""))),
    )


def _merged(rows: Sequence[tuple[str, ...]], place: int) -> list[tuple[str, ...]]:
    """Rows that differ only at this place become one, with the values there listed."""
    groups = grouped(((*row[:place], *row[place + 1 :]), row[place]) for row in rows)
    return [(*key[:place], units.names(values), *key[place:]) for key, values in groups.items()]
