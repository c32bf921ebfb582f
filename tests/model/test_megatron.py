"""Megatron-LM arguments: scripts, command lines and the printed list, real ones in small, and any other text."""

from __future__ import annotations

import pytest

from gemmscope.errors import UserError
from gemmscope.model import megatron
from gemmscope.model.megatron_values import evaluate
from gemmscope.model.spec import ModelSpec, MoeSpec

LLAMA3_8B = r"""
#!/bin/bash
# Pretrain Llama 3 8B; don't use --num-layers 99 here
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP_SIZE=${TP_SIZE:-2}
SEQ_LENGTH=8192
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes 1 --master_addr "localhost")

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336     # not the default
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --max-position-embeddings ${SEQ_LENGTH}
    --position-embedding-type rope
    --rotary-base 1000000
    --attention-dropout 0.0
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
)
PARALLEL="--tensor-model-parallel-size $TP_SIZE \
    --sequence-parallel --context-parallel-size 1"

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} \
    --micro-batch-size 1 \
    --global-batch-size 128 \
    --vocab-size 128256 --save "$CHECKPOINT_PATH" $PARALLEL --bf16 --lr 1.5e-4
"""

MIXTRAL_8X7B = """
python pretrain_gpt.py --num-layers=32 --hidden-size=4096 --ffn-hidden-size=14336 --num-attention-heads=32
 --group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2 --swiglu --disable-bias-linear
 --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000
 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2
 --seq-length 4096 --micro-batch-size 1 --window-size 4095,0
"""

DEEPSEEK_V3 = """
options="--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
 --v-head-dim 128 --qk-layernorm --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --mtp-num-layers 1 --vocab-size 129280
 --make-vocab-size-divisible-by 1 --swiglu --disable-bias-linear --normalization RMSNorm
 --untie-embeddings-and-output-weights
 --position-embedding-type rope --recompute-granularity selective --recompute-modules mla_up_proj moe"
PP=16
torchrun pretrain_gpt.py $options --pipeline-model-parallel-size $PP --expert-model-parallel-size $((PP * 4)) \\
  --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2
"""

DUMP = """
[0]: using world size: 16, data-parallel size: 4
0: ------------------------ arguments ------------------------
[default0]:  add_bias_linear ................................. True
0:   add_qkv_bias .................................... True
[0]:   ffn_hidden_size ................................. 8192
2024-05-01 10:00:00 | context_parallel_size ........................... 1
  data_parallel_size .............................. 4
  global_batch_size ............................... 64
  group_query_attention ........................... False
  hidden_size ..................................... 2048
  kv_channels ..................................... 128
  make_vocab_size_divisible_by .................... 128
  max_position_embeddings ......................... 2048
  micro_batch_size ................................ 4
  moe_layer_freq .................................. 1
  multi_latent_attention .......................... False
  normalization ................................... LayerNorm
  num_attention_heads ............................. 16
  num_experts ..................................... None
  num_layers ...................................... 24
  num_query_groups ................................ 1
  pipeline_model_parallel_size .................... 2
  position_embedding_type ......................... learned_absolute
  recompute_granularity ........................... full
  seq_length ...................................... 2048
  sequence_parallel ............................... False
  swiglu .......................................... False
  tensor_model_parallel_size ...................... 2
  untie_embeddings_and_output_weights ............. False
  vocab_size ...................................... None
  world_size ...................................... 16
0: -------------------- end of arguments ---------------------
 > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)
"""

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4"


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
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.q_bias) == (32, 8, 128, False)
    assert (mlp.intermediate_size, mlp.gated, mlp.activation, mlp.up_bias) == (14336, True, "silu", False)
    assert model.norm.kind == "rmsnorm"
    assert not model.tied_embeddings
    assert model.positions == 0
    assert attention.rotary
    assert source.run_settings == {
        "tp": 2,
        "sequence_parallel": True,
        "cp": 1,
        "micro_batch_size": 1,
        "sequence_length": 8192,
        "vocab_multiple": 128,
        "gradient_accumulation": 32,  # 128 sequences on 8 GPUs, 4 of them data-parallel
    }
    assert not any("--global-batch-size" in note for note in source.notes)


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
    assert not [note for note in source.notes if "--expert-tensor-parallel-size" in note]


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
    assert not [note for note in source.notes if "--expert-tensor-parallel-size" in note]


