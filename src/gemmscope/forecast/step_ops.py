"""Which part of a step an op belongs to, and how a linear is timed."""

from gemmscope.parts import StepPart
from gemmscope.workload.cases import Case
from gemmscope.workload.derive import EMBEDDING, HEAD
from gemmscope.workload.ops import PASSES, GroupedLinear, Linear, Op
from gemmscope.workload.recorded import TracedLinear
from gemmscope.workload.sparse import IndexScores, SparseAttention, TopK

ROUTING_OPS = ("Token Dispatch", "Token Combine")
UNQUANTIZED_ROUTING = ("Router", "Shared Expert Scale")


def linear_case(op: Linear) -> Case:
    """The case to time for a linear."""
    rows = op.rows if isinstance(op, GroupedLinear) else ()
    if isinstance(op, TracedLinear):
        ran = {gemm.pass_name for gemm in op.seen}
        rows = tuple((op.tokens + index) // op.groups for index in range(op.groups)) if op.groups > 1 else ()
        passes = tuple(pass_name for pass_name in PASSES if pass_name in ran)
        return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes, quantized=op.quantized)
    return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes=op.passes, quantized=op.quantized)


def part_of_linear(op: Linear) -> StepPart:
    """The part of the step that a linear belongs to; one that no recipe quantizes belongs to the block that it serves."""
    if not op.quantized and op.name.startswith(("Stream", "Laurel")):
        return "norms and activations"
    if not op.quantized and not isinstance(op, TracedLinear):
        return "routing" if op.name in UNQUANTIZED_ROUTING else "linear attention" if op.name.startswith("Mixer") else "attention"
    if op.section in (HEAD, EMBEDDING):  # left in BF16, as frameworks do
        return "head and loss" if op.section == HEAD else "embedding"
    return "GEMMs"


def part_of(op: Op) -> tuple[StepPart, str]:
    """The part of an op that is not a linear, and the table that has its uncertainty."""
    if op.kind in ("scan", "causal convolution"):
        return "linear attention", "linear attention"
    if isinstance(op, (IndexScores, SparseAttention, TopK)):
        return "attention", "sparse attention"
    if op.kind in ("attention", "batched GEMM") or op.name in ("Rotary", "Indexer Norm"):
        return "attention", "attention"
    if op.kind == "optimizer":
        return "optimizer", "bandwidth"
    if op.section == HEAD:
        return "head and loss", "bandwidth"
    if op.section == EMBEDDING or op.kind == "embedding":
        return "embedding", "bandwidth"
    return ("routing" if op.name in ROUTING_OPS else "norms and activations"), "bandwidth"
