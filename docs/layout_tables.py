"""Tables about layouts: what of each exchange is exposed, and the memory of layouts that ran."""

from __future__ import annotations

from typing import Any

from gemmscope.forecast.communication import cluster
from gemmscope.forecast.memory import rank_memory
from gemmscope.gpu.specs import GB, gpu
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec

# kind of exchange: when it happens, what it hides behind, and when it overlaps, if not always
EXCHANGES = {
    "tensor": ("tensor parallelism", "around every block, forward and backward", "the GEMMs it feeds, chunk by chunk",
               "`--tp-overlap`, with sequence parallelism"),
    "context": ("context parallelism", "keys and values of every layer", "attention", ""),
    "experts": ("expert parallelism", "tokens to their experts and back, per layer and direction",
                "another micro-batch's computation", "`--ep-overlap`"),
    "stages": ("pipeline", "activations and gradients between stages", "other pieces of the stage", "`--vp`"),
    "gradients": ("gradients", "once per step; with ZeRO-3 or FSDP, in every micro-batch", "the backward pass", "`--dp-overlap`"),
    "weights": ("weights", "as gradients", "the forward pass; with ZeRO-3 or FSDP, both passes", "`--dp-overlap`"),
    "offload": ("offloaded activations", "to the CPU in the forward pass, back in the backward pass", "all computation", ""),
}  # fmt: skip

SELECTIVE = {"recompute": "selective", "recompute_modules": ("layernorm", "moe_act")}
# Layouts of Megatron-Bridge's performance recipes: title, preset, GPU, recipe, run
RAN: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("Llama 70B, H100, FP8, tp 4, pp 8, vp 5", "llama-3.1-70b", "h100", "FP8Current",
     {"micro_batch_size": 1, "sequence_length": 8192, "tp": 4, "sequence_parallel": True, "pp": 8, "vp": 5, "dp": 2,
      "gradient_accumulation": 128}),
    ("Llama 70B, GB200, MXFP8, tp 2, pp 4, vp 5", "llama-3.1-70b", "gb200", "MXFP8",
     {"micro_batch_size": 1, "sequence_length": 8192, "tp": 2, "sequence_parallel": True, "pp": 4, "vp": 5, "dp": 8,
      "gradient_accumulation": 32}),
    ("Llama 70B, GB200, FP8, FSDP 64, activations of 40 layers in CPU memory", "llama-3.1-70b", "gb200", "FP8Current",
     {"micro_batch_size": 2, "sequence_length": 8192, "dp": 64, "zero": 3, "offloaded_layers": 40, "gradient_accumulation": 2}),
    ("Llama 8B, H100, FP8, FSDP 8", "llama-3.1-8b", "h100", "FP8Current",
     {"micro_batch_size": 1, "sequence_length": 8192, "dp": 8, "zero": 3, "gradient_accumulation": 16}),
    ("Qwen3 30B-A3B, H100, FP8, ep 16", "qwen3-30b-a3b", "h100", "FP8Current",
     {"micro_batch_size": 1, "sequence_length": 4096, "ep": 16, "dp": 16, "gradient_accumulation": 64}),
    ("GPT-OSS 120B, H100, BF16, pp 4, ep 8, norms and activations recomputed", "gpt-oss-120b", "h100", "BF16",
     {"micro_batch_size": 1, "sequence_length": 4096, "pp": 4, "ep": 8, "dp": 16, **SELECTIVE,
      "gradient_accumulation": 80}),
    ("GPT-OSS 120B, B200, BF16, ep 8, micro-batch 4, norms and activations recomputed", "gpt-oss-120b", "b200", "BF16",
     {"micro_batch_size": 4, "sequence_length": 4096, "ep": 8, "dp": 64, **SELECTIVE, "gradient_accumulation": 5}),
)  # fmt: skip


def exposed_shares() -> str:
    """What of each exchange stays exposed, from the table of coefficients."""
    lines = ["| communication | when | hides behind | exposed share |", "| --- | --- | --- | --- |"]
    for kind, (title, when, behind, overlap) in EXCHANGES.items():
        known = cluster()["exposed"][kind]
        with_overlap = f" with overlap ({overlap}), otherwise all of it" if overlap else ""
        lines.append(f"| {title} | {when} | {behind} | {known['least']:.0%}{with_overlap}; {known['basis']} |")
    return "\n".join(lines)


def memory_of_layouts() -> str:
    """GB of one GPU: the bounds and the usual case, beside what the GPU has."""
    lines = ["| model, GPU, precision | at least | usual | at most | GPU |", "| --- | ---: | ---: | ---: | ---: |"]
    for title, preset, chip, recipe, run in RAN:
        model = presets.load(preset).model
        assert model is not None
        needed = rank_memory(model, RunSpec(**run), recipe, gpu(chip))
        sizes = (needed.least_bytes, needed.total_bytes, needed.most_bytes, gpu(chip).memory_bytes)
        lines.append(f"| {title} | {' | '.join(f'{size / GB:.0f}' for size in sizes)} |")
    return "\n".join(lines)
