"""Recurrences over the sequence, computed chunk by chunk as fused kernels do, and short causal convolutions: FLOPs and bytes.

The FLOPs are those of the matrix products that the kernels run on whole chunks, masked parts included; what is elementwise in a
chunk is left out, except in Mamba's selective scan, which has no products. Sources:

* SSD (Mamba-2): "Transformers are SSMs" (arXiv 2405.21060), section 6, as mamba-ssm's `mamba_chunk_scan_combined` runs it:
  C·Bᵀ per group, its product with x, the states of chunks (Bᵀ·x) and what they add (C·state). Backward computes C·Bᵀ and the
  states again.
* gated delta rule and KDA: "Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692), as
  flash-linear-attention's `chunk_gated_delta_rule` and `chunk_kda` run them: K·Kᵀ and its triangular inverse, w and u, the
  states, Q·Kᵀ and the output. Backward computes w, u and the states again.
* lightning attention: "Lightning Attention-2" (arXiv 2401.04658): Q·Kᵀ·V inside a block, Q·(KᵀV) between blocks.
* selective scan (Mamba): "Mamba" (arXiv 2312.00752), about 9 FLOPs per channel, state and position; backward computes the states
  again.
"""

from dataclasses import dataclass
from typing import ClassVar

from gemmscope.model.mixers import MixerKind
from gemmscope.workload.ops import ELEMENT_BYTES, Op, Work

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Scan(Op):
    """One recurrence: `heads` values of `value_dim`, `groups` keys and queries of `key_dim`, `chunk` positions at once.

    >>> scan = Scan(name="Gated Delta Rule", rule="gated delta rule", batch=1, sequence=64, heads=2, groups=1, key_dim=128,
    ...             value_dim=128)
    >>> scan.forward().flops == 2 * (64 * (6 * 128 * 128 + 64 * 10 * 128) + 64**3 * 2 / 3)
    True
    """

    kind: ClassVar[str] = "scan"
    rule: MixerKind
    batch: int
    sequence: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    chunk: int = 64

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def length(self) -> int:
        """Positions of a chunk."""
        return min(self.chunk, self.sequence)

    def forward(self) -> Work:
        """Reads queries, keys, values and gates, writes the output; states of chunks go through memory."""
        c, k, v = self.length, self.key_dim, self.value_dim
        each: float
        if self.rule == "ssd":
            each = self.heads * (2 * c * v + 4 * k * v) + self.groups * 2 * c * k
        elif self.rule == "selective scan":
            each = self.heads * v * k * 9
        elif self.rule == "lightning attention":
            each = self.heads * (2 * c * (k + v) + 4 * k * v)
        else:
            each = self.heads * (6 * k * v + c * (6 * k + 4 * v) + c * c * 2 / 3)
        return Work(self.tokens * each, self._inputs() + self._outputs() + 2 * self._states() + 2 * self._inner())

    def backward(self) -> Work:
        """Two products for each of forward, and those that are computed again. Reads inputs and dO, writes gradients."""
        c, k, v = self.length, self.key_dim, self.value_dim
        if self.rule == "ssd":
            each = self.heads * (4 * c * v + 10 * k * v) + self.groups * 6 * c * k
        elif self.rule == "selective scan":
            each = self.heads * v * k * 27
        elif self.rule == "lightning attention":
            each = self.heads * (c * (6 * k + 4 * v) + 10 * k * v)
        else:
            each = self.heads * (16 * k * v + c * (16 * k + 10 * v) + 4 * c * c)
        return Work(self.tokens * each, 2 * (self._inputs() + self._outputs()) + 5 * self._states() + 6 * self._inner())

    def _inputs(self) -> float:
        """Bytes of queries, keys and values, and of the gates: one per head, or one per channel (KDA, Mamba's time step)."""
        gates = self.heads * (self.key_dim if self.rule == "kda" else self.value_dim if self.rule == "selective scan" else 1)
        return self.tokens * ((2 * self.groups * self.key_dim + self.heads * self.value_dim) * ELEMENT_BYTES + gates * FP32_BYTES)

    def _outputs(self) -> float:
        return self.tokens * self.heads * self.value_dim * ELEMENT_BYTES

    def _states(self) -> float:
        """Bytes of the states that chunks hand on. A selective scan keeps its state in registers."""
        if self.rule == "selective scan":
            return 0.0
        wide = FP32_BYTES if self.rule == "ssd" else ELEMENT_BYTES
        return self.tokens / self.length * self.heads * self.key_dim * self.value_dim * wide

    def _inner(self) -> float:
        """Bytes of what kernels hand to each other inside a chunk: C·Bᵀ; w, u and the triangular inverse of delta rules."""
        if self.rule == "ssd":
            return self.tokens * self.groups * self.length * ELEMENT_BYTES
        if self.rule in ("gated delta rule", "kda"):
            return self.tokens * self.heads * (self.key_dim + 2 * self.value_dim + self.length) * ELEMENT_BYTES
        return 0.0

    def kept_bytes(self) -> float:
        """What backward needs: the inputs, the output, and the triangular inverse of delta rules."""
        inverse = self.length if self.rule in ("gated delta rule", "kda") else 0
        return self._inputs() + self._outputs() + self.tokens * self.heads * inverse * ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class CausalConv(Op):
    """A short convolution over the positions of each channel alone, with its activation."""

    kind: ClassVar[str] = "causal convolution"
    tokens: int
    channels: int
    kernel: int

    def forward(self) -> Work:
        """Reads x, writes y."""
        elements = self.tokens * self.channels
        return Work(2 * self.kernel * elements, 2 * elements * ELEMENT_BYTES)

    def backward(self) -> Work:
        """Reads x and dy, writes dx; the gradient of the filters is small."""
        elements = self.tokens * self.channels
        return Work(4 * self.kernel * elements, 3 * elements * ELEMENT_BYTES)
