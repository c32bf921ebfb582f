"""The tables of an `ExplainResult`: where the time goes, GEMMs, causes, attention, collectives, kernels, launches, memory."""

import re
from collections.abc import Sequence

from gemmscope import units
from gemmscope.document.common import notes, phrase
from gemmscope.document.table import Cell, Column, Table, Value, table, write
from gemmscope.parts import StepPart
from gemmscope.results.explain import (
    AttentionTotal,
    Cause,
    CollectiveTotal,
    ExplainResult,
    GemmShapeTotal,
    PartComparison,
    RankTime,
    StepAccount,
    StepComparison,
    TopKernel,
    TracedStep,
    UnknownKernel,
)

MOST_UNKNOWN = 10  # kernels of unknown class that are listed one by one
MOST_STEPS = 60  # that are listed one by one
MOST_ROWS = 20  # of shapes, one by one
LONGEST_NAME = 46  # characters of a kernel
UNKNOWN = 0.02  # of the time of GEMMs: if the sizes of more are not recorded, a row says so
FUNCTOR = re.compile(r"\w*(?:Functor|_kernel_cuda|Ops\b|NormTwo|MeanOps)\w*")
LONGEST_FRAME = 60
HOST: StepPart = "idle, host-bound"
LEAST_REST = 0.002  # of the step
PASSES = ("fprop", "dgrad", "wgrad", "recomputed")


# --- where the time goes --------------------------------------------------------------------------------------------------


def _shares(name: str, title: str, head: str, times_ms: dict[str, float], step_ms: float, share: str, note: str = "") -> Table:
    """Times by name, and their shares of the step."""
    return table(
        name,
        title,
        times_ms,
        Column[str](head, str),
        Column("ms per step", lambda name: times_ms[name], ".2f"),
        Column(share, lambda name: times_ms[name] / step_ms, "%"),
        note=note,
    )


def parts_table(account: StepAccount) -> Table:
    """The parts of the step, the longest first."""
    times: dict[str, float] = {
        part: time for part, time in sorted(account.parts_ms.items(), key=lambda part: -part[1]) if time > 0
    }
    return _shares("parts", "Where the time of a step goes", "Part", times, account.step_ms, "Share of step")


def classes_table(account: StepAccount) -> Table:
    """Time by class of kernel."""
    times = {**account.classes_ms, "total": sum(account.classes_ms.values())}
    return _shares("classes", "By class of kernel", "Class", times, account.step_ms, "Share", phrase("explain-fused-casts"))


def idle_table(account: StepAccount) -> Table:
    """Idle time by reason."""
    times = {why: time for why, time in account.idle_ms.items() if time > 0}
    return _shares("idle_reasons", "Idle time by reason", "Reason", times, account.step_ms, "Share of step")


def steps_table(each_step: Sequence[TracedStep]) -> Table:
    """A row for each step, if there are several; if there are very many, only the slowest."""
    steps = each_step if len(each_step) > 1 else ()
    slowest = sorted(range(len(steps)), key=lambda place: -steps[place].time_ms)[:MOST_STEPS]

    hidden = len(steps) - len(slowest)
    return table(
        "steps",
        "Steps",
        [steps[place] for place in sorted(slowest)],
        Column("Step", lambda step: step.name),
        Column("Extra time of slow steps", _remark),
        Column("ms", lambda step: step.time_ms, ".2f"),
        Column("GPU busy, ms", lambda step: step.busy_ms, ".2f"),
        Column("GPU idle, ms", lambda step: step.idle_ms, ".2f"),
        note=phrase("explain-slowest-steps", shown=MOST_STEPS, steps=len(steps), hidden=hidden) if hidden else "",
    )


def _remark(step: TracedStep) -> str:
    """What makes a slow step slow, and whether it counts."""
    extra = f"{step.extra}: {step.extra_ms:+.1f} ms" if step.extra else "slow" if step.slow else ""
    return "; ".join(filter(None, [extra, "" if step.averaged else "excluded from the averages"]))


