"""The torchtitan reader: sizes of known flavors, run settings, findings, and that every wrong text ends in a UserError."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmscope.toml
from gemmscope.errors import UserError, shown
from gemmscope.model import torchtitan, torchtitan_model
from gemmscope.model.layer_spec import MlpSpec, MoeSpec
from gemmscope.toml import load_data, parse_toml
from gemmscope.workload.derive import derive
from gemmscope.workload.ops import Linear
from support.reading import codes, facts
from support.torchtitan_files import DEEPSEEK_671B, LLAMA_8B, config, read, run_of


def model_of(name: str, flavor: str) -> Any:
    return read(config(name, flavor)).model


# ------------------------------------------------------------------------------------------------------------- models


def test_llama3_8b_has_its_published_sizes() -> None:
    model = model_of("llama3", "8B")
    assert (model.name, model.hidden_size, len(model.layers), model.vocab_size) == (
        "torchtitan llama3 8B",
        4096,
        32,
        128256,
    )
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.qk_norm) == (32, 8, 128, None)
    assert mlp == MlpSpec(14336, gated=True, activation="silu")
    assert not model.tied_embeddings
    assert len(set(model.layers)) == 1


@pytest.mark.parametrize(
    ("name", "flavor", "parameters"),
    [
        ("llama3", "8B", 8_030_261_248),
        ("llama3", "70B", 70_553_706_496),
        ("llama3", "405B", 405_853_388_800),
        ("qwen3", "0.6B", 596_049_920),
        ("qwen3", "1.7B", 1_720_574_976),
        ("qwen3", "4B", 4_022_468_096),
        ("qwen3", "8B", 8_190_735_360),
        ("qwen3", "14B", 14_768_307_200),
        ("qwen3", "32B", 32_762_123_264),
        ("qwen3", "30B-A3B", 30_532_122_624),
        ("qwen3", "235B-A22B", 235_093_634_560),
        ("deepseek_v3", "16B", 15_706_484_224),
        ("deepseek_v3", "236B", 235_741_434_880),
        ("deepseek_v3", "671B", 671_026_404_352),
        ("gpt_oss", "20b", 20_914_757_184),
        ("gpt_oss", "120b", 116_829_156_672),
    ],
)
def test_sizes_give_the_published_parameter_count(name: str, flavor: str, parameters: int) -> None:
    assert count_parameters(model_of(name, flavor)) == parameters


def count_parameters(model: Any) -> int:
    dim = model.hidden_size
    total = model.vocab_size * dim * (1 if model.tied_embeddings else 2) + dim
    for layer in model.layers:
        total += 2 * dim + attention_parameters(layer.attention, dim)
        if isinstance(layer.mlp, MoeSpec):
            total += layer.mlp.experts * (dim + layer.mlp.router_bias + mlp_parameters(layer.mlp.expert, dim))
            total += mlp_parameters(layer.mlp.shared, dim) if layer.mlp.shared else 0
        else:
            total += mlp_parameters(layer.mlp, dim)
    return int(total)


def mlp_parameters(mlp: MlpSpec, dim: int) -> int:
    size = mlp.intermediate_size
    return 3 * dim * size + mlp.up_bias * 2 * size + mlp.down_bias * dim


def attention_parameters(attention: Any, dim: int) -> int:
    latent, out = attention.latent, attention.out_width * dim
    if latent:
        key_down = dim * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        nope = attention.head_dim - latent.rope_dim
        key_up = latent.kv_rank * attention.heads * (nope + attention.value_dim)
        query = dim * attention.q_width
        if latent.q_rank:
            query = dim * latent.q_rank + latent.q_rank + latent.q_rank * attention.q_width
        return int(query + key_down + key_up + out)
    widths = attention.q_width + attention.k_width + attention.v_width
    extra = attention.qkv_bias * widths + attention.out_bias * dim + attention.sinks * attention.heads
    return int(dim * widths + out + extra + (2 * attention.head_dim if attention.qk_norm else 0))


def test_llama4_alternates_and_shares_its_width_among_experts() -> None:
    scout, maverick = model_of("llama4", "17bx16e"), model_of("llama4", "17bx128e")
    assert scout.pattern() == "48 MoE"
    assert [layer.is_moe for layer in maverick.layers[:4]] == [False, True, False, True]
    assert maverick.layers[0].mlp.intermediate_size == 16384
    assert maverick.layers[1].mlp.expert.intermediate_size == 8192
    assert maverick.layers[1].mlp.shared.intermediate_size == 8192
    blocks = [layer.attention.chunk for layer in model_of("llama4", "17bx16e_irope").layers[:5]]
    assert blocks == [None, 8192, 8192, 8192, None]


def test_experts_keep_gate_and_up_apart_except_in_gpt_oss() -> None:
    assert not model_of("qwen3", "30B-A3B").layers[0].mlp.expert.stored_fused
    assert not model_of("deepseek_v3", "16B").layers[1].mlp.expert.stored_fused
    gpt_oss = model_of("gpt_oss", "20b")
    assert gpt_oss.layers[0].mlp.expert.stored_fused
    assert [layer.attention.window for layer in gpt_oss.layers[:3]] == [128, None, 128]


def test_deepseek_has_latent_attention() -> None:
    attention = model_of("deepseek_v3", "671B").layers[0].attention
    assert (attention.head_dim, attention.value_dim, attention.kv_heads) == (192, 128, 128)
    assert (attention.latent.q_rank, attention.latent.kv_rank, attention.latent.rope_dim) == (1536, 512, 64)
    assert model_of("deepseek_v3", "16B").layers[0].attention.latent.q_rank is None
    assert model_of("deepseek_v3", "671B").pattern() == "3 dense, 58 MoE"


def test_qwen3_normalises_each_head_and_ties_small_models() -> None:
    assert model_of("qwen3", "8B").layers[0].attention.qk_norm == "head"
    assert [model_of("qwen3", flavor).tied_embeddings for flavor in ("4B", "8B")] == [True, False]
    assert model_of("qwen3", "0.6B").layers[0].attention.q_width == 2048  # heads are wider than hidden / heads


@pytest.mark.parametrize(
    ("flavor", "parameters"),  # of transformers' text models with the same sizes
    [("27B", 26_895_998_464), ("35B-A3B", 34_660_610_688)],
)
def test_qwen3_5_has_delta_nets_and_gated_attention(flavor: str, parameters: int) -> None:
    source = read(config("qwen3_5", flavor))
    kinds = [layer.kind.split(" + ")[0] for layer in source.model.layers]
    assert kinds == ["gated delta rule"] * 3 + ["attention"] + kinds[:-4]
    workload = derive(source.model, run_of(config("qwen3_5", flavor)))
    assert workload.parameters == parameters
    first = [op.name for op in workload.ops if isinstance(op, Linear)][:6]
    assert first == [f"Mixer In {letter}" for letter in "QKVZAB"]
    assert facts(source, "language-part-only") == {"model_type": "qwen3_5"}


def test_every_known_flavor_is_read() -> None:
    for family, known in torchtitan_model.families().items():
        assert known["source"]
        for name in (family, *known.get("aliases", ()), f"simple_fsdp.{family}"):
            for flavor in known["flavors"]:
                assert model_of(name, flavor).model_type == family


# --------------------------------------------------------------------------------------------------------------- runs


ALWAYS = {
    "zero": 3,
    "optimizer_state": "fp32",
    "tp_overlap": False,
    "dp_overlap": True,
    "ep_overlap": False,
    "cuda_graphs": False,
}


def test_a_whole_file() -> None:
    source = read(LLAMA_8B)
    assert source.origin == "job.toml"
    assert source.run_settings == {
        "sequence_length": 8192,
        "micro_batch_size": 1,
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "recompute": "selective",
        "recompute_modules": ("every second GEMM",),
        "separate_projections": True,
        "sequence_parallel_linears": False,
        **ALWAYS,
    }
    assert codes(source) == []


def test_moe_run_with_sharding() -> None:
    source = read(DEEPSEEK_671B)
    run = run_of(DEEPSEEK_671B)
    assert (run.tp, run.ep, run.sequence_parallel, run.recompute) == (8, 64, True, "full")
    assert run.gradient_accumulation == 2048 // (4 * 64 * 2)
    assert (run.dp, run.zero, run.zero_ranks, run.tp_overlap, run.gpus) == (128, 3, 64, True, 1024)
    assert "expert-tp-not-modelled" not in codes(source)
    differing = read(DEEPSEEK_671B.replace("expert_tensor_parallel_degree = 8", "expert_tensor_parallel_degree = 1"))
    assert differing.run_settings["etp"] == 1
    assert "expert-tp-not-modelled" not in codes(differing)


@pytest.mark.parametrize(
    ("parallelism", "etp"),
    [
        ("expert_parallel_degree = 8; tensor_parallel_degree = 4", 1),  # torchtitan's default
        ("expert_parallel_degree = 8; tensor_parallel_degree = 4; expert_tensor_parallel_degree = 4", None),  # as everywhere
        ("expert_parallel_degree = 8; tensor_parallel_degree = 4; expert_tensor_parallel_degree = 3", None),
        ("expert_parallel_degree = 1; tensor_parallel_degree = 4; expert_tensor_parallel_degree = 1", None),  # has no effect
        ("tensor_parallel_degree = 4", None),
    ],
)
def test_tensor_parallelism_inside_experts(parallelism: str, etp: int | None) -> None:
    source = read(config("qwen3", "30B-A3B", parallelism=parallelism))
    assert source.run_settings.get("etp") == etp
    assert ("expert-tp-not-modelled" in codes(source)) == ("= 3" in parallelism)


def test_router_and_latent_down_projections_run_on_all_tokens_on_every_rank() -> None:
    source = read(DEEPSEEK_671B)
    assert source.model is not None
    workload = derive(source.model, run_of(DEEPSEEK_671B))
    unsplit = [op for op in workload.ops if isinstance(op, Linear) and op.name in ("Router", "Q Down Proj", "KV Down Proj")]
    assert {(op.name, op.tokens, op.copies) for op in unsplit} == {
        (name, 4 * 4096, 8) for name in ("Router", "Q Down Proj", "KV Down Proj")
    }


def test_converters_are_ignored() -> None:
    text = config().replace("flavor", 'converters = ["quantize.linear.float8"]\nflavor')
    assert facts(read(text), "converters-ignored") == {"value": "['quantize.linear.float8']"}


def test_a_dense_model_has_no_expert_tensor_parallelism() -> None:
    assert "etp" not in read(config(parallelism="expert_parallel_degree = 8; tensor_parallel_degree = 4")).run_settings


def test_what_the_file_leaves_out_is_left_out() -> None:
    settings_found = read(config()).run_settings
    assert set(settings_found) == {"recompute", "recompute_modules", "separate_projections", "sequence_parallel_linears", *ALWAYS}


def test_old_spellings() -> None:
    old = config(training="batch_size = 2; tensor_parallel_degree = 8", experimental="context_parallel_degree = 2")
    run = run_of(old)
    assert (run.micro_batch_size, run.tp, run.cp) == (2, 8, 2)
    tokenizer = config().replace("flavor", 'tokenizer_path = "t.model"\nflavor')
    assert facts(read(tokenizer), "vocabulary-assumed") == {"size": 128256}


def test_sequence_parallelism_follows_tensor_parallelism() -> None:
    assert not run_of(config(parallelism="tensor_parallel_degree = 1")).sequence_parallel
    assert run_of(config(parallelism="tensor_parallel_degree = 2")).sequence_parallel
    off = "tensor_parallel_degree = 2; enable_sequence_parallel = false"
    assert not run_of(config(parallelism=off)).sequence_parallel


def test_expert_parallelism_of_a_dense_model_is_dropped() -> None:
    source = read(config(parallelism="expert_parallel_degree = 8"))
    assert "ep" not in source.run_settings
    assert "expert-parallel-ignored" in codes(source)


@pytest.mark.parametrize(
    ("training", "parallelism", "expected"),
    [
        ("local_batch_size = 2; global_batch_size = 64", "", None),
        ("local_batch_size = 2; global_batch_size = 64", "data_parallel_shard_degree = 8", 4),
        ("local_batch_size = 2; global_batch_size = -1", "data_parallel_shard_degree = 8", None),
        (
            "local_batch_size = 2; global_batch_size = 64",
            "data_parallel_shard_degree = 4; data_parallel_replicate_degree = 2",
            4,
        ),
        ("local_batch_size = 8", "pipeline_parallel_degree = 2", 8),
        ("local_batch_size = 8", "pipeline_parallel_degree = 2; pipeline_parallel_microbatch_size = 4", 2),
        (
            "local_batch_size = 8; global_batch_size = 32",
            "pipeline_parallel_degree = 2; data_parallel_shard_degree = 2; data_parallel_replicate_degree = 1",
            16,
        ),
    ],
)
def test_gradient_accumulation(training: str, parallelism: str, expected: int | None) -> None:
    source = read(config(training=training, parallelism=parallelism))
    assert source.run_settings.get("gradient_accumulation") == expected
    assert source.global_batch == (64 if "= 64" in training else 32 if "= 32" in training else None)


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        ("pipeline_parallel_degree = 4", (8, 9, 8, 7)),
        ("pipeline_parallel_degree = 4; pipeline_parallel_layers_per_stage = 9", (8, 9, 8, 7)),
        (
            "pipeline_parallel_degree = 4; pipeline_parallel_last_stage_less_layers = 0",
            (8, 8, 8, 8),
        ),
        ('pipeline_parallel_degree = 4; pipeline_parallel_schedule = "Interleaved1F1B"', (8, 9, 8, 7)),
        ('pipeline_parallel_degree = 2; pipeline_parallel_schedule = "ZBVZeroBubble"', (15, 17)),
        ('pipeline_parallel_degree = 4; pipeline_parallel_schedule = "Novel"', None),
        ('pipeline_parallel_degree = 2; pipeline_parallel_split_points = ["layers.16"]', None),
    ],
)
def test_layers_per_pipeline_rank(parallelism: str, expected: tuple[int, ...] | None) -> None:
    source = read(config(parallelism=parallelism))
    assert source.run_settings.get("pp_layers") == expected
    assert expected is None or sum(expected) == 32
    assert ("stage-split-not-modelled" in codes(source)) == (expected is None)


@given(st.integers(1, 200), st.integers(2, 64), st.integers(0, 3), st.integers(0, 3))
def test_split_layers_loses_none(layers: int, stages: int, first: int, last: int) -> None:
    try:
        split = torchtitan.split_layers(layers, stages, first, last)
    except UserError:
        return
    assert sum(split) == layers
    assert len(split) == stages
    assert min(split) >= 0


@pytest.mark.parametrize(
    ("content", "recompute", "code", "share"),
    [
        ('mode = "none"', "none", "", None),
        ('mode = "full"', "full", "", None),
        ('mode = "selective"; selective_ac_option = "op"', "selective", "", None),
        ('mode = "selective"; selective_ac_option = "2"', "full", "", 16 / 32),
        ('mode = "selective"; selective_ac_option = 3', "full", "", 10 / 32),
        ('mode = "selective"; selective_ac_option = "1"', "full", "", 1.0),
        ('mode = "selective"', "selective", "recompute-unknown-gemms", None),
        ('mode = "memory_budget"', "none", "recompute-by-memory-budget", None),
    ],
)
def test_activation_checkpointing(content: str, recompute: str, code: str, share: float | None) -> None:
    settings = read(config(activation_checkpoint=content))
    assert settings.run_settings["recompute"] == recompute
    assert settings.run_settings.get("recompute_share") == share
    assert codes(settings) == ([code] if code else [])


# ---------------------------------------------------------------------------------------------------------------- toml


def test_toml_helpers() -> None:
    assert parse_toml("\ufeffa = 1") == {"a": 1}
    assert "llama3" in load_data("gemmscope.model", "torchtitan_flavors.toml")
    assert shown("…\n") == "'\\u2026\\n'"
    assert shown(10**5000) == "(int, too large to show)"
    assert shown([10**5000]) == "(list, too large to show)"
    assert shown(list(range(10**6))) == "a list of 1000000"
    assert shown(dict.fromkeys("abcdefghij")) == "a mapping of 10"
    assert shown({"a": [1]}) == "a mapping of 1"


@pytest.mark.parametrize("module", [gemmscope.toml, torchtitan, torchtitan_model])
def test_docstring_examples(module: Any) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted
    assert not outcome.failed
