"""`gemmscope shapes`: which GEMMs a model runs. No GPU; no torch, unless a model is traced."""

from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, Notes, applicable
from gemmscope.job.load import ModelRun
from gemmscope.job.rank_workload import RankWorkload, rank_workload
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.options.estimating import ShapesOptions
from gemmscope.progress import Reporter
from gemmscope.results.shapes import Check, ListedBatchedGemm, ListedGemm, ListedOp, ShapesResult
from gemmscope.run_context import PLAIN, RunContext
from gemmscope.workload.check import comparable_run, differences, has_fallback, recurrences
from gemmscope.workload.ops import Attention, BatchedGemm, GroupedLinear, Op
from gemmscope.workload.sparse import IndexScores
from gemmscope.workload.summary import totals
from gemmscope.workload.trace import trace_huggingface

LISTED = ShapesOptions()


def shapes(job: ModelRun, options: ShapesOptions = LISTED, context: RunContext = PLAIN) -> ShapesResult:
    """Every GEMM of one micro-batch on one rank, and the totals of the step."""
    if options.check and job.source.model is None:
        raise UserError(
            f"{job.source.origin} has no closed form to check, because its shapes are traced", f"remove {option('check')}"
        )
    subject = rank_workload(job, context.reporter.say)
    summed = totals(subject.workload, subject.run, job.source.model, subject.trace.parameters if subject.trace else 0)
    gemms = tuple(
        ListedGemm(gemm.op, gemm.pass_name, gemm.m, gemm.k, gemm.n, gemm.groups, gemm.count, gemm.flops,
                   gemm.flops * gemm.count / summed.gemm_flops)
        for gemm in subject.workload.gemms()
    )  # fmt: skip
    checked, findings = _check(subject, context.reporter) if options.check else (None, ())
    return ShapesResult(
        command=context.command,
        **subject.about(),
        findings=(*subject.findings, *findings),
        derived_by="closed form" if job.source.model else "trace",
        gemms=gemms,
        ops=tuple(map(_listed_op, subject.workload.ops)),
        batched_gemms=tuple(gemm for op in subject.workload.ops for gemm in _batched_gemms(op)),
        totals=summed,
        check=checked,
    )


def _listed_op(op: Op) -> ListedOp:
    forward, backward = op.forward(), op.backward()
    return ListedOp(
        op=op.name, kind=op.kind, section=op.section, count=op.count, forward_runs=op.forward_runs, copies=op.copies,
        forward_flops=forward.flops, forward_bytes=forward.bytes_moved,
        backward_flops=backward.flops, backward_bytes=backward.bytes_moved,
        parameters=op.parameters, rows_per_group=op.rows if isinstance(op, GroupedLinear) else None,
    )  # fmt: skip


def _batched_gemms(op: Op) -> list[ListedBatchedGemm]:
    if isinstance(op, (Attention, IndexScores)):
        return [
            ListedBatchedGemm(op=op.name, direction=direction, m=m, k=k, n=n, batch=batch, count=op.count)
            for direction, m, k, n, batch in op.batched_gemms()
        ]
    if isinstance(op, BatchedGemm):
        return [ListedBatchedGemm(op=op.name, direction=op.direction, m=op.m, k=op.k, n=op.n, batch=op.batch, count=op.count)]
    return []


def _check(subject: RankWorkload, reporter: Reporter) -> tuple[Check, tuple[Finding, ...]]:
    source, run, model = subject.source, subject.run, subject.source.model
    if source.config is None or model is None:
        raise UserError(
            f"{option('check')} compares with a model built by transformers, but {source.origin} is not a Hugging Face config",
            f"use {option('check')} with {option('config', 'config.json')} or a preset made from one",
        )
    reporter.say("checking against the live model on the meta device (importing torch takes a few seconds) …")
    trace = trace_huggingface(source.config, run.micro_batch_size, run.sequence_length)
    check = Check(
        differences=tuple(differences(model, run, trace)),
        model_class=trace.class_name,
        versions=dict(trace.versions),
        gemms=sum(gemm.count for gemm in trace.gemms),
    )
    live = {
        "model_class": check.model_class,
        "versions": ", ".join(f"{name} {version}" for name, version in check.versions.items()),
    }
    dense = any(isinstance(layer.mlp, MoeSpec) and layer.mlp.stored_dense for layer in model.layers)
    sparse = any(attention.top_k is not None for attention in model.attentions)
    notes: Notes = {
        "check-equal": (check.equal, {"gemms": check.gemms, **live}),
        "check-differs": (not check.equal, {"differences": len(check.differences), **live}),
        "check-unsharded": (comparable_run(run) != run, {}),
        "check-dense-experts": (dense, {"model_type": model.model_type}),
        "check-without-recurrences": (has_fallback(trace), {}),
        "check-of-recurrences": (recurrences(trace) and not has_fallback(trace), {"recurrences": recurrences(trace)}),
        "check-of-sparse-attention": (sparse, {}),
    }
    return check, tuple(applicable(notes))
