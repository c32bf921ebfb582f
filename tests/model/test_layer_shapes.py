"""Llama 4, Gemma 3n and 4, DeepSeek-V4: which layers have which shape, and what is refused. The oracle proves the sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gemmscope.errors import UserError
from gemmscope.model import hf, presets
from gemmscope.model.layer_spec import AttentionSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.model.vary import varied
from gemmscope.workload.check import as_live
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import count_parameters


def model(model_type: str, **settings: Any) -> ModelSpec:
    spec = hf.from_config({"model_type": model_type, **settings}, "config.json").model
    assert spec is not None
    return spec


def preset(name: str) -> ModelSpec:
    spec = presets.load(name).model
    assert spec is not None
    return spec


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    return list(spec.attentions)


def test_llama_4_interleaves_everything() -> None:
    spec = preset("llama-4-maverick")
    assert [layer.is_moe for layer in spec.layers[:4]] == [False, True, False, True]
    local, full = attentions(spec)[2:4]
    assert (local.chunk, local.rotary, local.temperature) == (8192, True, False)
    assert (full.chunk, full.rotary, full.temperature) == (None, False, True)
    scout = attentions(preset("llama-4-scout"))
    assert [attention.qk_norm for attention in scout[2:4]] == ["head", None]  # only beside rotary positions
    assert {attention.qk_norm for attention in attentions(spec)} == {None}


def test_an_empty_list_of_layer_numbers_chooses_no_layer() -> None:
    """It is not the same as no list, which means the usual layers."""
    assert not any(layer.is_moe for layer in model("llama4_text", moe_layers=[], num_hidden_layers=4).layers)
    short_convolutions = model("lfm2", full_attn_idxs=[], num_hidden_layers=4)
    assert [layer.attention for layer in short_convolutions.layers] == [None] * 4


def test_transformers_runs_all_experts_of_llama_4() -> None:
    """--check compares with what the class runs. The workload is what frameworks run."""
    spec = model("llama4_text", num_hidden_layers=1)
    moe = as_live(spec).layers[0].mlp
    assert isinstance(moe, MoeSpec)
    assert moe.top_k == moe.experts == 16
    rows = [gemm.m for gemm in derive(spec, RunSpec(1, 64)).gemms() if gemm.op == "Expert Down" and gemm.pass_name == "fprop"]
    assert rows == [64]


def test_gemma_4_shares_keys_and_widens_the_mlp() -> None:
    spec = preset("gemma-4-e2b")
    shared = [attention.shares_kv for attention in attentions(spec)]
    assert shared == [False] * 15 + [True] * 20
    widths = [layer.mlp.intermediate_size for layer in spec.layers if isinstance(layer.mlp, MlpSpec)]
    assert widths == [6144] * 15 + [12288] * 20
    sizes = Counter((attention.head_dim, attention.window) for attention in attentions(spec))
    assert sizes == {(256, 512): 28, (512, None): 7}


def test_gemma_4_runs_experts_beside_the_mlp() -> None:
    spec = preset("gemma-4-26b-a4b")
    moe = spec.layers[0].mlp
    assert isinstance(moe, MoeSpec)
    assert moe.shared is not None
    assert (moe.expert.intermediate_size, moe.shared.intermediate_size, moe.top_k) == (704, 2112, 8)
    full = attentions(spec)[5]
    assert (full.values_are_keys, full.kv_heads, full.head_dim) == (True, 2, 512)


def test_last_layer_of_gemma_4_sees_everything() -> None:
    windows = [attention.window for attention in attentions(model("gemma4_text", num_hidden_layers=4))]
    assert windows == [512, 512, 512, None]


@pytest.mark.parametrize(("window", "reach"), [(512, 512), (513, 512)])
def test_bidirectional_gemma_4(window: int, reach: int) -> None:
    spec = model("gemma4_text", num_hidden_layers=2, sliding_window=window, use_bidirectional_attention="all")
    assert [(attention.causal, attention.window) for attention in attentions(spec)] == [(False, reach), (False, None)]


def test_sizes_of_single_layers() -> None:
    """per_layer_config is what transformers writes in place of global_head_dim; other keys in it have no closed form."""
    spec = model("gemma4_text", num_hidden_layers=12, per_layer_config={"05": {"head_dim": 64}, "11": {"head_dim": 64}})
    assert [attention.head_dim for attention in attentions(spec)] == [*[256] * 5, 64] * 2
    other = {"model_type": "gemma4_text", "num_hidden_layers": 2, "per_layer_config": {"0": {"intermediate_size": 64}}}
    assert hf.from_config(other, "x").model is None
    assert hf.from_config({"model_type": "llama", "per_layer_config": {"0": {"intermediate_size": 64}}}, "x").model is None


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gemma-4-e2b", "4.6", "2.3"), ("gemma-4-e4b", "7.5", "4.6"), ("gemma-4-26b-a4b", "25.2", "3.8"),
        ("gemma-4-31b", "30.7", "30.7"), ("llama-4-scout", "107.8", "17.2"), ("llama-4-maverick", "400.7", "17.2"),
        ("deepseek-v4-flash", "284.3", "13.8"), ("deepseek-v4-pro", "1573.0", "49.8"),
    ],
)  # fmt: skip
def test_active_parameters(name: str, total: str, active: str) -> None:
    """As published: a token reads one row of the table with the inputs of all layers."""
    assert tuple(f"{count / 1e9:.1f}" for count in count_parameters(preset(name))) == (total, active)


def test_gemma_3n() -> None:
    spec = preset("gemma-3n-e4b")
    assert spec.streams == 4
    assert [layer.mlp.sparse for layer in spec.layers if isinstance(layer.mlp, MlpSpec)] == [True] * 10 + [False] * 25
    assert sum(attention.shares_kv for attention in attentions(spec)) == 15
    widths = [16, 32, 48]
    spec = model("gemma3n_text", num_hidden_layers=3, num_kv_shared_layers=0, intermediate_size=widths)
    assert [layer.mlp.intermediate_size for layer in spec.layers if isinstance(layer.mlp, MlpSpec)] == widths


def test_more_layers_share_keys_than_there_are() -> None:
    """transformers' code then shares none, unless the last kinds of layers occur only among the last."""
    kinds = ["sliding_attention", "full_attention"] * 2
    spec = model("gemma4_text", num_hidden_layers=4, num_kv_shared_layers=5, layer_types=kinds)
    assert not any(attention.shares_kv for attention in attentions(spec))