def test_experts_split_further_than_the_rest_are_noted():
    flags = "--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 4"
    source = megatron.read(f"{SMALL} {flags}", "args")
    assert "etp" not in source.run_settings
    assert [note for note in source.notes if "--expert-tensor-parallel-size = 4 does not divide" in note]


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
    assert source.run_settings["recompute"] == "none"
    assert source.run_settings["vocab_multiple"] == 1
    assert any("--mtp-num-layers" in note for note in source.notes)
    assert any("recomputing mla_up_proj, moe is not modelled" in note for note in source.notes)
    assert any("nothing is counted as recomputed" in note for note in source.notes)


def test_printed_list():
    source = megatron.read(DUMP, "train.log")
    model = source.model
    attention = model.layers[0].attention
    assert attention.kv_heads == 16  # num_query_groups counts only with group_query_attention
    assert attention.q_bias
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
    }
    assert source.notes == ()


def test_padded_vocabulary_in_the_list():
    source = megatron.read(DUMP.split("-------------------- end")[0] + "  padded_vocab_size .... 50432\n", "log")
    assert source.model.vocab_size == 50432
    assert source.run_settings["vocab_multiple"] == 1


def test_defaults_are_megatrons():
    source = megatron.read(SMALL, "args")
    layer = source.model.layers[0]
    assert layer.attention.head_dim == 16
    assert layer.attention.kv_heads == 4
    assert layer.attention.k_bias
    assert (layer.mlp.intermediate_size, layer.mlp.gated, layer.mlp.activation) == (256, False, "gelu")
    assert source.model.norm.kind == "layernorm"
    assert source.run_settings == {"vocab_multiple": 128}
    assert len(source.notes) == 2  # the width of the MLP is a default, the vocabulary is not there


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
    assert (attention.q_bias, attention.v_bias, attention.out_bias) == (True, True, False)
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
    ("flags", "noted"),
    [
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", True),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", True),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|t|t,L'", True),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ett|tt,L'", False),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", False),  # one piece each
        ("--pipeline-model-parallel-size 1 --num-layers-per-virtual-pipeline-stage 1", False),
    ],
)
def test_virtual_pipeline_is_noted(flags: str, noted: bool):
    notes = megatron.read(f"{SMALL} {flags}", "args").notes
    assert bool([note for note in notes if "counted as consecutive layers" in note]) == noted


def test_last_value_wins_and_is_noted():
    source = megatron.read(f"{SMALL} --hidden-size 128", "args")
    assert source.model.hidden_size == 128
    assert "--hidden-size is given more than once: the last value counts" in source.notes


def test_python_list_and_yaml_of_flags():
    assert model_of('ARGS = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"]').hidden_size == 64
    assert model_of("MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 64\n  --num-attention-heads: 4").hidden_size == 64


def test_slip_of_an_optional_flag_is_noted():
    source = megatron.read(f"{SMALL} --ffn-hiden-size 512", "args")
    assert "--ffn-hiden-size is ignored; did you mean --ffn-hidden-size?" in source.notes


