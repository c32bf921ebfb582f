"""A model's linears in every recipe and mode, as run files record them: to bars, tables, curves and speedups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gemmscope.errors import UserError
from gemmscope.measure.attribution import quantization_by_pass
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.report.bench import digits
from gemmscope.report.page.parts import REST, Bar, Bars, Cell, Curve, Estimate, Facts, Gain, Point, Segment, Table
from gemmscope.report.plot import COLOURS, MOST_OPS
from gemmscope.report.units import percent
from gemmscope.store.benchfile import RowRecord, SpeedupRecord, TaskRecord, TotalRecord

HEADS = {"autocast": "Autocast: quantizing included", "pre-quantized": "Pre-quantized: products alone"}
WHAT = {"autocast": "linears, autocast", "pre-quantized": "products, pre-quantized"}
MOST_KERNELS = 3  # of one pass in a hover
LONGEST_KERNEL = 96  # letters


@dataclass(frozen=True)
class Rows:
    """What was measured (or forecast), row by row."""

    rows: Sequence[RowRecord]
    speedups: Sequence[SpeedupRecord]
    totals: Sequence[TotalRecord]
    tasks: Sequence[TaskRecord] = ()
    doubt: str = "95%"  # what intervals are

    @cached_property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(row.mode for row in self.rows))

    @cached_property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(row.recipe for row in self.rows))

    @cached_property
    def ops(self) -> list[str]:
        return list(dict.fromkeys(row.op for row in self.rows))

    @property
    def bare(self) -> bool:
        """Whether these are single products of sizes that someone typed."""
        return bool(self.rows) and all(row.passes == ["fprop"] for row in self.rows)

    @cached_property
    def _rows(self) -> dict[tuple[str, str, str], RowRecord]:
        return {(row.op, row.recipe, row.mode): row for row in self.rows}

    @cached_property
    def _gains(self) -> dict[tuple[str, str, str], Estimate]:
        return {(one.op, one.recipe, one.mode): Estimate.of(one.speedup) for one in self.speedups if one.over == BASELINE}

    def row(self, op: str, name: str, mode: str) -> RowRecord | None:
        return self._rows.get((op, name, mode))

    def gain(self, name: str, mode: str, op: str = "") -> Estimate | None:
        """Over the baseline: of one op, or of all linears together."""
        return self._gains.get((op, name, mode))

    def total(self, name: str, mode: str) -> TotalRecord | None:
        return next((one for one in self.totals if (one.recipe, one.mode) == (name, mode)), None)

    def fell_back(self, name: str, mode: str) -> list[RowRecord]:
        """The ops that did not run in the precision asked for."""
        return [row for row in self.rows if (row.recipe, row.mode) == (name, mode) and fallback(row)]

    def best(self, mode: str) -> tuple[str, Estimate] | None:
        """The recipe that gains most, all linears together."""
        found = {name: gain for name in self.recipes if (gain := self.gain(name, mode)) is not None}
        return max(found.items(), key=lambda pair: pair[1].value) if found else None

    def quantizing_share(self, name: str) -> float | None:
        """Of the linears' time in autocast mode; None where it is not known."""
        total = self.total(name, "autocast")
        return total.quantize_ms / total.total_ms.value if total is not None and total.quantize_ms else None

    def states(self, name: str, mode: str) -> list[dict[str, Any]]:
        """Clock, power and temperature after each burst."""
        return [state for task in self.tasks if (task.recipe, task.mode) == (name, mode) for state in task.states]


def fallback(row: RowRecord) -> str:
    """Which pass ran in another precision than asked for; empty if none did, or if the framework left the op out on purpose."""
    if row.note and not row.note.startswith("not split"):
        return ""
    passes: dict[str, list[str]] = {}
    for name, found in row.evidence.items():
        if found.verdict == "fallback":
            passes.setdefault(found.words, []).append(name)
    return "; ".join(f"{' and '.join(names)} {words}" for words, names in passes.items())


def products_ms(row: RowRecord) -> dict[str, float]:
    """The passes without their share of the quantization; one block where the time is not split."""
    if not row.pass_ms:
        return {"": row.total_ms.value}
    shares = quantization_by_pass(row.quantize_ms, row.pass_ms)
    return {name: time - shares[name] for name, time in row.pass_ms.items()}


