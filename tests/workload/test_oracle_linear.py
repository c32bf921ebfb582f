"""Linear attention and sparse attention against the live classes: configs beyond those that every family is tested with."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gemmscope.model import hf
from gemmscope.model.spec import RunSpec
from gemmscope.workload.derive import derive, visible_pairs
from gemmscope.workload.ops import Linear
from gemmscope.workload.scans import Scan
from gemmscope.workload.sparse import IndexScores, SparseAttention
from gemmscope.workload.summary import count_parameters
from support.hf_variants import variant
from support.hf_variants_linear import LINEAR_FAMILIES
from support.oracle import compare, model_of
from support.refusals import refused

transformers = pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
trace_worker = pytest.importorskip("gemmscope.workload.trace_worker", reason="the oracle needs torch and transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # warnings of torch and transformers


@pytest.mark.parametrize("model_type", LINEAR_FAMILIES)
def test_random_configs_as_written(model_type: str) -> None:
    """What the config states and nothing else, under the names of published configs."""
    rng = random.Random(f"{model_type} as written")
    settings = variant(model_type, transformers.AutoConfig.for_model(model_type).to_dict(), rng)
    assert compare({"model_type": model_type, **settings}, RunSpec(2, 33)) == []


@pytest.mark.parametrize(
    "model_type", [*(name for name in LINEAR_FAMILIES if name != "lfm2_moe"), "minimax_m2", "glm4_moe", "deepseek_v3"]
)
def test_a_bare_config(model_type: str) -> None:
    """Only a model_type: every size is the configuration class's own."""
    assert model_of({"model_type": model_type}) == model_of(transformers.AutoConfig.for_model(model_type).to_dict())


@pytest.mark.parametrize(
    ("wrapper", "inner"), [("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text"), ("kimi_k25", "deepseek_v3")]
)
def test_the_language_part(wrapper: str, inner: str) -> None:
    source = hf.from_config({"model_type": wrapper}, "config.json")
    assert [finding.code for finding in source.findings] == ["language-part-only", "defaults-of-class"]
    assert source.model == model_of({"model_type": inner})


def test_the_language_part_is_the_live_causal_model() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 100}
    config = {"model_type": "qwen3_5", "text_config": {**sizes, "intermediate_size": 96, "tie_word_embeddings": True}}
    assert compare(config, RunSpec(1, 16)) == []


def test_kimi_k2_is_built_like_deepseek() -> None:
    source = hf.from_config({"model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64}, "config.json")
    assert source.config is not None
    assert source.config["model_type"] == "deepseek_v3"
    assert source.model is not None
    assert source.model.model_type == "kimi_k2"


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen2", "mixtral", "phi", "minimax", "lfm2", "granite", "nemotron"])
def test_heads_that_leave_a_remainder(model_type: str) -> None:
    """These classes take hidden // heads."""
    sizes = {"hidden_size": 100, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 2, "vocab_size": 100}
    experts = "n_routed_experts" if model_type == "glm4_moe" else "num_local_experts"
    small = {experts: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96}
    assert compare({"model_type": model_type, **sizes, **small}, RunSpec(1, 16)) == []


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "stablelm"])
def test_heads_that_leave_a_remainder_are_refused_where_the_class_refuses(model_type: str) -> None:
    sizes = {"hidden_size": 100, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 96}
    with refused("hidden_size = 100", "num_attention_heads = 6"):
        model_of({"model_type": model_type, **sizes, "num_key_value_heads": 6})
    with pytest.raises(Exception, match=r"multiple|divisible"):
        trace_worker.build_huggingface({"model_type": model_type, **sizes}, 1, 16)


