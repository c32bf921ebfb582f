"""Megatron-LM arguments: scripts, command lines and the printed list, real ones in small, and any other text."""

from __future__ import annotations

import pytest

from gemmscope.model import megatron
from gemmscope.model.layer_spec import MoeSpec
from gemmscope.model.python_code import evaluate
from gemmscope.model.spec import ModelSpec
from support.megatron_files import DEEPSEEK_V3, DUMP, LLAMA3_8B, MIXTRAL_8X7B, SMALL
from support.reading import codes, facts
from support.refusals import refused

NOTHING_TURNED_ON = {
    "sequence_parallel": False,
    "zero": 0,
    "optimizer_state": "fp32",
    "tp_overlap": False,
    "dp_overlap": False,
    "ep_overlap": False,
    "cuda_graphs": False,
    "gradient_precision": "fp32",
    "quantized_weights": False,
}


def model_of(text: str) -> ModelSpec:
    source = megatron.read(text, "pretrain.sh")
    assert source.model is not None
    return source.model


def test_llama3_script():
    source = megatron.read(LLAMA3_8B, "examples/llama3_8b.sh")
    model = source.model
    assert model is not None
    assert (model.name, model.hidden_size, len(model.layers), model.vocab_size) == ("llama3_8b", 4096, 32, 128256)
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.qkv_bias) == (32, 8, 128, False)
    assert (mlp.intermediate_size, mlp.gated, mlp.activation, mlp.up_bias) == (14336, True, "silu", False)
    assert model.norm.kind == "rmsnorm"
    assert not model.tied_embeddings
    assert model.positions == 0
    assert attention.rotary
    assert source.run_settings == {
        "tp": 2,
        "cp": 1,
        "micro_batch_size": 1,
        "sequence_length": 8192,
        "vocab_multiple": 128,
        "gradient_accumulation": 32,  # 128 sequences on 8 GPUs, 4 of them data-parallel
        "dp": 4,
        **NOTHING_TURNED_ON,
        "sequence_parallel": True,
    }
    assert source.global_batch == 128


def test_mixtral_command_line():
    source = megatron.read(MIXTRAL_8X7B, "mixtral")
    layer = source.model.layers[31]
    assert isinstance(layer.mlp, MoeSpec)
    assert (layer.mlp.experts, layer.mlp.top_k, layer.mlp.expert.intermediate_size) == (8, 2, 14336)
    assert layer.mlp.expert.stored_fused
    assert layer.mlp.shared is None
    assert layer.attention.window == 4096
    assert source.run_settings["ep"] == 8
    assert source.run_settings["etp"] == 1
    assert "expert-tp-not-modelled" not in codes(source)


@pytest.mark.parametrize(
    ("flags", "etp"),
    [
        ("--num-experts 8 --tensor-model-parallel-size 4 --expert-tensor-parallel-size 2", 2),
        ("--num-experts 8 --tensor-model-parallel-size 4 --expert-tensor-parallel-size 4", None),  # as everywhere else
        ("--num-experts 8 --tensor-model-parallel-size 4", None),
        ("--num-experts 8 --tensor-model-parallel-size $TP --expert-tensor-parallel-size 1", 1),  # whatever TP will be
        ("--tensor-model-parallel-size 4 --expert-tensor-parallel-size 1", None),  # no experts
    ],
)
def test_tensor_parallelism_inside_experts(flags: str, etp: int | None):
    source = megatron.read(f"{SMALL} {flags}", "args")
    assert source.run_settings.get("etp") == etp
    assert "expert-tp-not-modelled" not in codes(source)


def test_experts_split_further_than_the_rest_are_a_finding():
    flags = "--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 4"
    source = megatron.read(f"{SMALL} {flags}", "args")
    assert "etp" not in source.run_settings
    assert facts(source, "expert-tp-not-modelled") == {
        "setting": "--expert-tensor-parallel-size",
        "size": 4,
        "tp_setting": "--tensor-model-parallel-size",
        "tp": 2,
    }


