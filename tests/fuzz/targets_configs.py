"""Model files of every format, lists of GEMMs and calibrations: valid ones that were altered or damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hypothesis import strategies as st

from fuzz.hostile import OUTPUTS, SCALARS, TEXTS, VALUES, altered, damaged, json_bytes
from fuzz.targets import Target, command_line
from gemmscope.model.families import ALIASES, family, known_model_types
from gemmscope.model.megatron import KNOWN
from gemmscope.process import Answer, Ending
from support.megatron_files import DEEPSEEK_V3, LLAMA3_8B, MIXTRAL_8X7B
from support.torchtitan_files import DEEPSEEK_671B, LLAMA_8B, ONE_FILE

RUN = ["--micro-batch-size", "1", "--sequence-length", "64"]
COMMANDS = st.sampled_from([["shapes"], ["shapes"], ["forecast", "--gpu", "h200"], ["forecast", "--gpu", "a100,b300"]])
Case = tuple[list[str], bytes]
"""The command, without the file; and the file."""


@contextmanager
def without_workers() -> Iterator[None]:
    """Workers import torch and may use the network: here, they all fail."""
    failed = mock.Mock(return_value=Answer("", Ending(1, "no workers here")))
    with ExitStack() as patches:
        for module in ("gemmscope.model.hub", "gemmscope.workload.trace", "gemmscope.commands.doctor"):
            patches.enter_context(mock.patch(f"{module}.run_worker", failed))
        yield


def run_config(case: Case, folder: Path) -> str:
    """The file as `--config`."""
    command, data = case
    path = folder / "config"
    path.write_bytes(data)
    with without_workers():
        return command_line([*command, "--config", str(path)])


def cases(texts: st.SearchStrategy[bytes]) -> st.SearchStrategy[Case]:
    commands = st.builds(lambda command, output: [*command, *RUN, *output], COMMANDS, OUTPUTS)
    return st.tuples(commands, texts)


# --- Hugging Face

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "vocab_size": 100, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 64,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
NESTED = "text_config layer_types mlp_layer_types mlp_only_layers architectures _name_or_path is_encoder_decoder".split()


def keys_of(model_type: str) -> list[str]:
    """The keys that the facts of a family name."""
    texts = [value.partition("=")[0] for value in family(model_type).values() if isinstance(value, str)]
    return sorted({*texts, *family(model_type).get("defaults", {})} - {""})


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    model_type = draw(st.sampled_from(known_model_types()))
    alias = {key: draw(st.sampled_from(ALIASES.get(key, [key]))) for key in SIZES}
    config = {"model_type": model_type, **{alias[key]: value for key, value in SIZES.items()}}
    every = [*keys_of(model_type), *NESTED, *(name for names in ALIASES.values() for name in names)]
    config = draw(altered(config, every))
    if draw(st.integers(0, 9)) == 0:
        config = {"model_type": draw(TEXTS), "text_config": config}
    return json_bytes(config, as_utf8=draw(st.booleans()))


JSON_FILES = [json_bytes({"model_type": "llama", **SIZES}), json_bytes({"model_type": "qwen2_moe", **SIZES})]
JSON_PIECES = rb'{ } [ ] " : , NaN 1e999 \ud800 \u0000 null true -1 "model_type":'.split()
JSON_PIECES += [b"\xef\xbb\xbf", b"9" * 300]

# --- Megatron-LM

SHELL = r"""$X ${X:-8} $((2*4)) $(date) `ls` " ' \ ; | # ([0]*2+[1]) ( ) <<EOF fi X=8 ARGS=( Et|(tt|)*14t|L = -- -1 1e5""".split()
SHELL += ["'a b'", "\n", "if true; then", "pretrain_gpt.py", "pretrain_bert.py"]
FLAGS = sorted(KNOWN)
SCRIPTS = [LLAMA3_8B, MIXTRAL_8X7B, DEEPSEEK_V3, "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"]
PRINTED = "  num_layers ........ 4\n  hidden_size ........ 64\n  num_attention_heads ........ 4\n"


@st.composite
def scripts(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from(SCRIPTS))
    for _ in range(draw(st.integers(0, 4))):
        value = draw(st.sampled_from(SHELL) | SCALARS.map(str))
        text += f" --{draw(st.sampled_from(FLAGS)).replace('_', '-')}{draw(st.sampled_from([' ', ' ', '=', '']))}{value}"
    return text.encode("utf-8", "surrogatepass")


@st.composite
def printed_arguments(draw: st.DrawFn) -> bytes:
    text = PRINTED
    for _ in range(draw(st.integers(0, 5))):
        text += f"  {draw(st.sampled_from(FLAGS) | TEXTS)} {'.' * draw(st.integers(1, 9))} {draw(SCALARS)}\n"
    return text.encode("utf-8", "surrogatepass")


SCRIPT_PIECES = [piece.encode() for piece in SHELL] + [b"\x1b[31m", b"\xff", b"\0", b" --num-layers ", b"${", b"$(("]

# --- Megatron-Bridge

