"""FlexAttention: traced on the meta device, with the pairs that its block mask allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmscope.workload.trace import ModuleTrace, as_workload
from support.reading import codes

pytest.importorskip("torch.nn.attention.flex_attention", reason="tracing needs torch")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="tracing needs torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile

SOURCE = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

def causal(batch, head, query, key):
    return query >= key

def window(batch, head, query, key):
    return (query >= key) & (query - key < 4 * (head + 1))

def same_document(documents):
    return lambda batch, head, query, key: documents[query] == documents[key]

class Attention(torch.nn.Module):
    def __init__(self, mask, heads=None, attend=flex_attention, **options):
        super().__init__()
        self.qkv, self.mask, self.heads, self.attend, self.options = torch.nn.Linear(32, 96), mask, heads, attend, options
        self.documents = torch.nn.Buffer(torch.zeros(16, dtype=torch.long))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mask = self.mask(self.documents) if self.mask is same_document else self.mask
        blocks = create_block_mask(mask, None, self.heads, 16, 16, device=x.device) if mask else None
        result = self.attend(q, k, v, block_mask=blocks, **self.options)
        return result[0] + result[1][..., None] if isinstance(result, tuple) else result

class WithValues(Attention):
    def forward(self, x):
        x.sum().item()
        return super().forward(x)

def build(make, *args, **options):
    return make(*args, **options), torch.zeros(3, 16, 32)

def plain(): return build(Attention, None)
def one(): return build(Attention, causal)
def compiled(): return build(Attention, causal, attend=torch.compile(flex_attention))
def per_head(): return build(Attention, window, heads=2)
def documents(): return build(Attention, same_document)
def sums(): return build(Attention, causal, return_lse=True)
def values(): return build(WithValues, causal)
"""


def traced(folder: Path, name: str) -> ModuleTrace:
    (folder / "attends.py").write_text(SOURCE)
    request = {"module": f"{folder / 'attends.py'}:{name}", "micro_batch": None, "sequence": None}
    result: ModuleTrace = trace_worker.answer(request)
    return result


HALF = 16 * 17 // 2


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("plain", 256),
        ("one", HALF),
        ("compiled", HALF),
        ("sums", HALF),
        ("per_head", (16 * 4 - 6 + 16 * 8 - 28) / 2),
        ("values", HALF),
    ],
)
def test_pairs_of_a_block_mask(tmp_path: Path, name: str, pairs: float) -> None:
    (attention,) = traced(tmp_path, name).attentions
    sizes = (attention.batch, attention.heads, attention.queries, attention.keys, attention.head_dim, attention.backward_runs)
    assert sizes == (3, 2, 16, 16, 16, 1)
    assert attention.pairs == pytest.approx(pairs, rel=0.2 if name == "per_head" else 0)  # every other query of each head


def test_a_mask_of_unknown_values_is_counted_as_full_attention(tmp_path: Path) -> None:
    trace = traced(tmp_path, "documents")
    assert trace.attentions[0].pairs == 256
    assert "explicit-masks" in codes(as_workload(trace))


def test_a_long_sequence_is_sampled() -> None:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from gemmscope.workload.stand_ins import visible_share

    blocks = torch.zeros(1, 1, 1, dtype=torch.int32, device="meta")
    mask = BlockMask.from_kv_blocks(blocks, blocks[..., None], mask_mod=lambda batch, head, query, key: query >= key)
    share = visible_share(mask, 2**17, 2**17)
    assert share is not None
    assert float(share) == pytest.approx(0.5, abs=1e-3)
