"""Megatron-LM arguments that are wrong, or no arguments at all: one message each, whatever the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmscope.errors import UserError, option
from gemmscope.job.load import load_model
from gemmscope.model import megatron
from gemmscope.model.python_code import evaluate
from support.megatron_files import DEEPSEEK_V3, DUMP, LLAMA3_8B, MIXTRAL_8X7B, SMALL
from support.reading import checked, in_little_memory


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"torchrun --nnodes 1 pretrain_t5.py {SMALL}", "pretrain_t5.py trains T5"),
        (f"python tools/pretrain_bert.py {SMALL}", "pretrain_bert.py trains BERT"),
        (f"SCRIPT=$ROOT/pretrain_ict.py\npython $SCRIPT {SMALL}", "pretrain_ict.py trains a pair of BERT encoders"),
        (f"python pretrain_vision_classify.py {SMALL}", "pretrain_vision_classify.py trains a vision model"),
        (f"python pretrain_vlm.py {SMALL}", "pretrain_vlm.py trains a vision-language model"),
        (
            f"{SMALL} --decoder-seq-length $L --language-model-type mistral_7b",
            "--language-model-type is a setting of a vision-language",
        ),
        (f"torchrun train.py {SMALL} --dataset-provider mock", "--dataset-provider is a setting of a multimodal model"),
        (f"{SMALL} --decoder-num-layers 4", "--decoder-num-layers is a setting of T5"),
        (f"{SMALL} --decoder-seq-length $L", "--decoder-seq-length is a setting of T5"),
        (DUMP.replace("  kv_channels", "  decoder_seq_length .... 128\n  kv_channels"), "decoder_seq_length is a setting of T5"),
        (DUMP.replace("[0]: using", "+ torchrun /opt/pretrain_bert.py\n[0]: using"), "pretrain_bert.py trains BERT"),
    ],
)
def test_other_models_are_refused(text: str, says: str):
    with pytest.raises(UserError) as caught:
        megatron.read(text, "file.sh")
    assert caught.value.message.startswith(says)
    assert option("module", "FILE.py:FUNCTION") in caught.value.hint
    assert "config.json" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (SMALL.replace("layers 4", "layers eight"), "for example --num-layers 32"),
        (SMALL.replace("layers 4", "layers 0"), "for example --num-layers 32"),
        (SMALL.replace("64", "sixty"), "for example --hidden-size 4096"),
        (f"{SMALL} --micro-batch-size two", "for example --micro-batch-size 1"),
        (f"{SMALL} --num-experts many", "for example --num-experts 8"),
        (DUMP.replace("layers ...................................... 24", "layers ... x"), "for example num_layers ........ 32"),
    ],
)
def test_errors_give_a_fitting_example(text: str, hint: str):
    with pytest.raises(UserError) as caught:
        megatron.read(text, "file.sh")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no Megatron-LM arguments"),
        (SMALL.replace("hidden", "hiden") + " --hidden-dropout 0", r"it has --hiden-size \(did you mean --hidden-size"),
        ("--num-layers 4", "no --hidden-size and no --num-attention-heads"),
        (SMALL.replace("64", "sixty"), "--hidden-size must be a whole number, not 'sixty'"),
        (SMALL.replace("64", "64.0"), "not '64.0'"),
        (SMALL.replace("64", "-64"), "--hidden-size must be at least 1, not -64"),
        (SMALL.replace("64", "0"), "at least 1"),
        (SMALL.replace("64", "9" * 5001), "must be a whole number"),
        (SMALL.replace("64", "9" * 12), "must be at most"),
        (SMALL.replace("64", "66"), "not a multiple of --num-attention-heads = 4, and --kv-channels is not given"),
        (SMALL.replace("64", "$HIDDEN"), r"the value of --hidden-size is not known: \$HIDDEN \(the script does not set it\)"),
        (SMALL.replace("64", "$(cat size)"), "the value of --hidden-size is not known"),
        (SMALL.replace("64", ""), r"--hidden-size is not known: \(none\) \(the next word is --num-attention-heads\)"),
        (SMALL + " --group-query-attention --num-query-groups 3", "--num-attention-heads = 4 is not a multiple of"),
        (SMALL + " --num-experts 1", "--moe-router-topk = 2 is more than --num-experts = 1"),
        (SMALL + " --seq-length [8, 9]", r"--seq-length must be a whole number, not '\[8'"),
        (SMALL + " --num-experts 8 --moe-layer-freq [0]*3", "--moe-layer-freq lists 3 layers, but --num-layers is 4"),
        (SMALL + " --num-experts 8 --moe-layer-freq [2]*4", "must contain only 0 and 1"),
        (SMALL + " --num-experts 8 --moe-layer-freq __import__('os')", "must be a number or a list"),
        (SMALL + " --num-experts 8 --moe-layer-freq [1]*99999999999", "must be a number or a list"),
        (SMALL + " --window-size 1,2,3", "--window-size must be two numbers"),
        (SMALL + " --normalization BatchNorm", "--normalization must be LayerNorm or RMSNorm, not 'BatchNorm'"),
        (SMALL + " --recompute-granularity some", "--recompute-granularity must be selective or full, not 'some'"),
        (SMALL + " --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 5", "5 of 4 layers"),
        (SMALL + " --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*9", "2 stages and 4 layers"),
    ],
)  # fmt: skip
def test_messages(text: str, says: str):
    with pytest.raises(UserError, match=says):
        megatron.read(text, "file.sh")


@pytest.mark.parametrize(
    "text",
    ["1**9", "[1]*10**9", "-" * 9999 + "1", "(" * 9999, "[1" * 90, "a", "", "1/0", "[1]*[1]", "1_0", "[[1]]", "1 2"],
)
def test_only_plain_expressions(text: str):
    with pytest.raises(ValueError, match=r"^(not|a list)"):
        evaluate(text)


def test_growing_variables_stay_small():
    script = "A0=1234567890\n" + "\n".join(f"A{i + 1}=$A{i}$A{i}" for i in range(60)) + f"\n{SMALL} --seq-length $A60"
    with in_little_memory():
        assert checked(megatron, script) is None


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text(text: str):
    checked(megatron, text)
    checked(megatron, SMALL + " " + text)
    checked(megatron, f"{SMALL} --num-experts 4 --moe-layer-freq {text}")


WORDS = st.sampled_from(
    [f"--{name.replace('_', '-')}" for name in sorted(megatron.KNOWN)]
    + [
        "1",
        "2",
        "3",
        "4",
        "64",
        "-1",
        "0",
        "$A",
        "${A:-2}",
        "$((A*2))",
        "A=2",
        "'",
        '"',
        "(",
        ")",
        "#",
        "\\",
        "if",
        "fi",
    ]
    + ["true", "False", "None", "[1]*4", "1,0", "full", "RMSNorm", "=", "\n", "${", "$(", "`", "٣", "\x00", "rope"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, max_size=12), st.booleans())
def test_any_arguments(arguments: list[str], joined: bool):
    checked(megatron, SMALL + " " + ("" if joined else " ").join(arguments))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([LLAMA3_8B, MIXTRAL_8X7B, DEEPSEEK_V3, DUMP]), st.data())
def test_damaged_files(text: str, data: st.DataObject):
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 40)))
    checked(megatron, text[:start] + data.draw(st.text(max_size=6)) + text[end:])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(megatron.KNOWN)), st.text(st.characters(exclude_characters="\n"), max_size=20))
def test_any_printed_value(name: str, value: str):
    checked(megatron, DUMP.replace("------ end", f"------\n  {name} ........ {value}\n"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--enable-mhc-connections", "--enable-mhc-connections replaces the residual stream by several"),
        ("--flextron", "--flextron trains models of several sizes"),
        ("--spec my.layers my_spec", "--spec my.layers my_spec is code that builds the layers"),
        ("--spec megatron.core.models.hybrid gated_delta_product_stack_spec", "is code that builds the layers"),
    ],
)
def test_flags_that_change_the_layers_are_refused(flags: str, says: str):
    with pytest.raises(UserError) as caught:
        megatron.read(f"pretrain_gpt.py {SMALL} {flags}", "file.sh")
    assert says in caught.value.message
    assert option("module", "FILE.py:FUNCTION") in caught.value.hint


@pytest.mark.parametrize("spec", ["local", "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --mamba-num-groups 2"])
def test_specs_of_megatron_itself(spec: str):
    assert megatron.read(f"pretrain_gpt.py {SMALL} --spec {spec}", "file.sh").model is not None


def test_flags_that_are_called_like_sizes_are_refused(tmp_path: Path):
    script = tmp_path / "train.sh"
    script.write_text(f"srun --ntasks-per-node 8 pretrain_gpt.py {SMALL} --num-workers 2 --engram-hidden-size 64\n", "utf-8")
    with pytest.raises(UserError, match="has sizes that gemmscope does not read: engram-hidden-size") as caught:
        load_model(config=str(script))
    assert option("ignore_key", "engram-hidden-size") in caught.value.hint
    assert load_model(config=str(script), ignore_key=["engram-hidden-size"]).model is not None
    printed = megatron.read(DUMP.replace("  kv_channels", "  own_lora_rank .... 8\n  other_dim .... None\n  kv_channels"), "log")
    assert printed.unread == {"own_lora_rank": True}
    assert not megatron.read(DUMP, "log").unread
