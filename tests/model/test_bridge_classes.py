"""Provider classes of Megatron-Bridge: the class alone names the model, and the file overrides it."""

from __future__ import annotations

import pytest

from gemmscope.model import bridge
from gemmscope.model.bridge import provider_classes
from gemmscope.model.spec import ModelSource, RunSpec
from gemmscope.toml import load_data
from gemmscope.workload.derive import derive
from support.reading import codes, facts
from support.refusals import refused, refused_with_hint


def read(name: str, *lines: str) -> ModelSource:
    text = "\n  ".join(["model:", f"_target_: megatron.bridge.models.some.module.{name}", *lines])
    assert bridge.recognises(text)
    return bridge.read(text, "run.yaml")


def parameters(source: ModelSource) -> int:
    return derive(source.model, RunSpec(micro_batch_size=1, sequence_length=8)).parameters


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Llama2ModelProvider7B", "llama-2-7b"),
        ("Llama2ModelProvider70B", "llama-2-70b"),
        ("Llama31ModelProvider8B", "llama-3.1-8b"),
        ("Llama31ModelProvider70B", "llama-3.1-70b"),
        ("Llama31ModelProvider405B", "llama-3.1-405b"),
        ("Llama32ModelProvider1B", "llama-3.2-1b"),
        ("Qwen25ModelProvider500M", "qwen2.5-0.5b"),
        ("Qwen25ModelProvider1P5B", "qwen2.5-1.5b"),
        ("Qwen25ModelProvider7B", "qwen2.5-7b"),
        ("Qwen3ModelProvider600M", "qwen3-0.6b"),
        ("Qwen3ModelProvider8B", "qwen3-8b"),
        ("Qwen3ModelProvider32B", "qwen3-32b"),
        ("Qwen3MoEModelProvider30B_A3B", "qwen3-30b-a3b"),
        ("Qwen3MoEModelProvider235B_A22B", "qwen3-235b-a22b"),
        ("DeepSeekV2LiteModelProvider", "deepseek-v2-lite"),
        ("DeepSeekV3ModelProvider", "deepseek-v3"),
        ("GPTOSSProvider20B", "gpt-oss-20b"),
        ("GPTOSSProvider120B", "gpt-oss-120b"),
        ("Gemma3ModelProvider27B", "gemma-3-27b"),
        ("Nemotron4ModelProvider15B", "nemotron-4-15b"),
        ("MistralModelProvider", "mistral-7b"),
        ("Llama4Experts16ModelProvider", "llama-4-scout"),
        ("Llama4Experts128ModelProvider", "llama-4-maverick"),
        ("Qwen3NextModelProvider80B_A3B", "qwen3-next-80b-a3b"),
    ],
)
def test_parameters_are_those_of_the_published_model(name: str, preset: str):
    assert parameters(read(name)) == load_data("gemmscope.model.presets", f"{preset}.toml")["parameters"]


@pytest.mark.parametrize(
    ("name", "published"),
    [  # of transformers' classes with the published configs; without the layers of multi-token prediction
        ("NemotronHModelProvider8B", 8_100_852_736),
        ("Nemotron3NanoProvider", 31_577_937_344),
    ],
)
def test_parameters_of_hybrids(name: str, published: int):
    assert parameters(read(name)) == published


def test_latent_experts_and_prediction_layers():
    assert parameters(read("Nemotron3SuperProvider", "mtp_num_layers: 0")) == 120_668_687_360  # as transformers' class
    source = read("Nemotron3SuperProvider")
    assert source.model.prediction_layer.kind == "attention + MoE"
    assert source.model.prediction_layers == 2


def test_sparse_attention_adds_an_indexer_to_each_layer():
    indexer = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    assert parameters(read("DeepSeekV32ModelProvider")) == parameters(read("DeepSeekV3ModelProvider")) + 61 * indexer


def test_every_class_is_read():
    for name, settings in provider_classes().items():
        if "num_layers" in settings or "hybrid_layer_pattern" in settings:
            assert read(name).model.hidden_size == settings["hidden_size"]


def test_class_alone():
    source = read("Llama3ModelProvider8B")
    assert source.model.describe() == "32 dense layers, hidden 4096, 32 heads (8 key/value), intermediate 14336"
    assert source.run_settings == {"sequence_length": 8192, "vocab_multiple": 128, "sequence_parallel": False}
    assert codes(source) == ["vocabulary-of-class"]
    assert facts(source, "vocabulary-of-class") == {"size": 128256}


def test_the_file_overrides_the_class():
    source = read("Llama3ModelProvider8B", "num_layers: 4", "vocab_size: 32000", "tensor_model_parallel_size: 2")
    assert (len(source.model.layers), source.model.vocab_size, source.run_settings["tp"]) == (4, 32000, 2)
    assert codes(source) == []
    assert read("Llama3ModelProvider8B", "seq_length: 4096").run_settings["sequence_length"] == 4096
    assert read("Llama3ModelProvider8B\ndataset: {seq_length: 2048}").run_settings["sequence_length"] == 2048
    tokenizer = read("Llama3ModelProvider8B\ntokenizer: {vocab_size: 1000}")
    assert (tokenizer.model.vocab_size, tokenizer.run_settings["vocab_multiple"], codes(tokenizer)) == (1000, 128, [])


def test_attention_in_chunks():
    source = read("Llama4Experts128ModelProvider")
    assert [layer.attention.chunk for layer in source.model.layers[:4]] == [8192, 8192, 8192, None]
    assert source.model.pattern() == "24 dense, 24 MoE"


def test_classes_without_sizes():
    with refused("Qwen3ModelProvider", "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"):
        read("Qwen3ModelProvider")
    sizes = ["num_layers: 2", "hidden_size: 64", "num_attention_heads: 8", "ffn_hidden_size: 128"]
    attention = read("Qwen3ModelProvider", *sizes).model.layers[0].attention
    assert (attention.head_dim, attention.qk_norm, attention.qkv_bias) == (128, "head", False)


def test_unknown_classes_suggest_a_similar_one():
    with refused_with_hint("Llama3ModelProvider9B", "num_layers", "ffn_hidden_size", hint=("Llama3ModelProvider8B",)):
        read("Llama3ModelProvider9B")
