"""The models that torchtitan ships, built from their table of sizes.

`[model] name = "llama3", flavor = "8B"` refers to torchtitan's Python code, so the sizes ship as data with gemmscope
(`torchtitan_flavors.toml`), under torchtitan's own argument names. A `Flavor` is one row of that table. This module turns it into
layers by the rules of torchtitan's code: how wide an MLP is, which layers have experts, which see only a window.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any

from gemmscope.errors import UserError, did_you_mean, option, shown
from gemmscope.findings import Finding, Notes, applicable
from gemmscope.model.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MixerSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import ModelSpec
from gemmscope.toml import FactTable, inherited, load_data

Flavor = Mapping[str, Any]
"""The sizes of one flavor, under torchtitan's argument names."""


@cache
def families() -> dict[str, Any]:
    """The known models, as in `torchtitan_flavors.toml`."""
    tables = load_data("gemmscope.model", "torchtitan_flavors.toml")
    common = tables.pop("every_family")["defaults"]
    return {name: {**facts, "defaults": {**common, **facts.get("defaults", {})}} for name, facts in tables.items()}


@cache
def family_names() -> dict[str, str]:
    """The family by every value of model.name that builds it."""
    return {alias: family for family, facts in families().items() for alias in (family, *facts.get("aliases", ()))}


def load_flavor(family: str, name: str, *, registries: bool = False) -> Flavor:
    """The sizes of a known flavor; `registries`: as since jobs are configured in Python.

    >>> load_flavor("qwen3", "0.6B")["dim"], load_flavor("qwen3", "0.6B", registries=True)["fused_qkv"]
    (1024, True)
    """
    facts = families()[family]
    changes = {"attn_mask_type": "block_causal", **facts.get("registries", {})} if registries else {}
    sizes = {**facts["defaults"], **inherited(facts["flavors"], name), **changes, **changes.get(name, {})}
    return FactTable(sizes, "model/torchtitan_flavors.toml", f"{family}.flavors.{name}")


def model_and_flavor(model: Mapping[str, Any]) -> tuple[str, str]:
    """The family and the flavor that the `[model]` table of a job config names.

    >>> model_and_flavor({"name": "simple_fsdp.llama3", "flavor": "8B"})
    ('llama3', '8B')
    """
    names = family_names()
    given = _text(model, "name", names)
    # Experiments wrap a stock model under a dotted name: simple_fsdp.llama3 trains llama3.
    family = names.get(given.rsplit(".", 1)[-1])
    if family is None:
        raise _unknown(f"[model] name = {shown(given)} is not a known torchtitan model", given, names)
    flavors = families()[family]["flavors"]
    flavor = _text(model, "flavor", flavors)
    if sizes := sorted({"dim", "n_layers", "n_heads", *families()[family]["defaults"]} & model.keys()):
        raise UserError(f"[model] {sizes[0]} is not read: a flavor has sizes of its own", "remove it")
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
    return UserError(
        message,
        f"{did_you_mean(given, known)}known: {', '.join(known)}; for any other model give its Hugging Face config.json with "
        f"{option('config')}, or trace it with {option('module', 'FILE.py:FUNCTION')}",
    )


def model_spec(family: str, name: str, flavor: Flavor, layers: Sequence[Flavor] = (), prediction_layers: int = 0) -> ModelSpec:
    """The whole model of a flavor; `layers`: the facts of each layer, where they are known one by one."""
    return ModelSpec(
        name=f"torchtitan {family} {name}",
        hidden_size=flavor["dim"],
        layers=tuple(_layer(layer, 0) for layer in layers) or tuple(_layer(flavor, index) for index in range(flavor["n_layers"])),
        vocab_size=flavor["vocab_size"],
        tied_embeddings=flavor["enable_weight_tying"],
        prediction_layers=prediction_layers,
        model_type=family,
        source=families().get(family, {}).get("source", ""),
    )


def _layer(flavor: Flavor, index: int) -> LayerSpec:
    has_experts = flavor["num_experts"] > 0 and index >= flavor["n_dense_layers"]
    dense = _mlp(flavor["hidden_dim"] or swiglu_size(flavor), bias=flavor["bias"])
    mlp = _experts(flavor) if has_experts and (index + 1) % flavor["interleave_moe_layer_step"] == 0 else dense
    if flavor["full_attention_interval"] and (index + 1) % flavor["full_attention_interval"]:
        return LayerSpec(None, mlp, flavor["norms"], mixer=_delta_net(flavor))
    return LayerSpec(_attention(flavor, index), mlp, flavor["norms"])


