"""Residual streams, compressed attention, layers' own inputs: what they compute, and how they are split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmscope.errors import UserError
from gemmscope.forecast.memory import memory_of, rank_memory
from gemmscope.gpu.specs import gpu
from gemmscope.model import presets
from gemmscope.model.layer_spec import CompressedSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.step.stack_plan import plan_step
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Attention, GroupedLinear, Linear
from gemmscope.workload.rank_ops import visible_pairs
from gemmscope.workload.residual_streams import StreamMix
from gemmscope.workload.sparse import IndexScores
from support.refusals import refused


def preset(name: str) -> ModelSpec:
    spec = presets.load(name).model
    assert spec is not None
    return spec


@pytest.mark.parametrize("sequence", [1, 3, 4, 17, 64])
@pytest.mark.parametrize("rate", [1, 4, 5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
def test_entry_pairs_by_counting(sequence: int, rate: int, top_k: int | None) -> None:
    """A query sees the entries whose positions all came before or are its own, as transformers masks them."""
    spec = CompressedSpec(q_rank=1, rope_dim=1, out_groups=1, out_rank=1, rate=rate)
    seen = [min((position + 1) // rate, top_k if top_k is not None else sequence) for position in range(sequence)]
    assert spec.entry_pairs(sequence, top_k) == sum(seen)


@pytest.mark.parametrize("sequence", [1, 7, 8, 9, 31])
@pytest.mark.parametrize("chunk", [1, 4, 8, 50])
def test_chunks_by_counting(sequence: int, chunk: int) -> None:
    counted = sum(key <= query and key // chunk == query // chunk for query in range(sequence) for key in range(sequence))
    assert visible_pairs(sequence, causal=True, window=None, chunk=chunk) == counted


def test_attention_reads_keys_once() -> None:
    """Of DeepSeek-V4, keys are the values: fewer bytes, the same FLOPs."""
    ops = derive(preset("deepseek-v4-flash"), RunSpec(1, 4096)).ops
    attention = next(op for op in ops if isinstance(op, Attention) and op.keys > 4096)
    both = replace(attention, values_are_keys=False)
    assert attention.forward().flops == both.forward().flops
    saved = both.forward().bytes_moved - attention.forward().bytes_moved
    assert saved == attention.keys * attention.head_dim * 2


def test_the_indexer_learns_apart_from_the_model() -> None:
    """Its linears have no dgrad; as transformers runs them, no gradient at all."""
    spec = preset("deepseek-v4-flash")
    for separate, passes in ((False, ("fprop", "wgrad")), (True, ("fprop",))):
        ops = derive(spec, RunSpec(1, 1024, separate_projections=separate)).ops
        indexer = [op for op in ops if isinstance(op, Linear) and op.name.startswith("Indexer")]
        assert {op.passes for op in indexer} == {passes}
        scores = next(op for op in ops if isinstance(op, IndexScores))
        assert (scores.backward().flops > 0) is not separate


def test_a_sequence_shorter_than_an_entry() -> None:
    """Nothing depends on the compressor: it has no gradients."""
    ops = derive(preset("deepseek-v4-pro"), RunSpec(1, 64)).ops
    heavy = [op for op in ops if op.name == "Compressor KV+Gate" and op.section.endswith("128 to 1 compressed")]
    assert [op.passes for op in heavy if isinstance(op, Linear)] == [("fprop",)]


def test_streams_are_not_split() -> None:
    spec, run = preset("deepseek-v4-flash"), RunSpec(1, 1024, tp=4)
    mixes = {shard: next(op for op in derive(spec, replace(run, sequence_parallel=shard)).ops if isinstance(op, StreamMix))
             for shard in (False, True)}  # fmt: skip
    assert (mixes[False].rows, mixes[False].copies) == (1024, 4)
    assert (mixes[True].rows, mixes[True].copies) == (256, 1)
    with pytest.raises(UserError, match="o_groups = 8"):
        derive(spec, RunSpec(1, 1024, tp=16))


def test_tensor_parallelism_of_compressed_attention() -> None:
    """Query heads and output groups are split; the one head of keys is the same everywhere."""
    spec = preset("deepseek-v4-flash")
    ops = {op.name: op for op in derive(spec, RunSpec(1, 1024, tp=4)).ops}
    groups, keys, attention = ops["Attn Out Groups"], ops["KV Proj"], ops["Attention"]
    assert isinstance(groups, GroupedLinear)
    assert isinstance(keys, Linear)
    assert isinstance(attention, Attention)
    assert (groups.groups, groups.inputs, groups.facts.block) == (2, 4096, "attention")
    assert (keys.outputs, keys.copies) == (512, 4)
    assert (attention.heads, attention.kv_heads) == (16, 1)


def test_experts_are_told_from_groups() -> None:
    """Expert parallelism shares the experts, not the groups of the output projection."""
    spec, run = preset("deepseek-v4-flash"), RunSpec(1, 1024, ep=256)
    block = memory_of(spec).blocks(run)[0][0]
    assert block.experts == 3 * 4096 * 2048
    assert block.dense > 8 * 4096 * 1024


def test_memory_of_streams_and_shared_keys() -> None:
    """A layer's input is as wide as all streams together; layers that share keys keep none."""
    run = RunSpec(1, 1024)
    spec = preset("gemma-3n-e4b")
    layers = memory_of(spec).blocks(run)[0]
    assert {block.first for block in layers} == {4 * 1024 * 2048 * 2}
    assert rank_memory(spec, replace(run, recompute="full"), "BF16", gpu("h200")).activations_bytes < 16e9
    kinds = dict(zip(memory_of(spec)._kinds, layers, strict=True))
    own, shared = (
        next(block for layer, block in kinds.items() if layer.attention is not None and layer.attention.shares_kv is shares)
        for shares in (False, True)
    )
    assert own.kept - shared.kept >= 2 * 1024 * 2 * 256 * 2


def test_a_step_refuses_what_it_cannot_run() -> None:
    for name, what in (("deepseek-v4-flash", "compressed attention"), ("gemma-3n-e4b", "alternating updates")):
        with refused("step", what):
            plan_step(preset(name), RunSpec(1, 128))
