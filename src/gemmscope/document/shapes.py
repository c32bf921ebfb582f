"""The Document of a `ShapesResult`."""

from gemmscope import units
from gemmscope.document.common import batch_lines, command_facts, model_facts, phrase, same_model, subject
from gemmscope.document.model import Document, Message, Section
from gemmscope.document.table import Cell, Column, Table, Value, across, grouped, table, write
from gemmscope.results.shapes import Check, ListedGemm, ShapesResult
from gemmscope.workload.ops import gemm_size

MOST_OPS = 14  # of the short view
CHECKED = ("check-equal", "check-of-recurrences", "check-without-recurrences")
LINEAR_KINDS = ("linear", "grouped linear")
WORK = {"Forward FLOPs": "FLOP", "Forward bytes": "B", "Backward FLOPs": "FLOP", "Backward bytes": "B"}


def shapes_document(result: ShapesResult, name: str = "") -> Document:
    """Build the Document of the result."""
    count, flops = sum(gemm.count for gemm in result.gemms), units.si(result.totals.gemm_flops_per_step, "FLOP")
    about, totals = model_facts(result.model, result.run, result.stage), result.totals
    beside = (totals.convolution_flops + totals.batched_gemm_flops) * totals.micro_batches_per_step
    tables = [_gemms(result), _totals(result), _others(result)]
    if result.check is not None and result.check.differences:
        tables.append(_differences(result.check))
    return Document(
        kind="shapes",
        title=f"{result.name}: {result.model.description}" if result.model and result.model.description else result.name,
        subject=subject(result.model, result.run),
        where="one rank",
        answer=phrase("shapes-answer", count=count, flops=flops)
        + (phrase("shapes-beside", flops=units.si(beside, "FLOP")) if beside else ""),
        summary=_summary(result),
        because=(_parameters(result), *(message.text for message in result.findings if message.code in CHECKED)),
        context=tuple(batch_lines(result.run, result.stage)),
        sections=(Section("GEMMs and other work", tuple(tables)),),
        messages=tuple(map(Message.of, result.findings)),
        facts={"Method": (*about, ("derived by", result.derived_by), *command_facts(result))},
        next_purpose=phrase("shapes-next"),
        next_command=same_model("forecast", result, "--gpu b300,h200") if result.gemms else "",
        name=name,
    )


def _parameters(result: ShapesResult) -> str:
    totals = result.totals
    parts = {
        "rounded": totals.parameters if totals.parameters >= 1e6 else None,
        "active": totals.active_parameters if totals.active_parameters != totals.parameters else None,
        "of-rank": totals.parameters_of_rank if totals.parameters_of_rank != totals.parameters else None,
    }
    more = "".join(phrase(f"shapes-parameters-{part}", count=units.parameters(n)) for part, n in parts.items() if n is not None)
    return phrase("shapes-parameters", count=totals.parameters, more=more)


def _groups(gemm: ListedGemm) -> Value:
    return gemm.groups if gemm.groups > 1 else Cell("", 1.0)


def _summary(result: ShapesResult) -> Table:
    """A row for each op and size: the sizes of its forward GEMM, and the FLOPs of all its passes."""
    if result.check is not None and result.check.differences:
        return _differences(result.check)
    # the size of the linear, whichever pass
    ops = grouped(((gemm.op, gemm.groups, *gemm_size(gemm.m, gemm.k, gemm.n, gemm.pass_name)), gemm) for gemm in result.gemms)
    work = {op: sum(gemm.flops * gemm.count for gemm in gemms) for op, gemms in ops.items()}
    shown = sorted(work, key=lambda op: -work[op])[:MOST_OPS]

    left_out = f" {phrase('not-shown', rows=units.counted(len(ops) - len(shown), 'smaller op'))}" if len(ops) > len(shown) else ""
    return table(
        "summary",
        "GEMMs of one micro-batch on one rank",
        [gemms for op, gemms in ops.items() if op in shown],
        Column("Op", lambda gemms: gemms[0].op),
        Column("Forward M x K x N", lambda gemms: gemms[0].shape),
        Column("Passes", lambda gemms: ", ".join(dict.fromkeys(gemm.pass_name for gemm in gemms)), drop=3),
        Column("Groups", lambda gemms: _groups(gemms[0]), "g", drop=1),
        Column("Count", lambda gemms: gemms[0].count, "g", drop=2),
        Column("FLOPs", lambda gemms: sum(gemm.flops * gemm.count for gemm in gemms), "FLOP"),
        Column("Share", lambda gemms: sum(gemm.share for gemm in gemms), "%"),
        note=phrase("shapes-passes") + left_out,
        sparse=True,
    )


