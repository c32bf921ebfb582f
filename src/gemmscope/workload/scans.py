"""Recurrences over the sequence, computed chunk by chunk as fused kernels do, and short causal convolutions: FLOPs and bytes.

The FLOPs are those of the matrix products that the kernels run on whole chunks, masked parts included; what is elementwise in a
chunk is left out, except in Mamba's selective scan, which has no products. Sources:

* SSD (Mamba-2): "Transformers are SSMs" (arXiv 2405.21060), section 6, as mamba-ssm's `mamba_chunk_scan_combined` runs it:
  C·Bᵀ per group, its product with x, the states of chunks (Bᵀ·x) and what they add (C·state). Backward computes C·Bᵀ and the
  states again. `_state_space` counts each product.
* gated delta rule and KDA: "Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692), as
  flash-linear-attention's `chunk_gated_delta_rule` and `chunk_kda` run them: K·Kᵀ and its triangular inverse, w and u, the
  states, Q·Kᵀ and the output. Backward computes w, u and the states again. `_delta_rule` counts each product.
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
from gemmscope.workload.ops import ELEMENT_BYTES, FP32_BYTES, Elementwise, Op, Work

DELTA_BLOCK = 16  # positions of a block in the kernels of delta rules
SSD_BLOCK = 64  # and of Mamba-2's scan, which try 32 to 128


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
        return self._work(backward=False)

    def backward(self) -> Work:
        """Reads inputs and dO, writes gradients; computes again what forward does not keep."""
        return self._work(backward=True)

    def _work(self, *, backward: bool) -> Work:
        if self.rule in ("gated delta rule", "kda"):
            flops, moved = _delta_rule(self, backward=backward)
        elif self.rule == "ssd":
            flops, moved = _state_space(self, backward=backward)
        else:
            c, k, v = self.length, self.key_dim, self.value_dim
            lightning = c * (6 * k + 4 * v) + 10 * k * v if backward else 2 * c * (k + v) + 4 * k * v
            selective = (27 if backward else 9) * k * v
            flops = self.heads * (selective if self.rule == "selective scan" else lightning)
            passes, states = (2, 5) if backward else (1, 2)
            return Work(self.tokens * flops, passes * (self._inputs() + self._outputs()) + states * self._states())
        return Work(self.tokens * flops, self.tokens * moved)

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


def _delta_rule(scan: Scan, *, backward: bool) -> tuple[float, float]:
    """FLOPs and bytes of delta rules in chunks, counted in the kernels of flash-linear-attention 0.6.

    Per position and head, with chunks of c positions, keys of size k and values of size v; blocks of b = 16 positions make up a
    chunk, and products of which only the lower triangle is needed run on the blocks below the diagonal and on it.

    gated delta rule (`fla/ops/gated_delta_rule/chunk.py`), forward:

    * `chunk_gated_delta_rule_fwd_kkt_solve`: K·Kᵀ on lower blocks (c + b)k; its triangular inverse, 16 products of blocks: c²/2
    * `recompute_w_u_fwd`: w 2ck and u 2cv
    * `chunk_gated_delta_rule_fwd_h`: w·state and Kᵀ·v, 4kv
    * `chunk_fwd_o`: q·state 2kv, q·Kᵀ 2ck, and its product with v 2cv

    backward:

    * w, u and the states again: 2ck + 2cv + 4kv
    * `chunk_bwd_dv_local`: 2ck + 2cv
    * `chunk_gated_delta_rule_bwd_dhu`: k·dstate, qᵀ·do and wᵀ·dv, 6kv
    * `chunk_bwd_dqkwg`: do·vᵀ 2cv; do·state, v·dstate and dv·state 6kv; two products with keys and queries 4ck
    * `prepare_wy_repr_bwd`: two products each for w and u, 4ck + 4cv; the inverse's gradient 4c²; K·Kᵀ and its gradients 6ck

    KDA (`fla/ops/kda/`) scales every channel of a key by its own decay. So q·Kᵀ is computed with K·Kᵀ, both on lower blocks, and
    their gradients (four products) too; both results are kept for backward. Blocks on the diagonal count like the others,
    although the kernels may compute these without tensor cores.

    Bytes: BF16 elements that the kernels read and write, FP32 ones counted twice; a state is c positions' share.
    """
    c, k, v, kda = scan.length, scan.key_dim, scan.value_dim, scan.rule == "kda"
    lower, state = (c + min(DELTA_BLOCK, c)) * k, k * v / c
    flops: float
    if backward:
        keys = 6 * c * k + 4 * lower if kda else 18 * c * k
        flops = 16 * k * v + keys + 10 * c * v + 4 * c * c
        shared, own = (0, 42 * k + 11 * c) if kda else (9 * k, 11 * k + 2 * c)
        rest = 15 * v + 4 * state
    else:
        scores = 2 * lower if kda else lower + 2 * c * k
        flops = 6 * k * v + scores + 2 * c * k + 4 * c * v + c * c / 2
        shared, own = (0, 22 * k + 4 * c) if kda else (5 * k, 2 * k + 2 * c)  # of KDA, decays are FP32, and as many as keys
        rest = 6 * v + 2 * state
    return scan.heads * flops, (scan.groups * shared + scan.heads * (own + rest)) * ELEMENT_BYTES


def _state_space(scan: Scan, *, backward: bool) -> tuple[float, float]:
    """The state-space scan of Mamba-2 (SSD), kernel by kernel: FLOPs and bytes for each position.

    The algorithm is that of "Transformers are SSMs" (arXiv 2405.21060), section 6, as `mamba_chunk_scan_combined` runs it
    (github.com/state-spaces/mamba, `mamba_ssm/ops/triton/ssd_combined.py`). Sizes: chunks of c positions, heads of v values,
    groups of k states.

    | forward kernel    | products                                              |
    | ----------------- | ----------------------------------------------------- |
    | chunk state       | Bᵀ·x                                    2kv per head  |
    | bmm chunk         | C·Bᵀ                                    2ck per group |
    | chunk scan        | C·state, (C·Bᵀ)·x               2kv + 2cv per head    |

    | backward kernel   | products                                              |
    | ----------------- | ----------------------------------------------------- |
    | again             | Bᵀ·x, C·Bᵀ                  2kv per head, 2ck per group |
    | dstates           | Cᵀ·dO                                   2kv per head  |
    | dx                | (C·Bᵀ)ᵀ·dO, B·dstate            2cv + 2kv per head    |
    | dB, dC            | x·dstate, dO·state                      4kv per head  |
    | d(C·Bᵀ)           | dO·xᵀ                                   2cv per head  |
    | bmm backward      | d(C·Bᵀ) with C and with B               4ck per group |
    | decay             | dO·xᵀ                                   2cv per head  |

    In the products of c x c positions with x or dO, the kernels skip the blocks above the diagonal; C·Bᵀ is computed whole.
    States are FP32 between the kernel that makes them and the one that hands them on, and BF16 after it; C·Bᵀ is FP32.

    Bytes count reads and writes of values (forward: x twice, the output; backward: x five times, dO five times, dx), of keys, of
    gates, of C·Bᵀ and of states in FP32 (forward: written, handed on in BF16, read).
    """
    c, k, v = scan.length, scan.key_dim, scan.value_dim
    with_states, with_values, of_keys = (5, 3, 3) if backward else (2, 1, 1)
    values, keys, gates, inner, states = (11, 15, 20, 6, 8.5) if backward else (3, 4, 7, 2, 3)
    products = scan.heads * (with_states * k * v + with_values * seen_positions(c) * v) + of_keys * scan.groups * c * k
    wide = scan.heads * gates + scan.groups * inner * c + scan.heads * states * k * v / c
    return 2 * products, (scan.heads * values * v + scan.groups * keys * k) * ELEMENT_BYTES + wide * FP32_BYTES


def seen_positions(chunk: int) -> float:
    """Positions of its chunk that a position is multiplied with in Mamba-2's kernels, on average."""
    return (chunk + min(SSD_BLOCK, chunk)) / 2


@dataclass(frozen=True, kw_only=True)
class CausalConv(Elementwise):
    """A short convolution over the positions of each channel alone, with its activation: `rows` positions, `width` channels."""

    kind: ClassVar[str] = "causal convolution"
    kernel: int
    forward_tensors: float = 2  # reads x, writes y
    backward_tensors: float = 3  # reads x and dy, writes dx; the gradient of the filters is small
    kept_tensors: float = 1


def causal_conv(tokens: int, channels: int, kernel: int, parameters: int = 0) -> CausalConv:
    """The convolution with its FLOPs."""
    return CausalConv(
        role="causal-conv", rows=tokens, width=channels, kernel=kernel, parameters=parameters, forward_flops=2 * kernel,
        backward_flops=4 * kernel,
    )  # fmt: skip
