"""What one rank of a job computes, and the linears of it that are measured or forecast."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemmscope.errors import UserError, option, shown
from gemmscope.findings import Finding, finding, without_repeats
from gemmscope.grouping import grouped
from gemmscope.job.load import ModelRun
from gemmscope.model.families import built_like, known_model_types
from gemmscope.model.limits import check_size
from gemmscope.model.spec import ModelSource, RunSpec
from gemmscope.results.base import ModelSummary
from gemmscope.workload.cases import CALLED, Case, cases_of, forward_calls
from gemmscope.workload.derive import EMBEDDING, HEAD, STEP, Workload, derive, with_lora
from gemmscope.workload.ops import PASSES, GroupedLinear, Linear
from gemmscope.workload.trace import ModuleTrace, as_workload, trace_huggingface, trace_module
from gemmscope.workload.traced_ops import TracedLinear


@dataclass(frozen=True)
class RankWorkload:
    """What one rank computes. `trace` where the live model had to be run to know."""

    source: ModelSource
    run: RunSpec
    workload: Workload
    findings: tuple[Finding, ...]
    trace: ModuleTrace | None = None

    @property
    def name(self) -> str:
        if self.source.model is not None:
            return self.source.model.name
        return f"{self.trace.class_name if self.trace else 'model'} from {self.source.origin}"

    def about(self) -> dict[str, Any]:
        """The fields of a result that name the model and its run."""
        return {
            "origin": self.source.origin,
            "model": ModelSummary.of(self.source.model, self.name, self.source.origin),
            "run": self.run,
            "stage": self.workload.stage,
        }


def rank_workload(job: ModelRun, say: Callable[[str], None]) -> RankWorkload:
    """Derive the operations in closed form where there is one, else trace the live model."""
    trace, run = None, job.run
    if job.source.model is not None:
        workload = derive(job.source.model, job.run)
    else:
        trace = _trace(job, say)
        workload = with_lora(as_workload(trace), run, job.source.origin)
        if trace.inputs is not None:  # which the module provides: the micro-batch is their number of samples
            run = replace(run, micro_batch_size=trace.samples or 1, sequence_length=1, inputs=trace.inputs)
    findings = (*job.source.findings, *job.findings, *workload.findings)
    return RankWorkload(job.source, run, workload, findings, trace)


# Settings that a traced model can be run with: those that do not change what one rank computes.
TRACED_SETTINGS = (
    "micro_batch_size", "sequence_length", "gradient_accumulation", "dp", "zero", "zero_ranks", "optimizer_state",
    "gradient_precision", "dp_overlap", "cuda_graphs", "separate_projections", "lora", "lora_linears",
)  # fmt: skip


def _trace(job: ModelRun, say: Callable[[str], None]) -> ModuleTrace:
    source, run = job.source, job.run
    plain = RunSpec(**{name: getattr(run, name) for name in TRACED_SETTINGS})
    if run != plain:
        raise UserError(
            f"{source.origin} is traced as it runs in one process: it cannot be sharded or recomputed here",
            f"keep only {option('micro_batch_size')}, {option('sequence_length')}, {option('gradient_accumulation')}, and data "
            f"parallelism ({option('gpus')}, {option('dp')}, {option('zero')})",
        )
    say("tracing the live model on the meta device (importing torch takes a few seconds) …")
    sizes = (job.micro_batch, job.sequence)
    return trace_module(source.module, *sizes) if source.module is not None else _trace_unknown(source.config or {}, *sizes)


def _trace_unknown(config: Mapping[str, Any], micro_batch: int | None, sequence: int | None) -> ModuleTrace:
    """Trace a model type without closed form; if that fails, name the known type that it is probably built like."""
    try:
        return trace_huggingface(config, micro_batch, sequence, as_trained=True)
    except UserError as error:
        given = str(config.get("model_type"))
        similar = built_like(config) if given not in known_model_types() else ""
        part, place = ("its language part", " in text_config") if isinstance(config.get("text_config"), Mapping) else ("it", "")
        hint = f'if {part} is built like {similar}, set "model_type": "{similar}"{place}; ' if similar else ""
        message = f"model_type {shown(given)} has no closed form here, so it must be traced: {error.message}"
        raise UserError(message, hint + error.hint) from error


@dataclass(frozen=True)
class LinearCases:
    """The linears to measure or forecast. `layers` and `layer_counts` where all layers are alike: how many there are, and how
    often one runs each op."""

    cases: tuple[Case, ...]
    findings: tuple[Finding, ...] = ()
    layers: int | None = None
    layer_counts: Mapping[str, int] | None = None


def as_forward_calls(linears: LinearCases) -> LinearCases:
    """The same GEMMs, counted as Transformer Engine's benchmark script does: each as a forward call with its own X and W."""
    if grouped := [case.op for case in linears.cases if case.rows]:
        raise UserError(
            f"{option('as_te_benchmark')}: the script has no counterpart of experts ({grouped[0]})",
            f"remove {option('as_te_benchmark')}",
        )
    counts = linears.layer_counts
    of_calls = {op + call: count for op, count in counts.items() for call in CALLED.values()} if counts is not None else None
    findings = (*linears.findings, finding("counted-as-te-benchmark"))
    return LinearCases(tuple(forward_calls(linears.cases)), findings, linears.layers, of_calls)