BRIDGE: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 100}
BRIDGE_KEYS = [*sorted(KNOWN), "_target_", "transformer", "activation_func", "num_moe_experts", "moe_layer_freq", "window_size"]
YAML_FILE = yaml.safe_dump({"model": BRIDGE, "train": {"micro_batch_size": 1}}).encode()
YAML_PIECES = rb"&a *a !!python/object:os.system !!binary ? - : { [ ' ${model.seq_length} 2020-13-45 1:59:59 0x .inf".split()
YAML_PIECES += [b"<<: *a\n", b"|\n", b"\t", b"%YAML 9.9\n", b"---\n", b"...\n", b"\xff", b"\x1b"]


@st.composite
def bridges(draw: st.DrawFn) -> bytes:
    batch = draw(altered({"micro_batch_size": 1}, ["global_batch_size"]))
    document = {"model": draw(altered(BRIDGE, BRIDGE_KEYS)), "train": batch}
    document = draw(altered(document, ["dataset", "model", "train"])) if draw(st.integers(0, 4)) == 0 else document
    return yaml.dump(document, allow_unicode=draw(st.booleans())).encode("utf-8", "surrogatepass")


# --- torchtitan

TITAN = """
seq_len local_batch_size global_batch_size batch_size tensor_parallel_degree context_parallel_degree pipeline_parallel_degree
pipeline_parallel_schedule pipeline_parallel_layers_per_stage enable_async_tensor_parallel expert_parallel_degree mode name flavor
expert_tensor_parallel_degree data_parallel_shard_degree pipeline_parallel_split_points data_parallel_replicate_degree converters
pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers pipeline_parallel_microbatch_size
selective_ac_option tokenizer_path
""".split()
TOML_TABLES = "model training parallelism activation_checkpoint experimental job".split()
TOML_VALUES = '"8B" "llama3" "1F1B" "Interleaved1F1B" "DualPipeV" "full" "op" [] {} 1979-05-27 nan -inf true'.split()
TOML_PIECES = rb"[[ ]] [model] = \u0000 1_ 0x {a= ''' .a.a.a.a.a.a.a.a".split()
TOML_PIECES += [b".a" * 50, b"\xff", b"\x1b", b"\r", b"\n"]


@st.composite
def titans(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from([LLAMA_8B, DEEPSEEK_671B, '[model]\nname = "llama4"\nflavor = "17bx16e"\n']))
    for _ in range(draw(st.integers(0, 4))):
        value = draw(st.sampled_from(TOML_VALUES) | st.integers(-2, 300).map(str) | VALUES.map(json.dumps))
        key, table = draw(st.sampled_from(TITAN)), f"[{draw(st.sampled_from(TOML_TABLES))}]"
        before, heading, after = text.partition(f"{table}\n")  # a table may stand only once
        kept = "\n".join(line for line in after.split("\n") if not line.startswith(f"{key} ="))
        text = f"{before}{table}\n{key} = {value}\n{kept}" if heading else f"{text}\n{table}\n{key} = {value}\n"
    return text.encode("utf-8", "surrogatepass")


TITAN_COMMAND = """TP=${TP:-2}
torchrun --nproc_per_node=8 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \\
    --training.local_batch_size=4 --training.seq-len 4096 --parallelism.tensor_parallel_degree $TP
"""


@st.composite
def titan_commands(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from([TITAN_COMMAND, "MODULE=llama3 CONFIG=llama3_8b ./run_train.sh"]))
    for _ in range(draw(st.integers(0, 4))):
        name = f"{draw(st.sampled_from(TOML_TABLES))}.{draw(st.sampled_from(TITAN))}"
        name = draw(st.sampled_from([name, name, "module", "config", "model.name", "model.flavor"]))
        value = draw(st.sampled_from(SHELL) | SCALARS.map(str))
        text = f"{text.rstrip()} --{name}{draw(st.sampled_from([' ', '=', '']))}{value}\n"
    return text.encode("utf-8", "surrogatepass")


# --- recipes of Megatron-Bridge

RECIPE = """from megatron.bridge.models.qwen import Qwen3MoEModelProvider30B_A3B

GPUS = 8

def small_pretrain_config(tensor_parallelism=4, layers=None):
    cfg = common()
    cfg.model = Qwen3MoEModelProvider30B_A3B(expert_model_parallel_size=GPUS, sequence_parallel=True)
    cfg.model.tensor_model_parallel_size = tensor_parallelism
    cfg.model.seq_length = 2 * 4096
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 2
    return cfg
"""
RECIPES = [RECIPE.encode(), RECIPE.replace("cfg.model = ", "cfg = ConfigContainer(model=").replace("True)", "True))").encode()]
VALUES_IN_PYTHON = r"""GPUS 2**99999 2**-1 10**10**10 'a'*10**10 [0]*10**10 -1 1e999 None True "\ud800" "\x1b[2J"
lambda:0 GPUS.x (1,2)[9]
f"{GPUS}" {} 1//0 1<<10**10 __import__("os") not 8>>-1 layers""".split()
PYTHON_PIECES = [piece.encode() for piece in VALUES_IN_PYTHON] + [
    *rb"( ) [ ] : = def class return ''' # @ *args **k if: else: for import".split(),
    b"\n    ",
    b"\t",
    b"\x00",
    b"\xff",
    b"(" * 300,
]


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from([one.decode() for one in RECIPES]))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.sampled_from(["cfg.model", "cfg.train", "cfg.dataset", "cfg.ddp", "cfg", "model_cfg"]))
        key = draw(st.sampled_from(BRIDGE_KEYS))
        value = draw(st.sampled_from(VALUES_IN_PYTHON) | SCALARS.map(ascii))
        line = draw(st.sampled_from([f"    {place}.{key} = {value}\n", f"    {key} = {value}\n"]))
        text = text.replace("    return cfg\n", f"{line}    return cfg\n")
    return text.encode("utf-8", "surrogatepass")