def test_deepseek_script():
    source = megatron.read(DEEPSEEK_V3, "v3.sh")
    model = source.model
    assert model.pattern() == "3 dense, 58 MoE"
    attention, moe = model.layers[60].attention, model.layers[60].mlp
    assert (attention.head_dim, attention.value_dim, attention.kv_heads) == (192, 128, 128)
    assert (attention.latent.q_rank, attention.latent.kv_rank, attention.latent.rope_dim) == (1536, 512, 64)
    assert (moe.experts, moe.top_k, moe.expert.intermediate_size) == (256, 8, 2048)
    assert moe.shared.intermediate_size == 2048
    assert not moe.shared_gate
    assert source.run_settings["pp_layers"] == (3, *(4,) * 14, 2)
    assert source.run_settings["ep"] == 64
    assert source.run_settings["recompute"] == "selective"
    assert source.run_settings["recompute_modules"] == ("mla_up_proj", "moe")
    assert source.run_settings["vocab_multiple"] == 1
    assert model.prediction_layers == 1


def test_printed_list():
    source = megatron.read(DUMP, "train.log")
    model = source.model
    attention = model.layers[0].attention
    assert attention.kv_heads == 16  # num_query_groups counts only with group_query_attention
    assert attention.qkv_bias
    assert attention.out_bias
    assert model.positions == 2048
    assert not attention.rotary
    assert model.tied_embeddings
    assert model.norm.bias
    assert model.vocab_size == 50257
    assert source.run_settings == {
        "tp": 2,
        "pp": 2,
        "cp": 1,
        "sequence_parallel": False,
        "micro_batch_size": 4,
        "sequence_length": 2048,
        "vocab_multiple": 128,
        "recompute": "full",
        "gradient_accumulation": 4,
        "dp": 4,
        **NOTHING_TURNED_ON,
    }
    assert source.findings == ()


def test_padded_vocabulary_in_the_list():
    source = megatron.read(DUMP.split("-------------------- end")[0] + "  padded_vocab_size .... 50432\n", "log")
    assert source.model.vocab_size == 50432
    assert source.run_settings["vocab_multiple"] == 1


def test_defaults_are_megatrons():
    source = megatron.read(SMALL, "args")
    layer = source.model.layers[0]
    assert layer.attention.head_dim == 16
    assert layer.attention.kv_heads == 4
    assert layer.attention.qkv_bias
    assert (layer.mlp.intermediate_size, layer.mlp.gated, layer.mlp.activation) == (256, False, "gelu")
    assert source.model.norm.kind == "layernorm"
    assert source.run_settings == {"vocab_multiple": 128, **NOTHING_TURNED_ON}
    assert codes(source) == ["vocabulary-missing", "mlp-width-default"]
    assert facts(source, "mlp-width-default") == {"setting": "--ffn-hidden-size", "width": 256}


@pytest.mark.parametrize(
    ("flags", "width", "gated", "activation"),
    [
        ("", 4096, False, "gelu"),
        ("--swiglu", 2688, True, "silu"),
        ("--quick-geglu", 4096, True, "quick_gelu"),
        ("--squared-relu", 4096, False, "relu2"),
    ],
)
def test_default_width_of_the_mlp(flags: str, width: int, gated: bool, activation: str):
    mlp = model_of(f"--num-layers 1 --hidden-size 1024 --num-attention-heads 8 {flags}").layers[0].mlp
    assert (mlp.intermediate_size, mlp.gated, mlp.activation) == (width, gated, activation)


def test_attention_switches():
    attention = (
        model_of(SMALL + " --add-qkv-bias --disable-bias-linear --qk-layernorm --softmax-type learnable").layers[0].attention
    )
    assert (attention.qkv_bias, attention.out_bias) == (True, False)
    assert (attention.qk_norm, attention.qk_norm_bias, attention.sinks) == ("head", True, True)
    assert model_of(SMALL + " --group-query-attention").layers[0].attention.kv_heads == 1
    latent = model_of(SMALL + " --multi-latent-attention").layers[0].attention.latent
    assert (latent.q_rank, latent.kv_rank) == (None, 32)


@pytest.mark.parametrize(
    ("value", "moe"),
    [("1", "1111"), ("2", "1010"), ("'[0,1,1,1]'", "0111"), ('"([0]*1+[1])*2"', "0101"), (r"\([0]*3+[1]*1\)", "0001")],
)
def test_moe_layers(value: str, moe: str):
    layers = model_of(f"{SMALL} --num-experts 8 --moe-layer-freq {value}").layers
    assert "".join("01"[layer.is_moe] for layer in layers) == moe


