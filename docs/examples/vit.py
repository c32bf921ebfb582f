"""A vision transformer of transformers, ViT-L/16. The labels are among its inputs, so it computes its own loss."""

import torch
from transformers import ViTConfig, ViTForImageClassification


def build(micro_batch_size=64):
    config = ViTConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=1000)
    images = torch.zeros(micro_batch_size, 3, 224, 224, dtype=torch.bfloat16)
    labels = torch.zeros(micro_batch_size, dtype=torch.long)
    return ViTForImageClassification(config).bfloat16(), {"pixel_values": images, "labels": labels}