def numbers_table(result: ExplainResult) -> Table:
    """The numbers of one step."""
    account = result.account
    casts = account.quantization_kernels
    values: dict[str, tuple[Value, str]] = {
        "GPU busy, ms": (account.busy_ms, ".2f"),
        "GPU busy, share of the step": (account.busy_share, "%"),
        "GPU idle, ms": (sum(account.idle_ms.values()), ".2f"),
        "GPU busy with kernels that were not recorded, ms": (account.unrecorded_ms, ".2f"),
        "communication, ms": (account.communication_ms, ".2f"),
        "communication hidden behind computation, ms": (account.hidden_ms, ".2f"),
        "communication hidden behind computation, share of it": (account.hidden_share, "%"),
        "several kernels at once, ms": (account.overlapped_ms, ".2f"),
        "kernels and copies": (account.kernels, ".0f"),
        "launches": (account.launches, ".0f"),
        "micro-batches": (account.micro_batches, "g"),
        "quantization kernels": (casts, ".0f"),
        "quantization kernels per low-precision GEMM": (casts / account.low_gemms if account.low_gemms else None, ".1f"),
        "quantization kernels per micro-batch": (casts / account.micro_batches, ".0f"),
        f"linears in low precision, share of {result.low_share_of} (without the output head)": (result.low_share, "%"),
        "GPU time in kernels of a known class": (account.named_share, "%"),
    }
    rows = [(name, write(value, unit)) for name, (value, unit) in values.items()]
    return table("numbers", "Per step", rows, Column("What", lambda row: row[0]), Column("Value", lambda row: row[1], "g"))


def unknown_table(unknown: Sequence[UnknownKernel]) -> Table:
    """Kernels of no known class: the longest, and the others together."""
    rest = unknown[MOST_UNKNOWN:]
    others: dict[str, Value] = {
        "Kernel": f"{len(rest)} more",
        "ms per step": sum(kernel.time_ms for kernel in rest),
        "Runs per step": sum(kernel.count for kernel in rest),
    }
    return table(
        "unknown_kernels",
        "Kernels of unknown class",
        unknown[:MOST_UNKNOWN],
        Column("Kernel", lambda kernel: kernel.name),
        Column("ms per step", lambda kernel: kernel.time_ms, ".3f"),
        Column("Runs per step", lambda kernel: kernel.count, "runs, decimal"),
        more=[others] if rest else [],
    )


# --- GEMMs ----------------------------------------------------------------------------------------------------------------


def gemms_table(account: StepAccount) -> Table:
    """The GEMMs of each precision."""
    gemms, total = account.gemms, sum(row.flops for row in account.gemms)
    of_attention = sum(row.time_ms - account.classes_ms.get(f"GEMM {row.precision}", 0.0) for row in gemms)
    return table(
        "gemms_by_precision",
        "GEMMs by precision, per step",
        gemms,
        Column("Precision", lambda row: row.precision),
        Column("GEMMs", lambda row: row.count, ".0f"),
        Column("ms", lambda row: row.time_ms, ".2f"),
        Column("TFLOP", lambda row: row.flops / 1e12 if row.flops > 0 else None, ".2f"),
        Column("Share of FLOPs", lambda row: row.flops / total if all(one.flops for one in gemms) else None, "%"),
        Column("TFLOP/s", lambda row: row.tflops, ".0f"),
        note=phrase("explain-gemms-of-attention", time=of_attention) if of_attention > UNKNOWN * account.busy_ms else "",
    )


def gemm_shape_table(result: ExplainResult) -> Table:
    """The shapes that take the most time, and the others together."""
    shapes = result.tables.gemm_shapes

    rest, every_ms = shapes[MOST_ROWS:], sum(row.time_ms for row in result.account.gemms)
    unknown_ms = every_ms - sum(row.time_ms for row in shapes)
    unknown = sum(row.count for row in result.account.gemms) - sum(row.count for row in shapes)
    others = {
        f"{len(rest)} more shapes": (sum(row.count for row in rest), sum(row.time_ms for row in rest), bool(rest)),
        "size not recorded": (max(unknown, 0.0), unknown_ms, bool(shapes) and unknown_ms > UNKNOWN * every_ms and unknown >= 0.5),
    }
    note = {
        "explain-alignment": True,
        "explain-sustained": any(row.sustained_share is not None for row in shapes),
        "explain-better-recipe": any(row.better for row in shapes),
    }
    more = [{"M x N x K": name, "GEMMs": count, "ms": time_ms} for name, (count, time_ms, applies) in others.items() if applies]
    return table(
        "gemms_by_shape",
        "GEMMs by shape, per step",
        shapes[:MOST_ROWS],
        Column("M x N x K", _size),
        Column("Pass", _passes),
        Column("Precision", lambda row: row.precision),
        Column("GEMMs", lambda row: row.count, "runs"),
        Column("ms", lambda row: row.time_ms, ",.3f"),
        Column("TFLOP/s", lambda row: _rate(row.tflops), ",.0f"),
        Column("Of sustained", lambda row: row.sustained_share, "%, whole"),
        Column("Of roofline", lambda row: row.roofline_share, "%, whole"),
        Column("Bound by", lambda row: row.bound or None, "g"),
        Column(
            "Alignment",
            lambda row: Cell(str(row.alignment_bytes), row.alignment_bytes, level="warning" if row.alignment_bytes < 16 else ""),
            "d",
        ),
        Column("Better recipe", lambda row: row.better or None, "g"),
        Column("ms with it", lambda row: row.better_ms, ",.3f"),
        Column(
            "Speedup",
            lambda row: Cell(f"{row.time_ms / row.better_ms:,.2f}x", row.time_ms / row.better_ms) if row.better_ms else None,
            "x",
        ),
        note=notes(note),
        more=more,
        sparse=True,
    )


