"""Sharding: whatever the split, all ranks together do the unsharded work; what cannot be split is refused with advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError, in_shell
from gemmscope.model import presets
from gemmscope.model.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload import sharding
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Attention, GroupedLinear, Linear, Norm
from support.reading import facts


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Small models of every kind: grouped-query or latent attention, dense, MoE and mixed layers, ragged vocabularies."""
    kv_heads = draw(st.sampled_from([4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    attention = AttentionSpec(heads, kv_heads, head_dim=draw(st.sampled_from([8, 12])), causal=draw(st.booleans()))
    if draw(st.booleans()):
        latent = LatentSpec(q_rank=draw(st.sampled_from([None, 20])), kv_rank=12, rope_dim=4)
        attention = replace(attention, kv_heads=heads, value_dim=8, latent=latent)
    dense = MlpSpec(draw(st.sampled_from([32, 64])), gated=draw(st.booleans()))
    shared = draw(st.sampled_from([None, MlpSpec(16, gated=True)]))
    moe = MoeSpec(8, draw(st.integers(1, 3)), MlpSpec(24, gated=True), shared, shared_gate=shared is not None)
    pattern = draw(st.lists(st.booleans(), min_size=4, max_size=4)) * draw(st.sampled_from([1, 2]))
    layers = tuple(LayerSpec(attention, moe if is_moe else dense) for is_moe in pattern)
    return ModelSpec("random", hidden_size=draw(st.sampled_from([48, 64])), layers=layers, vocab_size=draw(st.integers(50, 300)))


SPLITS = st.sampled_from([1, 2, 4])
SEQUENCE_PARALLEL = st.fixed_dictionaries({"sequence_parallel": st.booleans(), "sequence_parallel_linears": st.booleans()})


@settings(max_examples=300, deadline=None)
@given(models(), SPLITS, SPLITS, SPLITS, SPLITS, SEQUENCE_PARALLEL, st.booleans(), st.sampled_from([1.0, 1.3, 4.0]))
def test_all_ranks_together_do_the_unsharded_work(
    model: ModelSpec, tp: int, cp: int, pp: int, ep: int, along_sequence: dict[str, bool], separate: bool, imbalance: float
) -> None:
    has_experts = any(layer.is_moe for layer in model.layers)
    if not has_experts:
        ep, imbalance = 1, 1.0
    whole = RunSpec(2, 64, separate_projections=separate)
    run = replace(whole, tp=tp, cp=cp, pp=pp, ep=ep, imbalance=imbalance, **along_sequence)
    expected = _work(model, whole)
    flops_of: dict[str, float] = {}
    padding = 0.0
    for stage in range(pp):
        for op in derive(model, replace(run, pp_stage=stage)).ops:
            if not isinstance(op, (Linear, Attention)):
                continue
            ranks = tp * cp / op.copies  # replicated work is named as such, and counts once
            if isinstance(op, GroupedLinear):
                # Each expert-parallel rank has its own rows; together they hold the micro-batches of all of them.
                moe = next(layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeSpec))
                rows = sum(sum(sharding.expert_rows(moe, run, rank)) for rank in range(ep)) / ep
                flops = 6 * rows * op.inputs * op.outputs * op.count
            else:
                flops = op.total().flops
            flops_of[op.name] = flops_of.get(op.name, 0) + flops * ranks
            if isinstance(op, Linear) and op.padding:
                padding += 6 * op.tokens * op.inputs * op.padding * cp
    flops_of["LM Head"] -= padding
    assert flops_of == pytest.approx(expected, rel=1e-12)


def _work(model: ModelSpec, run: RunSpec) -> dict[str, float]:
    work: dict[str, float] = {}
    for op in derive(model, run).ops:
        if isinstance(op, (Linear, Attention)):
            work[op.name] = work.get(op.name, 0) + op.total().flops
    return work


@settings(max_examples=200, deadline=None)
@given(models(), SPLITS, SPLITS, SPLITS)
def test_all_ranks_together_hold_the_parameters(model: ModelSpec, tp: int, pp: int, ep: int) -> None:
    """Linears that are split hold each weight once over tp (and experts over ep); replicated ones hold it on every rank."""
    if not any(layer.is_moe for layer in model.layers):
        ep = 1
    run = RunSpec(2, 64, tp=tp, pp=pp, ep=ep)

    def parameters_of(run: RunSpec) -> float:
        total = 0.0
        for stage in range(run.pp):
            for op in derive(model, replace(run, pp_stage=stage)).ops:
                if isinstance(op, Linear):
                    padding = op.padding * op.inputs
                    experts = run.ep if isinstance(op, GroupedLinear) else 1
                    total += (op.parameters * op.count * run.tp * experts) / op.copies - padding
        return total

    assert parameters_of(run) == pytest.approx(parameters_of(RunSpec(2, 64)), rel=1e-12)


@settings(max_examples=300, deadline=None)
@given(models(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 200), st.booleans())
def test_any_split_is_derived_or_refused_with_advice(
    model: ModelSpec, tp: int, cp: int, pp: int, ep: int, sequence: int, sequence_parallel: bool
) -> None:
    run = RunSpec(1, sequence, tp=tp, cp=cp, pp=pp, ep=ep, sequence_parallel=sequence_parallel)
    try:
        workload = derive(model, run)
    except UserError as error:
        assert error.hint
        return
    assert all(gemm.m > 0 and gemm.k > 0 and gemm.n > 0 for gemm in workload.gemms() if gemm.groups == 1)


@pytest.mark.parametrize(
    ("preset", "settings", "message", "advice"),
    [
        ("llama-3.1-8b", {"tp": 3}, "--tp 3 does not divide num_attention_heads = 32", "1, 2, 4, 8"),
        ("llama-3.1-8b", {"tp": 16}, "--tp 16 does not divide num_key_value_heads = 8", "1, 2, 4, 8"),
        ("llama-3.1-8b", {"pp": 5}, "--pp 5 does not divide num_hidden_layers = 32", "--pp-layers 7,7,6,6,6"),
        ("llama-3.1-8b", {"ep": 2}, "has no experts", "leave out --ep"),
        ("mixtral-8x7b", {"ep": 3}, "--ep 3 does not divide the number of experts = 8", "1, 2, 4, 8"),
        ("mixtral-8x7b", {"imbalance": 9.0}, "--imbalance 9 is too large", "at most 8"),
        ("mixtral-8x7b", {"tp": 4, "etp": 3}, "--etp 3 does not divide --tp 4", "1, 2, 4"),
        ("llama-3.1-8b", {"cp": 3}, "--cp 3 does not split --sequence-length 4096", "4092, 4098"),
        ("llama-3.1-8b", {"pp": 2, "pp_stage": 2}, "--pp-stage 2 does not exist", "stages are numbered 0 to 1"),
        ("llama-3.1-8b", {"pp": 2, "pp_layers": (16, 15)}, "add up to 32", "--pp-layers 16,16"),
    ],
)
def test_what_does_not_divide_is_refused(preset: str, settings: dict[str, object], message: str, advice: str) -> None:
    model = presets.load(preset).model
    assert model is not None
    with pytest.raises(UserError) as caught:
        derive(model, replace(RunSpec(1, 4096), **settings))
    assert message in in_shell(caught.value.message)
    assert advice in in_shell(caught.value.hint)


def test_uneven_pipeline() -> None:
    model = presets.load("deepseek-v3").model
    assert model is not None
    run = RunSpec(1, 64, pp=4, pp_layers=(16, 15, 15, 15))
    counts = []
    for stage in range(4):
        ops = derive(model, replace(run, pp_stage=stage)).ops
        counts.append(sum(op.count for op in ops if op.name == "Attn Out"))
        assert any(op.name == "Embedding" for op in ops) == (stage == 0)
        assert any(op.name == "LM Head" for op in ops) == (stage == 3)
    assert counts == [16, 15, 15, 15]


@pytest.mark.parametrize(("preset", "pp"), [("gpt2", 12), ("gemma-3-27b", 2), ("deepseek-v3", 61), ("mixtral-8x7b", 4)])
def test_the_stage_with_most_work_is_chosen_among_all(preset: str, pp: int) -> None:
    """Deriving equal stages only once must not change the chosen stage."""
    model = presets.load(preset).model
    assert model is not None
    chosen = derive(model, RunSpec(1, 64, pp=pp))
    every = [derive(model, RunSpec(1, 64, pp=pp, pp_stage=stage)) for stage in range(pp)]
    work = [sum(op.total().flops for op in workload.ops) for workload in every]
    assert chosen.stage == work.index(max(work))
    assert chosen.ops == every[chosen.stage].ops


def test_padded_vocabulary_is_named() -> None:
    model = presets.load("gpt2").model
    assert model is not None
    workload = derive(model, RunSpec(1, 64, tp=2, vocab_multiple=128))
    head = next(op for op in workload.ops if op.name == "LM Head")
    assert isinstance(head, Linear)
    assert head.outputs == 50432 // 2
    assert facts(workload, "vocabulary-padded") == {"size": 50257, "padded": 50432}


def test_linears_that_tp_does_not_split_run_on_a_share_of_the_sequence_or_on_all_of_it() -> None:
    model = presets.load("deepseek-v3").model
    assert model is not None
    shared = RunSpec(1, 4096, tp=4, sequence_parallel=True)
    for run, tokens in ((shared, 1024), (replace(shared, sequence_parallel_linears=False), 4096)):
        workload = derive(model, run)
        unsplit = [op for op in workload.ops if op.name in ("Router", "Q Down Proj", "KV Down Proj")]
        assert {op.tokens for op in unsplit if isinstance(op, Linear)} == {tokens}
        assert {op.copies for op in unsplit} == {tokens // 1024}
        norms = {op.name: op.rows for op in workload.ops if isinstance(op, Norm)}
        assert (norms["Norm"], norms["Q Latent Norm"], norms["KV Latent Norm"]) == (1024, tokens, tokens)
        replicated = [finding.facts["ops"] for finding in workload.findings if finding.code == "linears-replicated"]
        assert replicated == ([["Q Down Proj", "KV Down Proj", "Router"]] if tokens == 4096 else [])


def test_experts_without_tensor_parallelism_get_fewer_rows_of_full_width() -> None:
    model = presets.load("deepseek-v3").model
    assert model is not None
    split = derive(model, RunSpec(1, 4096, tp=4, ep=8))
    whole = derive(model, RunSpec(1, 4096, tp=4, ep=8, etp=1))
    up = {
        name: next(op for op in work.ops if isinstance(op, GroupedLinear) and op.name == "Expert Gate+Up")
        for name, work in (("split", split), ("whole", whole))
    }
    assert (up["split"].tokens, up["split"].outputs) == (32768, 1024)
    assert (up["whole"].tokens, up["whole"].outputs) == (8192, 4096)


@given(st.integers(1, 5000), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.floats(1, 16))
def test_imbalance(tokens: int, top_k: int, ep: int, imbalance: float) -> None:
    """No token is lost, the busiest expert has `imbalance` times the average, and rank 0 is the busiest."""
    moe = MoeSpec(16, top_k, MlpSpec(8, gated=True))
    run = RunSpec(1, tokens, ep=ep, imbalance=imbalance)
    ranks = [sharding.expert_rows(moe, run, rank) for rank in range(ep)]
    rows = [row for rank in ranks for row in rank]
    assert sum(rows) == tokens * top_k * ep
    mean = sum(rows) / 16
    assert max(rows) == pytest.approx(mean * imbalance, abs=1.5, rel=1e-6)
    assert sum(ranks[0]) == max(map(sum, ranks)) or imbalance == 1


@given(st.integers(0, 1000), st.integers(1, 50))
def test_spread(total: int, parts: int) -> None:
    sizes = sharding.spread(total, parts)
    assert sum(sizes) == total
    assume(parts > 1)
    assert max(sizes) - min(sizes) <= 1
