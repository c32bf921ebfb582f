"""torchtitan job configs, and what every test does with one."""

from __future__ import annotations

import re

from gemmscope.model import torchtitan
from gemmscope.model.spec import ModelSource, RunSpec

LLAMA_8B = """
# a job for eight GPUs
[job]
dump_folder = "./outputs"
description = "Llama 3 8B"

[profiling]
enable_profiling = true

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 1
seq_len = 8192
steps = 1_000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true

[quantize.linear.float8]
filter_fqns = ["output"]
"""

DEEPSEEK_671B = """
[model]
name = "deepseek_v3"
flavor = "671B"

[training]
local_batch_size = 4
global_batch_size = 2048
seq_len = 4096

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 64
tensor_parallel_degree = 8
expert_parallel_degree = 64
expert_tensor_parallel_degree = 8
enable_async_tensor_parallel = true

[activation_checkpoint]
mode = "full"
"""


# A small registry of the same structure as torchtitan's: the files of a package.
BLOCKS = """
class Linear: pass
def attention(dim, heads, kv_heads, *, fused):
    if fused:
        qkv = FusedQKVLinear.Config(wqkv=Linear.Config(in_features=dim, out_features=(heads + 2 * kv_heads) * (dim // heads)))
    else:
        qkv = QKVLinear.Config(wq=Linear.Config(in_features=dim, out_features=dim), wkv=None)
    return GQAttention.Config(n_heads=heads, n_kv_heads=kv_heads, head_dim=None, qkv_linear=qkv,
                              wo=Linear.Config(in_features=dim, out_features=dim), param_init=partial(f, std=dim**-0.5))
"""
MODEL = """
from .blocks import attention, Linear

def layers(n_layers, *, dim, heads, kv_heads, hidden, fused=True):
    result = []
    for index in range(n_layers):
        result.append(Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(normalized_shape=dim), ffn_norm=RMSNorm.Config(normalized_shape=dim),
            attention=attention(dim, heads, kv_heads, fused=fused),
            feed_forward=FeedForward.Config(w1=Linear.Config(in_features=dim, out_features=hidden), w2=None, w3=None)))
    return result

def _small(backend):
    dim = 64
    return Llama3Model.Config(dim=dim, vocab_size=256, layers=layers(3, dim=dim, heads=8, kv_heads=2, hidden=3 * dim))

def _apart(backend):
    config = _small(backend)
    config.layers = layers(3, dim=64, heads=8, kv_heads=2, hidden=192, fused=False)
    return config

flavors = {"small": _small, "apart": _apart}

def model_registry(flavor, backend="flex", converters=None):
    config = flavors[flavor](backend)
    if converters is not None:
        for converter in converters:
            config = converter.build().convert(config)
    return ModelSpec(name="llama3", flavor=flavor, model=config)
"""
JOBS = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.mine import model_registry

def small() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("small"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * 512, max_context_length=512),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config())

def apart() -> Trainer.Config:
    config = small()
    config.model_spec = model_registry("apart", converters=[Float8LinearConverter.Config(emulate=True)])
    config.parallelism.data_parallel_shard_degree = 4
    config.activation_checkpoint = None
    return config

def _helper(): return None
"""
ONE_FILE = "from torchtitan.config import ParallelismConfig, TrainingConfig\n" + re.sub(
    r"^from .*$|\b(?=(?:attention|layers|model_registry)\()",
    lambda match: "" if match[0] else "_",
    BLOCKS + MODEL + JOBS.partition("def apart()")[0],
    flags=re.MULTILINE,
)
"""All of a registry in one file, with one job."""


def config(name: str = "llama3", flavor: str = "8B", **tables: str) -> str:
    lines = [f'[model]\nname = "{name}"\nflavor = "{flavor}"']
    lines += [f"[{table}]\n" + content.replace("; ", "\n") for table, content in tables.items()]
    return "\n".join(lines)


def read(text: str) -> ModelSource:
    return torchtitan.read(text, "job.toml")


def run_of(text: str) -> RunSpec:
    """The settings as the next stage takes them: batch and sequence come from elsewhere if the file has none."""
    return RunSpec(**{"micro_batch_size": 1, "sequence_length": 2048, **read(text).run_settings})