def same_kernels(name: str, names: Iterable[str]) -> str:
    """The recipe whose products it shares, if that one was measured."""
    try:
        other = recipe(name).same_kernels_as or ""
    except UserError:
        return ""
    return other if other in names else ""


# --- bars ----------------------------------------------------------------------------------------------------------------


def bars(found: Rows) -> tuple[Bars, ...]:
    """One picture per mode: a bar per recipe, every op in its colour, wgrad lighter, quantizing on top."""
    return tuple(
        Bars(HEADS[mode], f"All linears of one micro-batch, {mode}, ms", "ms per micro-batch", _bars_of(found, mode))
        for mode in found.modes
    )


def _bars_of(found: Rows, mode: str) -> tuple[Bar, ...]:
    colours = _colours(found)
    return tuple(_bar(found, name, mode, colours) for name in found.recipes)


def _colours(found: Rows) -> dict[str, int]:
    """The largest ops have colours of their own, in the order they run."""
    work: dict[str, int] = {}
    for row in found.rows:
        work[row.op] = row.tokens * row.inputs * row.outputs * row.count
    largest = sorted(work, key=lambda op: -work[op])[: len(work) if len(work) <= len(COLOURS) else MOST_OPS]
    own = [op for op in found.ops if op in largest]
    return {op: own.index(op) if op in own else REST for op in found.ops}


def _bar(found: Rows, name: str, mode: str, colours: dict[str, int]) -> Bar:
    rows = [row for op in found.ops if (row := found.row(op, name, mode)) is not None]
    if found.total(name, mode) is None or not rows:
        other = same_kernels(name, found.recipes) if mode == "pre-quantized" else ""
        return Bar(name, note=f"same kernels as {other}" if other else "not measured")
    segments = [
        segment for row in sorted(rows, key=lambda row: colours[row.op] == REST) for segment in _of_op(found, row, colours)
    ]
    quantizing = {row.op: sum(row.quantize_ms.values()) * row.count for row in rows}
    spent = sum(quantizing.values())
    if spent:
        per_op = tuple((op, f"{digits(time)} ms") for op, time in quantizing.items() if time)
        segments.append(Segment("quantizing", spent, REST, "hatched", (("in all", f"{digits(spent)} ms"), *per_op)))
    fallen = bool(found.fell_back(name, mode))
    return Bar(
        name, tuple(segments), None if fallen else found.gain(name, mode), baseline=name == BASELINE,
        alarm="FALLBACK" if fallen else "",
    )  # fmt: skip


def _of_op(found: Rows, row: RowRecord, colours: dict[str, int]) -> list[Segment]:
    """The products of one op as often as they run: fprop and dgrad together, wgrad lighter."""
    products, colour = products_ms(row), colours[row.op]
    forward = sum(time for name, time in products.items() if name != "wgrad") * row.count
    label = row.op if colour != REST else "smaller ops"
    whole = "products" if "" in products else "fprop + dgrad"
    made = [Segment(label, forward, colour, "plain", _facts(found, row, whole, forward, ("fprop", "dgrad")))]
    if "wgrad" in products:
        wgrad = products["wgrad"] * row.count
        made.append(Segment(label, wgrad, colour, "light", _facts(found, row, "wgrad", wgrad, ("wgrad",))))
    return made


def _facts(found: Rows, row: RowRecord, part: str, time_ms: float, passes: Sequence[str]) -> Facts:
    """What a hover shows: the time, the kernels, the clocks, the samples."""
    each = f"{row.count} x {digits(time_ms / row.count)} ms" if row.count > 1 else ""
    gain = found.gain(row.recipe, row.mode, row.op)
    lines = [
        (part, f"{digits(time_ms)} ms" + (f" = {each}" if each else "")),
        ("tokens x in x out", shape(row)),
        ("speedup of the op", gain.times if gain else "FALLBACK: " + fallback(row) if fallback(row) else ""),
    ]
    for name in passes:
        if name in row.evidence:
            lines += [(f"{name} ran", row.evidence[name].words.removeprefix("ran "))]
            lines += [(f"{name} kernel", short(kernel)) for kernel in row.evidence[name].kernels[:MOST_KERNELS]]
    tasks = [task for task in found.tasks if (task.op, task.recipe, task.mode) == (row.op, row.recipe, row.mode)]
    lines += [("samples", samples([task.rounds_ms for task in tasks])), *clocks([s for task in tasks for s in task.states])]
    return tuple((name, value) for name, value in lines if value)


