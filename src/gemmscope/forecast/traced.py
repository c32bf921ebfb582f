"""What a traced module runs beside its linears, on a GPU: time by part of the step, uncertainty, launches, memory.

A trace has every operator with its bytes, but does not show which of them a compiler fuses into one kernel. `fused` assumes that
chains of operators are fused, as torch.compile does (see `workload/traffic.py`); else every operator is a kernel. Error bars are
wider than those of a closed form, whose parts were measured in training.
"""

from collections.abc import Iterable
from functools import cache, partial

from gemmscope.forecast.communication import cluster
from gemmscope.forecast.estimate import Estimate
from gemmscope.forecast.memory import memory_facts, recipe_memory, reserve_bytes, shards, state_bytes, storage
from gemmscope.forecast.training import attention_ms, facts, work_ms
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.spec import RunSpec
from gemmscope.parts import StepPart
from gemmscope.recipe.recipes import recipe
from gemmscope.results.forecast import RecipeMemory
from gemmscope.toml import load_data
from gemmscope.workload.derive import HEAD, with_adapters
from gemmscope.workload.ops import FP32_BYTES, BatchedGemm, Convolution, Direction, Elementwise, Linear, Op
from gemmscope.workload.scans import CausalConv, Scan
from gemmscope.workload.trace import MIXER, ModuleTrace, as_workload
from gemmscope.workload.traced_ops import Between, TracedAttention

BACKWARD_KERNELS = 3  # of attention: the row sums, the gradients, their conversion
UNFUSED_FORWARD, UNFUSED_BACKWARD = 3, 5  # the batched GEMMs and the softmax
TracedOp = Between | BatchedGemm | Convolution | TracedAttention
coefficients = cache(partial(load_data, "gemmscope.forecast", "coefficients/traced.toml"))
"""Of traced modules."""


def part_of(op: TracedOp) -> StepPart:
    """The part of the step that an op belongs to."""
    return "linear attention" if op.section == MIXER else op.facts.part


def traced_estimate(op: TracedOp, chip: GpuSpec, *, fused: bool) -> Estimate:
    """Milliseconds of all runs of an op in one micro-batch, with their uncertainty."""
    known, launch_ms = coefficients(), facts()["launch_ms"]
    if isinstance(op, Between):
        every = op.all_moved
        moved, kernels = (every.fused_bytes, every.kernels) if fused else (op.total().bytes_moved, every.launches)
        time_ms = moved / (chip.bandwidth_tbps * 1e9 * known["bandwidth"][op.kind]) + kernels * launch_ms
        return Estimate(float(time_ms), 0.0, known["uncertainty"]["fused" if fused else "eager"])
    if isinstance(op, TracedAttention):
        one_way = _unfused_ms if op.unfused else attention_ms
        once = op.forward_runs * one_way(op, chip, "forward") + op.backward_runs * one_way(op, chip, "backward")
        table = known["unfused_attention"] if op.unfused else known["explicit_mask"] if op.mask_bytes else {}
        uncertainty = table.get("uncertainty", known["uncertainty"]["attention"])
        return Estimate(float(op.count * once * table.get("slower", 1.0)), 0.0, uncertainty)
    kind = "convolution" if isinstance(op, Convolution) else "batched_gemm"
    return Estimate(float(op.count * (work_ms(op.work(), chip, known[kind]) + launch_ms)), 0.0, known["uncertainty"][kind])


def _unfused_ms(op: TracedAttention, chip: GpuSpec, direction: Direction) -> float:
    """One run as batched GEMMs in FP32, between which all scores are read and written in FP32."""
    table = coefficients()["unfused_attention"]
    rates = table["gflops_per_sm"]
    rate = rates.get(chip.architecture, rates["other"]) * 1e6 * chip.sms
    gemms = [gemm for which, *gemm in op.batched_gemms() if which == direction]
    scores = op.batch * op.heads * op.queries * op.keys * FP32_BYTES
    moved_ms = table[direction] * scores / (chip.bandwidth_tbps * 1e9 * table["bandwidth"])
    flops = sum(2 * m * k * n * batch for m, k, n, batch in gemms)
    return float(flops / rate + moved_ms + (len(gemms) + 1) * facts()["launch_ms"])


def launches(ops: Iterable[Op], *, fused: bool) -> int:
    """The number of kernels of one micro-batch in BF16."""
    return sum(_launches(op, fused=fused) for op in ops)


def _launches(op: Op, *, fused: bool) -> int:
    match op:
        case Between():
            return op.all_moved.kernels if fused else op.all_moved.launches
        case Linear():
            return sum(gemm.count for gemm in op.gemms())
        case TracedAttention():
            forward, backward = (UNFUSED_FORWARD, UNFUSED_BACKWARD) if op.unfused else (1, BACKWARD_KERNELS)
            return round(op.count * (forward * op.forward_runs + backward * op.backward_runs))
        case BatchedGemm() | Convolution():
            return op.count
        case Scan():
            return 2 * op.count * int(facts()["linear attention"]["kernels"])
        case CausalConv() | Elementwise():
            return 2 * op.count
        case _:
            return 0


def launch_ms(ops: Iterable[Op], recipe_name: str, quantized: int, run: RunSpec, *, fused: bool) -> tuple[float, float]:
    """Milliseconds that the CPU needs to launch one micro-batch, and the number of launches; few with CUDA graphs. `quantized`
    linears also cast X, W and dY."""
    chosen = recipe(recipe_name)
    casts = 3 * facts()["quantize"]["casts"][chosen.base or chosen.name]["kernels"] * quantized if chosen.quantizes else 0
    count = float(launches(ops, fused=fused) + casts) * (cluster()["host"]["graphs"] if run.cuda_graphs else 1.0)
    return count * coefficients()["launch_ms"]["fused" if fused else "eager"], count


def traced_memory(trace: ModuleTrace, run: RunSpec, recipe_name: str, chip: GpuSpec) -> RecipeMemory:
    """Weights, gradients, optimizer and activations. Activations are those of eager autograd in BF16, in every recipe.

    Lower bound: a compiler recomputes part of the activations. Upper bound: the allocator is fragmented.
    """
    known, (ranks, _) = memory_facts(), shards(run)
    ops = [op for op in with_adapters(as_workload(trace).ops, run) if isinstance(op, Linear)]
    added = sum(op.all_parameters for op in ops)  # by adapters: a trace knows no other
    every, trained = trace.parameters + added, trace.trainable if run.lora is None else added
    states = state_bytes(run, (every, every / ranks), (trained, trained / ranks))
    linears = [op for op in ops if op.quantized and op.section != HEAD]
    copies = storage(recipe_name, chip.architecture).copies * sum(op.groups * op.inputs * op.outputs * op.count for op in linears)
    every_state, workspace = sum(states.values()), 2.0 * trace.largest_saved_bytes
    least = every_state + trace.saved_bytes * coefficients()["kept"]["least"] + known["reserve_gb"]["least"] * 1e9
    scattered = known["fragmentation"]["most"] * (trace.saved_bytes + states["gradients_bytes"])
    most = every_state + copies + trace.saved_bytes + scattered + 2 * workspace + known["reserve_gb"]["most"] * 1e9
    return recipe_memory(
        recipe_name, chip, stage=0, in_flight=1.0, least_bytes=least, most_bytes=most, **states,
        activations_bytes=float(trace.saved_bytes), quantized_copies_bytes=copies, communication_bytes=0.0,
        workspace_bytes=workspace, reserve_bytes=reserve_bytes(run),
    )  # fmt: skip
