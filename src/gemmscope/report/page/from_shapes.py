"""A run file of `gemmscope shapes` as a part of a report: which products one rank runs."""

from __future__ import annotations

from gemmscope.report.page.facts import batch_facts, command_facts, subject
from gemmscope.report.page.parts import Cell, Finding, RunPart, Table, noted
from gemmscope.report.units import parameters, percent, si
from gemmscope.store.runfile import ShapesFile

COLUMNS = {"Op": False, "Pass": False, "M x K x N": False, "Groups": True, "Count": True, "FLOPs each": True, "Share": True}


def from_shapes(file: ShapesFile, name: str) -> RunPart:
    """Everything that the file says."""
    totals = file.totals
    count = sum(gemm.count for gemm in file.gemms)
    step = si(totals.gemm_flops_per_step, "FLOP")
    rows = tuple(
        (
            Cell(gemm.op), Cell(gemm.pass_name), Cell(f"{gemm.m}x{gemm.k}x{gemm.n}", float(gemm.flops)),
            Cell(str(gemm.groups), gemm.groups), Cell(str(gemm.count), gemm.count),
            Cell(si(gemm.flops, "FLOP"), float(gemm.flops)), Cell(percent(gemm.share), gemm.share),
        )
        for gemm in file.gemms
    )  # fmt: skip
    check = [Finding("note", f"equal to the live {file.check.model_class}")] if file.check and file.check.equal else []
    if file.check and not file.check.equal:
        check = [Finding("warning", f"{len(file.check.differences)} differences to the live {file.check.model_class}")]
    return RunPart(
        kind="shapes",
        name=name,
        subject=subject(file.model, file.run),
        where="one rank",
        answer=f"One micro-batch runs {count:,} GEMMs on one rank; a step takes {step} in them.",
        because=(
            f"Attention takes {si(totals.attention_flops_per_step, 'FLOP')} a step. The model has "
            f"{parameters(totals.parameters)} parameters, {parameters(totals.parameters_of_rank)} on this rank.",
        ),
        ops=(Table("GEMMs of one micro-batch on one rank", COLUMNS, rows),),
        findings=(*check, *map(noted, file.notes)),
        method=(
            *batch_facts(file.model, file.run),
            ("derived by", file.derived_by),
            *command_facts(file.command, file.gemmscope_version),
        ),
    )