def _size(row: GemmShapeTotal) -> str:
    size = f"{row.m} x {row.n} x {row.k}"
    return f"{row.batch} x ({size})" if row.batch > 1 else size


def _passes(row: GemmShapeTotal) -> str | None:
    return "all" if (set(PASSES[:3]) == set(row.passes)) else ", ".join(name for name in PASSES if name in row.passes) or None


def _rate(tflops: float | None) -> Value:
    """TFLOP/s with a decimal if they are few."""
    return Cell(f"{tflops:,.1f}", tflops) if tflops is not None and tflops < 10 else tflops


# --- causes and comparisons -----------------------------------------------------------------------------------------------


def causes_table(result: ExplainResult, *, short: bool = False) -> Table:
    """What each cause costs; evidence and advice are messages."""
    step_ms = result.account.step_ms

    return table(
        "why" if short else "causes",
        "Why the step is not faster, per step" if short else "Causes, by the speedup from fixing them",
        enumerate(result.causes, start=1),
        Column("Cause", lambda row: f"{row[0]}. {row[1].title}"),
        Column("Where", lambda row: row[1].where, drop=2),
        Column("Cost, ms" if short else "Cost, ms per step", lambda row: row[1].cost_ms, ".2f"),
        Column("Share" if short else "Share of step", lambda row: row[1].cost_ms / step_ms, "%", drop=1),
        Column("Speedup if fixed", lambda row: speedup_cell(row[1]), "x"),
        sparse=short,
    )


def speedup_cell(cause: Cause) -> Cell:
    """What fixing a cause gains; the least and the largest gain where the trace cannot show it."""
    low, high = cause.speedup_range or (cause.speedup_without, cause.speedup_without)
    least = f"{low:.2f}x to " if f"{low:.2f}" != "1.00" else "up to "
    return Cell(f"{least if high > low else ''}{high:.2f}x", cause.speedup_without, low, high)


def comparison_table(comparison: StepComparison) -> Table:
    """Part by part, and the sum of the parts that both sides have."""
    known = [part for part in comparison.parts if part.expected_ms is not None]
    expected, actual = sum(part.expected_ms or 0.0 for part in known), sum(part.trace_ms for part in known)
    speedups = [part.speedup for part in comparison.parts]
    speedup = speedups[-1] if any(speedups) else expected / actual if actual else None
    total = PartComparison(part="total", expected_ms=expected, trace_ms=actual, speedup=speedup)
    return table(
        f"compared {comparison.expected}",
        comparison.title,
        (*comparison.parts, total),
        Column("Part", lambda part: part.part),
        Column(f"{comparison.expected}, ms", lambda part: part.expected_ms, ".2f"),
        Column("this trace, ms", lambda part: part.trace_ms, ".2f"),
        Column("Difference, ms", lambda part: part.difference_ms, "+.2f"),
        Column(
            "Speedup so far",
            lambda part: Cell(f"{part.speedup:.2f}x", part.speedup) if part.speedup is not None else None,
            "x",
        ),
    )


# --- attention, collectives, kernels --------------------------------------------------------------------------------------


def attention_table(totals: Sequence[AttentionTotal]) -> Table:
    """The attention kernels of each shape and pass."""

    def sizes(row: AttentionTotal) -> str | None:
        shape = (row.batch, row.heads, row.queries, row.keys, row.head_dim)
        return " x ".join(map(str, shape)) if None not in shape else None

    note = {
        "explain-causal": any(row.tflops is not None for row in totals),
        "explain-faster-attention": any(row.faster for row in totals),
    }
    return table(
        "attention",
        "Attention, per step",
        totals[:MOST_ROWS],
        Column("Implementation", lambda row: row.backend),
        Column("Pass", lambda row: row.pass_name or None),
        Column("Batch x heads x queries x keys x head size", sizes),
        Column("Causal", lambda row: None if row.causal is None else "yes" if row.causal else "no"),
        Column("Precision", lambda row: row.precision or None),
        Column("Runs", lambda row: row.count, "runs"),
        Column("ms", lambda row: row.time_ms, ",.3f"),
        Column("TFLOP/s", lambda row: _rate(row.tflops), ",.0f"),
        Column("Faster", lambda row: row.faster or None, "g"),
        Column("ms with it", lambda row: row.faster_ms, ",.3f"),
        note=notes(note),
        sparse=True,
    )


