"""Training beyond single GEMMs: which GEMMs a recipe runs, the time of quantization, and all ops that are not GEMMs.

All of it is bytes over bandwidth or FLOPs over a rate; `coefficients/training.toml` holds the shares of the chip's rates that
real kernels reach, with their source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import hypot
from typing import Any, NamedTuple

from gemmscope.forecast.gemm import slowed
from gemmscope.gpu.specs import GpuSpec, gpu
from gemmscope.recipe.recipes import Recipe
from gemmscope.recipe.recipes import recipe as recipe_named
from gemmscope.recipe.support import support
from gemmscope.toml import load_data
from gemmscope.workload.ops import ELEMENT_BYTES, Attention, Op, Work
from gemmscope.workload.scans import Scan
from gemmscope.workload.sparse import IndexScores

facts = cache(partial(load_data, "gemmscope.forecast", "coefficients/training.toml"))
"""Of training steps."""


@cache
def _measured_on() -> tuple[int, int]:
    """The compute capability of the chip that the shares were measured on."""
    return gpu(facts()["measured_on"]).capability


def uncertainty_of(table: str, chip: GpuSpec, tables: Mapping[str, Any] | None = None) -> float:
    """The uncertainty of a part, larger on architectures that were not measured in training."""
    known = (facts() if tables is None else tables)[table]
    power = slowed(chip)[1] if "attention" in table else 0.0
    return float(hypot(known["uncertainty_measured" if chip.capability == _measured_on() else "uncertainty"], power))


def library_uncertainty(fmt: str, chip: GpuSpec) -> float:
    """The shared uncertainty of a format's GEMMs in training, whose library is not the one that was measured widely.

    >>> library_uncertainty("fp8", gpu("h100")) < library_uncertainty("fp8", gpu("b200"))
    True
    """
    table = facts()["common"]
    measured = table["uncertainty_measured"] if chip.capability == _measured_on() else {}
    return float(measured.get(fmt, table["uncertainty"][fmt]))


def gemm_format(recipe: Recipe, pass_name: str, chip: GpuSpec) -> str:
    """The format of a pass's GEMMs, as the forecast of GEMMs names it.

    >>> from gemmscope.recipe.recipes import recipe
    >>> gemm_format(recipe("FP8Block"), "fprop", gpu("h200")), gemm_format(recipe("FP8Block"), "fprop", gpu("b300"))
    ('fp8-block', 'mxfp8')
    >>> gemm_format(recipe("FP8Block"), "fprop", gpu("rtx-pro-6000"))
    'fp8-block'
    """
    emulated_by = support(recipe.name, chip.capability).emulated_by
    if emulated_by and support(emulated_by, chip.capability).runs:  # elsewhere, its own GEMMs were measured
        return gemm_format(recipe_named(emulated_by), pass_name, chip)
    return str(recipe.precision(pass_name).fact("timed_as"))


def gemm_factor(fmt: str, chip: GpuSpec) -> float:
    """The time of GEMMs in training, relative to the library that was measured widely."""
    return float(facts()["gemms"].get(chip.architecture, {}).get(fmt, 1.0))


def recipe_factor(recipe: Recipe) -> float:
    """The time of a recipe's GEMMs, relative to its format: torchao differs from Transformer Engine."""
    return float(facts()["torchao"]["gemms"][recipe.base or recipe.name]) if only_torchao(recipe) else 1.0


def only_torchao(recipe: Recipe) -> bool:
    """Whether training runs the recipe only with torchao.

    >>> from gemmscope.recipe.recipes import recipe
    >>> only_torchao(recipe("FP8Rowwise")), only_torchao(recipe("MXFP8"))
    (True, False)
    """
    return "torchao" in recipe.backends and "transformer_engine" not in recipe.backends


def torchao_known(chip: GpuSpec) -> bool:
    """Whether torchao was measured on a GPU of this architecture."""
    return chip.architecture in facts()["torchao"]["architectures"]


class Quantizing(NamedTuple):
    """The time to quantize one tensor: launches, and a time per element.

    Elements of a short tensor take up to `excess` more; in a tensor of `half_at` elements, half of that.
    """

    launch_ms: float
    element_ms: float
    excess: float = 0.0
    half_at: float = 1.0

    def time_ms(self, elements: float) -> float:
        """The time to quantize a tensor with this many elements.

        >>> Quantizing(0.0, 1e-6, excess=0.4, half_at=1e8).time_ms(1e8)
        120.0
        """
        return self.launch_ms + self.element_ms * elements * (1 + self.excess / (1 + elements / self.half_at))

    def times(self, factor: float) -> Quantizing:
        """The same costs, scaled by a factor."""
        return self._replace(launch_ms=self.launch_ms * factor, element_ms=self.element_ms * factor)


