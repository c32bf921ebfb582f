"""Tables of an `ExplainResult` beyond where the time goes: GEMMs by shape, attention, collectives, kernels, launches, memory."""

import re
from collections.abc import Mapping

from gemmscope import units
from gemmscope.document.model import Block
from gemmscope.document.table import NOTHING, Cell, Table, bytes_cell, columns, number, share_cell, without_empty
from gemmscope.parts import StepPart
from gemmscope.results.explain import ExplainResult
from gemmscope.results.explain_tables import AttentionTotal, CollectiveTotal, GemmShapeTotal, LaunchStatistics, MemoryPoint

MOST_ROWS = 20  # of shapes, one by one
MOST_READINGS = 20
LONGEST_NAME = 46  # characters of a kernel
UNKNOWN = 0.02  # of the time of GEMMs: if the sizes of more are not recorded, a row says so
FUNCTOR = re.compile(r"\w*(?:Functor|_kernel_cuda|Ops\b|NormTwo|MeanOps)\w*")
LONGEST_FRAME = 60
HOST: StepPart = "idle, host-bound"
LEAST_REST = 0.002  # of the step
PASSES = ("fprop", "dgrad", "wgrad", "recomputed")


def table_sections(result: ExplainResult) -> Mapping[str, tuple[Block, ...]]:
    """The tables of each section, by its title."""
    return {
        "Attention": (_attention(result),),
        "Communication": (_collectives(result),),
        "Kernels and launches": (_kernels(result), _launches(result.tables.launches), _idle_frames(result), _allocator(result)),
        "Memory": (_memory(result),),
    }


def gemm_shape_table(result: ExplainResult) -> Table:
    """The shapes that take the most time, and the others together."""
    shapes = result.tables.gemm_shapes
    rows = [_gemm_row(row) for row in shapes[:MOST_ROWS]]
    if rest := shapes[MOST_ROWS:]:
        rows.append(_gemm_rest(f"{len(rest)} more shapes", sum(row.count for row in rest), sum(row.time_ms for row in rest)))
    known_ms, every_ms = sum(row.time_ms for row in shapes), sum(row.time_ms for row in result.account.gemms)
    if rows and every_ms - known_ms > UNKNOWN * every_ms:
        count = sum(row.count for row in result.account.gemms) - sum(row.count for row in shapes)
        rows.append(_gemm_rest("size not recorded", max(count, 0.0), every_ms - known_ms))
    heads = columns(
        ("M x N x K", "Pass", "Precision"),
        (
            "GEMMs",
            "ms",
            "TFLOP/s",
            "Of sustained",
            "Of roofline",
            "Bound by",
            "Alignment",
            "Better recipe",
            "ms with it",
            "Speedup",
        ),
    )
    notes = ["Alignment of the rows in bytes; 16 is best."]
    if any(row.sustained_share is not None for row in shapes):
        notes.append(
            "Sustained: the rate that large GEMMs usually reach on this GPU. Roofline: what its published rate and memory "
            "bandwidth allow."
        )
    if any(row.better for row in shapes):
        notes.append("Better recipe: a forecast that includes casts of the activations.")
    return without_empty(Table("GEMMs by shape, per step", heads, tuple(rows), " ".join(notes)))


def _gemm_rest(name: str, count: float, time_ms: float) -> tuple[Cell, ...]:
    return (Cell(name), Cell("-"), Cell("-"), count_cell(count), fixed(time_ms, 3), *(NOTHING,) * 8)


def _gemm_row(row: GemmShapeTotal) -> tuple[Cell, ...]:
    size = f"{row.m} x {row.n} x {row.k}"
    every = set(PASSES[:3]) == set(row.passes)
    passes = "all" if every else ", ".join(name for name in PASSES if name in row.passes)
    return (
        Cell(f"{row.batch} x ({size})" if row.batch > 1 else size),
        Cell(passes or "-"),
        Cell(row.precision),
        count_cell(row.count),
        fixed(row.time_ms, 3),
        fixed(row.tflops, 0 if row.tflops >= 10 else 1),
        share_cell(row.sustained_share, 1.0),
        share_cell(row.roofline_share, 1.0),
        Cell(row.bound or "-"),
        Cell(str(row.alignment_bytes), row.alignment_bytes, level="warning" if row.alignment_bytes < 16 else ""),
        Cell(row.better or "-"),
        fixed(row.better_ms, 3),
        fixed(row.time_ms / row.better_ms if row.better_ms else None, unit="x"),
    )