def collectives_table(totals: Sequence[CollectiveTotal]) -> Table:
    """The collectives of each kind, process group and size."""

    rest = totals[MOST_ROWS:]
    sums: dict[str, Value] = {
        "Collective": f"{len(rest)} more",
        "Runs": sum(total.count for total in rest),
        "ms": sum(total.time_ms for total in rest),
        "Exposed ms": sum(total.exposed_ms for total in rest),
    }
    from_ranks = any(total.waiting_from == "other ranks" for total in totals)
    return table(
        "collectives",
        "Collectives, per step",
        totals[:MOST_ROWS],
        Column("Collective", lambda total: total.kind),
        Column("Process group", lambda total: total.group or None),
        Column("Ranks", lambda total: total.ranks, "g"),
        Column("Runs", lambda total: total.count, "runs"),
        Column("Message", lambda total: total.message_bytes, "B"),
        Column("ms", lambda total: total.time_ms, ",.3f"),
        Column("Exposed ms", lambda total: total.exposed_ms, ",.3f"),
        Column("Waiting ms", lambda total: total.waiting_ms, ",.3f"),
        Column("Transfer ms", lambda total: None if total.waiting_ms is None else total.time_ms - total.waiting_ms, ",.3f"),
        Column("Algorithm GB/s", lambda total: total.algorithm_gbps, ",.1f"),
        Column("Bus GB/s", lambda total: total.bus_gbps, ",.1f"),
        note=phrase("explain-waiting-of-ranks" if from_ranks else "explain-waiting"),
        more=[sums] if rest else [],
        sparse=True,
    )


def kernels_table(kernels: Sequence[TopKernel], step_ms: float) -> Table:
    """The kernels that take the most time."""
    return table(
        "kernels",
        "Longest kernels, per step",
        kernels,
        Column("Kernel", lambda kernel: kernel_label(kernel.name)),
        Column("Class", lambda kernel: kernel.kernel_class),
        Column("Runs", lambda kernel: kernel.count, "runs"),
        Column("ms", lambda kernel: kernel.time_ms, ",.3f"),
        Column("Share", lambda kernel: kernel.time_ms / step_ms, "%"),
        Column("Mean µs", lambda kernel: kernel.mean_us, ",.1f"),
    )


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


def idle_frames_table(result: ExplainResult) -> Table:
    """Idle time of the GPU by what the CPU did meanwhile."""
    step_ms, frames = result.account.step_ms, result.tables.idle_frames

    rest_ms = result.account.parts_ms.get(HOST, 0.0) - sum(frame.time_ms for frame in frames)
    rest: dict[str, Value] = {
        "CPU activity": "other",
        "Idle ms": rest_ms,
        "Share of step": rest_ms / step_ms if step_ms else None,
    }
    return table(
        "idle",
        "GPU idle time by CPU activity, per step",
        frames,
        Column("CPU activity", lambda frame: _frame_name(frame.frame)),
        Column("Kind", lambda frame: frame.kind),
        Column("Gaps", lambda frame: frame.gaps, "runs"),
        Column("Idle ms", lambda frame: frame.time_ms, ",.3f"),
        Column("Share of step", lambda frame: frame.time_ms / step_ms, "%"),
        note=phrase("explain-idle-frames"),
        more=[rest] if frames and rest_ms > LEAST_REST * step_ms else [],
    )


def _frame_name(name: str) -> str:
    """A long name without its start, which is the same for most paths.

    >>> _frame_name("torch/nn/modules/module.py(1773): _wrapped_call_impl"), _frame_name("")
    ('torch/nn/modules/module.py(1773): _wrapped_call_impl', '-')
    """
    return (name if len(name) <= LONGEST_FRAME else f"…{name[1 - LONGEST_FRAME :]}") or "-"


def ranks_table(result: ExplainResult) -> Table:
    """A row for each rank. Columns about waiting are left out if the ranks have no collectives in common."""

    def name(rank: RankTime) -> Cell:
        return Cell(f"{rank.rank}, straggler" if rank.rank == result.straggler else str(rank.rank), rank.rank)

    return table(
        "ranks",
        "Ranks, per step",
        result.ranks,
        Column("Rank", name),
        Column("Step ms", lambda rank: rank.step_ms, ".2f"),
        Column("Computing ms", lambda rank: rank.computing_ms, ".2f"),
        Column("Exposed communication ms", lambda rank: rank.exposed_ms, ".2f"),
        Column("Idle ms", lambda rank: rank.idle_ms, ".2f"),
        Column("Waits ms", lambda rank: rank.waiting_ms, ".2f"),
        Column("Last to arrive", lambda rank: rank.last_to_arrive, ".1f"),
        Column("Others wait for it ms", lambda rank: rank.delay_ms, ".2f"),
        note=phrase("explain-waits") if result.straggler is not None else "",
        sparse=True,
    )
