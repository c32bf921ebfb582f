"""Splits the kernels of one linear's forward and backward pass into its parts.

A linear in training runs three products (fprop, dgrad, wgrad, in this order) and quantizes three tensors: X and W before fprop,
dY before dgrad. Each quantized copy serves two passes, so its time is charged half to each: X to fprop and wgrad, W to fprop and
dgrad, dY to dgrad and wgrad. Nothing is left over: fills and copies go with the kernel they precede, and what is no product
and no quantization is kept as `other`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gemmscope.measure.kernels import KernelRun, classify
from gemmscope.workload.ops import PASSES

TENSOR_PASSES = {"X": ("fprop", "wgrad"), "W": ("fprop", "dgrad"), "dY": ("dgrad", "wgrad")}


class AttributionError(ValueError):
    """The kernels do not look like one linear's forward and backward pass."""


@dataclass(frozen=True)
class Parts:
    """Microseconds by part; `kernels` are the names behind each."""

    gemm_us: dict[str, float]  # by pass
    quantize_us: dict[str, float]  # by tensor
    other_us: float
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def total_us(self) -> float:
        return sum(self.gemm_us.values()) + sum(self.quantize_us.values()) + self.other_us

    def charged_us(self) -> dict[str, float]:
        """Time by pass, quantization and the rest included: sums to the total."""
        charged = dict(self.gemm_us)
        for tensor, passes in TENSOR_PASSES.items():
            for pass_name in passes:
                charged[pass_name] += self.quantize_us[tensor] / 2
        return {pass_name: time + self.other_us / len(PASSES) for pass_name, time in charged.items()}


def attribute(runs: Sequence[KernelRun], *, weight_cached: bool = False, products_per_pass: int = 1) -> Parts:
    """Walk through the kernels in the order they ran.

    A tensor's quantization ends with its cast; every kernel since the one before belongs to it. The first product ends the
    forward pass, so what is quantized before it is X and then W (`weight_cached`: X alone), and what comes after is dY. Experts
    run `products_per_pass` products, and quantize as many weights.
    """
    gemm_us: dict[str, float] = dict.fromkeys(PASSES, 0.0)
    quantize_us = dict.fromkeys(TENSOR_PASSES, 0.0)
    kernels: dict[str, list[str]] = {}
    waiting: list[KernelRun] = []  # fills and copies, until it is known what for
    forward_tensors = ["X"] if weight_cached else ["X", "W"]
    casts = products = 0
    other_us = 0.0
    for run in runs:
        facts = classify(run.name)
        if facts.kernel_class == "memory":
            waiting.append(run)
            continue
        time_us = run.duration_us + sum(each.duration_us for each in waiting)
        waiting = []
        if facts.kernel_class == "gemm":
            is_tail = "reduce" in run.name.lower()  # split-K: the second half of the product before
            products += 0 if is_tail else 1
            if products > len(PASSES) * products_per_pass:
                raise AttributionError(f"more than {len(PASSES) * products_per_pass} products: {run.name}")
            pass_name = PASSES[(products - 1) // products_per_pass]
            gemm_us[pass_name] += time_us
            kernels.setdefault(pass_name, []).append(run.name)
        elif facts.kernel_class == "quantize":
            tensor = forward_tensors[min(casts, len(forward_tensors) - 1)] if products == 0 else "dY"
            quantize_us[tensor] += time_us
            kernels.setdefault(tensor, []).append(run.name)
            casts += 1 if facts.ends_tensor and products == 0 else 0
        else:
            other_us += time_us
            kernels.setdefault("other", []).append(run.name)
    other_us += sum(each.duration_us for each in waiting)
    if products != len(PASSES) * products_per_pass:
        raise AttributionError(f"{products} products where {len(PASSES) * products_per_pass} were expected")
    return Parts(gemm_us, quantize_us, other_us, {part: tuple(names) for part, names in kernels.items()})
