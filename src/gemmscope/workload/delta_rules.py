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
their gradients (four products) too; both results are kept for backward. Blocks on the diagonal count like the others, although
the kernels may compute these without tensor cores.
"""

from typing import NamedTuple

from gemmscope.model.layer_spec import MixerKind

BLOCK = 16
DELTA_RULES: tuple[MixerKind, ...] = ("gated delta rule", "kda")


class DeltaSizes(NamedTuple):
    """Sizes of one recurrence: positions of a chunk, sizes of keys and values, heads of values and of keys."""

    rule: MixerKind
    chunk: int
    key: int
    value: int
    heads: int
    groups: int


def forward_flops(sizes: DeltaSizes) -> float:
    """FLOPs of one position in forward, all heads."""
    c, k, v, block = sizes.chunk, sizes.key, sizes.value, min(BLOCK, sizes.chunk)
    lower = (c + block) * k
    scores = 2 * lower if sizes.rule == "kda" else lower + 2 * c * k
    return sizes.heads * (6 * k * v + scores + 2 * c * k + 4 * c * v + c * c / 2)


def backward_flops(sizes: DeltaSizes) -> float:
    """FLOPs of one position in backward, all heads, including what is computed again."""
    c, k, v, block = sizes.chunk, sizes.key, sizes.value, min(BLOCK, sizes.chunk)
    keys = 6 * c * k + 4 * (c + block) * k if sizes.rule == "kda" else 18 * c * k
    return sizes.heads * (16 * k * v + keys + 10 * c * v + 4 * c * c)


def forward_elements(sizes: DeltaSizes) -> float:
    """BF16 elements that the kernels of one position read and write, FP32 ones counted twice; a state is c positions' share."""
    c, k, v, state = sizes.chunk, sizes.key, sizes.value, sizes.key * sizes.value / sizes.chunk
    if sizes.rule == "kda":  # decays are FP32, and as many as keys
        return sizes.heads * (10 * k + 6 * v + 4 * c + 2 * state + 12 * k)
    return 5 * sizes.groups * k + sizes.heads * (2 * k + 6 * v + 2 * c + 2 * state)


def backward_elements(sizes: DeltaSizes) -> float:
    """The elements that backward reads and writes, counted as those of forward."""
    c, k, v, state = sizes.chunk, sizes.key, sizes.value, sizes.key * sizes.value / sizes.chunk
    if sizes.rule == "kda":
        return sizes.heads * (42 * k + 15 * v + 11 * c + 4 * state)
    return 9 * sizes.groups * k + sizes.heads * (11 * k + 15 * v + 2 * c + 4 * state)
