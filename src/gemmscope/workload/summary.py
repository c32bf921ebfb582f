"""The totals of a workload: FLOPs per kind of layer, per micro-batch and per step, and the parameters."""

from collections import defaultdict
from dataclasses import dataclass, replace

from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.derive import EMBEDDING, HEAD, STEP, Workload, derive
from gemmscope.workload.ops import Attention, BatchedGemm, Convolution, GroupedLinear, Linear, Work
from gemmscope.workload.scans import Scan
from gemmscope.workload.sparse import IndexScores


@dataclass(frozen=True)
class LayerTotal:
    """The GEMMs of one kind of layer, of which this rank's stage has `layers`."""

    section: str
    layers: int
    gemm_flops: float


@dataclass(frozen=True)
class Totals:
    """The totals of one rank. GEMMs are those of linears; those inside attention are counted separately, and so are batched GEMMs
    of two activations that belong to no attention, which only a trace shows."""

    layers: tuple[LayerTotal, ...]
    gemm_flops: float  # per micro-batch
    attention_flops: float
    other: Work
    micro_batches_per_step: int
    parameters_of_rank: int
    parameters: int  # of the whole model
    active_parameters: int  # used by one token
    # of linears, attention (linear attention too), batched GEMMs and convolutions per micro-batch, without recomputation
    model_flops: float
    batched_gemm_flops: float = 0.0
    scan_flops: float = 0.0  # state-space scans, delta rules and the like
    convolution_flops: float = 0.0

    @property
    def gemm_flops_per_step(self) -> float:
        return self.gemm_flops * self.micro_batches_per_step


def totals(workload: Workload, run: RunSpec, model: ModelSpec | None, traced_parameters: int = 0) -> Totals:
    """Add up a workload. In a traced one (`model` is None), kinds of layers are not known."""
    sections: dict[str, float] = defaultdict(float)
    attention, other, batched, scans, needed = Work(), Work(), Work(), Work(), 0.0
    for op in workload.ops:
        if isinstance(op, (Linear, Attention, BatchedGemm, Convolution, IndexScores, Scan)):
            needed += replace(op, forward_runs=min(op.forward_runs, 1)).total().flops
        match op:
            case Linear():
                sections[op.section] += op.total().flops
            case BatchedGemm() if op.facts.part != "attention":
                batched += op.total()
            case Attention() | BatchedGemm() | IndexScores():
                attention += op.total()
            case Scan():
                scans += op.total()
            case _:
                other += op.total()
    total, active = count_parameters(model) if model else (traced_parameters, traced_parameters)
    layers = {section: flops for section, flops in sections.items() if section not in (EMBEDDING, HEAD, STEP)} if model else {}
    return Totals(
        layers=tuple(LayerTotal(name, workload.layers[name], flops / workload.layers[name]) for name, flops in layers.items()),
        gemm_flops=sum(sections.values()),
        attention_flops=attention.flops,
        batched_gemm_flops=batched.flops,
        scan_flops=scans.flops,
        convolution_flops=sum(op.total().flops for op in workload.ops if isinstance(op, Convolution)),
        model_flops=needed,
        other=other,
        micro_batches_per_step=run.gradient_accumulation,
        parameters_of_rank=workload.parameters if model else traced_parameters,
        parameters=total,
        active_parameters=active,
    )


def count_parameters(model: ModelSpec) -> tuple[int, int]:
    """(all parameters, those used by one token) of the unsharded model.

    >>> from gemmscope.model import presets
    >>> count_parameters(presets.load("mixtral-8x7b").model)
    (46702792704, 12879925248)
    """
    whole = derive(model, RunSpec(micro_batch_size=1, sequence_length=1))  # what one token runs: as many experts as have a row
    experts = [op for op in whole.ops if isinstance(op, GroupedLinear)]
    idle = sum(op.all_parameters // op.groups * op.rows.count(0) for op in experts)
    if model.layer_inputs is not None:  # a token only reads one row of this table: it is not the weight of a GEMM
        idle += (model.layer_inputs.vocab_size - 1) * model.layer_inputs.width * len(model.layers)
    return whole.parameters, whole.parameters - idle
