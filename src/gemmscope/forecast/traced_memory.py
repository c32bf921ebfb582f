"""Memory of one GPU that trains a traced module: states from its parameters, and activations that autograd kept in the trace."""

from gemmscope.forecast.memory import RankMemory, facts, shards, storage
from gemmscope.forecast.memory_blocks import FP32_BYTES
from gemmscope.forecast.traced import coefficients
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.spec import RunSpec
from gemmscope.workload.derive import HEAD
from gemmscope.workload.ops import ELEMENT_BYTES, Linear
from gemmscope.workload.trace import ModuleTrace, as_workload


def traced_memory(trace: ModuleTrace, run: RunSpec, recipe_name: str, chip: GpuSpec) -> RankMemory:
    """Weights, gradients, optimizer and activations. Activations are those of eager autograd in BF16, in every recipe.

    Lower bound: a compiler recomputes part of the activations. Upper bound: the allocator is fragmented.
    """
    known, zero, fp32 = facts(), run.zero_stage, run.state_precision == "fp32"
    ranks, _ = shards(run)
    state_bytes = FP32_BYTES if fp32 else ELEMENT_BYTES
    gradient_bytes = FP32_BYTES if (run.gradient_precision or run.state_precision) == "fp32" else ELEMENT_BYTES
    shared = trace.trainable / ranks
    weights = trace.parameters / ranks * state_bytes if zero == 3 else trace.parameters * ELEMENT_BYTES
    gradients = gradient_bytes * (shared if zero >= 2 else trace.trainable)
    master, moments = shared * FP32_BYTES if fp32 and zero < 3 else 0.0, 2 * shared * state_bytes
    linears = [op for op in as_workload(trace).ops if isinstance(op, Linear) and op.quantized and op.section != HEAD]
    copies = storage(recipe_name, chip.architecture).copies * sum(op.groups * op.inputs * op.outputs * op.count for op in linears)
    states, workspace = weights + gradients + master + moments, 2.0 * trace.largest_saved_bytes
    reserve = known["reserve_gb"]["usual" if run.gpus == 1 else "usual_several_gpus"] * 1e9
    least = states + trace.saved_bytes * coefficients()["kept"]["least"] + known["reserve_gb"]["least"] * 1e9
    scattered = known["fragmentation"]["most"] * (trace.saved_bytes + gradients)
    most = states + copies + trace.saved_bytes + scattered + 2 * workspace + known["reserve_gb"]["most"] * 1e9
    return RankMemory(
        weights, gradients, master, moments, float(trace.saved_bytes), copies, 0.0, workspace, reserve, least, most
    )  # fmt: skip