def short(kernel: str) -> str:
    """A kernel's name without its arguments, and not too long."""
    bare = kernel.replace("(anonymous namespace)::", "").removeprefix("void ").split("(")[0]
    return bare if len(bare) <= LONGEST_KERNEL else bare[: LONGEST_KERNEL - 1] + "…"


def shape(row: RowRecord) -> str:
    """Tokens, input and output features; and how many experts."""
    groups = f", {row.groups} groups" if row.groups > 1 else ""
    return f"{row.tokens}x{row.inputs}x{row.outputs}{groups}"


def samples(tasks: Sequence[Sequence[Sequence[float]]]) -> str:
    """How many, in how many bursts.

    >>> samples([[[1.0, 1.1], [1.2]]]), samples([])
    ('3 in 2 bursts', '')
    """
    count = sum(len(burst) for bursts in tasks for burst in bursts)
    bursts = max((len(bursts) for bursts in tasks), default=0)
    return f"{count} in {bursts} burst{'s' if bursts != 1 else ''}" if count else ""


def clocks(states: Sequence[dict[str, Any]]) -> Facts:
    """SM clock and power while measuring, in the middle and at the ends."""
    made = []
    for name, key, unit in (("SM clock", "sm_mhz", "MHz"), ("power", "power_w", "W"), ("temperature", "temperature_c", "°C")):
        values = sorted(float(value) for state in states if isinstance(value := state.get(key), (int, float)))
        if values:
            spread = f" ({values[0]:.0f} to {values[-1]:.0f})" if values[0] != values[-1] else ""
            made.append((name, f"{values[len(values) // 2]:.0f} {unit}{spread}"))
    return tuple(made)


# --- tables and curves ---------------------------------------------------------------------------------------------------


def modes_table(found: Rows) -> Table | None:
    """Autocast against pre-quantized, side by side: what quantizing leaves of the products' gain."""
    if len(found.modes) < 2 or found.bare:
        return None
    rows = []
    for name in found.recipes:
        if name == BASELINE:
            continue
        auto, bare = found.gain(name, "autocast"), found.gain(name, "pre-quantized")
        other = same_kernels(name, found.recipes)
        share = found.quantizing_share(name)
        products = gain_cell(found, name, "pre-quantized")
        rows.append(
            (
                Cell(name),
                gain_cell(found, name, "autocast"),
                products if bare or not other else Cell(f"as {other}", _value(found.gain(other, "pre-quantized"))),
                Cell(percent(share), share) if share is not None else Cell("-"),
                _kept(auto, bare or (found.gain(other, "pre-quantized") if other else None)),
            )
        )
    columns = {"Recipe": False, "Autocast": True, "Pre-quantized": True, "Spent quantizing": True, "Kept of the gain": True}
    words = "Pre-quantized is what the hardware gives if quantizing were free; autocast is what training pays."
    return Table("Autocast against pre-quantized", columns, tuple(rows), words)


def _value(found: Estimate | None) -> float | None:
    return found.value if found is not None else None


def _kept(auto: Estimate | None, bare: Estimate | None) -> Cell:
    if auto is None or bare is None or bare.value <= 1:
        return Cell("-")
    kept = (auto.value - 1) / (bare.value - 1)
    return Cell(percent(kept), kept)


def gain_cell(found: Rows, name: str, mode: str, op: str = "") -> Cell:
    """A speedup, or what stands in its way."""
    gain = found.gain(name, mode, op)
    if gain is not None:
        return Cell(gain.times, gain.value, "warning" if gain.loses or gain.too_close else "")
    fallen = [row for row in found.fell_back(name, mode) if op in ("", row.op)]
    return Cell("FALLBACK", 0.0, "alarm") if fallen else Cell("-")