def test_window_layers():
    layers = model_of(f"{SMALL} --window-size 127,0 --window-attn-skip-freq 4").layers
    assert [layer.attention.window for layer in layers] == [128, 128, 128, None]


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", (1, 2, 1)),
        ("--decoder-last-pipeline-num-layers 2", (1, 1, 2)),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", (1, 2, 1)),
        ("--pipeline-model-parallel-layout 'E|t*2|(t)*2,L'", (0, 2, 2)),
        ("--pipeline-model-parallel-layout 'Et|t|t|t||L'", (2, 1, 1)),
    ],
)
def test_uneven_pipeline(flags: str, layers: tuple[int, ...]):
    source = megatron.read(f"{SMALL} --pipeline-model-parallel-size 3 {flags}", "args")
    assert source.run_settings["pp_layers"] == layers


@pytest.mark.parametrize(
    ("flags", "pieces"),
    [
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|t|t,L'", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|tt,L'", None),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", None),  # one piece each
        ("--pipeline-model-parallel-size 1 --num-layers-per-virtual-pipeline-stage 1", None),
    ],
)
def test_virtual_pipeline(flags: str, pieces: int | None):
    source = megatron.read(f"{SMALL} {flags}", "args")
    assert source.run_settings.get("vp") == pieces
    assert "stage-of-several-pieces" not in codes(source)  # all layers are alike
    mixed = megatron.read(f"{SMALL} {flags} --num-experts 8 --moe-layer-freq ([0]*2+[1]*2)", "args")
    assert ("stage-of-several-pieces" in codes(mixed)) == (pieces is not None)


def test_pieces_that_do_not_divide_a_stage_are_refused():
    with refused("--num-layers-per-virtual-pipeline-stage 3", "2 layers"):
        megatron.read(f"{SMALL} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "args")


def test_last_value_wins():
    source = megatron.read(f"{SMALL} --hidden-size 128", "args")
    assert source.model.hidden_size == 128
    assert facts(source, "setting-repeated") == {"setting": "--hidden-size"}


def test_python_list_and_yaml_of_flags():
    assert model_of('ARGS = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"]').hidden_size == 64
    assert model_of("MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 64\n  --num-attention-heads: 4").hidden_size == 64


def test_gpt_oss_has_rotary_positions():
    learned, rotary = (model_of(f"{SMALL} --max-position-embeddings 4096 {flag}") for flag in ("", "--enable-gpt-oss"))
    assert (learned.positions, rotary.positions) == (4096, 0)
    assert next(rotary.attentions).rotary


def test_misspelled_optional_flag():
    source = megatron.read(f"{SMALL} --ffn-hiden-size 512", "args")
    assert facts(source, "setting-misspelled") == {"setting": "--ffn-hiden-size", "suggestion": "--ffn-hidden-size"}


def test_what_only_looks_like_another_model_is_read():
    assert model_of(f"# as in pretrain_t5.py\npython pretrain_gpt.py {SMALL} --spec local")
    printed = DUMP.replace("  kv_channels", "  decoder_num_layers .... None\n  spec ..... None\n  kv_channels")
    assert megatron.read(printed, "train.log").findings == ()
    both = f"if $BERT; then S=pretrain_bert.py; else S=pretrain_gpt.py; fi\npython $S {SMALL}"
    assert facts(megatron.read(both, "x.sh"), "read-as-gpt") == {"script": "pretrain_bert.py"}


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        (f"{SMALL} --num-query-groups 2", True),
        (f"{SMALL} --num-query-groups 2 --group-query-attention", False),
        (f"{SMALL} --num-query-groups 2 --multi-latent-attention", False),
        (DUMP, False),
        (DUMP.replace("num_query_groups ................................ 1", "num_query_groups ..... 8"), True),
    ],
)
def test_query_groups_that_megatron_ignores(text: str, ignored: bool):
    source = megatron.read(text, "x")
    assert ("query-groups-ignored" in codes(source)) == ignored
    assert not ignored or source.model.layers[0].attention.kv_heads == source.model.layers[0].attention.heads


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--pipeline-parallel-size", "--pipeline-model-parallel-size"),
        ("--expert-parallel-size", "--expert-model-parallel-size"),
        ("--seq-len", "--seq-length"),
        ("--batch-size", "--micro-batch-size"),
    ],
)
def test_another_spelling_of_a_run_flag(flag: str, meant: str):
    assert facts(megatron.read(f"{SMALL} {flag} 2", "args"), "setting-misspelled") == {"setting": flag, "suggestion": meant}
    both = megatron.read(f"{SMALL} {flag} 2 {meant} 2", "args")  # the other spelling is for another program of the script
    assert "setting-misspelled" not in codes(both)


