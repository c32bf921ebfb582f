"""Megatron-Bridge recipes in Python: small ones in the style of the public ones, and any other text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError, option
from gemmscope.model import bridge_recipe, readers
from support.reading import checked, codes, facts

ASSIGNED = """
import torch
from megatron.bridge.models.qwen import Qwen3MoEModelProvider30B_A3B

GPUS = 8

def small_pretrain_config():
    \"\"\"Qwen3 on eight GPUs.\"\"\"
    cfg = common()
    cfg.model = Qwen3MoEModelProvider30B_A3B(expert_model_parallel_size=GPUS, sequence_parallel=True)
    cfg.model.tensor_model_parallel_size = GPUS // 4
    cfg.model.seq_length = 2 * 4096
    cfg.model.pipeline_dtype = torch.bfloat16
    cfg.dataset.seq_length = 8192
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 2
    cfg.ddp.use_distributed_optimizer = True
    cfg.optimizer.lr = schedule(3)
    return cfg

def small_sft_config():
    cfg = common()
    cfg.model = Qwen3MoEModelProvider30B_A3B(tensor_model_parallel_size=1)
    return cfg
"""

PASSED_ON = """
from megatron.bridge.models import llama

def model_config(tensor_parallelism=1, context_parallelism=2, sequence_parallelism=False):
    return llama.Llama3ModelProvider8B(
        tensor_model_parallel_size=tensor_parallelism,
        context_parallel_size=context_parallelism,
        sequence_parallel=sequence_parallelism,
    )

def pretrain_config(*, tensor_parallelism: int = 4, micro_batch_size: int = 1, vocab_size: int = 32000):
    model_cfg = model_config(tensor_parallelism=tensor_parallelism)
    cfg = ConfigContainer(
        model=model_cfg,
        train=TrainingConfig(micro_batch_size=micro_batch_size, global_batch_size=512),
        ddp=DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True),
        dataset=GPTDatasetConfig(sequence_length=4096),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size),
    )
    if long_context:
        cfg.dataset.sequence_length = 8192
    return cfg
"""


def test_settings_that_are_assigned():
    source = readers.read_text(ASSIGNED, "recipe.py")
    assert (len(source.model.layers), source.model.layers[0].mlp.experts) == (48, 128)
    assert source.run_settings == {
        "sequence_length": 8192,
        "micro_batch_size": 2,
        "tp": 2,
        "ep": 8,
        "sequence_parallel": True,
        "zero": 1,
    }
    assert source.global_batch == 64
    assert codes(source) == []


def test_settings_that_a_function_passes_on():
    source = readers.read_text(PASSED_ON, "recipe.py")
    assert source.model.vocab_size == 32000
    expected = {"tp": 4, "cp": 2, "micro_batch_size": 1, "dp_overlap": True, "vocab_multiple": 128}
    assert {name: source.run_settings[name] for name in expected} == expected
    assert facts(source, "setting-without-value")["setting"] == "model.seq_length"


FROM_HUB = """
from megatron.bridge import AutoBridge
MODEL_ID = "Qwen/Qwen3-8B"

def qwen3_pretrain_config():
    cfg = common()
    cfg.model = AutoBridge.from_hf_pretrained(MODEL_ID).to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.seq_length = 4096
    cfg.model.mtp_num_layers = 1
    cfg.train.micro_batch_size = 2
    return cfg
"""


def test_a_model_from_the_hub_is_the_preset_with_that_source():
    source = readers.read_text(FROM_HUB, "recipe.py")
    assert (source.model.name, source.model.prediction_layers) == ("qwen3-8b", 1)
    assert source.run_settings == {"sequence_length": 4096, "micro_batch_size": 2, "tp": 4, "sequence_parallel": False}
    assert codes(source) == []


def test_a_variable_that_holds_the_model():
    text = "import megatron.bridge\nmodel = Qwen3ModelProvider8B()\nmodel.num_layers = 2\nmodel.seq_length = length()"
    source = bridge_recipe.read(text, "x.py")
    assert len(source.model.layers) == 2
    assert facts(source, "setting-without-value")["reason"] == "length(), which the file does not define"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "ID = 'nvidia/x'\ndef f():\n  m = AutoBridge.from_hf_pretrained(ID)",
            "takes its model from nvidia/x, which is not a preset",
        ),
        (
            "m = AutoBridge.from_hf_pretrained('Qwen/Qwen3-8B')\nm.num_layers = 2",
            "from Qwen/Qwen3-8B and changes model.num_layers",
        ),
        ("cfg = llama3_8b_pretrain_config()", "no function that builds a model"),
        ("a = Qwen3ModelProvider8B()\ndef f():\n  return Qwen3ModelProvider4B()", "several models: Qwen3ModelProvider8B, Qwen3"),
        ("def f(:", "the Python is not valid, line 2"),
        ("x = " + "(" * 5000, "the Python is not valid"),
        ("x = '\0'", "the Python is not valid"),
        ("x = 1\n" * 40_000, "too long"),
        ("m = Qwen3ModelProvider8B(num_layers='x')", "model.num_layers must be a whole number, not 'x'"),
    ],
)
def test_messages(text: str, says: str):
    with pytest.raises(UserError, match=says) as caught:
        bridge_recipe.read("import megatron.bridge\n" + text, "x.py")
    assert caught.value.hint


def test_the_message_names_the_hub_id():
    with pytest.raises(UserError) as caught:
        bridge_recipe.read("import megatron.bridge\nm = AutoBridge.from_hf_pretrained('nvidia/x')", "x.py")
    assert option("config", "nvidia/x") in caught.value.hint


def test_recognises():
    assert bridge_recipe.recognises(ASSIGNED)
    assert bridge_recipe.recognises(PASSED_ON)
    assert not bridge_recipe.recognises("# from megatron.bridge import x")
    assert not bridge_recipe.recognises("model:\n  _target_: megatron.bridge.models.llama.Llama3ModelProvider8B")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([ASSIGNED, PASSED_ON, FROM_HUB]), st.data())
def test_damaged_files(text: str, data: st.DataObject):
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 30)))
    checked(bridge_recipe, text[:start] + data.draw(st.text(max_size=6)) + text[end:])


def test_provider_classes_of_the_file() -> None:
    text = """
from megatron.bridge.models.nemotronh import NemotronHModelProvider
LAYERS = 5
@dataclass
class Tiny(NemotronHModelProvider):
    hybrid_override_pattern: str = "M-M*-"
    num_layers: int = LAYERS
    hidden_size: int = 512
    num_attention_heads: int = 8
    ffn_hidden_size = 1024
class Tinier(Tiny):
    hidden_size: int = 256
def pretrain_config(tp: int = 2):
    return ConfigContainer(model=Tinier(tensor_model_parallel_size=tp), train=TrainingConfig(micro_batch_size=2))
"""
    source = bridge_recipe.read(text, "recipe.py")
    assert source.model is not None
    assert (source.model.pattern(), source.model.hidden_size) == ("2 Mamba-2, 2 MLP, 1 attention", 256)
    assert (source.run_settings["tp"], source.run_settings["micro_batch_size"]) == (2, 2)
