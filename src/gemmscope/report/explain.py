"""A diagnosis as tables and sentences."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from gemmscope.explain.cause import short_name
from gemmscope.explain.diagnose import Diagnosis
from gemmscope.explain.pair import Pair
from gemmscope.explain.ranks import RankRow
from gemmscope.report.shapes import Table
from gemmscope.report.units import percent


def above(found: Diagnosis) -> list[str]:
    """The answer first, then what was looked at."""
    trace, steps = found.trace, found.seen.steps
    gpu = trace.gpu_name or "an unnamed GPU"
    rank = f", rank {trace.rank} of {trace.world_size}" if trace.rank is not None and trace.world_size > 1 else ""
    return [
        found.words,
        f"{trace.path}: {gpu}{rank}; {len(steps.chosen)} steps of {found.account.step_ms:.2f} ms, found by {steps.found_by}",
    ]


def tables(found: Diagnosis) -> list[Table]:
    """Where the time goes, which products ran, what it costs."""
    account = found.account
    classes = [(name, f"{time:.2f}", percent(time / account.step_ms)) for name, time in account.classes.items()]
    classes.append(
        ("sum: the step", f"{sum(account.classes.values()):.2f}", percent(sum(account.classes.values()) / account.step_ms))
    )
    made = [
        Table("where a step's time goes", ("Name", "ms", "share"), tuple(classes)),
        Table("products by precision, per step", ("Name", "count", "ms", "TFLOP", "of FLOPs", "TFLOP/s"), _census(found)),
    ]
    if found.causes:
        rows = [
            (f"{number}. {cause.title}", f"{cause.cost_ms:.1f}", f"{cause.speedup(account.step_ms):.2f}x")
            for number, cause in enumerate(found.causes, start=1)
        ]
        made.append(Table("why it is not faster", ("Name", "costs ms", "without it"), tuple(rows)))
    return made


def _census(found: Diagnosis) -> tuple[tuple[str, ...], ...]:
    rows, total = [], sum(row.flops for row in found.account.census)
    for row in found.account.census:
        known = row.flops > 0
        rows.append(
            (
                row.precision,
                f"{row.count:.0f}",
                f"{row.time_ms:.2f}",
                f"{row.flops / 1e12:.2f}" if known else "?",
                percent(row.flops / total) if known else "?",
                f"{row.flops / row.time_ms / 1e9:.0f}" if known and row.time_ms else "?",
            )
        )
    return tuple(rows)


def below(found: Diagnosis) -> list[str]:
    """Evidence and advice, cause by cause; then what was counted, and what is not known."""
    account, evidence = found.account, found.evidence
    lines: list[str] = []
    for number, cause in enumerate(found.causes, start=1):
        where = f" ({cause.where})" if cause.where else ""
        lines.append(f"{number}. {cause.title}{where}: {'; '.join(cause.evidence)}")
        if cause.kernels:
            lines.append(f"   kernels: {', '.join(cause.kernels)}")
        lines.append(f"   what to do: {'; '.join(cause.advice(evidence.framework))}")
    lines += [
        f"GPU busy {account.busy_ms:.2f} ms ({percent(1 - account.idle_share)}), idle {sum(account.idle.values()):.2f} ms"
        + (f": {', '.join(f'{why} {time:.2f}' for why, time in account.idle.items())}" if account.idle else ""),
        f"{account.kernels:.0f} kernels and copies per step from {account.launches:.0f} launches, "
        f"{account.micro_batches} micro-batch{'es' if account.micro_batches != 1 else ''}; "
        f"{account.kernels_per_product:.1f} kernels per product, its casts included",
        f"{account.casts:.0f} quantization kernels, {account.casts / max(account.low_products, 1):.1f} for each low-precision "
        f"product, {account.casts / account.micro_batches:.0f} per micro-batch",
        f"{percent(evidence.low_share)} {evidence.counted_in} of the linears run low (the output head left out)",
    ]  # fmt: skip
    if account.hidden_ms:
        lines.append(f"communication hidden behind computation: {account.hidden_ms:.2f} ms")
    if account.overlapped_ms > 0.01 * account.step_ms:
        lines.append(f"several kernels computed at once for {account.overlapped_ms:.2f} ms; each has its share of that time")
    lines.append(f"{percent(account.named_share)} of GPU time is in a named class")
    lines += [
        f"unknown kernel: {short_name(name)}, {time:.3f} ms in {count:.0f} runs" for name, time, count in account.unknown[:10]
    ]
    if len(account.unknown) > 10:
        rest = account.unknown[10:]
        lines.append(f"and {len(rest)} more unknown kernels, {sum(time for _, time, _ in rest):.3f} ms together")
    return lines + [f"note: {note}" for note in account.notes]


def pair_table(pair: Pair) -> Table:
    """Row by row, and what the differences sum to."""
    rows = []
    for held in pair.rows:
        difference = held.difference_ms
        rows.append(
            (
                held.row,
                "-" if held.expected_ms is None else f"{held.expected_ms:.2f}",
                f"{held.found_ms:.2f}",
                "" if difference is None else f"{difference:+.2f}",
                "" if held.speedup is None else f"{held.speedup:.2f}x",
            )
        )
    known = [held for held in pair.rows if held.expected_ms is not None]
    left, right = sum(held.expected_ms or 0.0 for held in known), sum(held.found_ms for held in known)
    rows.append(("sum", f"{left:.2f}", f"{right:.2f}", f"{right - left:+.2f}", f"{left / right:.2f}x" if right else ""))
    return Table(pair.title, ("Name", f"{pair.expected} ms", "this trace ms", "difference", "speedup down to here"), tuple(rows))


def rank_table(rows: Sequence[RankRow]) -> Table:
    """One line per rank."""
    cells = [
        (str(row.rank), *(f"{time:.2f}" for time in (row.step_ms, row.computing_ms, row.exposed_ms, row.idle_ms))) for row in rows
    ]
    return Table("ranks", ("rank", "step ms", "computing ms", "communication exposed ms", "idle ms"), tuple(cells))


def as_csv(found: Diagnosis) -> str:
    """One line per class and per cause, with plain numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["kind", "name", "ms", "share_of_step", "count", "flops", "speedup_without", "evidence"])
    step = found.account.step_ms
    for name, time in found.account.classes.items():
        writer.writerow(["class", name, time, time / step, "", "", "", ""])
    for row in found.account.census:
        writer.writerow(["products", row.precision, row.time_ms, row.time_ms / step, row.count, row.flops, "", ""])
    for cause in found.causes:
        cells = [cause.key, cause.cost_ms, cause.cost_ms / step, "", "", cause.speedup(step), "; ".join(cause.evidence)]
        writer.writerow(["cause", *cells])
    for name, time, count in found.account.unknown:
        writer.writerow(["unknown kernel", name, time, time / step, count, "", "", ""])
    return out.getvalue()
