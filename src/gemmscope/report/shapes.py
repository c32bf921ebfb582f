"""The result of `gemmscope shapes` as rows and sentences, which the terminal, Markdown and CSV then lay out."""

from __future__ import annotations

from dataclasses import dataclass

from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.report.units import parameters, percent, si
from gemmscope.workload.derive import Workload
from gemmscope.workload.ops import Linear, Op, Work
from gemmscope.workload.summary import Totals

GEMM_COLUMNS = ("Op", "Pass", "M x K x N", "Groups", "Count", "FLOPs each", "FLOPs", "Share")
OTHER_COLUMNS = ("Op", "Count", "Forward FLOPs", "Forward bytes", "Backward FLOPs", "Backward bytes")
# Aligned left; numbers stand right.
TEXT_COLUMNS = frozenset({"Op", "Pass", "Name", "Description", "Backend", "Measured", "Recipe", "Over", "Row", "Verdict"})


@dataclass(frozen=True)
class Table:
    """A title, column names, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def gemm_table(workload: Workload, totals: Totals) -> Table:
    """Every GEMM of one micro-batch on one rank. An op's name is written once, at its first pass."""
    rows = []
    previous = ""
    for gemm in workload.gemms():
        rows.append(
            (
                "" if gemm.op == previous else gemm.op,
                gemm.pass_name,
                gemm.shape,
                str(gemm.groups) if gemm.groups > 1 else "",
                str(gemm.count),
                si(gemm.flops, "FLOP"),
                si(gemm.flops * gemm.count, "FLOP"),
                percent(gemm.flops * gemm.count / totals.gemm_flops) if totals.gemm_flops else "",
            )
        )
        previous = gemm.op
    return Table("GEMMs of one micro-batch on one rank", GEMM_COLUMNS, tuple(rows))


def other_table(workload: Workload) -> Table:
    """Everything that is no GEMM of a linear, equal names added up."""
    sums: dict[str, tuple[int, Work, Work]] = {}
    for op in workload.ops:
        if not isinstance(op, Linear):
            count, forward, backward = sums.get(op.name, (0, Work(), Work()))
            sums[op.name] = (count + op.count, forward + _forward(op), backward + op.backward().times(op.count))
    rows = tuple(
        (name, str(count), _flops(forward), _bytes(forward), _flops(backward), _bytes(backward))
        for name, (count, forward, backward) in sums.items()
    )
    return Table("Everything else (least traffic in bf16, nothing fused)", OTHER_COLUMNS, rows)


def _forward(op: Op) -> Work:
    return op.forward().times(op.forward_runs * op.count)


def _flops(work: Work) -> str:
    return si(work.flops, "FLOP") if work.flops else "-"


def _bytes(work: Work) -> str:
    return si(work.bytes_moved, "B") if work.bytes_moved else "-"


def headline(name: str, model: ModelSpec | None, run: RunSpec, workload: Workload) -> list[str]:
    """Which model, which batch, which rank."""
    lines = [name]
    if model is not None:
        lines[0] += f": {model.describe()}"
    split = f" / cp {run.cp}" if run.cp > 1 else ""
    lines.append(f"micro-batch {run.micro_batch_size} x sequence {run.sequence_length}{split} = {run.tokens} tokens")
    parts = [f"{name} {getattr(run, name)}" for name in ("tp", "cp", "pp", "ep") if getattr(run, name) > 1]
    if run.expert_tp != run.tp:
        parts.append(f"etp {run.expert_tp}")
    if run.sequence_parallel:
        parts.append("sequence parallel")
    if run.pp > 1:
        parts.append(f"stage {workload.stage}")
    if run.pp_layers:
        parts.append(f"layers {','.join(map(str, run.pp_layers))}")
    if run.imbalance != 1:
        parts.append(f"imbalance {run.imbalance:g}")
    if run.recompute != "none":
        parts.append(f"recompute {run.recompute}")
    if run.separate_projections:
        parts.append("separate projections")
    return [*lines, ", ".join(parts)] if parts else lines


def closing(totals: Totals) -> list[str]:
    """Totals per layer, per micro-batch and per step, and the parameters, in sentences."""
    lines = [
        f"{layer.section}: {si(layer.gemm_flops, 'FLOP')} of GEMMs per layer, {layer.layers} layers" for layer in totals.layers
    ]
    rest = "attention" if totals.layers else "products without a weight, attention's among them"
    step = f"micro-batch: {si(totals.gemm_flops, 'FLOP')} of GEMMs, {si(totals.attention_flops, 'FLOP')} of {rest}"
    lines.append(step)
    count = totals.micro_batches_per_step
    lines.append(
        f"step: {si(totals.gemm_flops_per_step, 'FLOP')} of GEMMs, {si(totals.attention_flops * count, 'FLOP')} of attention "
        f"({count} micro-batch{'es' if count > 1 else ''} per step)"
    )
    held = f"parameters: {totals.parameters:,} ({parameters(totals.parameters)})"
    if totals.active_parameters != totals.parameters:
        held += f", {parameters(totals.active_parameters)} active per token"
    if totals.parameters_of_rank != totals.parameters:
        held += f"; {parameters(totals.parameters_of_rank)} on this rank"
    return [*lines, held]
