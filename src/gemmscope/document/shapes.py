"""The Document of a `ShapesResult`."""

from gemmscope import units
from gemmscope.document.common import batch_lines, command_facts, model_facts, same_model, subject
from gemmscope.document.model import Document, Message, Section
from gemmscope.document.table import NOTHING, Cell, Table, bytes_cell, columns, number, share_cell, without_empty
from gemmscope.results.shapes import Check, ListedGemm, ShapesResult
from gemmscope.workload.ops import gemm_size

GEMM_COLUMNS = columns(("Op", "Pass", "M x K x N"), ("Groups", "Count", "FLOPs each", "FLOPs", "Share"))
OTHER_COLUMNS = columns(("Op",), ("Count", "Forward FLOPs", "Forward bytes", "Backward FLOPs", "Backward bytes"))
MOST_OPS = 14  # of the short view
CHECKED = ("check-equal", "check-of-recurrences", "check-without-recurrences")
LINEAR_KINDS = ("linear", "grouped linear")


def shapes_document(result: ShapesResult, name: str = "") -> Document:
    """Build the Document of the result."""
    count, flops = sum(gemm.count for gemm in result.gemms), units.si(result.totals.gemm_flops_per_step, "FLOP")
    about = model_facts(result.model, result.run, result.stage)
    tables = [_gemms(result), _totals(result), _others(result)]
    if result.check is not None and result.check.differences:
        tables.append(_differences(result.check))
    return Document(
        kind="shapes",
        title=f"{result.name}: {result.model.description}" if result.model and result.model.description else result.name,
        subject=subject(result.model, result.run),
        where="one rank",
        answer=f"One micro-batch runs {count:,} GEMMs on one rank. They need {flops} per training step.",
        summary=_summary(result),
        because=(_parameters(result), *(message.text for message in result.findings if message.code in CHECKED)),
        context=tuple(batch_lines(result.run, result.stage)),
        sections=(Section("GEMMs and other work", tuple(tables)),),
        messages=tuple(map(Message.of, result.findings)),
        facts={"Method": (*about, ("derived by", result.derived_by), *command_facts(result))},
        next_purpose="forecast its time on GPUs you do not have",
        next_command=same_model("forecast", result, "--gpu b300,h200") if result.gemms else "",
        name=name,
    )


def _parameters(result: ShapesResult) -> str:
    totals = result.totals
    rounded = f" ({units.parameters(totals.parameters)})" if totals.parameters >= 1e6 else ""
    text = f"The model has {totals.parameters:,} parameters{rounded}"
    if totals.active_parameters != totals.parameters:
        text += f", {units.parameters(totals.active_parameters)} active per token"
    if totals.parameters_of_rank != totals.parameters:
        text += f"; this rank holds {units.parameters(totals.parameters_of_rank)}"
    return f"{text}."


def _summary(result: ShapesResult) -> Table:
    """A row for each op and size: the sizes of its forward GEMM, and the FLOPs of all its passes."""
    if result.check is not None and result.check.differences:
        return _differences(result.check)
    ops: dict[tuple[object, ...], list[ListedGemm]] = {}
    for gemm in result.gemms:
        size = gemm_size(gemm.m, gemm.k, gemm.n, gemm.pass_name)  # of the linear, whichever pass
        ops.setdefault((gemm.op, gemm.groups, *size), []).append(gemm)
    work = {op: sum(gemm.flops * gemm.count for gemm in gemms) for op, gemms in ops.items()}
    shown = sorted(work, key=lambda op: -work[op])[:MOST_OPS]
    rows = []
    for op, gemms in ops.items():
        if op in shown:
            first, passes = gemms[0], list(dict.fromkeys(gemm.pass_name for gemm in gemms))
            rows.append(
                (
                    *(Cell(first.op), Cell(first.shape), Cell(", ".join(passes))),
                    number(first.groups) if first.groups > 1 else Cell("", 1.0),
                    *(number(first.count), _flops(work[op]), share_cell(sum(gemm.share for gemm in gemms))),
                )
            )
    left_out = f" {units.counted(len(ops) - len(shown), 'smaller op')} not shown." if len(ops) > len(shown) else ""
    note = f"dgrad is M x N x K, wgrad K x M x N.{left_out}"
    dropped = {"Passes": 3, "Groups": 1, "Count": 2}
    heads = columns(("Op", "Forward M x K x N", "Passes"), ("Groups", "Count", "FLOPs", "Share"), dropped)
    return without_empty(Table("GEMMs of one micro-batch on one rank", heads, tuple(rows), note))


