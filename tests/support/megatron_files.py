"""Megatron-LM launch scripts and a printed list of arguments: real ones, shortened."""

from __future__ import annotations

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

HYBRID_8B = r"""
#!/bin/bash
: "${TP:=4}"
SEQ_LEN=${SEQ_LEN:-4096}
options=" \
    --tensor-model-parallel-size ${TP} --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \
    --untie-embeddings-and-output-weights --position-embedding-type none \
    --num-layers 56 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 \
    --seq-length ${SEQ_LEN} --max-position-embeddings ${SEQ_LEN} --micro-batch-size 4 --global-batch-size 1024 \
    --disable-bias-linear --normalization RMSNorm --vocab-size 256000 --bf16 \
    --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
torchrun --nproc_per_node 8 --nnodes 2 ../../pretrain_mamba.py ${options}
"""

NANO_MOE = r"""
PATTERN="MEM*|EME-"
ARGS=(
    --hybrid-layer-pattern "${PATTERN}"
    --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 64
    --mamba-num-heads 12 --mamba-head-dim 32 --mamba-state-dim 64 --mamba-num-groups 4
    --num-experts 16 --moe-router-topk 3 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 192
)
ARGS+=(
    --ffn-hidden-size 512 --squared-relu --disable-bias-linear --normalization RMSNorm --position-embedding-type none
    --untie-embeddings-and-output-weights --vocab-size 1000 --seq-length 128 --pipeline-model-parallel-size 2
    --expert-model-parallel-size 2
)
torchrun --nproc-per-node ${GPUS:-8} pretrain_hybrid.py "${ARGS[@]}" --micro-batch-size "${MBS:=2}"
"""

DELTA_NET = """
torchrun pretrain_gpt.py --num-layers 8 --hidden-size 256 --num-attention-heads 4 --kv-channels 64
 --group-query-attention --num-query-groups 2 --qk-layernorm --experimental-attention-variant gated_delta_net
 --linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 32 --linear-value-head-dim 48
 --linear-num-key-heads 4 --linear-num-value-heads 8 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 64
 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 1000
 --untie-embeddings-and-output-weights --seq-length 128 --micro-batch-size 1
"""