@pytest.mark.parametrize(
    ("modules", "recompute", "code", "value"),
    [
        ("", "selective", "", None),
        ("--recompute-modules core_attn", "selective", "", ("core_attn",)),
        ("--recompute-modules mlp core_attn", "selective", "", ("core_attn", "mlp")),
        ("--recompute-modules moe_act gdn", "selective", "recompute-not-modelled", ["gdn"]),
        ("--recompute-modules gdn mhc", "none", "recompute-not-modelled", ["gdn", "mhc"]),
        ("--recompute-modules $MODULES moe", "selective", "setting-without-value", "$MODULES"),
    ],
)
def test_recompute_modules(modules: str, recompute: str, code: str, value: object):
    source = megatron.read(f"{SMALL} --recompute-granularity selective {modules}", "args")
    assert source.run_settings["recompute"] == recompute
    known = [code for code in codes(source) if code not in ("vocabulary-missing", "mlp-width-default")]
    assert known == ([code] if code else [])
    assert value in facts(source, code).values() if code else source.run_settings.get("recompute_modules") == value


def test_recomputing_some_layers_of_each_piece():
    """Method block recomputes the first layers of every piece of a pipeline stage; uniform recomputes all."""
    stages = "--num-layers 24 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3"
    for method, number, share in (("block", 1, 6 / 24), ("block", 4, 1.0), ("block", 0, 0.0), ("uniform", 1, None)):
        flags = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {number} {stages}"
        settings = megatron.read(f"{SMALL} {flags}", "args").run_settings
        assert (settings["recompute"], settings.get("recompute_share")) == ("full", share)


@pytest.mark.parametrize(
    ("launcher", "steps"),
    [
        ("--nproc_per_node 8 --nnodes 2", 4),
        ("--nproc-per-node=8 --nnodes=2", 4),
        ("--nproc_per_node $GPUS --nnodes ${NODES:-2}", 4),
        ("--nproc_per_node gpu --nnodes 2", None),
        ("--nproc_per_node 8 --nnodes 1:4", None),
        ("--nproc_per_node 8 --nnodes $UNKNOWN", None),
        ("--nproc_per_node 16", 4),  # torchrun's default is one node
        ("--nproc_per_node 999999 --nnodes 999999", None),
        ("--nproc_per_node 3 --nnodes 1", None),  # does not hold the model
        ("--nproc_per_node 8 --nnodes 2 --context-parallel-size $CP", None),  # who has the same model is not known
    ],
)
def test_gradient_accumulation_from_the_launcher(launcher: str, steps: int | None):
    batch = "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 64"
    source = megatron.read(f"GPUS=8\ntorchrun {launcher} pretrain_gpt.py {SMALL} {batch}", "x.sh")
    assert source.run_settings.get("gradient_accumulation") == steps
    assert source.run_settings.get("dp") == (8 if steps else None)
    assert source.global_batch == 64


def test_branches():
    script = f"""
    if [ $SIZE = 7B ]; then
        HEADS=32
    elif [ $SIZE = 13B ]; then
        HEADS=40
    fi
    if [ $SP = true ]; then sp="--sequence-parallel"; fi
    {SMALL} --train-iters $ITERS --num-query-groups $HEADS $sp
    """
    source = megatron.read(script, "x.sh")  # nothing needed depends on HEADS
    assert source.run_settings["sequence_parallel"]
    assert facts(source, "settings-in-condition") == {"settings": ["--sequence-parallel"]}
    with refused("--num-attention-heads", "$HEADS", 32, 40):
        megatron.read(script.replace("--num-query-groups", "--num-attention-heads"), "x.sh")


