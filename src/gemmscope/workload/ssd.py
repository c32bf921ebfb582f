"""The state-space scan of Mamba-2 (SSD), kernel by kernel: FLOPs and bytes for each position.

The algorithm is that of "Transformers are SSMs" (arXiv 2405.21060), section 6, as `mamba_chunk_scan_combined` runs it
(github.com/state-spaces/mamba, `mamba_ssm/ops/triton/ssd_combined.py`). Sizes: chunks of c positions, heads of v values, groups
of k states.

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

In the products of c x c positions with x or dO, the kernels skip the blocks above the diagonal; C·Bᵀ is computed whole. States
are FP32 between the kernel that makes them and the one that hands them on, and BF16 after it; C·Bᵀ is FP32.
"""

from dataclasses import dataclass

from gemmscope.workload.ops import ELEMENT_BYTES

FP32_BYTES = 4
BLOCK = 64  # positions of a block; the kernels try 32 to 128


@dataclass(frozen=True)
class SsdSizes:
    """Sizes of a scan: positions of a chunk, states of a group, values of a head, and how many there are of each."""

    chunk: int
    key_dim: int
    value_dim: int
    heads: int
    groups: int

    @property
    def seen(self) -> float:
        """Positions of its chunk that a position is multiplied with, on average."""
        return (self.chunk + min(BLOCK, self.chunk)) / 2

    def products(self, with_states: int, with_values: int, of_keys: int) -> float:
        """FLOPs, given how many products there are with states, of positions with values, and of keys with keys."""
        states = with_states * self.key_dim * self.value_dim
        return 2 * (
            self.heads * (states + with_values * self.seen * self.value_dim) + of_keys * self.groups * self.chunk * self.key_dim
        )

    def traffic(self, values: float, keys: float, gates: float, inner: float, states: float) -> float:
        """Bytes, given the number of reads and writes of values, keys, gates, C·Bᵀ and of states in FP32."""
        per_chunk = self.heads * self.key_dim * self.value_dim / self.chunk
        return (
            values * self.heads * self.value_dim * ELEMENT_BYTES
            + keys * self.groups * self.key_dim * ELEMENT_BYTES
            + gates * self.heads * FP32_BYTES
            + inner * self.groups * self.chunk * FP32_BYTES
            + states * per_chunk * FP32_BYTES
        )


def forward(sizes: SsdSizes) -> tuple[float, float]:
    """FLOPs and bytes of one position. Values: x twice, the output. States: written, handed on in BF16, read.

    >>> forward(SsdSizes(chunk=64, key_dim=128, value_dim=64, heads=8, groups=1))[0] == 8 * 64 * (4 * 128 + 2 * 64) + 2 * 64 * 128
    True
    """
    return sizes.products(2, 1, 1), sizes.traffic(values=3, keys=4, gates=7, inner=2, states=3)


def backward(sizes: SsdSizes) -> tuple[float, float]:
    """FLOPs and bytes of one position. Values: x five times, dO five times, dx."""
    return sizes.products(5, 3, 3), sizes.traffic(values=11, keys=15, gates=20, inner=6, states=8.5)