def quantizing(recipe: Recipe, chip: GpuSpec) -> Quantizing:
    """The cost of quantizing one tensor for all its GEMMs.

    >>> from gemmscope.recipe.recipes import recipe
    >>> round(quantizing(recipe("FP8Delayed"), gpu("h200")).time_ms(16384 * 4096), 3)
    0.082
    """
    if not recipe.quantizes:
        return Quantizing(0.0, 0.0)
    table = facts()["quantize"]
    known = table["casts"][recipe.base or recipe.name]
    written = recipe.bytes_written / (2 if recipe.one_copy(chip.architecture) else 1)
    element_ms = (recipe.bytes_read + written) / (chip.bandwidth_tbps * 1e9 * known["bandwidth"])
    slower = table["slower"].get(chip.architecture, {})
    return Quantizing(known["kernels"] * facts()["launch_ms"], element_ms, **slower)


def one_way(recipe: Recipe, chip: GpuSpec) -> float:
    """The time to quantize a tensor for one direction, relative to both: for weights of layers whose input needs no gradient.

    >>> from gemmscope.recipe.recipes import recipe
    >>> one_way(recipe("FP8Delayed"), gpu("h200")), one_way(recipe("FP8Delayed"), gpu("b200"))
    (0.75, 1.0)
    """
    if not recipe.quantizes or recipe.one_copy(chip.architecture):
        return 1.0
    return (recipe.bytes_read + recipe.bytes_written / 2) / (recipe.bytes_read + recipe.bytes_written)


def op_ms(op: Op, chip: GpuSpec) -> float:
    """Milliseconds of all runs of an op that is not a linear, in one micro-batch (the optimizer: in one step)."""
    if isinstance(op, (Scan, Attention, IndexScores)):
        kinds: dict[type[Op], Callable[..., float]] = {Scan: scan_ms, Attention: attention_ms, IndexScores: index_ms}
        one_run = next(one_run for kind, one_run in kinds.items() if isinstance(op, kind))
        return op.count * (op.forward_runs * one_run(op, chip, "forward") + one_run(op, chip, "backward"))
    reached = chip.bandwidth_tbps * 1e9 * facts()["bandwidth"][op.facts.bandwidth or op.kind]
    launches = 2 if op.backward().bytes_moved else 1
    return float(op.total().bytes_moved / reached + op.count * launches * facts()["launch_ms"])


def work_ms(work: Work, chip: GpuSpec, shares: Mapping[str, float]) -> float:
    """FLOPs at a share of the BF16 rate, or bytes at a share of the bandwidth, whichever takes longer."""
    compute_ms = slowed(chip)[0] * work.flops / (chip.tflops["bf16"] * 1e9 * shares["rate"])
    return float(max(compute_ms, work.bytes_moved / (chip.bandwidth_tbps * 1e9 * shares["bandwidth"])))


def scan_ms(op: Scan, chip: GpuSpec, direction: str) -> float:
    """One forward or backward run: FLOPs at a share of the BF16 rate, or bytes at a share of the bandwidth."""
    table = facts()["linear attention"]
    work = op.forward() if direction == "forward" else op.backward()
    return work_ms(work, chip, table[op.rule][direction]) + float(table["kernels"] * facts()["launch_ms"])


def index_ms(op: IndexScores, chip: GpuSpec, direction: str) -> float:
    """One forward or backward run of the indexer's scores; most have no backward."""
    work = op.forward() if direction == "forward" else op.backward()
    return work_ms(work, chip, facts()["sparse attention"]) + float(facts()["launch_ms"]) if work.flops else 0.0


def attention_ms(op: Attention, chip: GpuSpec, direction: str) -> float:
    """One forward or backward run: FLOPs at a rate that long sequences reach, and what is rearranged around it."""
    table = facts()["attention"][direction]
    sequence = min(op.keys, op.window or op.keys)
    rate = chip.tflops["bf16"] / slowed(chip)[0] * 1e9 * table["rate"] * sequence / (sequence + table["half_at"])
    work = op.forward() if direction == "forward" else op.backward()
    bandwidth = chip.bandwidth_tbps * 1e9 * facts()["bandwidth"]["elementwise"]
    extra = table.get("extra_tensors", 0) * op.batch * op.queries * op.heads * op.head_dim * ELEMENT_BYTES
    return float(max(work.flops / rate, work.bytes_moved / bandwidth) + extra / bandwidth + facts()["launch_ms"])
