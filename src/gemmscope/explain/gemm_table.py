"""The GEMMs of a step by shape: how long they take, and how close they come to what the GPU can do."""

from collections.abc import Sequence
from math import gcd

from gemmscope.explain.cause import StepEvidence, main_kernels
from gemmscope.explain.gemms import Size
from gemmscope.explain.view import TimedWork
from gemmscope.results.explain import GemmShapeTotal

MOST_SHAPES = 200
ALIGNED_BYTES = 16
# Bytes per element of the operands, scales included, and of the result
OPERAND_BYTES = {"FP4": 0.5625, "FP8": 1.0, "FP8 blocks": 1.03, "MXFP8": 1.03, "INT8": 1.0, "FP32": 4.0, "TF32": 4.0}
WEIGHT_BYTES = {"FP4 weights": 0.5625, "FP8 weights": 1.0, "INT8 weights": 1.0, "INT4 weights": 0.5}
HIGH_BYTES = 2.0

Key = tuple[Size, int, str]  # size, GEMMs in one kernel, precision


def gemm_shapes(step: StepEvidence) -> tuple[GemmShapeTotal, ...]:
    """The shapes by time, the longest first. GEMMs of unknown size are left out."""
    groups: dict[Key, list[TimedWork]] = {}
    for item in step.items:
        size = item.gemm.size
        if size is not None and min(size) > 0 and item.gemm.flops > 0 and item.work.time > 0:
            batch = max(round(item.gemm.flops / (2.0 * size[0] * size[1] * size[2])), 1)
            groups.setdefault((size, batch, item.gemm.precision), []).append(item)
    rows = [_row(step, key, items) for key, items in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.time_ms)[:MOST_SHAPES])


def _row(step: StepEvidence, key: Key, items: Sequence[TimedWork]) -> GemmShapeTotal:
    (m, k, n), batch, precision = key
    time_us = sum(item.work.time for item in items)
    flops = sum(item.gemm.flops for item in items)
    passes = tuple(sorted({item.gemm.pass_name for item in items} - {""}))
    row = GemmShapeTotal(
        m=m, n=n, k=k, batch=batch, passes=passes, precision=precision,
        count=step.per_step(items), time_ms=time_us / 1000 / step.view.count, tflops=flops / time_us / 1e6,
        alignment_bytes=alignment(m if passes == ("wgrad",) else k, n, precision), kernel=main_kernels(items, 1)[0],
    )  # fmt: skip
    peak = step.gpu.peak(precision) if step.gpu is not None else None
    if step.gpu is None or not peak:
        return row
    compute_us = flops / peak / 1e6
    bandwidth = step.gpu.bandwidth_tbps
    memory_us = len(items) * gemm_bytes(m, k, n, batch, precision) / bandwidth / 1e6 if bandwidth else 0.0
    return row.model_copy(
        update={
            "sustained_share": row.tflops / (peak * step.gpu.usual),
            "roofline_share": max(compute_us, memory_us) / time_us,
            "bound": "memory" if memory_us > compute_us else "compute",
        }
    )


def gemm_bytes(m: int, k: int, n: int, batch: int, precision: str) -> float:
    """Bytes that a GEMM has to move at least: both operands and the result.

    >>> gemm_bytes(1024, 1024, 1024, 1, "BF16") / 2**20, gemm_bytes(1024, 1024, 1024, 1, "FP8") / 2**20
    (6.0, 4.0)
    """
    operand = OPERAND_BYTES.get(precision, HIGH_BYTES)
    weight = WEIGHT_BYTES.get(precision, operand)
    return batch * (m * k * operand + k * n * weight + m * n * (4.0 if precision in ("FP32", "TF32") else HIGH_BYTES))


def alignment(inner: int, columns: int, precision: str) -> int:
    """The largest power of two, up to 16, of which the rows of operands and result are a multiple, in bytes.

    >>> alignment(64, 3137, "BF16"), alignment(4096, 4096, "BF16"), alignment(4090, 4096, "FP8")
    (2, 16, 2)
    """
    bits = round(8 * OPERAND_BYTES.get(precision, HIGH_BYTES)) if precision != "FP4" else 4
    whole = gcd(gcd(inner * bits, columns * bits), 8 * ALIGNED_BYTES)
    return max(whole // 8, 1)