def test_what_only_looks_like_another_model_is_read():
    assert model_of(f"# as in pretrain_t5.py\npython pretrain_gpt.py {SMALL} --spec local")
    printed = DUMP.replace("  kv_channels", "  decoder_num_layers .... None\n  spec ..... None\n  kv_channels")
    assert megatron.read(printed, "train.log").notes == ()
    both = f"if $BERT; then S=pretrain_bert.py; else S=pretrain_gpt.py; fi\npython $S {SMALL}"
    assert [note for note in megatron.read(both, "x.sh").notes if "pretrain_bert.py as well" in note]


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        (f"{SMALL} --num-query-groups 2", True),
        (f"{SMALL} --num-query-groups 2 --group-query-attention", False),
        (f"{SMALL} --num-query-groups 2 --multi-latent-attention", False),
        (DUMP, False),
        (DUMP.replace("num_query_groups ................................ 1", "num_query_groups ..... 8"), True),
    ],
)
def test_query_groups_that_megatron_ignores_are_noted(text: str, noted: bool):
    source = megatron.read(text, "x")
    assert bool([note for note in source.notes if note.startswith("Megatron ignores ")]) == noted
    assert not noted or source.model.layers[0].attention.kv_heads == source.model.layers[0].attention.heads


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
def test_wrong_spelling_of_a_run_flag_is_noted(flag: str, meant: str):
    note = f"{flag} is ignored; did you mean {meant}?"
    assert note in megatron.read(f"{SMALL} {flag} 2", "args").notes
    assert note not in megatron.read(f"{SMALL} {flag} 2 {meant} 2", "args").notes  # for another program of the script


@pytest.mark.parametrize(
    ("modules", "recompute", "said"),
    [
        ("", "selective", ""),
        ("--recompute-modules core_attn", "selective", ""),
        ("--recompute-modules mlp core_attn", "selective", "recomputing mlp is not modelled, only that of attention"),
        ("--recompute-modules moe_act mlp", "none", "recomputing mlp, moe_act is not modelled, nothing is counted"),
        ("--recompute-modules $MODULES moe", "selective", "--recompute-modules is left out: $MODULES"),
    ],
)
def test_recompute_modules(modules: str, recompute: str, said: str):
    source = megatron.read(f"{SMALL} --recompute-granularity selective {modules}", "args")
    assert source.run_settings["recompute"] == recompute
    found = [note for note in source.notes if "recompute" in note]
    assert (said in found[0]) if said else not found


@pytest.mark.parametrize(
    ("launcher", "steps"),
    [
        ("--nproc_per_node 8 --nnodes 2", 4),
        ("--nproc-per-node=8 --nnodes=2", 4),
        ("--nproc_per_node $GPUS --nnodes ${NODES:-2}", 4),
        ("--nproc_per_node gpu --nnodes 2", None),
        ("--nproc_per_node 8 --nnodes 1:4", None),
        ("--nproc_per_node 8 --nnodes $UNKNOWN", None),
        ("--nproc_per_node 8", None),
        ("--nproc_per_node 999999 --nnodes 999999", None),
        ("--nproc_per_node 3 --nnodes 1", None),  # does not hold the model
        ("--nproc_per_node 8 --nnodes 2 --context-parallel-size $CP", None),  # who has the same model is not known
    ],
)
def test_gradient_accumulation_from_the_launcher(launcher: str, steps: int | None):
    batch = "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 64"
    source = megatron.read(f"GPUS=8\ntorchrun {launcher} pretrain_gpt.py {SMALL} {batch}", "x.sh")
    assert source.run_settings.get("gradient_accumulation") == steps
    assert bool([note for note in source.notes if "--global-batch-size is given, but" in note]) == (steps is None)


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
    assert "taken although inside a condition of the script: --sequence-parallel" in source.notes
    with pytest.raises(UserError, match="HEADS is 32 or 40, depending on a condition"):
        megatron.read(script.replace("--num-query-groups", "--num-attention-heads"), "x.sh")


def test_recognises():
    assert all(megatron.recognises(text) for text in (LLAMA3_8B, MIXTRAL_8X7B, DEEPSEEK_V3, DUMP))
    assert not megatron.recognises('{"hidden_size": 4096, "num_hidden_layers": 32}')
    assert not megatron.recognises("")


def test_expressions():
    assert evaluate("2*(3+4)-9/2") == 10
    assert evaluate("2*[0,1]+[-1]") == [0, 1, 0, 1, -1]


def test_unknown_run_settings_are_left_out():
    source = megatron.read(f"TP=$1\n{SMALL} --tensor-model-parallel-size $TP --seq-length 8 --vocab-size 64 --lr $LR", "x")
    assert source.run_settings == {"sequence_length": 8, "vocab_multiple": 128}
    assert "--tensor-model-parallel-size is left out: $TP, which is not known: the text does not set it" in source.notes