def ops_table(found: Rows) -> Table:
    """Every op (or bare product) in every recipe and mode: one execution."""
    speedup = f"Speedup [{found.doubt}]"
    if found.bare:
        columns = {"M x K x N": False, "Recipe": False, "Mode": False, "ms": True, "TFLOP/s": True, "Quantizing": True}
    else:
        columns = {"Op": False, "Recipe": False, "Mode": False, "Tokens x in x out": False, "Count": True, "ms": True}
        columns |= {"TFLOP/s": True, "fprop": True, "dgrad": True, "wgrad": True, "Quantizing": True}
    rows = tuple(_op_cells(found, row) for row in found.rows)
    words = "" if found.bare else "Passes in ms, each with its share of the quantization."
    title = "Every product" if found.bare else "Every op, one execution"
    return Table(title, {**columns, speedup: True, "Kernels prove": False}, rows, words)


def _op_cells(found: Rows, row: RowRecord) -> tuple[Cell, ...]:
    time_ms, work = row.total_ms.value, float(row.tokens * row.inputs * row.outputs)
    rate = 2 * work * len(row.passes) / time_ms / 1e9
    spent = sum(row.quantize_ms.values()) / time_ms
    names = (Cell(row.op, work if found.bare else None), Cell(row.recipe), Cell(row.mode))
    sizes = () if found.bare else (Cell(shape(row), work), Cell(str(row.count), row.count))
    passes = [row.pass_ms.get(name) for name in (() if found.bare else ("fprop", "dgrad", "wgrad"))]
    return (
        *names,
        *sizes,
        Cell(digits(time_ms), time_ms),
        Cell(f"{rate:.0f}" if rate >= 10 else f"{rate:.3g}", rate),
        *(Cell(digits(time), time) if time is not None else Cell("-") for time in passes),
        Cell(percent(spent), spent) if spent else Cell("-"),
        Cell("1.000x", 1.0) if row.recipe == BASELINE else gain_cell(found, row.recipe, row.mode, row.op),
        _proof(row),
    )


def _proof(row: RowRecord) -> Cell:
    """What kernel names say of the precision: the same for all passes, or the worst."""
    if fallback(row):
        return Cell(f"FALLBACK: {fallback(row)}", None, "alarm")
    if row.note and not row.note.startswith("not split"):
        return Cell(f"left as is: {row.note}", None, "note")
    if not row.evidence:
        return Cell("-")
    verdicts = [found.verdict for found in row.evidence.values()]
    worst = next((verdict for verdict in ("unproven", "emulated") if verdict in verdicts), "")
    words = " · ".join(dict.fromkeys(found.words.split(", scales")[0] for found in row.evidence.values()))
    return Cell(f"{worst}: {words}" if worst else words, None, "warning" if worst else "")


def curves(found: Rows) -> tuple[Curve, ...]:
    """Speedups of bare products against their shape, a picture for each mode."""
    if not found.bare:
        return ()
    square = all(row.tokens == row.inputs == row.outputs for row in found.rows)
    axis = "side of square matrices" if square else "M x K x N"
    made = []
    for mode in found.modes:
        series = {name: _points(found, name, mode, square) for name in found.recipes if name != BASELINE}
        kept = {name: points for name, points in series.items() if points}
        if kept:
            made.append(Curve(HEADS[mode], f"Times faster than {BASELINE}, {mode}", axis, kept, tuple(series)))
    return tuple(made)


def _points(found: Rows, name: str, mode: str, square: bool) -> tuple[Point, ...]:
    made = []
    for op in found.ops:
        row, gain = found.row(op, name, mode), found.gain(name, mode, op)
        if row is not None and gain is not None:
            facts = (("speedup", gain.times), *_facts(found, row, name, row.total_ms.value, ("fprop",)))
            made.append(Point(str(row.tokens) if square else op, gain, tuple(f for f in facts if f[0] != "speedup of the op")))
    return tuple(made)


def gains(found: Rows) -> tuple[Gain, ...]:
    """What can be set beside other runs."""
    return tuple(
        Gain(f"{op}, {mode}" if op else WHAT.get(mode, mode), name, gain)
        for mode in found.modes
        for op in (found.ops if found.bare else [""])
        for name in found.recipes
        if (gain := found.gain(name, mode, op)) is not None
    )