@pytest.mark.parametrize(
    "script",
    [
        ': "${MBS:=2}"\npython pretrain_gpt.py ARGS --micro-batch-size $MBS',
        ": ${MBS:=2} ${TP:=1}\nARGS --micro-batch-size ${MBS}",
        ': "${MBS:=${BASE:=2}}"\nARGS --micro-batch-size $MBS',
        'MBS=2\n: "${MBS:=1}"\nARGS --micro-batch-size $MBS',
        ': "${MBS:=1}"\nMBS=2\nARGS --micro-batch-size $MBS',
        "MBS=${MBS:-2}\nARGS --micro-batch-size $MBS",
        "ARGS --micro-batch-size ${MBS-2}",
        'LIST=(\n  ARGS\n)\nLIST+=(\n  --micro-batch-size "${MBS:=2}"\n)\npython pretrain_gpt.py "${LIST[@]}"',
        'LIST="ARGS"\nLIST+=" --micro-batch-size ${MBS:=2}"\npython pretrain_gpt.py $LIST',
        "case $1 in --mbs) MBS=$2;; esac\nMBS=${MBS:-2}\nARGS --micro-batch-size $MBS",
        "if $SMALL; then MBS=1; else MBS=4; fi\nMBS=2\nARGS --micro-batch-size $MBS",
        "MBS=1\n((MBS *= 2))\nARGS --micro-batch-size $MBS",
        "let MBS=3-1\nARGS --micro-batch-size $MBS",
        "MBS=\nMBS+=2\nARGS --micro-batch-size $MBS",
        "LIST=(--micro-batch-size=$((1 + 1)) --bf16)\npython pretrain_gpt.py ARGS ${LIST[@]}",
        "python pretrain_gpt.py ARGS --micro-batch-size 2\nUNUSED=(\n  --micro-batch-size 4\n)\nALSO='--micro-batch-size 8'",
    ],
)
def test_defaults_of_variables(script: str):
    assert megatron.read(script.replace("ARGS", SMALL), "x.sh").run_settings["micro_batch_size"] == 2


def test_defaults_do_not_replace_what_a_condition_decides():
    script = f"if $SMALL; then MBS=1; else MBS=4; fi\n: ${{MBS:=2}}\nMBS=${{MBS:-2}}\n{SMALL} --micro-batch-size $MBS"
    assert "micro_batch_size" not in megatron.read(script, "x.sh").run_settings


SCALES = f"""
SCALE=${{SCALE:-"small"}}  # or "large"
case "${{SCALE}}" in
    "tiny" | "small")
        HIDDEN=64
        ;;
    large) HIDDEN=4096; ARGS+=(--swiglu) ;;
    *)
        echo "unknown scale"; exit 1
        ;;
esac
if [ "$HIDDEN" -gt 1000 ]; then ARGS+=( --qk-layernorm )
elif [[ $SCALE == s* ]]; then ARGS+=(--sequence-parallel)
else ARGS+=(--recompute-granularity full); fi
if [ -n "$OTHER" ]; then ARGS+=(--micro-batch-size 2); fi
{SMALL.replace("64", "$HIDDEN")}
"""


def test_branches_that_the_script_decides():
    source = megatron.read(SCALES, "x.sh")
    assert (source.model.hidden_size, source.model.layers[0].mlp.gated) == (64, False)
    assert source.run_settings["sequence_parallel"]
    assert "recompute" not in source.run_settings
    assert source.run_settings["micro_batch_size"] == 2
    assert facts(source, "settings-in-condition") == {"settings": ["--micro-batch-size"]}
    large = megatron.read(SCALES.replace('"small"}', "large}"), "x.sh")
    assert (large.model.hidden_size, large.model.layers[0].attention.qk_norm) == (4096, "head")
    assert large.model.layers[0].mlp.gated
    with refused("--hidden-size", "HIDDEN", 64, 4096):
        megatron.read(SCALES.replace('SCALE=${SCALE:-"small"}', "SCALE=$1"), "x.sh")


def test_recognises():
    assert all(megatron.recognises(text) for text in (LLAMA3_8B, MIXTRAL_8X7B, DEEPSEEK_V3, DUMP))
    assert not megatron.recognises('{"hidden_size": 4096, "num_hidden_layers": 32}')
    assert not megatron.recognises("")


def test_expressions():
    assert evaluate("2*(3+4)-9/2") == 10
    assert evaluate("2*[0,1]+[-1]") == [0, 1, 0, 1, -1]


def test_run_settings_without_a_known_value_are_ignored():
    source = megatron.read(f"TP=$1\n{SMALL} --tensor-model-parallel-size $TP --seq-length 8 --vocab-size 64 --lr $LR", "x")
    assert source.run_settings == {"sequence_length": 8, "vocab_multiple": 128, **NOTHING_TURNED_ON}
    assert facts(source, "setting-without-value") == {
        "setting": "--tensor-model-parallel-size",
        "value": "$TP",
        "reason": "the script does not set it",
    }