def linear_cases(workload: Workload, *, as_run: bool = False) -> LinearCases:
    """The distinct linears of a workload, and what is measured differently from how the model runs it. `as_run`: with the passes
    that run."""
    linears: list[Linear] = []
    findings: list[Finding] = []
    for op in workload.ops:
        if not isinstance(op, Linear):
            continue
        linears.append(_with_rows(op) if isinstance(op, TracedLinear) and op.groups > 1 else op)
        if linears[-1] is not op:
            findings.append(finding("rows-split-evenly", op=op.name, groups=op.groups))
        if not as_run and len({gemm.pass_name for gemm in op.gemms()}) < len(PASSES):
            findings.append(finding("all-passes-measured", op=op.name))
    if any(op.forward_runs > 1 for op in linears):
        findings.append(finding("recompute-not-in-linears"))
    linears = _with_unique_names(linears)
    return LinearCases(
        tuple(cases_of(linears, as_run=as_run)), tuple(without_repeats(findings)), *_layer(linears, workload.layers)
    )


def _with_rows(op: Linear) -> Linear:
    """A traced linear of several weights: how its rows are split is not known from a trace."""
    check_size(f"the number of weights of {shown(op.name)}", op.groups, "experts")
    rows = tuple((op.tokens + index) // op.groups for index in range(op.groups))
    return GroupedLinear(
        role=op.role, label=op.label, tokens=op.tokens, inputs=op.inputs, outputs=op.outputs, count=op.count, rows=rows
    )


def _with_unique_names(linears: list[Linear]) -> list[Linear]:
    """A name that stands for several sizes gets the size appended: results are kept by name."""
    sizes: dict[str, set[tuple[int, int, int, int]]] = {}
    for op in linears:
        sizes.setdefault(op.name, set()).add((op.tokens, op.inputs, op.outputs, op.groups))
    return [
        replace(op, label=f"{op.name} {op.tokens}x{op.inputs}x{op.outputs}") if len(sizes[op.name]) > 1 else op for op in linears
    ]


def _layer(linears: Iterable[Linear], counts: Mapping[str, int]) -> tuple[int | None, dict[str, int] | None]:
    """How many layers there are and how often one runs each op, where all have the same linears; (None, None) where not."""
    kinds = grouped((op.section, op) for op in linears if op.section not in (EMBEDDING, HEAD, STEP, ""))
    shares = [{case.op: case.count // counts[section] for case in cases_of(inside)} for section, inside in kinds.items()]
    if not shares or any(share != shares[0] for share in shares):
        return None, None
    return sum(counts[section] for section in kinds), shares[0]