def _gemms(result: ShapesResult) -> Table:
    return table(
        "gemms",
        "GEMMs of one micro-batch on one rank",
        result.gemms,
        Column("Op", lambda gemm: gemm.op),
        Column("Pass", lambda gemm: gemm.pass_name),
        Column("M x K x N", lambda gemm: gemm.shape),
        Column("Groups", _groups, "g"),
        Column("Count", lambda gemm: gemm.count, "g"),
        Column("FLOPs each", lambda gemm: gemm.flops, "FLOP"),
        Column("FLOPs", lambda gemm: gemm.flops * gemm.count, "FLOP"),
        Column("Share", lambda gemm: gemm.share, "%"),
    )


def _totals(result: ShapesResult) -> Table:
    """FLOPs per layer, per micro-batch and per step."""
    totals, steps = result.totals, result.totals.micro_batches_per_step

    others = {
        "Attention": totals.attention_flops,
        "Linear attention": totals.scan_flops,
        "Batched GEMMs outside attention": totals.batched_gemm_flops,
        "Convolutions": totals.convolution_flops,
    }
    sums = {"GEMMs": (totals.gemm_flops, totals.gemm_flops_per_step)}
    sums |= {name: (flops, flops * steps) for name, flops in others.items() if flops}
    rows: list[dict[str, Value]] = [
        {"Part": name, "Per micro-batch": once, "Per step": of_step} for name, (once, of_step) in sums.items()
    ]
    return table(
        "flops",
        f"FLOPs on one rank ({units.counted(steps, 'micro-batch')} per step)",
        totals.layers,
        Column("Part", lambda layer: f"GEMMs of one {layer.section}"),
        Column("Layers", lambda layer: layer.layers, "g"),
        Column("Per micro-batch", lambda layer: layer.gemm_flops, "FLOP"),
        Column("Per step", lambda _: None, "FLOP"),
        more=rows,
    )


def _others(result: ShapesResult) -> Table:
    """Everything that is not a GEMM of a linear, summed by name (in a trace, by name and kind)."""
    sums: dict[str, dict[str, float]] = {}
    for op in result.ops:
        if op.kind not in LINEAR_KINDS:
            forward = op.count * op.forward_runs
            work = (
                op.forward_flops * forward,
                op.forward_bytes * forward,
                op.backward_flops * op.count,
                op.backward_bytes * op.count,
            )
            own = sums.setdefault(f"{op.op}: {op.kind}" if result.derived_by == "trace" else op.op, {})
            for name, value in zip(("Count", *WORK), (op.count, *work), strict=True):
                own[name] = own.get(name, 0.0) + value

    return table(
        "others",
        "Everything else (minimum memory traffic in BF16, nothing fused)",
        sums,
        Column[str]("Op", str),
        Column("Count", lambda op: sums[op]["Count"], ".0f"),
        *across(WORK, lambda op, head: write(sums[op][head] or None, WORK[head]), "g"),
    )


def _differences(check: Check) -> Table:
    return table(
        "differences",
        "Differences from the live model",
        check.differences,
        Column("What", lambda difference: difference.what),
        Column("Derived", lambda difference: difference.derived, "g"),
        Column("Traced", lambda difference: difference.traced, "g"),
    )
