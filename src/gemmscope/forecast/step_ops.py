"""How a linear is timed."""

from gemmscope.workload.cases import Case
from gemmscope.workload.ops import PASSES, GroupedLinear, Linear
from gemmscope.workload.traced_ops import TracedLinear


def linear_case(op: Linear) -> Case:
    """The case to time for a linear."""
    rows = op.rows if isinstance(op, GroupedLinear) else ()
    if isinstance(op, TracedLinear):
        ran = {gemm.pass_name for gemm in op.seen}
        rows = tuple((op.tokens + index) // op.groups for index in range(op.groups)) if op.groups > 1 else ()
        passes = tuple(pass_name for pass_name in PASSES if pass_name in ran)
        return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes, quantized=op.quantized)
    return Case(op.name, op.tokens, op.inputs, op.outputs, op.count, rows, passes=op.passes, quantized=op.quantized)
