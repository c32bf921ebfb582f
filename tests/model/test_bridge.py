"""Megatron-Bridge YAML: real ones in small, and whatever else a file may hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError, option
from gemmscope.job.load import load_model, model_run
from gemmscope.model import bridge
from support.reading import checked, codes, facts, in_little_memory
from support.refusals import refused, refused_with_hint

LLAMA = """
dataset:
  sequence_length: 8192
mixed_precision: bf16_mixed
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  context_parallel_size: 2
  expert_tensor_parallel_size: 1
  ffn_hidden_size: 14336
  gated_linear_unit: true
  hidden_size: 4096
  init_method: &normal
    _partial_: true
    _target_: torch.nn.init.normal_
  output_layer_init_method: *normal
  is_hybrid_model: false
  kv_channels: 128
  make_vocab_size_divisible_by: 128
  multi_latent_attention: false
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 32
  num_moe_experts: null
  num_query_groups: 8
  pipeline_model_parallel_layout: null
  position_embedding_type: rope
  recompute_granularity: null
  recompute_modules: [core_attn]
  seq_length: 8192
  sequence_parallel: true
  share_embeddings_and_output_weights: false
  should_pad_vocab: true
  tensor_model_parallel_size: 4
  vocab_size: 128256
  window_size: null
train:
  global_batch_size: 512
  micro_batch_size: 1
