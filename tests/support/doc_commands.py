"""Every command in README and documentation, the files they need, and why some are not run."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from functools import cache
from pathlib import Path

import gemmscope as gs
from gemmscope.results.bench import BenchResult
from support.megatron_files import LLAMA3_8B
from support.predictions import step_run
from support.run_files import put, recorded_bench
from support.step_files import recorded_step
from support.sweep_files import measured_plane
from support.torchtitan_files import LLAMA_8B

ROOT = Path(__file__).parent.parent.parent
TEXTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TRACES = ROOT / "tests" / "data" / "traces"


BRIDGE = """
dataset: {sequence_length: 8192}
mixed_precision: bf16_mixed
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  ffn_hidden_size: 14336
  gated_linear_unit: true
  hidden_size: 4096
  multi_latent_attention: false
  num_moe_experts: null
  kv_channels: 128
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 32
  num_query_groups: 8
  seq_length: 8192
  vocab_size: 128256
train: {global_batch_size: 512, micro_batch_size: 1}
"""


@cache
def commands() -> dict[str, str]:
    """Each complete command, and the first text that shows it. Those with … in them are not complete."""
    places: dict[str, str] = {}
    for path in TEXTS:
        for block in code_blocks(path.read_text(encoding="utf-8")):
            joined = re.sub(r" \\\n\s+", " ", block)
            for line in re.findall(r"^(?:\$ )?(gemmscope .*)$", joined, flags=re.MULTILINE):
                command = " ".join(re.sub(r"\s#.*", "", line).split())
                if "…" not in command:
                    places.setdefault(command, str(path.relative_to(ROOT)))
    return places


def code_blocks(text: str) -> list[str]:
    """The blocks of commands and output: those without a language, or of a shell."""
    blocks, language, lines = [], None, list[str]()
    for line in text.splitlines():
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = line[3:], []
        else:
            blocks += ["\n".join(lines)] if language in ("", "bash", "console") else []
            language = None
    return blocks


def reason_not_to_run(command: str) -> str:
    """Why the tests do not run it here; empty if they do."""
    arguments = command.split()
    if arguments[1] in ("bench", "step", "fleet", "calibrate"):
        return "needs a GPU"
    if arguments[1] == "explore":
        return "takes ten seconds: tests/writers/test_explorer.py makes a small page"
    if arguments[1] == "numerics":
        return "imports torch, and needs a recording: tests/cli/test_numerics_cli.py runs it"
    if "--check" in arguments:
        return "imports torch and transformers: test_shown_check_is_real_output and tests/workload check shapes"
    if "--module" in arguments:
        return "imports torch: tests/workload traces modules"
    if arguments[1] == "doctor":
        return "starts the installed frameworks: tests/cli/test_doctor.py runs it"
    if "--install-completion" in arguments or "--show-completion" in arguments:
        return "changes the shell: test_completion_can_be_shown shows it"
    return ""


def put_files(folder: Path) -> None:
    """The files that the commands name."""
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1024,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("pretrain_llama.sh", "pretrain.sh"):
        (folder / name).write_text(LLAMA3_8B)
    (folder / "llama3_8b.toml").write_text(LLAMA_8B)
    (folder / "run_config.yaml").write_text(BRIDGE)
    (folder / "gemms.csv").write_text("m,k,n,format\n8192,4096,14336,bf16\n8192,4096,14336,nvfp4\n")
    put(folder, "step.json", recorded_step("llama8b"))
    step_run(folder).rename(folder / "step_run.json")
    first, again = recorded_bench("first"), recorded_bench("again")
    runs: dict[str, BenchResult] = {
        "before.json": first, "after.json": again, "main.json": first, "branch.json": again, "monday.json": first,
        "tuesday.json": again, "wednesday.json": first, "baseline.json": first, "new.json": again, "bench-h200.json": first,
        "bench-h100.json": again,
    }  # fmt: skip
    for name, result in runs.items():
        put(folder, name, result)
    for name in ("sweep-before.json", "sweep-after.json"):
        put(folder, name, measured_plane())
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 24}
    put(folder, "forecast-b300.json", gs.load(**sizes).on(micro_batch_size=31, sequence_length=512).forecast("b300"))
    traces = {"trace": "healthy_te_delayed", "fp8": "healthy_te_delayed", "bf16": "healthy_te_bf16"}
    for name, recorded in traces.items():
        shutil.copy(TRACES / f"{recorded}.json.gz", folder / f"{name}.json.gz")
    trace = json.loads(gzip.decompress((TRACES / "healthy_te_delayed.json.gz").read_bytes()))
    for rank in range(4):
        trace["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
