"""torchtitan commands and launch scripts: the model by module and config or by name and flavor, settings as flags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError
from gemmscope.model import readers, torchtitan_command
from support.reading import checked, facts

SCRIPT = """
#!/usr/bin/bash
NGPU=${NGPU:-"8"}
: "${TP:=2}"
MODULE=${MODULE:-"deepseek_v3"}
CONFIG=${CONFIG:-"deepseek_v3_16b"}
if [ $TP -gt 4 ]; then EXTRA="--parallelism.pipeline_parallel_degree 2"; fi
torchrun --nproc_per_node=${NGPU} -m torchtitan.train --module ${MODULE} --config ${CONFIG} \\
    --training.local_batch_size=4 --training.seq-len 4096 --parallelism.tensor_parallel_degree $TP \\
    --parallelism.expert_parallel_degree 8 --parallelism.enable_async_tensor_parallel --activation_checkpoint.mode full
"""


def test_script():
    assert torchtitan_command.recognises(SCRIPT)
    source = readers.read_text(SCRIPT, "run.sh")
    assert source.model.name == "torchtitan deepseek_v3 16B"
    expected = {
        "tp": 2,
        "ep": 8,
        "micro_batch_size": 4,
        "sequence_length": 4096,
        "tp_overlap": True,
        "recompute": "full",
        "dp": 4,
    }
    assert {name: source.run_settings[name] for name in expected} == expected
    assert "pp" not in source.run_settings
    assert source.framework == "torchtitan"


def test_a_job_of_torchtitan_with_flags_of_today():
    source = readers.read_text(
        "torchrun --nproc_per_node=8 --nnodes 4 -m torchtitan.train --module llama3 --config llama3_70b"
        " --training.max_context_length 4096 --training.num_tokens_per_microbatch_per_dp_rank 16384"
        " --training.num_tokens_per_train_step 131072"
        " activation-checkpoint:selective",
        "x.sh",
    )
    expected = {
        "tp": 8,
        "dp": 4,
        "sequence_length": 4096,
        "micro_batch_size": 4,
        "gradient_accumulation": 2,
        "recompute": "selective",
    }
    assert {name: source.run_settings[name] for name in expected} == expected
    assert source.global_batch == 32
    assert source.model.layers[0].attention.stored_fused  # Q, K and V are one linear
    old = readers.read_text("./run_train.sh --model.name llama3 --model.flavor 70B --training.seq_len 4096", "x.sh")
    assert not old.model.layers[0].attention.stored_fused


def test_gpus_that_the_degrees_do_not_divide():
    with pytest.raises(UserError, match="8 GPUs cannot be split by tensor_parallel_degree 8 x pipeline_parallel_degree 2"):
        torchtitan_command.read(
            "NGPU=8 ./run_train.sh --module llama3 --config llama3_70b --parallelism.pipeline_parallel_degree 2", "x.sh"
        )


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("MODULE=llama3 CONFIG=llama3_8b ./run_train.sh", "llama3 8B"),
        ("./run_train.sh --module qwen3 --config qwen3_0_6b", "qwen3 0.6B"),
        ("./run_train.sh --module qwen3 --config qwen3_30b_a3b", "qwen3 30B-A3B"),
        ("./run_train.sh --module torchtitan.models.gpt_oss --config gpt_oss_120b", "gpt_oss 120b"),
        ("./run_train.sh --model.name llama3 --model.flavor 70B", "llama3 70B"),
    ],
)
def test_models(command: str, name: str):
    source = readers.read_text(command, "x.sh")
    assert source.model.name == f"torchtitan {name}"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("--module lama3 --config llama3_8b", "--module lama3 is not a known torchtitan model"),
        ("--module llama3 --config llama3_9b", "--config llama3_9b is not one of torchtitan's own jobs of llama3"),
        ("--module llama3 --config llama3_8b_wide", "--config llama3_8b_wide is not one of torchtitan's own jobs of llama3"),
        ("--module llama4 --config llama4_17bx16e_irope", "is not one of torchtitan's own jobs of llama4"),
        ("--module llama3 --config llama3_8b --model.n_layers 4", r"\[model\] n_layers is not read"),
        ("--training.seq_len 4096", r"\[model\] name is missing"),
        ("--model.name llama3 --model.flavor 9B", r"flavor = '9B' is not a known flavor"),
        ("--model.name llama3 --model.flavor 8B --training.seq_len long", "seq_len must be a whole number, not 'long'"),
        ("--model.name llama3 --model.flavor 8B --training.seq_len --x", "seq_len must be a whole number, not True"),
    ],
)
def test_messages(command: str, says: str):
    with pytest.raises(UserError, match=says) as caught:
        torchtitan_command.read(f"./run_train.sh {command}", "x.sh")
    assert caught.value.hint


def test_flags_in_quotes_and_in_conditions():
    script = """
    if [ -n "$FAST" ]; then EXTRA="--parallelism.pipeline_parallel_degree 2 --training.seq_len=4096"; fi
    UNUSED="--training.local_batch_size 7"
    torchrun -m torchtitan.train --model.name llama3 --model.flavor 8B $EXTRA
    """
    source = torchtitan_command.read(script, "x.sh")
    assert (source.run_settings["pp"], source.run_settings["sequence_length"]) == (2, 4096)
    assert "micro_batch_size" not in source.run_settings
    assert facts(source, "settings-in-condition")["settings"] == [
        "--parallelism.pipeline_parallel_degree",
        "--training.seq_len",
    ]


def test_unknown_values_are_ignored():
    source = torchtitan_command.read("--model.name llama3 --model.flavor 8B --training.local_batch_size $B", "x.sh")
    assert "micro_batch_size" not in source.run_settings
    assert facts(source, "setting-without-value")["setting"] == "training.local_batch_size"


def test_other_commands_are_not_recognised():
    for text in ("python pretrain_gpt.py --num-layers 4", "MODULE=x CONFIG=y make", "[model]\nname = 'llama3'"):
        assert not torchtitan_command.recognises(text)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_scripts(data: st.DataObject):
    start = data.draw(st.integers(0, len(SCRIPT)))
    end = min(len(SCRIPT), start + data.draw(st.integers(0, 30)))
    checked(torchtitan_command, SCRIPT[:start] + data.draw(st.text(max_size=6)) + SCRIPT[end:])
