"""The closed form: the worked example, fused and separate projections, attention's pairs, totals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.model import presets
from gemmscope.model.spec import EVERY_SECOND, ModelSpec, RunSpec, from_hyperparameters
from gemmscope.workload.derive import Workload, derive, visible_pairs
from gemmscope.workload.ops import Attention, Linear
from gemmscope.workload.summary import count_parameters, totals
from support.preset_names import ORIGINALS


def preset(name: str) -> ModelSpec:
    model = presets.load(name).model
    assert model is not None
    return model


def shapes(workload: Workload) -> dict[str, list[str]]:
    by_op: dict[str, list[str]] = {}
    for gemm in workload.gemms():
        by_op.setdefault(gemm.op, []).append(gemm.shape)
    return by_op


def test_reference_worked_example() -> None:
    model = preset("codonfm-5b")
    run = RunSpec(micro_batch_size=31, sequence_length=512)
    workload = derive(model, run)
    assert shapes(workload) == {
        "QKV Proj": ["15872x4096x12288", "15872x12288x4096", "4096x15872x12288"],
        "Attn Out": ["15872x4096x4096", "15872x4096x4096", "4096x15872x4096"],
        "MLP Up": ["15872x4096x16384", "15872x16384x4096", "4096x15872x16384"],
        "MLP Down": ["15872x16384x4096", "15872x4096x16384", "16384x15872x4096"],
    }
    assert {gemm.count for gemm in workload.gemms()} == {24}
    summary = totals(workload, run, model)
    assert summary.layers[0].gemm_flops == pytest.approx(19.17e12, rel=5e-4)
    assert summary.gemm_flops == pytest.approx(460e12, rel=5e-4)


def test_grouped_query_attention_and_gated_mlp() -> None:
    """N of QKV is not 3 x hidden, N of the MLP is not the intermediate size."""
    fused = shapes(derive(preset("llama-3.1-8b"), RunSpec(1, 4096)))
    assert fused["QKV Proj"][0] == "4096x4096x6144"
    assert fused["MLP Gate+Up"][0] == "4096x4096x28672"
    separate = shapes(derive(preset("llama-3.1-8b"), RunSpec(1, 4096, separate_projections=True)))
    assert [separate[name][0] for name in ("Q Proj", "K Proj", "V Proj")] == [
        "4096x4096x4096",
        "4096x4096x1024",
        "4096x4096x1024",
    ]
    assert separate["MLP Gate"] == separate["MLP Up"]


@pytest.mark.parametrize("name", presets.names())
def test_fusing_changes_neither_flops_nor_parameters(name: str) -> None:
    model = preset(name)
    fused, separate = derive(model, RunSpec(1, 64)), derive(model, RunSpec(1, 64, separate_projections=True))
    assert fused.parameters == separate.parameters
    flops = [
        # transformers does not train indexers
        sum(gemm.flops * gemm.count for gemm in workload.gemms() if not gemm.op.startswith("Indexer"))
        for workload in (fused, separate)
    ]
    assert flops[0] == flops[1]


def test_head_dim_of_its_own() -> None:
    qwen = shapes(derive(preset("qwen3-0.6b"), RunSpec(1, 128)))  # hidden 1024, 16 heads of 128
    assert qwen["QKV Proj"][0] == "128x1024x4096"
    assert qwen["Attn Out"][0] == "128x2048x1024"


def test_experts_are_grouped_gemms() -> None:
    workload = derive(preset("mixtral-8x7b"), RunSpec(1, 4096))
    up = next(gemm for gemm in workload.gemms() if gemm.op == "Expert Gate+Up")
    assert (up.m, up.k, up.n, up.groups, up.count) == (8192, 4096, 28672, 8, 32)
    wgrad = next(gemm for gemm in workload.gemms() if gemm.op == "Expert Gate+Up" and gemm.pass_name == "wgrad")
    assert (wgrad.m, wgrad.k, wgrad.n, wgrad.groups) == (4096, 8192, 28672, 8)


def test_full_recompute_runs_the_layers_forward_twice() -> None:
    model = preset("llama-3.2-1b")
    plain, full = derive(model, RunSpec(1, 128)), derive(model, RunSpec(1, 128, recompute="full"))
    counts = {(gemm.op, gemm.pass_name): gemm.count for gemm in full.gemms()}
    for gemm in plain.gemms():
        again = 2 if gemm.pass_name == "fprop" and gemm.op != "LM Head" else 1
        assert counts[(gemm.op, gemm.pass_name)] == gemm.count * again
    selective = derive(model, RunSpec(1, 128, recompute="selective"))
    assert {op.forward_runs for op in selective.ops if isinstance(op, Attention)} == {2}
    assert {op.forward_runs for op in selective.ops if isinstance(op, Linear)} == {1}


def test_a_part_of_the_layers_runs_forward_twice() -> None:
    """torchtitan keeps every second GEMM: of Q, K, V, out, gate, up, down it runs K, out and up again."""
    model = preset("llama-3.2-1b")
    run = RunSpec(1, 128, separate_projections=True, recompute="selective", recompute_modules=(EVERY_SECOND,))
    again = {op.role for op in derive(model, run).ops if op.forward_runs == 2}
    assert again == {"norm", "k-proj", "rotary", "attention-out", "residual", "mlp-up", "mlp-activation"}
    half = derive(model, replace(run, recompute="full", recompute_modules=(), recompute_share=0.5))
    counts = {(gemm.op, gemm.pass_name): gemm.count for gemm in half.gemms()}
    assert (counts["MLP Up", "fprop"], counts["MLP Up", "dgrad"]) == (24, 16)
    with pytest.raises(UserError, match="has no 'mlps'"):
        replace(run, recompute_modules=("mlps",))


def test_every_kind_of_op_is_there() -> None:
    kinds = {op.kind for op in derive(preset("deepseek-v3"), RunSpec(1, 64)).ops}
    assert kinds == {
        *("linear", "grouped linear", "attention", "norm", "activation", "elementwise", "embedding", "loss", "optimizer"),
    }


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12_879_925_248), ("deepseek-v3", 37_552_282_624), ("llama-3.1-8b", 8_030_261_248)]
)
def test_parameters(name: str, active: int) -> None:
    assert count_parameters(preset(name)) == (presets.describe(name).parameters, active)


def test_presets_in_other_sizes_have_their_parameters() -> None:
    """Those that are `like` another one; each of the others is compared with its live class."""
    others = [name for name in presets.names() if name not in ORIGINALS]
    assert others
    counted = {name: derive(preset(name), RunSpec(1, 64)).parameters for name in others}
    assert counted == {name: presets.describe(name).parameters for name in others}


@given(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 80)), st.booleans())
def test_visible_pairs_by_counting(sequence: int, window: int | None, causal: bool) -> None:
    def sees(query: int, key: int) -> bool:
        if causal:
            return key <= query and (window is None or query - key < window)
        return window is None or abs(query - key) <= window // 2

    counted = sum(sees(query, key) for query in range(sequence) for key in range(sequence))
    assert visible_pairs(sequence, causal=causal, window=window) == counted


@given(
    st.integers(1, 6), st.sampled_from([1, 2, 4]), st.sampled_from([8, 40]), st.integers(1, 5), st.integers(1, 4), st.booleans()
)
def test_three_gemms_of_equal_flops(heads: int, groups: int, head_dim: int, layers: int, batch: int, gated: bool) -> None:
    """Each linear's three passes are the same work, and FLOPs are six times tokens times the weights that meet them."""
    model = from_hyperparameters(
        hidden_size=heads * groups * 16,
        intermediate_size=56,
        num_attention_heads=heads * groups,
        num_key_value_heads=groups,
        head_dim=head_dim,
        num_hidden_layers=layers,
        gated=gated,
    )
    workload = derive(model, RunSpec(batch, 32))
    for op in workload.ops:
        if isinstance(op, Linear):
            assert len({gemm.flops for gemm in op.gemms()}) == 1
    weights = sum(op.inputs * op.outputs * op.count for op in workload.ops if isinstance(op, Linear))
    assert sum(gemm.flops * gemm.count for gemm in workload.gemms()) == 6 * batch * 32 * weights