"""

DEEPSEEK = """
model:
  _target_: megatron.bridge.models.mla_provider.MLAModelProvider
  num_layers: 27
  hidden_size: 2048
  ffn_hidden_size: 10944
  num_attention_heads: 16
  gated_linear_unit: true
  activation_func: torch.nn.functional.silu
  add_bias_linear: false
  normalization: RMSNorm
  q_lora_rank: null
  kv_lora_rank: 512
  num_moe_experts: 64
  moe_ffn_hidden_size: 1408
  moe_router_topk: 6
  moe_shared_expert_intermediate_size: 2816
  moe_layer_freq: [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
  pipeline_model_parallel_size: 2
  num_layers_in_first_pipeline_stage: 13
  expert_model_parallel_size: 8
  recompute_granularity: selective
  position_embedding_type: rope
  vocab_size: 102400
train: {micro_batch_size: 2}
dataset: {seq_length: 4096}
"""

SMALL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


def text_of(**model: object) -> str:
    return yaml.safe_dump({"model": {**SMALL, **model}})


def test_llama_run_config():
    source = bridge.read(LLAMA, "run_config.yaml")
    model = source.model
    assert model is not None
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.qkv_bias) == (32, 8, 128, False)
    assert (mlp.intermediate_size, mlp.gated, mlp.activation) == (14336, True, "silu")
    assert (model.vocab_size, model.tied_embeddings, model.norm.kind, model.positions) == (128256, False, "rmsnorm", 0)
    assert source.run_settings == {
        "sequence_length": 8192,
        "micro_batch_size": 1,
        "tp": 4,
        "cp": 2,
        "sequence_parallel": True,
        "vocab_multiple": 128,
    }
    assert source.global_batch == 512
    assert codes(source) == []


def test_deepseek():
    source = bridge.read(DEEPSEEK, "moonlight.yaml")
    model = source.model
    assert model.pattern() == "1 dense, 26 MoE"
    attention, moe = model.layers[1].attention, model.layers[1].mlp
    assert (attention.head_dim, attention.value_dim, attention.latent.q_rank) == (192, 128, None)
    assert (moe.experts, moe.top_k, moe.expert.intermediate_size, moe.shared.intermediate_size) == (64, 6, 1408, 2816)
    assert moe.expert.stored_fused
    assert source.run_settings == {
        "sequence_length": 4096,
        "micro_batch_size": 2,
        "pp": 2,
        "ep": 8,
        "pp_layers": (13, 14),
        "recompute": "selective",
        "sequence_parallel": False,
    }


def test_defaults_are_megatron_cores():
    source = bridge.read(text_of(gated_linear_unit=True, activation_func="silu", seq_length=128), "x.yaml")
    layer = source.model.layers[0]
    assert layer.mlp.intermediate_size == 256  # no narrower for a gated MLP, unlike Megatron-LM's arguments
    assert source.model.positions == 128
    assert source.model.tied_embeddings
    assert layer.attention.kv_heads == 4
    assert bridge.read(text_of(multi_latent_attention=True), "x").model.layers[0].attention.latent.q_rank == 512


def test_patterns_and_windows():
    layers = bridge.read(text_of(num_moe_experts=8, moe_layer_freq="([0]*1+[1]*3)", window_size=[127, 0]), "x").model.layers
    assert [layer.is_moe for layer in layers] == [False, True, True, True]
    assert layers[0].attention.window == 128
    squared = bridge.read(text_of(activation_func="megatron.core.activations.squared_relu"), "x").model.layers[0].mlp
    assert squared.activation == "relu2"


def test_list_layout_and_nested_transformer():
    layout = [["embedding", "decoder"], ["decoder"] * 3 + ["loss"]]
    source = bridge.read(text_of(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout), "x")
    assert source.run_settings["pp_layers"] == (1, 3)
    nested = yaml.safe_dump({"model": {"vocab_size": 100, "transformer": SMALL}})
    assert bridge.read(nested, "x").model.vocab_size == 100


def test_references():
    text = text_of(seq_length=256) + "dataset: {sequence_length: '${model.seq_length}'}\ntrain: {micro_batch_size: '${a.b}'}\n"
    source = bridge.read(text, "x")
    assert "micro_batch_size" not in source.run_settings
    assert facts(source, "setting-without-value") == {
        "setting": "train.micro_batch_size",
        "value": "${a.b}",
        "reason": "the file does not set it",
    }
    assert bridge.read(text + "a: {b: 3}\n", "x").run_settings["micro_batch_size"] == 3
    assert checked(bridge, text + "a: {b: '${a.b}'}\n")


def test_tensor_parallelism_inside_experts():
    split = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    assert bridge.read(text_of(**split, num_moe_experts=8), "x").run_settings["etp"] == 1
    assert "etp" not in bridge.read(text_of(**split), "x").run_settings


def test_virtual_pipeline():
    pieces = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert bridge.read(text_of(**pieces), "x").run_settings["vp"] == 2
    assert "vp" not in bridge.read(text_of(**{**pieces, "pipeline_model_parallel_size": 1}), "x").run_settings
    mixed = bridge.read(text_of(**pieces, num_moe_experts=8, moe_layer_freq=[0, 0, 0, 1]), "x")
    assert facts(mixed, "stage-of-several-pieces") == {"setting": "model.virtual_pipeline_model_parallel_size"}


def test_two_sequence_lengths():
    source = bridge.read(text_of(seq_length=256) + "dataset: {sequence_length: 128}", "x")
    assert source.run_settings["sequence_length"] == 256
    assert facts(source, "sequence-length-differs") == {"length": "256", "dataset_length": "128"}


def test_a_class_whose_sizes_are_not_known():
    target = "my.package.OwnModelProvider"
    with pytest.raises(UserError, match=r"OwnModelProvider.*missing: num_layers, hidden_size, num_attention_heads"):
        bridge.read(f"model:\n  _target_: {target}\n  seq_length: 8192\n", "x")
    with pytest.raises(UserError, match="missing: multi_latent_attention, ffn_hidden_size, gated_linear_unit"):
        bridge.read(text_of(_target_=target), "x")
    assert bridge.read(text_of(_target_="megatron.bridge.models.gpt_provider.GPTModelProvider"), "x").model


def test_other_models_are_refused():
    with refused("model._target_", "T5") as caught:
        bridge.read(text_of(_target_="megatron.bridge.models.t5_provider.T5ModelProvider"), "x.yaml")
    assert isinstance(caught.value, UserError)
    assert option("module", "FILE.py:FUNCTION") in caught.value.hint


def test_modules_whose_recomputation_is_not_modelled_are_named():
    selective = {"recompute_granularity": "selective"}
    source = bridge.read(text_of(**selective, recompute_modules=["moe", "mhc"]), "x")
    assert source.run_settings["recompute_modules"] == ("moe",)
    assert facts(source, "recompute-not-modelled") == {"setting": "model.recompute_modules", "modules": ["mhc"]}
    for modules in (["core_attn", "moe"], None):
        assert bridge.read(text_of(**selective, recompute_modules=modules), "x").run_settings["recompute"] == "selective"


def test_errors_give_a_fitting_example():
    with refused_with_hint("model.num_layers", "'eight'", hint=("model.num_layers: 32",)):
        bridge.read(text_of(num_layers="eight"), "x.yaml")


@pytest.mark.parametrize("deep", ["a: " + "[" * 100_000, "a:\n" + "- " * 100_000, "a: " + "{a: " * 101 + "1" + "}" * 101])
def test_deep_nesting_ends_in_a_message(deep: str):
    with refused("YAML", 100):
        bridge.read(f"{deep}\n", "x.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("- 1", "the file is a list"),
        ("model: llama", "no settings under model:"),
        ("model: {num_layers: 4, hiden_size: 64}", "it has model.hiden_size"),
        ("model: {num_layers: [", "the YAML is not valid, line 1"),
        ("model: !!python/object:os.system {}", "the YAML is not valid"),
        ("model: {num_layers: 2020-13-45}", "the YAML is not valid"),
        ("model: {num_layers: " + "9" * 5000 + "}", "."),
        ("a: " + "[" * 5000, "the YAML is not valid"),
        ("model: {hidden_size: 64, num_attention_heads: 4, num_layers: 0x" + "f" * 9000 + "}", "too large to show"),
        (text_of(hidden_size=64.0), "model.hidden_size must be a whole number, not 64.0"),
        (text_of(hidden_size=True), "not True"),
        (text_of(hidden_size=[64]), "not a list"),
        (text_of(hidden_size=-64), "at least 1"),
        (text_of(hidden_size=65), "model.kv_channels is not given"),
        (text_of(num_moe_experts=2, moe_router_topk=4), "model.moe_router_topk = 4 is more than model.num_moe_experts = 2"),
        (text_of(num_moe_experts=2, moe_layer_freq=[1, "a", 1, 1]), "each number of model.moe_layer_freq"),
        (text_of(sequence_parallel="maybe"), "model.sequence_parallel must be true or false"),
        (text_of(normalization=[1]), "model.normalization must be a single value, not a list"),
    ],
)  # fmt: skip
def test_messages(text: str, says: str):
    with pytest.raises(UserError, match=says):
        bridge.read(text, "x.yaml")


def test_recognises():
    assert bridge.recognises(LLAMA)
    assert bridge.recognises(DEEPSEEK)
    assert bridge.recognises("model: {hidden_size: 4}")
    assert not bridge.recognises('{"hidden_size": 4096}')
    assert not bridge.recognises("[model]\nname = 'llama3'")
    assert not bridge.recognises("--num-layers 3")


def bomb(merge: bool) -> str:
    lines = ["a0: &a0 {hidden_size: 64, num_layers: 4, num_attention_heads: 4}"]
    for i in range(12):
        copies = ", ".join([f"*a{i}"] * 9)
        lines.append(f"a{i + 1}: &a{i + 1} " + (f"{{<<: [{copies}]}}" if merge else f"[{copies}]"))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "activation_func",
        "moe_layer_freq",
        "recompute_modules",
        "pipeline_model_parallel_layout",
        "_target_",
    ],
)
def test_nested_aliases_stay_cheap(key: str):
    sizes = "num_layers: 4, hidden_size: 64, num_attention_heads: 4, num_moe_experts: 2, pipeline_model_parallel_size: 2"
    with in_little_memory():
        checked(bridge, f"{bomb(merge=False)}\nmodel: {{{sizes}, {key}: *a12}}")
        assert checked(bridge, f"{bomb(merge=True)}\nmodel: *a12") is None


def test_recursive_aliases():
    assert checked(bridge, "model: &m {num_layers: 4, hidden_size: 64, num_attention_heads: *m}") is None
    assert (
        checked(
            bridge, "model: &m {num_layers: 4, hidden_size: 64, num_attention_heads: 4, transformer: *m, seq_length: &l [*l]}"
        )
        is None
    )
    assert checked(bridge, "&d model: *d") is None
    assert checked(bridge, "model: {1: 2, [a]: 3, ~: 4, num_layers: 4, hidden_size: 64, num_attention_heads: 4}") is None
    assert checked(bridge, "model: {1: 2, ~: 4, num_layers: 4, hidden_size: 64, num_attention_heads: 4}")


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text(text: str):
    checked(bridge, text)
    checked(bridge, "model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n  " + text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
OTHERS = """_target_ activation_func window_size recompute_modules recompute_granularity qk_layernorm normalization
pipeline_model_parallel_layout sequence_parallel transformer should_pad_vocab num_layers_in_first_pipeline_stage
multi_latent_attention mtp_num_layers world_size softmax_type hybrid_layer_pattern hybrid_override_pattern is_hybrid_model
hybrid_attention_ratio hybrid_mlp_ratio mamba_num_heads mamba_head_dim mamba_num_groups mtp_hybrid_override_pattern
experimental_attention_variant linear_attention_freq linear_num_key_heads dsa_indexer_topk moe_latent_size attention_chunk_size
attention_output_gate tokenizer_vocabulary layer_norms"""
NAMES = st.sampled_from([*bridge.TELLTALE, *re.findall(r"\w+", OTHERS)])


@settings(max_examples=250, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=5), VALUES, VALUES)
def test_any_values(model: dict[str, object], train: object, dataset: object):
    checked(bridge, yaml.safe_dump({"model": {**SMALL, **model}, "train": train, "dataset": dataset}))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([LLAMA, DEEPSEEK]), st.data())
def test_damaged_files(text: str, data: st.DataObject):
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 30)))
    checked(bridge, text[:start] + data.draw(st.text(max_size=6)) + text[end:])


def test_settings_that_are_called_like_sizes_can_be_ignored(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text_of(residual_stream_size=8, num_layrs=3, some_switch=True), encoding="utf-8")
    with pytest.raises(UserError, match="sizes that gemmscope does not read: model"):
        load_model(config=str(file))
    source = load_model(config=str(file), ignore_key=["model.residual_stream_size", "model.num_layrs"])
    assert source.model is not None
    assert "keys-ignored" in codes(source)


def test_sequence_parallelism_is_off_where_the_file_does_not_say(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text_of(tensor_model_parallel_size=2, seq_length=64) + "\ntrain: {micro_batch_size: 1}", encoding="utf-8")
    assert not model_run(load_model(config=str(file))).run.sequence_parallel