# --- GEMMs

CELLS = st.sampled_from('64 1024 8192.0 bf16 fp8 mxfp8 nvfp4 fprop dgrad nt cublas " "a ,'.split()) | SCALARS.map(str)
HEADS = ["m,k,n,format", "M,K,N,Format,layout,groups,library", "m,k,n,format,note", "m,k,n", "m,m,k,n,format", ""]


@st.composite
def gemm_lists(draw: st.DrawFn) -> tuple[list[str], bytes]:
    wrong = draw(st.integers(0, 3)) * 3  # in a hundred cells
    lines = [draw(TEXTS) if draw(st.integers(0, 99)) < wrong else draw(st.sampled_from([*HEADS[:2] * 3, *HEADS]))]
    for _ in range(draw(st.integers(1, 4))):
        good = ["64", "128", "256", draw(st.sampled_from(["bf16", "fp8"])), "fprop", "2", "cublas"][: lines[0].count(",") + 1]
        lines.append(",".join(draw(CELLS) if draw(st.integers(0, 99)) < wrong else cell for cell in good))
    options = draw(st.sampled_from([[], ["--state", "burst"], ["--library", "cublas"], ["--csv", "-"]]))
    gpu = draw(st.sampled_from(["h200", "a100,b300"]))
    end = draw(st.sampled_from(["\n", "\r\n", "\r", "\n\n"]))
    return ["forecast", "--gpu", gpu, "--gemms", "-", *options], end.join(lines).encode("utf-8", "surrogatepass")


def run_gemms(case: Case, folder: Path) -> str:
    return command_line(*case)


# --- calibrations

CALIBRATION = json.loads(files("gemmscope.forecast").joinpath("coefficients/calibrated/h200.json").read_text(encoding="utf-8"))
CALIBRATION_KEYS = ["gpu", "device", "gemms", "quantize", "burst", "parts", "versions", "version", "extra"]


@st.composite
def calibrations(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged([json_bytes(CALIBRATION)], JSON_PIECES))
    table = draw(st.sampled_from(["gemms", "burst", "quantize", "parts", "versions"]))
    factors = st.floats() | VALUES
    changed = {**CALIBRATION[table], draw(st.sampled_from([*CALIBRATION[table], "x"]) | TEXTS): draw(factors)}
    return json_bytes(draw(altered({**CALIBRATION, table: changed}, CALIBRATION_KEYS)))


def run_calibration(case: Case, folder: Path) -> str:
    """The file where forecasts look for it."""
    command, data = case
    place = folder / "gemmscope" / "calibration" / "h200.json"
    place.parent.mkdir(parents=True)
    place.write_bytes(data)
    with mock.patch.dict(os.environ, XDG_CONFIG_HOME=str(folder)):
        return command_line([*command, "--gpu", "h200"])


CALIBRATED = st.sampled_from(["--shapes 64", "--preset gpt2 --micro-batch-size 1 --sequence-length 64"])
CALIBRATION_COMMANDS = st.builds(lambda what, output: ["forecast", *what.split(), *output], CALIBRATED, OUTPUTS)

READER_INPUTS = {
    "hf": (configs(), damaged(JSON_FILES, JSON_PIECES)),
    "megatron": (scripts(), printed_arguments(), damaged([s.encode() for s in SCRIPTS], SCRIPT_PIECES)),
    "bridge": (bridges(), damaged([YAML_FILE], YAML_PIECES)),
    "bridge_recipe": (recipes(), damaged(RECIPES, PYTHON_PIECES)),
    "torchtitan": (titans(), damaged([LLAMA_8B.encode(), DEEPSEEK_671B.encode()], TOML_PIECES)),
    "torchtitan_command": (titan_commands(), damaged([TITAN_COMMAND.encode()], SCRIPT_PIECES)),
    "torchtitan_registry": (damaged([ONE_FILE.encode()], PYTHON_PIECES),),
}
"""The inputs of every reader of `model/readers.py`, by the name of its module."""
CONFIGS = st.one_of([strategy for strategies in READER_INPUTS.values() for strategy in strategies])

TARGETS = [
    *(
        Target(f"config-{reader}-{number}", cases(strategy), run_config)
        for reader, strategies in READER_INPUTS.items()
        for number, strategy in enumerate(strategies)
    ),
    Target("gemm-list", gemm_lists(), run_gemms),
    Target("calibration", st.tuples(CALIBRATION_COMMANDS, calibrations()), run_calibration),
]