def test_deepseek_v4_layers() -> None:
    """Flash begins with windows alone, Pro with heavy compression."""
    flash, pro = (preset(f"deepseek-v4-{size}") for size in ("flash", "pro"))
    rates = [
        [attention.compressed.rate for attention in attentions(spec) if attention.compressed is not None] for spec in (flash, pro)
    ]
    assert (rates[0][:5], rates[1][:5]) == ([0, 0, 4, 128, 4], [128, 128, 4, 128, 4])
    assert [len(of_model) for of_model in rates] == [43, 61]
    assert {
        attention.indexer is not None
        for attention in attentions(flash)
        if attention.compressed and attention.compressed.rate == 4
    } == {True}
    assert derive(flash, RunSpec(1, 64)).layers == {
        "layer, window 128": 2, "layer, 4 to 1 compressed": 21, "layer, 128 to 1 compressed": 20,
    }  # fmt: skip


def test_other_names_of_deepseek_v4() -> None:
    """The configuration class gives these keys priority."""
    spec = model("deepseek_v4", num_hidden_layers=1, num_local_experts=8, intermediate_size=64, n_routed_experts=4)
    moe = spec.layers[0].mlp
    assert isinstance(moe, MoeSpec)
    assert (moe.experts, moe.expert.intermediate_size) == (8, 64)


def test_another_hidden_size() -> None:
    """Everything that is as wide as the hidden size follows, before the first layer and after the last too."""
    for name in ("gemma-3n-e4b", "deepseek-v4-flash", "gemma-4-e2b", "llama-4-scout"):
        spec = preset(name)
        wider = varied(spec, {"hidden": 2 * spec.hidden_size, "layers": 4})
        assert all(one.inputs % wider.hidden_size == 0 for one in (*wider.first_linears, *wider.last_linears))
        assert derive(wider, RunSpec(1, 64)).parameters > 0
    assert varied(preset("gemma-4-e2b"), {"layers": 4}).first_linears[0].outputs == 4 * 256


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("llama4_text", {"layer_types": ["sliding_attention"] * 48}, "cannot be 'sliding_attention'"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "one entry per layer"),
        ("llama4_text", {"moe_layers": 3}, "moe_layers must be a list"),
        ("llama4_text", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
        ("llama4_text", {"attention_chunk_size": -1}, "attention_chunk_size"),
        ("gemma4_text", {"layer_types": ["chunked_attention"] * 30}, "cannot be 'chunked_attention'"),
        ("gemma4_text", {"num_kv_shared_layers": 27}, "leaves no layer of full_attention"),
        ("gemma4_text", {"enable_moe_block": True}, "no moe_intermediate_size"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": "x"}}}, "head_dim must be a whole number"),
        ("gemma3n_text", {"num_hidden_layers": 6}, "num_kv_shared_layers = 15 leaves no layer"),
        ("gemma3n_text", {"intermediate_size": [1, 2]}, "intermediate_size has 2 entries"),
        ("gemma3n_text", {"altup_num_inputs": 0}, "residual streams"),
        ("deepseek_v4", {"compress_ratios": [7] * 43}, "compress_ratios must be a list of 0, 4, 128"),
        ("deepseek_v4", {"layer_types": ["full_attention"] * 43}, "cannot be 'full_attention'"),
        ("deepseek_v4", {"layer_types": []}, "43 entries"),
        ("deepseek_v4", {"compress_rates": {"compressed_sparse_attention": 4}}, "heavily_compressed_attention"),
        ("deepseek_v4", {"compress_rate_hca": 0}, "compress_rates of heavily_compressed_attention must be at least 1"),
        ("deepseek_v4", {"o_groups": 7}, "cannot be split into o_groups = 7"),
        ("deepseek_v4", {"partial_rotary_factor": 2}, "partial_rotary_factor"),
        ("deepseek_v4", {"hc_mult": 10**6}, "residual streams"),
    ],
)
def test_bad_input(model_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model(model_type, **settings)
