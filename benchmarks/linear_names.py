"""Which linears of Hugging Face's model families `numerics/names.toml` does not know, on the meta device.

python benchmarks/linear_names.py
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from gemmscope.numerics.in_training.model_recorder import find_modules
from gemmscope.numerics.names import name_linears

MASKED = ["bert", "roberta", "modernbert"]
CAUSAL = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "phi3",
    "opt",
    "nemotron_h",
    "mamba2",
    "falcon_mamba",
    "lfm2",
    "olmoe",
    "starcoder2",
    "cohere",
    "granite",
    "glm4",
    "glm4_moe",
    "llama4_text",
    "bamba",
    "minimax",
    "jamba",
    "zamba2",
    "qwen2_moe",
]


def main() -> None:
    """One line per family."""
    for family in CAUSAL + MASKED:
        config = AutoConfig.for_model(family)
        with torch.device("meta"):
            model = (AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM).from_config(config)
        places = [place for *_, own in find_modules(model, seed=0) for place in own]
        names = name_linears({place.key: (place.inputs, place.outputs) for place in places}).values()
        unknown = sorted({name.linear for name in names if not name.op})
        print(f"{family:12} {len(names):5} linears, ops: {', '.join(sorted({name.op for name in names if name.op}))}")
        if unknown:
            print(f"{'':12} unknown: {', '.join(unknown[:6])}")


if __name__ == "__main__":
    main()
