"""The result of `gemmscope shapes`: every GEMM of one micro-batch on one rank, and what the step adds up to."""

from dataclasses import dataclass
from typing import Literal

from gemmscope.results.base import ModelResult, Part
from gemmscope.workload.check import Difference
from gemmscope.workload.ops import Direction, Gemm
from gemmscope.workload.summary import Totals


@dataclass(frozen=True)
class ListedGemm(Gemm):
    """A GEMM with its work. `share` is its part of all GEMM FLOPs of the micro-batch."""

    flops: int = 0
    share: float = 0.0


class ListedOp(Part):
    """Any operation, GEMMs included, with its work forward and backward."""

    op: str
    kind: str
    section: str
    """Where in the model: embedding, a kind of layer, head, step."""
    count: int
    """Executions per micro-batch (optimizer: per step)."""
    forward_runs: int | float
    """2 where the forward pass is recomputed; less where it is in a share of the layers."""
    copies: int
    """Ranks of the tensor-parallel group that run the same op on the same data."""
    forward_flops: float
    """Of one execution."""
    forward_bytes: float
    backward_flops: float
    backward_bytes: float
    parameters: int
    """Of one instance, on this rank."""
    rows_per_group: tuple[int, ...] | None = None
    """Grouped linears: tokens of each expert."""


class ListedBatchedGemm(Part):
    """A batched GEMM without a weight: the scores, context and gradients of unfused attention."""

    op: str
    direction: Direction
    m: int
    k: int
    n: int
    batch: int
    count: int


class Check(Part):
    """The closed form compared with a trace of the same model."""

    differences: tuple[Difference, ...]
    model_class: str
    versions: dict[str, str]
    gemms: int = 0
    """GEMMs that the trace counted."""

    @property
    def equal(self) -> bool:
        return not self.differences


class ShapesResult(ModelResult):
    """The result of `gemmscope shapes`: every GEMM of a training step, and its other work."""

    kind: Literal["shapes"] = "shapes"
    derived_by: Literal["closed form", "trace"]
    gemms: tuple[ListedGemm, ...]
    ops: tuple[ListedOp, ...]
    batched_gemms: tuple[ListedBatchedGemm, ...]
    totals: Totals
    check: Check | None = None
