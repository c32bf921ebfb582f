"""torchtitan job configs, and what every test does with one."""

from __future__ import annotations

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


def config(name: str = "llama3", flavor: str = "8B", **tables: str) -> str:
    lines = [f'[model]\nname = "{name}"\nflavor = "{flavor}"']
    lines += [f"[{table}]\n" + content.replace("; ", "\n") for table, content in tables.items()]
    return "\n".join(lines)


def read(text: str) -> ModelSource:
    return torchtitan.read(text, "job.toml")


def run_of(text: str) -> RunSpec:
    """The settings as the next stage takes them: batch and sequence come from elsewhere if the file has none."""
    return RunSpec(**{"micro_batch_size": 1, "sequence_length": 2048, **read(text).run_settings})
