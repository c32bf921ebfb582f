"""Recurrences over the sequence, computed chunk by chunk as fused kernels do, and short causal convolutions: FLOPs and bytes.

The FLOPs are those of the matrix products that the kernels run on whole chunks, masked parts included; what is elementwise in a
chunk is left out, except in Mamba's selective scan, which has no products. Sources:

* SSD (Mamba-2): "Transformers are SSMs" (arXiv 2405.21060), section 6, as mamba-ssm's `mamba_chunk_scan_combined` runs it:
  C·Bᵀ per group, its product with x, the states of chunks (Bᵀ·x) and what they add (C·state). Backward computes C·Bᵀ and the
  states again. `ssd.py` counts each product.
* gated delta rule and KDA: "Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692), as
  flash-linear-attention's `chunk_gated_delta_rule` and `chunk_kda` run them: K·Kᵀ and its triangular inverse, w and u, the
  states, Q·Kᵀ and the output. Backward computes w, u and the states again. `delta_rules.py` counts each product.
* lightning attention: "Lightning Attention-2" (arXiv 2401.04658): Q·Kᵀ·V inside a block, Q·(KᵀV) between blocks, in
  flash-linear-attention's `chunk_lightning_attn` (`fla/ops/simple_gla/chunk.py`). Forward: Kᵀ·v and q·state 4kv, q·Kᵀ and its
  product with v 2c(k + v). Backward: the states again and their gradients 4kv, three products with states 6kv, q·Kᵀ again, do·vᵀ
  and three products with these 6ck + 4cv.
* selective scan (Mamba): "Mamba" (arXiv 2312.00752). About 9 FLOPs per channel, state and position, as its authors
  count them (github.com/state-spaces/mamba/issues/110). Backward computes the states again and scans in reverse: about 27.
"""

from dataclasses import dataclass
from typing import ClassVar

from gemmscope.model.layer_spec import MixerKind
from gemmscope.workload import delta_rules, ssd
from gemmscope.workload.delta_rules import DELTA_RULES, DeltaSizes
from gemmscope.workload.ops import ELEMENT_BYTES, Op, Work
from gemmscope.workload.ssd import SsdSizes

FP32_BYTES = 4


def scan_role(rule: MixerKind) -> str:
    """The role of a mixer's recurrence."""
    return rule.replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Scan(Op):
    """One recurrence: `heads` values of `value_dim`, `groups` keys and queries of `key_dim`, `chunk` positions at once.

    >>> scan = Scan(role="gated-delta-rule", rule="gated delta rule", batch=1, sequence=64, heads=2, groups=1, key_dim=128,
    ...             value_dim=128)
    >>> scan.forward().flops == 64 * 2 * (6 * 128 * 128 + (64 + 16) * 128 + 64 * 8 * 128 + 64 * 64 / 2)
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
        if self.rule in DELTA_RULES:
            flops, elements = delta_rules.forward_flops(self._delta()), delta_rules.forward_elements(self._delta())
            return Work(self.tokens * flops, self.tokens * elements * ELEMENT_BYTES)
        if self.rule == "ssd":
            flops, moved = ssd.forward(self._ssd())
            return Work(self.tokens * flops, self.tokens * moved)
        c, k, v = self.length, self.key_dim, self.value_dim
        lightning = 2 * c * (k + v) + 4 * k * v
        flops_per_token = self.heads * (9 * k * v if self.rule == "selective scan" else lightning)
        return Work(self.tokens * flops_per_token, self._inputs() + self._outputs() + 2 * self._states())

    def backward(self) -> Work:
        """Two GEMMs for each forward GEMM, plus those that are recomputed. Reads inputs and dO, writes gradients."""
        if self.rule in DELTA_RULES:
            flops, elements = delta_rules.backward_flops(self._delta()), delta_rules.backward_elements(self._delta())
            return Work(self.tokens * flops, self.tokens * elements * ELEMENT_BYTES)
        if self.rule == "ssd":
            flops, moved = ssd.backward(self._ssd())
            return Work(self.tokens * flops, self.tokens * moved)
        c, k, v = self.length, self.key_dim, self.value_dim
        lightning = c * (6 * k + 4 * v) + 10 * k * v
        flops_per_token = self.heads * (27 * k * v if self.rule == "selective scan" else lightning)
        return Work(self.tokens * flops_per_token, 2 * (self._inputs() + self._outputs()) + 5 * self._states())

    def _delta(self) -> DeltaSizes:
        return DeltaSizes(self.rule, self.length, self.key_dim, self.value_dim, self.heads, self.groups)

    def _ssd(self) -> SsdSizes:
        return SsdSizes(self.length, self.key_dim, self.value_dim, self.heads, self.groups)

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
        return self.tokens / self.length * self.heads * self.key_dim * self.value_dim * ELEMENT_BYTES

    def kept_bytes(self) -> float:
        """What backward needs: the inputs, the output, and the triangular inverse of delta rules (of KDA, q·Kᵀ too)."""
        inverse = self.length * {"gated delta rule": 1, "kda": 2}.get(self.rule, 0)
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

    def kept_bytes(self) -> float:
        """What backward needs: x."""
        return self.tokens * self.channels * ELEMENT_BYTES
