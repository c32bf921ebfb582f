"""The time of a GEMM from the chip's rates and the GEMM's sizes alone, and how well it fills the chip.

A GEMM is cut into tiles of the result; as many tiles as the chip has multiprocessors run at a time, in waves. The last wave is
rarely full, and the edge tiles reach beyond the matrix: this is why times grow in steps when a size grows smoothly. Added to this
are the bytes that must come from memory, and the time to launch. `roofline_ms` combines the three for the best of a few tile
sizes.

How libraries differ from this (their choice of tiles, their schedule) is fitted to measurements, as a correction to this time.
The correction sees only `features`: shapes and how they fill the chip, never the chip's rates. A faster memory or a higher rate
therefore acts through the physics alone, and always in the right direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmscope.recipe.precisions import precisions

Array: TypeAlias = NDArray[np.float64]

TILES = ((256, 256), (256, 128), (128, 256), (256, 192), (192, 192), (320, 128), (128, 128), (256, 64), (64, 256))
SMALL_TILE_COST = 24.0  # a tile of side s moves 1/s as much per FLOP: the smaller, the longer it waits for its operands
FILL_K = 200.0  # cost of filling and draining a tile's pipeline, in elements of K
BANDWIDTH_REACHED = 0.92  # of the data sheet's
LAUNCH_MS = 0.0025
SHARPNESS = 4.0  # how sudden the change from memory-bound to compute-bound is

RESULT_BYTES = 2.0


@dataclass(frozen=True)
class Shapes:
    """GEMMs M x K x N, as arrays of one length. With `groups` > 1, `split_k` says whether K, not M, is the sum over groups."""

    m: Array
    k: Array
    n: Array
    groups: Array
    split_k: NDArray[np.bool_]

    @staticmethod
    def of(m: Any, k: Any, n: Any, groups: Any = 1, split_k: Any = False) -> Shapes:
        """Shapes from numbers or sequences, broadcast to one length."""
        parts = np.broadcast_arrays(*(np.atleast_1d(np.asarray(sizes, dtype=np.float64)) for sizes in (m, k, n, groups, split_k)))
        return Shapes(parts[0], parts[1], parts[2], parts[3], parts[4].astype(bool))

    def take(self, index: NDArray[np.int_]) -> Shapes:
        """The shapes at these indices."""
        return Shapes(self.m[index], self.k[index], self.n[index], self.groups[index], self.split_k[index])

    @property
    def flops(self) -> Array:
        return 2 * self.m * self.k * self.n

    @property
    def rows(self) -> Array:
        """Rows of one group's result."""
        return np.where(self.split_k, self.m, self.m / self.groups)

    @property
    def inner(self) -> Array:
        """The inner dimension of one group."""
        return np.where(self.split_k, self.k / self.groups, self.k)

    def bytes_moved(self, fmt: str) -> Array:
        """Operands read once, results written once."""
        rows, inner = self.rows, self.inner
        return self.groups * ((rows * inner + inner * self.n) * precisions()[fmt].operand_bytes + rows * self.n * RESULT_BYTES)


def tile_work(shapes: Shapes, sms: int) -> Array:
    """FLOPs of all waves for each tile size, where idle slots and the filling of the pipeline count as work."""
    columns = []
    for rows, cols in TILES:
        tiles = shapes.groups * np.ceil(shapes.rows / rows) * np.ceil(shapes.n / cols)
        cost = 1 + SMALL_TILE_COST * (1 / rows + 1 / cols)
        columns.append(np.ceil(tiles / sms) * sms * (rows * cols * 2.0) * (shapes.inner + FILL_K) * cost)
    return np.stack(columns, axis=1)


def memory_ms(shapes: Shapes, fmt: str, bandwidth_tbps: float) -> Array:
    """The time to move the bytes of each GEMM."""
    return shapes.bytes_moved(fmt) / (bandwidth_tbps * 1e9 * BANDWIDTH_REACHED)


def roofline_ms(shapes: Shapes, fmt: str, *, sms: int, tflops: float, bandwidth_tbps: float, work: Array | None = None) -> Array:
    """The time of each GEMM from compute, memory and launch.

    >>> float(roofline_ms(Shapes.of(8192, 8192, 8192), "bf16", sms=132, tflops=989, bandwidth_tbps=4.8).round(3)[0])
    1.397
    """
    compute = (tile_work(shapes, sms) if work is None else work).min(axis=1) / (tflops * 1e9)
    moved = memory_ms(shapes, fmt, bandwidth_tbps)
    peak = np.maximum(compute, moved)
    total: Array = peak * ((compute / peak) ** SHARPNESS + (moved / peak) ** SHARPNESS) ** (1 / SHARPNESS) + LAUNCH_MS
    return total


def features(shapes: Shapes, sms: int, work: Array | None = None) -> NDArray[np.float32]:
    """The inputs of the correction: the sizes of a GEMM, its intensity, and how every tile size would fill the chip."""
    work = tile_work(shapes, sms) if work is None else work
    m, k, n = shapes.m, shapes.k, shapes.n
    best = work.min(axis=1)
    intensity = shapes.flops / (shapes.bytes_moved("bf16"))
    fills = []
    for rows, cols in TILES:
        tiles = shapes.groups * np.ceil(shapes.rows / rows) * np.ceil(shapes.n / cols)
        fills.append(shapes.groups * shapes.rows * n / (np.ceil(tiles / sms) * sms * rows * cols))
    sizes = (
        np.log2(m / 2048) / 3, np.log2(n / 4096) / 3, np.log2(k / 4096) / 3, np.log2(m * n * k) / 6 - 5.5,
        np.log2(m * n / sms) / 5 - 3, np.log2(intensity) / 3 - 3, np.log2(best) / 6 - 6, np.log2(m / n) / 4,
    )  # fmt: skip
    chosen = np.log(work / best[:, None]).clip(0, 1)
    return np.concatenate([np.stack(sizes, axis=1), np.stack(fills, axis=1) * 2 - 1, chosen], axis=1).astype(np.float32)
