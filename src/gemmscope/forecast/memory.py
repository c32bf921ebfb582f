"""Whether the training state of one rank fits into a GPU: a lower bound, from the memory of the linears and the parameters."""

from __future__ import annotations

from gemmscope.findings import Finding, finding
from gemmscope.gpu.specs import GpuSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.results.linears import Linears
from gemmscope.step.answer import BYTES_PER_PARAMETER
from gemmscope.workload.ops import ELEMENT_BYTES


def does_not_fit(linears: Linears, model: ModelSpec, run: RunSpec, parameters: int, chip: GpuSpec) -> list[Finding]:
    """A finding where some recipe needs more memory than the GPU has.

    That is weights, gradients and moments, quantized copies, and the inputs of the linears that one micro-batch keeps. Where
    whole layers are recomputed, each keeps its input alone.
    """
    layers = sum(case.count for case in linears.cases if case.op.startswith("Attn Out"))
    needed_gb = {}
    for memory in linears.memory:
        inputs = layers * run.tokens * model.hidden_size * ELEMENT_BYTES if run.recompute == "full" else memory.kept_bytes
        needed_gb[memory.recipe] = (BYTES_PER_PARAMETER * parameters + memory.copies_bytes + inputs) / 1e9
    too_large = {name: size for name, size in needed_gb.items() if size > chip.memory_gb}
    return [finding("does-not-fit", needed_gb=too_large, memory_gb=chip.memory_gb)] if too_large else []