def _attention(result: ExplainResult) -> Table:
    heads = columns(
        ("Implementation", "Pass", "Batch x heads x queries x keys x head size", "Causal", "Precision"),
        ("Runs", "ms", "TFLOP/s", "Faster", "ms with it"),
    )
    rows = tuple(map(_attention_row, result.tables.attention[:MOST_ROWS]))
    notes = []
    if any(row.tflops is not None for row in result.tables.attention):
        notes.append("TFLOP/s count half of the scores where the mask is known to be causal.")
    if any(row.faster for row in result.tables.attention):
        notes.append("Faster: an implementation that would be faster, at its known rate on this GPU.")
    return without_empty(Table("Attention, per step", heads, rows, " ".join(notes)))


def _attention_row(row: AttentionTotal) -> tuple[Cell, ...]:
    sizes = (row.batch, row.heads, row.queries, row.keys, row.head_dim)
    return (
        Cell(row.backend),
        Cell(row.pass_name or "-"),
        Cell(" x ".join(map(str, sizes)) if None not in sizes else "-"),
        Cell("-" if row.causal is None else "yes" if row.causal else "no"),
        Cell(row.precision or "-"),
        count_cell(row.count),
        fixed(row.time_ms, 3),
        fixed(row.tflops, 0 if (row.tflops or 0) >= 10 else 1),
        Cell(row.faster or "-"),
        fixed(row.faster_ms, 3),
    )


def _collectives(result: ExplainResult) -> Table:
    totals = result.tables.collectives
    heads = columns(
        ("Collective", "Process group"),
        ("Ranks", "Runs", "Message", "ms", "Exposed ms", "Waiting ms", "Transfer ms", "Algorithm GB/s", "Bus GB/s"),
    )
    rows = list(map(_collective_row, totals[:MOST_ROWS]))
    if rest := totals[MOST_ROWS:]:
        sums = [sum(total.count for total in rest), sum(total.time_ms for total in rest), sum(total.exposed_ms for total in rest)]
        cells = (NOTHING, count_cell(sums[0]), NOTHING, fixed(sums[1], 3), fixed(sums[2], 3), *(NOTHING,) * 4)
        rows.append((Cell(f"{len(rest)} more"), Cell("-"), *cells))
    from_ranks = any(total.waiting_from == "other ranks" for total in totals)
    note = (
        "Waiting: time beyond that of the last rank to arrive."
        if from_ranks
        else "Waiting: time beyond the shortest collective of the same size, a lower bound. Traces of all ranks show all of it."
    )
    table = Table("Collectives, per step", heads, tuple(rows), note)
    return without_empty(table)


def _collective_row(total: CollectiveTotal) -> tuple[Cell, ...]:
    waiting = total.waiting_ms
    return (
        Cell(total.kind),
        Cell(total.group or "-"),
        number(total.ranks),
        count_cell(total.count),
        bytes_cell(total.message_bytes),
        fixed(total.time_ms, 3),
        fixed(total.exposed_ms, 3),
        fixed(waiting, 3),
        fixed(total.time_ms - waiting if waiting is not None else None, 3),
        fixed(total.algorithm_gbps, 1),
        fixed(total.bus_gbps, 1),
    )


def _kernels(result: ExplainResult) -> Table:
    step_ms = result.account.step_ms
    rows = tuple(
        (
            *(Cell(kernel_label(kernel.name)), Cell(kernel.kernel_class), count_cell(kernel.count)),
            *(fixed(kernel.time_ms, 3), share_cell(kernel.time_ms / step_ms), fixed(kernel.mean_us, 1)),
        )
        for kernel in result.tables.kernels
    )
    heads = columns(("Kernel", "Class"), ("Runs", "ms", "Share", "Mean µs"))
    return Table("Longest kernels, per step", heads, rows)


