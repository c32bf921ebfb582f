"""The operations that only a trace shows: linears, attention and what runs between them, with the counts that were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from typing import Literal

from gemmscope.workload.derive import HEAD
from gemmscope.workload.ops import Attention, Gemm, Linear, Op, Pass, Work

KINDS = ("norm", "activation", "softmax", "embedding", "loss")  # of work between GEMMs, and its roles; all else is elementwise
ALL_VISIBLE = Fraction(1)  # of the pairs of queries and keys
Unfused = tuple[Literal["sizes", "query", "key", "value", "mask"], ...]


@dataclass(frozen=True, kw_only=True)
class TracedLinear(Linear):
    """A linear as it was recorded: each pass has its own count, because a frozen weight or a first layer skips some.

    `forward_runs` times `count` is how often it ran forward. `backward` is the average over the `count` instances.
    """

    role: str = "traced-linear"
    seen: tuple[Gemm, ...] = ()
    weights: int = 1  # more than one in a grouped GEMM
    convertible: bool = True  # frameworks can swap it for one in low precision

    @property
    def groups(self) -> int:
        return self.weights

    @property
    def quantized(self) -> bool:
        return self.convertible

    def gemms(self) -> Iterator[Gemm]:
        yield from self.seen

    def running(self, *passes: Pass) -> TracedLinear:
        return replace(self, seen=tuple(gemm for gemm in self.seen if gemm.pass_name in passes))

    def backward(self) -> Work:
        """As many GEMMs as were recorded: two, or fewer where a gradient is not needed."""
        gemms = sum(gemm.count for gemm in self.seen if gemm.pass_name != "fprop")
        return self._one_gemm().times(gemms / self.count)


@dataclass(frozen=True, kw_only=True)
class TracedAttention(Attention):
    """A call of scaled_dot_product_attention. `backward_runs` is 0 where no gradient is needed.

    `mask_bytes` are those of an explicit mask, 0 without one; `mask_gradient`: it is a bias that is learned.
    `unfused`: why no fused kernel of PyTorch accepts it. "sizes": not four dimensions, batch sizes or heads that differ, or a
    head size that these kernels do not have. Else the tensors that are not contiguous in their last dimension. It then runs as
    batched GEMMs and a softmax, in FP32.
    """

    role: str = "attention"
    backward_runs: int = 1
    mask_bytes: int = 0
    mask_gradient: bool = False
    unfused: Unfused = ()

    def forward(self) -> Work:
        return super().forward() + Work(0, self.mask_bytes)

    def backward(self) -> Work:
        moved = self.mask_bytes * (2 if self.mask_gradient else 1)
        return Work(2 * super().forward().flops, super().backward().bytes_moved + moved).times(self.backward_runs)


@dataclass(frozen=True)
class Moved:
    """Operators of one direction: FLOPs, bytes and launches one by one; bytes and kernels where a compiler fuses them."""

    flops: float = 0.0
    bytes_moved: float = 0.0
    launches: int = 0
    fused_bytes: float = 0.0
    kernels: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class OtherWork:
    """The operators that one module runs between its GEMMs, summed over all its layers."""

    path: str
    kind: str
    forward: Moved = Moved()
    backward: Moved = Moved()


@dataclass(frozen=True, kw_only=True)
class Between(Op):
    """Memory-bound operators between GEMMs. Bytes are those of operators launched one by one."""

    moved: OtherWork

    @property
    def kind(self) -> str:  # type: ignore[override]
        """What its operators are: a norm, an activation, a softmax, an embedding, the loss, or elementwise."""
        return self.moved.kind if self.moved.kind in KINDS else "elementwise"

    def forward(self) -> Work:
        return self._per_run(self.moved.forward)

    def backward(self) -> Work:
        return self._per_run(self.moved.backward)

    def _per_run(self, moved: Moved) -> Work:
        return Work(moved.flops / self.count, moved.bytes_moved / self.count)

    @property
    def all_moved(self) -> Moved:
        """All runs in one micro-batch, forward and backward."""
        return self.moved.forward + self.moved.backward


def between(work: OtherWork, *, head: bool = False) -> Between:
    """The op for the recorded work. Its count is how often its operators ran forward, or backward if they ran only there."""
    count = work.forward.launches or work.backward.launches or 1
    role = "head-elementwise" if head else work.kind if work.kind in KINDS else "elementwise"
    return Between(role=role, label=work.path, section=HEAD if head else "", moved=work, count=count)
