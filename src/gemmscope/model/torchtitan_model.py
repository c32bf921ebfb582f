"""The models that torchtitan ships, built from their table of sizes.

`[model] name = "llama3", flavor = "8B"` refers to torchtitan's Python code, so the sizes ship as data with gemmscope
(`torchtitan_flavors.toml`), under torchtitan's own argument names. A `Flavor` is one row of that table. This module turns it into
layers by the rules of torchtitan's code: how wide an MLP is, which layers have experts, which see only a window.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.model.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MixerSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import ModelSpec
from gemmscope.toml import load_data

OTHER_WAYS = f"for any other model give its Hugging Face config.json with {option('config')}, or trace it with " + option(
    "module", "FILE.py:FUNCTION"
)


@dataclass(frozen=True)
class Flavor:
    """The sizes of one flavor, under torchtitan's argument names. None: computed from the others."""

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | None = None  # of a dense feed-forward block
    ffn_dim_multiplier: float = 1.0
    multiple_of: int = 256
    enable_weight_tying: bool = False
    bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    attn_mask_type: str = "causal"
    sliding_window_size: int | None = None  # on every second layer, from the first
    every_n_layers_nope: int | None = None  # those layers see the whole sequence, the others one block of it
    fixed_attn_block_size: int | None = None
    num_experts: int = 0
    top_k: int = 1
    num_shared_experts: int = 0
    moe_inter_dim: int | None = None
    fused_experts: bool = False
    n_dense_layers: int = 0  # the first layers are dense
    interleave_moe_layer_step: int = 1  # then every n-th is MoE
    q_lora_rank: int = 0  # 0: queries are projected directly
    kv_lora_rank: int = 0  # 0: no latent attention
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rotary_dim: int | None = None
    gated_attention: bool = False  # the query projection also makes a gate for the output
    shared_expert_gate: bool = False
    full_attention_interval: int | None = None  # all but every n-th layer have a gated delta net instead of attention
    n_key_heads: int = 1
    n_value_heads: int = 1
    key_head_dim: int = 1
    value_head_dim: int = 1

    def is_linear(self, layer: int) -> bool:
        return bool(self.full_attention_interval) and (layer + 1) % (self.full_attention_interval or 1) != 0

    def is_moe(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.n_dense_layers and (layer + 1) % self.interleave_moe_layer_step == 0


@cache
def families() -> dict[str, Any]:
    """The known models, as in `torchtitan_flavors.toml`."""
    return load_data("gemmscope.model", "torchtitan_flavors.toml")


def load_flavor(family: str, name: str) -> Flavor:
    """The sizes of a known flavor.

    >>> load_flavor("qwen3", "0.6B").dim
    1024
    """
    facts: dict[str, Any] = dict(families()[family]["flavors"][name])
    base = families()[family]["flavors"][facts.pop("like")] if "like" in facts else {}
    return Flavor(**{**families()[family].get("defaults", {}), **base, **facts})


def model_and_flavor(model: Mapping[str, Any]) -> tuple[str, str]:
    """The family and the flavor that the `[model]` table of a job config names.

    >>> model_and_flavor({"name": "simple_fsdp.llama3", "flavor": "8B"})
    ('llama3', '8B')
    """
    names = {alias: family for family, facts in families().items() for alias in (family, *facts.get("aliases", ()))}
    given = _text(model, "name", names)
    # Experiments wrap a stock model under a dotted name: simple_fsdp.llama3 trains llama3.
    family = names.get(given.rsplit(".", 1)[-1])
    if family is None:
        raise _unknown(f"[model] name = {shown(given)} is not a known torchtitan model", given, names)
    flavors = families()[family]["flavors"]
    flavor = _text(model, "flavor", flavors)
    if flavor not in flavors:
        raise _unknown(f"[model] flavor = {shown(flavor)} is not a known flavor of {family}", flavor, flavors)
    return family, flavor


def _text(model: Mapping[str, Any], key: str, known: Mapping[str, Any]) -> str:
    value = model.get(key)
    if isinstance(value, str):
        return value
    message = f"[model] {key} is missing" if key not in model else f"[model] {key} must be text, not {shown(value)}"
    raise UserError(message, f'write {key} = "…" below [model], with one of: {", ".join(known)}')


def _unknown(message: str, given: str, known: Mapping[str, Any]) -> UserError:
    similar = closest(given[:100], known)
    suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
    return UserError(message, f"{suggestion}known: {', '.join(known)}; {OTHER_WAYS}")


def model_spec(family: str, name: str, flavor: Flavor) -> ModelSpec:
    """The whole model of a flavor."""
    return ModelSpec(
        name=f"torchtitan {family} {name}",
        hidden_size=flavor.dim,
        layers=tuple(_layer(flavor, index) for index in range(flavor.n_layers)),
        vocab_size=flavor.vocab_size,
        tied_embeddings=flavor.enable_weight_tying,
        model_type=family,
        source=families()[family]["source"],
    )


def _layer(flavor: Flavor, index: int) -> LayerSpec:
    mlp = _experts(flavor) if flavor.is_moe(index) else _dense(flavor)
    return (
        LayerSpec(None, mlp, mixer=_delta_net(flavor)) if flavor.is_linear(index) else LayerSpec(_attention(flavor, index), mlp)
    )


def _delta_net(flavor: Flavor) -> MixerSpec:
    """A gated delta net, with six projections of its own."""
    return MixerSpec(
        kind="gated delta rule",
        heads=flavor.n_value_heads,
        value_dim=flavor.value_head_dim,
        groups=flavor.n_key_heads,
        key_dim=flavor.key_head_dim,
        conv_kernel=4,
        norm="head",
        stored=("q", "k", "v", "z", "a", "b"),
    )


def swiglu_size(dim: int, multiplier: float = 1.0, multiple_of: int = 256, shared_by: int = 1) -> int:
    """Llama's rule for the intermediate size: two thirds of 4 x dim, scaled, divided, rounded up.

    A gated block has three weights where a plain one has two, so 2/3 of the width keeps the parameter count. Llama 4
    divides it further by the number of experts that a token visits (`shared_by`).

    >>> swiglu_size(4096, 1.3, 1024), swiglu_size(5120, 1.2, 2048, shared_by=2)
    (14336, 8192)
    """
    size = int(multiplier * int(2 * 4 * dim / 3)) // shared_by
    return ceil(size / multiple_of) * multiple_of


def _attention(flavor: Flavor, index: int) -> AttentionSpec:
    if flavor.kv_lora_rank:
        return AttentionSpec(
            heads=flavor.n_heads,
            kv_heads=flavor.n_heads,
            head_dim=flavor.qk_nope_head_dim + flavor.qk_rope_head_dim,
            value_dim=flavor.v_head_dim,
            latent=LatentSpec(flavor.q_lora_rank or None, flavor.kv_lora_rank, flavor.qk_rope_head_dim),
        )
    return AttentionSpec(
        heads=flavor.n_heads,
        kv_heads=flavor.n_kv_heads or flavor.n_heads,
        head_dim=flavor.head_dim or flavor.dim // flavor.n_heads,
        q_bias=flavor.bias,
        k_bias=flavor.bias,
        v_bias=flavor.bias,
        out_bias=flavor.bias,
        window=flavor.sliding_window_size if index % 2 == 0 else None,
        chunk=flavor.fixed_attn_block_size if flavor.every_n_layers_nope and index % flavor.every_n_layers_nope else None,
        qk_norm="head" if flavor.qk_norm else None,
        sinks=flavor.sinks,
        rotary_dim=flavor.rotary_dim,
        gated=flavor.gated_attention,
    )


def _dense(flavor: Flavor) -> MlpSpec:
    return _mlp(flavor.hidden_dim or swiglu_size(flavor.dim, flavor.ffn_dim_multiplier, flavor.multiple_of), bias=flavor.bias)


def _mlp(size: int, *, bias: bool = False, fused: bool = False) -> MlpSpec:
    return MlpSpec(size, gated=True, activation="silu", up_bias=bias, down_bias=bias, stored_fused=fused)


def _experts(flavor: Flavor) -> MoeSpec:
    visited = flavor.top_k + flavor.num_shared_experts
    size = flavor.moe_inter_dim or swiglu_size(flavor.dim, flavor.ffn_dim_multiplier, flavor.multiple_of, visited)
    shared_size = size * flavor.num_shared_experts  # shared experts are one wide block
    return MoeSpec(
        experts=flavor.num_experts,
        top_k=flavor.top_k,
        expert=_mlp(size, bias=flavor.bias, fused=flavor.fused_experts),
        shared=_mlp(shared_size) if shared_size else None,
        shared_gate=flavor.shared_expert_gate,
        router_bias=flavor.bias,
    )


def model_findings(model: Mapping[str, Any], flavor: Flavor) -> list[Finding]:
    """What is assumed or not modelled about the model of a `[model]` table."""
    findings = []
    family = model_and_flavor(model)[0]
    if families()[family].get("multimodal"):
        findings.append(finding("language-part-only", model_type=family))
    if "tokenizer_path" in model:
        findings.append(finding("vocabulary-assumed", size=flavor.vocab_size))
    if flavor.attn_mask_type == "block_causal":
        findings.append(finding("document-mask-not-modelled"))
    if model.get("converters"):
        findings.append(finding("converters-ignored", value=shown(model["converters"])))
    return findings
