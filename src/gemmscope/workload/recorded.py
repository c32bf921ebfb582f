"""The operations that only a trace shows: linears, attention and what runs between them, with the counts that were recorded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from gemmscope.workload.ops import Attention, Gemm, Linear, Op, Work

Unfused = tuple[Literal["sizes", "query", "key", "value", "mask"], ...]


@dataclass(frozen=True, kw_only=True)
class TracedLinear(Linear):
    """A linear as it was recorded: each pass has its own count, because a frozen weight or a first layer skips some.

    `forward_runs` times `count` is how often it ran forward. `backward` is the average over the `count` instances.
    """

    seen: tuple[Gemm, ...] = ()
    weights: int = 1  # more than one in a grouped GEMM

    @property
    def groups(self) -> int:
        return self.weights

    def gemms(self) -> Iterator[Gemm]:
        yield from self.seen

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

    kind: ClassVar[str] = "elementwise"
    moved: OtherWork

    def forward(self) -> Work:
        return self._per_run(self.moved.forward)

    def backward(self) -> Work:
        return self._per_run(self.moved.backward)

    def _per_run(self, moved: Moved) -> Work:
        return Work(moved.flops / self.count, moved.bytes_moved / self.count)

    @property
    def fused_bytes(self) -> float:
        """Bytes that all runs in one micro-batch move, if a compiler fuses operators."""
        return self.moved.forward.fused_bytes + self.moved.backward.fused_bytes

    @property
    def kernels(self) -> int:
        """Kernels of all runs in one micro-batch, if a compiler fuses operators."""
        return self.moved.forward.kernels + self.moved.backward.kernels

    @property
    def launches(self) -> int:
        """Kernels of all runs in one micro-batch, if every operator is launched by itself."""
        return self.moved.forward.launches + self.moved.backward.launches


@dataclass(frozen=True, kw_only=True)
class BetweenNorm(Between):
    """The operators of a normalization between GEMMs."""

    kind: ClassVar[str] = "norm"


@dataclass(frozen=True, kw_only=True)
class BetweenActivation(Between):
    """The operators of an activation function between GEMMs."""

    kind: ClassVar[str] = "activation"


@dataclass(frozen=True, kw_only=True)
class BetweenSoftmax(Between):
    """The operators of a softmax outside fused attention between GEMMs."""

    kind: ClassVar[str] = "softmax"


@dataclass(frozen=True, kw_only=True)
class BetweenEmbedding(Between):
    """The operators of an embedding between GEMMs."""

    kind: ClassVar[str] = "embedding"


@dataclass(frozen=True, kw_only=True)
class BetweenLoss(Between):
    """The operators of the loss between GEMMs."""

    kind: ClassVar[str] = "loss"


_OP_CLASSES = (Between, BetweenNorm, BetweenActivation, BetweenSoftmax, BetweenEmbedding, BetweenLoss)
_KINDS = {op_class.kind: op_class for op_class in _OP_CLASSES}


def between(work: OtherWork) -> Between:
    """The op for the recorded work. Its count is how often its operators ran forward, or backward if they ran only there."""
    count = work.forward.launches or work.backward.launches or 1
    return _KINDS.get(work.kind, Between)(name=work.path, moved=work, count=count)
