"""An encoder-decoder of transformers with the sizes of T5 v1.1 large: 512 tokens in, 114 out."""

import torch
from transformers import T5Config, T5ForConditionalGeneration


def build(micro_batch_size=32):
    sizes = {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16, "num_layers": 24, "vocab_size": 32128}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    tokens = torch.zeros(micro_batch_size, 512, dtype=torch.long)
    labels = torch.zeros(micro_batch_size, 114, dtype=torch.long)
    return T5ForConditionalGeneration(config).bfloat16(), {"input_ids": tokens, "labels": labels}