def _delta_net(flavor: Flavor) -> MixerSpec:
    """A gated delta net, with six projections of its own."""
    return MixerSpec(
        kind="gated delta rule",
        heads=flavor["n_value_heads"],
        value_dim=flavor["value_head_dim"],
        groups=flavor["n_key_heads"],
        key_dim=flavor["key_head_dim"],
        conv_kernel=4,
        norm="head",
        stored=("q", "k", "v", "z", "a", "b"),
    )


def swiglu_size(flavor: Flavor, shared_by: int = 1) -> int:
    """Llama's rule for the intermediate size: two thirds of 4 x dim, scaled, divided, rounded up.

    A gated block has three weights where a plain one has two, so 2/3 of the width keeps the parameter count. Llama 4
    divides it further by the number of experts that a token visits (`shared_by`).

    >>> swiglu_size(load_flavor("llama3", "8B")), swiglu_size(load_flavor("llama4", "17bx16e"), shared_by=2)
    (14336, 8192)
    """
    multiple: int = flavor["multiple_of"]
    size = int(flavor["ffn_dim_multiplier"] * int(2 * 4 * flavor["dim"] / 3)) // shared_by
    return ceil(size / multiple) * multiple


def _attention(flavor: Flavor, index: int) -> AttentionSpec:
    if flavor["kv_lora_rank"]:
        return AttentionSpec(
            heads=flavor["n_heads"],
            kv_heads=flavor["n_heads"],
            head_dim=flavor["qk_nope_head_dim"] + flavor["qk_rope_head_dim"],
            value_dim=flavor["v_head_dim"],
            latent=LatentSpec(flavor["q_lora_rank"] or None, flavor["kv_lora_rank"], flavor["qk_rope_head_dim"]),
        )
    nope, window = flavor["every_n_layers_nope"], flavor["sliding_window_size"]
    return AttentionSpec(
        heads=flavor["n_heads"],
        kv_heads=flavor["n_kv_heads"] or flavor["n_heads"],
        head_dim=flavor["head_dim"] or flavor["dim"] // flavor["n_heads"],
        qkv_bias=flavor["bias"],
        out_bias=flavor["bias"],
        window=window or None if index % 2 == 0 else None,
        chunk=flavor["fixed_attn_block_size"] if nope and index % nope else None,
        qk_norm="head" if flavor["qk_norm"] else None,
        qk_norm_weight=flavor["qk_norm_weight"],
        sinks=flavor["sinks"],
        rotary=flavor["use_rope"],
        rotary_dim=flavor["rotary_dim"] or None,
        gated=flavor["gated_attention"],
        stored_fused=flavor["fused_qkv"],
    )


def _mlp(size: int, *, bias: bool = False, fused: bool = False) -> MlpSpec:
    return MlpSpec(size, gated=True, activation="silu", up_bias=bias, down_bias=bias, stored_fused=fused)


def _experts(flavor: Flavor) -> MoeSpec:
    visited = flavor["top_k"] + flavor["num_shared_experts"]
    size = flavor["moe_inter_dim"] or swiglu_size(flavor, visited)
    shared_size = flavor["shared_inter_dim"] or size * flavor["num_shared_experts"]  # shared experts are one wide block
    return MoeSpec(
        experts=flavor["num_experts"],
        top_k=flavor["top_k"],
        expert=_mlp(size, bias=flavor["bias"], fused=flavor["fused_experts"]),
        shared=_mlp(shared_size) if shared_size else None,
        shared_gate=flavor["shared_expert_gate"],
        router_bias=flavor["bias"],
    )


def model_findings(model: Mapping[str, Any], flavor: Flavor) -> list[Finding]:
    """What is assumed or not modelled about the model of a `[model]` table."""
    family = model_and_flavor(model)[0]
    notes: Notes = {
        "language-part-only": (families()[family].get("multimodal"), {"model_type": family}),
        "vocabulary-assumed": ("tokenizer_path" in model, {"size": flavor["vocab_size"]}),
        "document-mask-not-modelled": (flavor["attn_mask_type"] == "block_causal", {}),
        "converters-ignored": (model.get("converters"), {"value": shown(model.get("converters"))}),
    }
    return applicable(notes)
