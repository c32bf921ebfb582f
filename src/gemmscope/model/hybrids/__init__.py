"""Layers of families that are more than attention and MLP. `layers_by` in families.toml names the function."""

from collections.abc import Callable
from typing import Any

from gemmscope.model.families import FamilyConfig
from gemmscope.model.hybrids import by_layer, gemma, linear, mamba, sparse_attention
from gemmscope.model.layer_spec import LayerSpec

HYBRIDS: dict[str, Callable[[FamilyConfig, int, int], list[LayerSpec]]] = {
    "gated_delta_net": linear.gated_delta_net,
    "olmo_hybrid": linear.olmo_hybrid,
    "kimi_linear": linear.kimi_linear,
    "minimax": linear.minimax,
    "lfm2": linear.lfm2,
    "mamba": mamba.mamba,
    "mamba_or_attention": mamba.mamba_or_attention,
    "falcon_h1": mamba.falcon_h1,
    "zamba2": mamba.zamba2,
    "nemotron_h": mamba.nemotron_h,
    "indexed_attention": sparse_attention.indexed_attention,
    "llama4": sparse_attention.llama4,
    "gemma4": gemma.gemma4,
    "gemma3n": gemma.gemma3n,
    "deepseek_v4": sparse_attention.deepseek_v4,
    "mimo_v2": by_layer.mimo_v2,
    "step3": by_layer.step3,
    "longcat": by_layer.longcat,
    "minimax_m3": by_layer.minimax_m3,
    "nemotron_nas": by_layer.nemotron_nas,
}
"""Layers, from a config, its hidden size and its number of layers."""

ENDS: dict[str, Callable[[FamilyConfig, int, int], dict[str, Any]]] = {
    "gemma": gemma.ends,
    "deepseek_v4": sparse_attention.deepseek_v4_ends,
    "nemotron_h": mamba.nemotron_ends,
    "earlier_states": linear.earlier_states_ends,
}
"""Fields of `ModelSpec` outside of its layers, from the same, by `ends_by` in families.toml."""