def _gemms(result: ShapesResult) -> Table:
    rows = tuple(
        (
            *(Cell(gemm.op), Cell(gemm.pass_name), Cell(gemm.shape)),
            number(gemm.groups) if gemm.groups > 1 else Cell("", 1.0),
            *(number(gemm.count), _flops(gemm.flops), _flops(gemm.flops * gemm.count), share_cell(gemm.share)),
        )
        for gemm in result.gemms
    )
    return Table("GEMMs of one micro-batch on one rank", GEMM_COLUMNS, rows)


def _totals(result: ShapesResult) -> Table:
    """FLOPs per layer, per micro-batch and per step."""
    totals, steps = result.totals, result.totals.micro_batches_per_step
    rows = [
        *(
            (Cell(f"GEMMs of one {layer.section}"), number(layer.layers), _flops(layer.gemm_flops), NOTHING)
            for layer in totals.layers
        ),
        (Cell("GEMMs"), NOTHING, _flops(totals.gemm_flops), _flops(totals.gemm_flops_per_step)),
    ]
    if totals.attention_flops:
        attention = totals.attention_flops
        rows.append((Cell("Attention"), NOTHING, _flops(attention), _flops(attention * steps)))
    if totals.scan_flops:
        scans = totals.scan_flops
        rows.append((Cell("Linear attention"), NOTHING, _flops(scans), _flops(scans * steps)))
    if totals.batched_gemm_flops:
        batched = totals.batched_gemm_flops
        rows.append((Cell("Batched GEMMs outside attention"), NOTHING, _flops(batched), _flops(batched * steps)))
    title = f"FLOPs on one rank ({units.counted(steps, 'micro-batch')} per step)"
    return Table(title, columns(("Part",), ("Layers", "Per micro-batch", "Per step")), tuple(rows))


def _flops(value: float) -> Cell:
    return Cell(units.si(value, "FLOP"), float(value))


def _others(result: ShapesResult) -> Table:
    """Everything that is not a GEMM of a linear, summed by name (in a trace, by name and kind)."""
    sums: dict[str, list[float]] = {}
    traced = result.derived_by == "trace"
    for op in result.ops:
        if op.kind not in LINEAR_KINDS:
            forward = op.count * op.forward_runs
            work = [float(op.count), op.forward_flops * forward, op.forward_bytes * forward]
            work += [op.backward_flops * op.count, op.backward_bytes * op.count]
            name = f"{op.op}: {op.kind}" if traced else op.op
            sums[name] = [total + value for total, value in zip(sums.get(name, [0.0] * 5), work, strict=True)]
    rows = []
    for name, (count, *work) in sums.items():
        cells = [cell(value) if value else NOTHING for cell, value in zip((_flops, bytes_cell) * 2, work, strict=True)]
        rows.append((Cell(name), number(count, f"{count:.0f}"), *cells))
    return Table("Everything else (minimum memory traffic in BF16, nothing fused)", OTHER_COLUMNS, tuple(rows))


def _differences(check: Check) -> Table:
    rows = tuple(
        (Cell(difference.what), number(difference.derived), number(difference.traced)) for difference in check.differences
    )
    return Table("Differences from the live model", columns(("What",), ("Derived", "Traced")), rows)
