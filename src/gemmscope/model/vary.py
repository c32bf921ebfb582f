"""Vary the sizes of a model, to compare architectures: one size is set, and the sizes that belong to it are scaled with it."""

from collections.abc import Mapping
from dataclasses import replace

from gemmscope.errors import UserError, option
from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, MoeSpec
from gemmscope.model.limits import LARGEST, check_size, divisors
from gemmscope.model.spec import ModelSpec

SIZES = {
    "hidden": "hidden_size",
    "layers": "layers",
    "intermediate": "intermediate_size",
    "heads": "heads",
    "experts": "experts",
}
"""What can be varied, and the limit that applies to it."""
MULTIPLE = 128  # scaled widths are multiples of this, so that all recipes and tensor parallelism can use them


def varied(model: ModelSpec, values: Mapping[str, int]) -> ModelSpec:
    """The model with these sizes. Sizes that are given are not scaled.

    With `hidden`, MLPs, heads (of mixers too) and latent ranks keep their ratio to it (rounded to multiples of 128); the size of
    a head stays. Key/value heads stay too if they divide the heads. With `layers`, the kinds of layers keep their shares.

    >>> from gemmscope.model import presets
    >>> varied(presets.load("llama-3.1-8b").model, {"hidden": 5120}).describe()
    '32 dense layers, hidden 5120, 40 heads (8 key/value), intermediate 17920'
    >>> varied(presets.load("deepseek-v3").model, {"layers": 20, "experts": 64}).pattern()
    '1 dense, 19 MoE'
    """
    for name, value in values.items():
        check_size(option(name), value, SIZES[name])
    hidden = values.get("hidden", model.hidden_size)
    ratio, predicting = hidden / model.hidden_size, model.prediction_layer
    changed = {layer: _layer(layer, ratio, values) for layer in dict.fromkeys(model.layers)}
    layers = tuple(changed[layer] for layer in model.layers)  # equal layers are one object
    if "layers" in values:
        layers = tuple(layers[place * len(layers) // values["layers"]] for place in range(values["layers"]))
    embedding = model.embedding_size
    if embedding is not None and hidden != model.hidden_size:
        embedding = hidden if embedding == model.hidden_size else _scaled(embedding, ratio)
    return replace(
        model,
        hidden_size=hidden,
        layers=layers,
        embedding_size=embedding,
        prediction_layer=_layer(predicting, ratio, values) if predicting is not None else None,
        first_linears=_ends(model.first_linears, model, hidden, len(layers)),
        last_linears=_ends(model.last_linears, model, hidden, len(layers)),
    )


def _ends(linears: tuple[LinearSpec, ...], model: ModelSpec, hidden: int, layers: int) -> tuple[LinearSpec, ...]:
    """Linears before the first layer and after the last: as wide as the new hidden size, and as the inputs of all layers."""
    inputs = model.layer_inputs.width if model.layer_inputs is not None else 0

    def size(old: int) -> int:
        if inputs and old == inputs * len(model.layers):
            return inputs * layers
        return old // model.hidden_size * hidden if old % model.hidden_size == 0 else old

    return tuple(replace(one, inputs=size(one.inputs), outputs=size(one.outputs)) for one in linears)


def _layer(layer: LayerSpec, ratio: float, values: Mapping[str, int]) -> LayerSpec:
    attention = _attention(layer.attention, ratio, values) if layer.attention is not None else None
    mlp = _mlp(layer.mlp, ratio, values) if layer.mlp is not None else None
    mixer = layer.mixer
    if mixer is not None:
        mixer = replace(mixer, heads=max(round(mixer.heads * ratio / mixer.groups), 1) * mixer.groups)
    extra = tuple(replace(one, inputs=_scaled(one.inputs, ratio), outputs=_scaled(one.outputs, ratio)) for one in layer.extra)
    return replace(layer, attention=attention, mlp=mlp, mixer=mixer, extra=extra)


def _attention(attention: AttentionSpec, ratio: float, values: Mapping[str, int]) -> AttentionSpec:
    heads = values.get("heads", max(round(attention.heads * ratio), 1))
    kv_heads = heads if attention.kv_heads == attention.heads else _key_value_heads(attention, heads)
    latent = attention.latent
    if latent is not None:
        q_rank = _scaled(latent.q_rank, ratio) if latent.q_rank is not None else None
        latent = replace(latent, q_rank=q_rank, kv_rank=_scaled(latent.kv_rank, ratio))
    compressed = attention.compressed
    if compressed is not None:
        compressed = replace(compressed, q_rank=_scaled(compressed.q_rank, ratio))
    return replace(attention, heads=heads, kv_heads=kv_heads, latent=latent, compressed=compressed)


def _key_value_heads(attention: AttentionSpec, heads: int) -> int:
    """As many as before if they divide the heads; else the nearest number that does."""
    return min(divisors(heads), key=lambda number: (abs(number - attention.kv_heads), -number))


def _mlp(mlp: MlpSpec | MoeSpec, ratio: float, values: Mapping[str, int]) -> MlpSpec | MoeSpec:
    """In a model with experts, `intermediate` is the size of an expert where the layer has experts."""
    if isinstance(mlp, MlpSpec):
        return replace(mlp, intermediate_size=values.get("intermediate", _scaled(mlp.intermediate_size, ratio)))
    expert = replace(mlp.expert, intermediate_size=values.get("intermediate", _scaled(mlp.expert.intermediate_size, ratio)))
    shared = replace(mlp.shared, intermediate_size=_scaled(mlp.shared.intermediate_size, ratio)) if mlp.shared else None
    experts = values.get("experts", mlp.experts)
    return replace(mlp, experts=experts, top_k=min(mlp.top_k, experts), expert=expert, shared=shared)


def _scaled(size: int, ratio: float) -> int:
    """The width scaled by the ratio, as a multiple of 128; unchanged if the ratio is 1."""
    return size if ratio == 1 else min(max(round(size * ratio / MULTIPLE), 1) * MULTIPLE, LARGEST["intermediate_size"])


def check_varied(model: ModelSpec, names: Mapping[str, object]) -> None:
    """Raise a `UserError` for a size that this model does not have."""
    if "experts" in names and not any(layer.is_moe for layer in model.layers):
        raise UserError(f"experts cannot vary: {model.name} has none", "vary hidden, layers, intermediate, heads or sequence")