def test_sparse_attention_visits_the_chosen_pairs() -> None:
    """At a long sequence: the kernel's pairs of the latent; at a short one, all pairs with a mask are less work."""
    model = model_of({"model_type": "deepseek_v32", "num_hidden_layers": 1, "first_k_dense_replace": 1})
    for sequence, sparse in ((65536, True), (4096, False)):
        ops = derive(model, RunSpec(1, sequence)).ops
        attention = next(op for op in ops if isinstance(op, SparseAttention))
        chosen, visible = (visible_pairs(sequence, causal=True, window=window) for window in (2048, None))
        assert attention.pairs == chosen
        expected = chosen * (576 + 512) if sparse else visible * (192 + 128)
        assert attention.forward().flops == 2 * 128 * expected
        scores = next(op for op in ops if isinstance(op, IndexScores))
        assert scores.forward().flops == 2 * visible * 64 * 129


def test_the_indexer_is_trained_apart() -> None:
    """Frameworks detach its input: no dgrad. transformers runs it without gradients."""
    model = model_of({"model_type": "deepseek_v32", "num_hidden_layers": 1})

    def passes(run: RunSpec) -> set[tuple[str, ...]]:
        return {op.passes for op in derive(model, run).ops if isinstance(op, Linear) and op.name.startswith("Indexer")}

    assert passes(RunSpec(1, 64)) == {("fprop", "wgrad")}
    assert passes(RunSpec(1, 64, separate_projections=True)) == {("fprop",)}


def test_shared_choices_have_no_indexer() -> None:
    model = model_of({"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "index_topk_pattern": "FSSF"})
    assert [attention.indexer is not None for attention in model.attentions] == [True, False, False, True]
    assert {attention.top_k for attention in model.attentions} == {2048}


def test_tensor_parallelism_splits_the_delta_rule() -> None:
    model = model_of({"model_type": "qwen3_next", "num_hidden_layers": 4})
    whole, part = (next(op for op in derive(model, RunSpec(1, 128, tp=tp)).ops if isinstance(op, Scan)) for tp in (1, 2))
    assert (whole.heads, whole.groups, part.heads, part.groups) == (32, 16, 16, 8)
    assert whole.forward().flops == 2 * part.forward().flops


def test_active_parameters() -> None:
    """Of DeepSeek-V3.2: 37B as published, and the indexers; the embedding's table counts as a whole."""
    total, active = count_parameters(model_of({"model_type": "deepseek_v32"}))
    assert (round(total / 1e9), round(active / 1e9)) == (672, 38)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"model_type": "qwen3_next", "layer_types": ["sliding_attention"], "num_hidden_layers": 1},
            ["qwen3_next", "'sliding_attention'"],
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["full_attention"], "num_hidden_layers": 2},
            ["layer_types", "1 entries", "num_hidden_layers = 2"],
        ),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 3}, ["heads", 32, 3]),
        ({"model_type": "qwen3_5_text", "full_attention_interval": 0}, ["full_attention_interval", 0]),
        ({"model_type": "qwen3_5_text", "partial_rotary_factor": "half"}, ["partial_rotary_factor", "'half'"]),
        ({"model_type": "kimi_linear", "linear_attn_config": 3}, ["linear_attn_config", 3]),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}},
            ["layer 3", "full_attn_layers", "kda_layers"],
        ),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [0], "kda_layers": []}},
            ["full_attn_layers", "[0]", 1, 27],
        ),
        ({"model_type": "minimax", "block_size": 0}, ["block_size", 0]),
        ({"model_type": "lfm2", "full_attn_idxs": 2}, ["full_attn_idxs", 2]),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": "1"}, ["block_ffn_dim_multiplier", "'1'"]),
        ({"model_type": "lfm2_moe"}, ["layer_types"]),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, ["q_lora_rank"]),
        ({"model_type": "deepseek_v32", "index_head_dim": 32}, ["index_head_dim = 32", "qk_rope_head_dim = 64"]),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FX"}, ["index_topk_pattern", "'FX'"]),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "SF", "num_hidden_layers": 2}, ["first layer", "indexer"]),
    ],
)
def test_invalid_configs(config: dict[str, Any], named: list[object]) -> None:
    with refused(*named):
        model_of(config)