def kernel_label(name: str) -> str:
    """A short name that still tells PyTorch's elementwise kernels apart: by the functor among the template's arguments.

    >>> kernel_label("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, 2>(int)")
    'vectorized_elementwise_kernel CUDAFunctor_add'
    >>> kernel_label("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT")
    'nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT'
    """
    plain = units.kernel_name(name, len(name)).removeprefix("at::native::")
    base, opened, arguments = plain.partition("<")
    telling = FUNCTOR.search(arguments) if opened else None
    label = f"{base} {telling[0]}" if telling is not None else plain
    return label if len(label) <= LONGEST_NAME else f"{label[: LONGEST_NAME - 1]}…"


def _launches(launches: LaunchStatistics | None) -> Table:
    if launches is None:
        return Table("Launches, per step", columns(("What",), ("Value",)), ())
    cells = {
        "launches": count_cell(launches.launches),
        "kernels shorter than 10 µs": count_cell(launches.short_kernels),
        "time in these kernels, ms": fixed(launches.short_ms, 3),
        "from launch to start, median µs": fixed(launches.delay_median_us, 1),
        "from launch to start, 90th percentile µs": fixed(launches.delay_p90_us, 1),
        "work queued at a launch, mean": fixed(launches.queue_mean, 1),
        "work queued at a launch, maximum": number(launches.queue_most),
        "launches to an idle GPU": share_cell(launches.queue_empty_share),
    }
    rows = tuple((Cell(what), cell) for what, cell in cells.items() if cell is not NOTHING)
    return Table("Launches, per step", columns(("What",), ("Value",)), rows)


def _idle_frames(result: ExplainResult) -> Table:
    step_ms, frames = result.account.step_ms, result.tables.idle_frames
    rows = [
        (
            *(Cell(_frame_name(frame.frame)), Cell(frame.kind)),
            *(count_cell(frame.gaps), fixed(frame.time_ms, 3), share_cell(frame.time_ms / step_ms)),
        )
        for frame in frames
    ]
    rest_ms = result.account.parts_ms.get(HOST, 0.0) - sum(frame.time_ms for frame in frames)
    if frames and rest_ms > LEAST_REST * step_ms:
        rows.append((Cell("other"), Cell("-"), NOTHING, fixed(rest_ms, 3), share_cell(rest_ms / step_ms)))
    note = "The innermost CPU activity that covers at least half of the time from the last kernel to the next launch."
    heads = columns(("CPU activity", "Kind"), ("Gaps", "Idle ms", "Share of step"))
    return Table("GPU idle time by CPU activity, per step", heads, tuple(rows), note)


def _frame_name(name: str) -> str:
    """A long name without its start, which is the same for most paths.

    >>> _frame_name("torch/nn/modules/module.py(1773): _wrapped_call_impl"), _frame_name("")
    ('torch/nn/modules/module.py(1773): _wrapped_call_impl', '-')
    """
    return (name if len(name) <= LONGEST_FRAME else f"…{name[1 - LONGEST_FRAME :]}") or "-"


def _allocator(result: ExplainResult) -> Table:
    rows = tuple((Cell(call.name), count_cell(call.count), fixed(call.time_ms, 3)) for call in result.tables.allocator)
    note = "In a steady state, PyTorch's caching allocator makes none of these calls."
    return Table("Allocator calls, per step", columns(("Call",), ("Calls", "ms")), rows, note)


def _memory(result: ExplainResult) -> Table:
    points = result.tables.memory
    every = max(-(-len(points) // MOST_READINGS), 1)
    shown = [max(points[at : at + every], key=lambda point: point.allocated) for at in range(0, len(points), every)]
    rows = tuple(map(_memory_row, shown))
    note = "Memory of the caching allocator, from the start of the first step: the maximum of each interval."
    return Table("Memory over time", columns((), ("ms", "Allocated", "Reserved")), rows, note)


def _memory_row(point: MemoryPoint) -> tuple[Cell, ...]:
    return fixed(point.time_ms), bytes_cell(point.allocated), bytes_cell(point.reserved)


def count_cell(count: float) -> Cell:
    """Runs per step: whole, unless they are few and differ between steps."""
    if 0 < count < 0.05:
        return number(count, "<0.1")
    return number(count, f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}")


def fixed(value: float | None, digits: int = 2, unit: str = "") -> Cell:
    """A number with a fixed number of decimals."""
    return number(value, f"{value:,.{digits}f}{unit}" if value is not None else None)
