"""Builds the model from Megatron settings, layer by layer.

Megatron builds every layer from the same settings. Two of them can differ from layer to layer: `moe_layer_freq` says which layers
have experts instead of one MLP, `window_attn_skip_freq` which layers see the whole sequence. In hybrid models a pattern names the
single block of each layer (`megatron_hybrid`). Settings that a file does not give have Megatron's defaults, which are those of
GPT-2: LayerNorm, biases everywhere, learned positions, an MLP four times as wide as the model, and an output head that shares the
embedding's weight.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import PurePath

from gemmscope.errors import UserError, closest, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.model.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, MoeSpec
from gemmscope.model.limits import check_divides, check_size, divisors_text
from gemmscope.model.megatron_hybrid import (
    ATTENTION,
    DELTA,
    EXPERTS,
    LATENT,
    LINEAR_ATTENTION,
    MAMBA,
    MLP,
    SPARSE,
    SPARSE_ATTENTION,
    VARIANT,
    HybridPattern,
    delta_mixer,
    hybrid_pattern,
    linear_attention_layers,
    mamba_mixer,
    sparse,
)
from gemmscope.model.megatron_settings import FACTS, MegatronSettings, all_but_every
from gemmscope.model.spec import ModelSpec, NormSpec

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
"""The settings that every file must have."""
HYBRID_LAYERS = (MAMBA, DELTA, ATTENTION, LATENT, MLP, EXPERTS)


def model_spec(settings: MegatronSettings, origin: str, unknown_names: Collection[str] = ()) -> ModelSpec:
    """The whole model, named after the file (`origin`). `unknown_names`: names in the file that are not used here."""
    _reject_not_modelled(settings)
    pattern = hybrid_pattern(settings)
    _require_sizes(settings, pattern, unknown_names)
    hidden = settings.size("hidden_size", "hidden_size", 0)
    learned = settings.text("position_embedding_type", "learned_absolute") == "learned_absolute"
    depths = pattern.single_depths if pattern else settings.maybe_count("mtp_num_layers", "layers") or 0
    return ModelSpec(
        name=PurePath(origin).stem or "Megatron model",
        hidden_size=hidden,
        layers=tuple(_hybrid_layers(settings, hidden, pattern, pattern.layers) if pattern else _layers(settings, hidden)),
        vocab_size=settings.maybe_size("vocab_size", "vocab_size"),
        norm=NormSpec("layernorm", bias=True) if _has_layer_norm(settings) else NormSpec("rmsnorm"),
        tied_embeddings=settings.flag("share_embeddings_and_output_weights", default=True),
        positions=(settings.maybe_size(settings.defaults["positions"], "sequence_length") or 0) if learned else 0,
        prediction_layers=depths,
        prediction_layer=_prediction_layer(settings, hidden, pattern) if pattern and depths else None,
        prediction_shared=depths > 1 and settings.flag("mtp_use_repeated_layer"),
        source=origin,
    )


def _layers(settings: MegatronSettings, hidden: int) -> list[LayerSpec]:
    """The layers of a GPT model: attention, or a linear kind of it, and an MLP or experts."""
    count = settings.size("num_layers", "layers", 0)
    dense, moe = dense_mlp(settings, hidden), _moe_mlp(settings, hidden)
    is_moe = settings.layers("moe_layer_freq", count, lambda layer, every: layer % every == 0) if moe else None
    windowed = settings.layers("window_attn_skip_freq", count, all_but_every) or [True] * count
    linear = linear_attention_layers(settings, count)
    latent = settings.flag("multi_latent_attention")
    full, near = (_attention(settings, hidden, window, latent=latent) for window in (None, _window(settings)))
    near = replace(near, chunk=settings.maybe_size("attention_chunk_size", "sequence_length"))
    mixer = delta_mixer(settings) if any(linear) else None
    norms = settings.size("layer_norms", "layers", 2)
    layers, indexed = [], settings.text(VARIANT).lower() == SPARSE_ATTENTION
    for layer in range(count):
        mlp = moe if moe and (is_moe is None or is_moe[layer]) else dense
        attention = near if windowed[layer] else full
        attention = sparse(settings, attention, layer) if indexed else attention
        layers.append(LayerSpec(None, mlp, norms, mixer=mixer) if linear[layer] else LayerSpec(attention, mlp, norms))
    return layers


def _hybrid_layers(settings: MegatronSettings, hidden: int, pattern: HybridPattern, layers: str) -> list[LayerSpec]:
    """Layers of a hybrid model, by their symbols. Each has one block, and a norm before it."""
    kinds = {symbol: _hybrid_layer(settings, hidden, pattern, symbol) for symbol in HYBRID_LAYERS if symbol in layers}
    if SPARSE not in layers:
        return [kinds[symbol] for symbol in layers]
    latent = _attention(settings, hidden, None, latent=settings.flag("multi_latent_attention"))
    return [
        LayerSpec(sparse(settings, latent, layer), None, norms=1) if symbol == SPARSE else kinds[symbol]
        for layer, symbol in enumerate(layers)
    ]


def _hybrid_layer(settings: MegatronSettings, hidden: int, pattern: HybridPattern, symbol: str) -> LayerSpec:
    if symbol in (MAMBA, DELTA):
        return LayerSpec(None, None, norms=1, mixer=mamba_mixer(settings, hidden) if symbol == MAMBA else delta_mixer(settings))
    if symbol in (ATTENTION, LATENT):
        return LayerSpec(_attention(settings, hidden, _window(settings), latent=symbol == LATENT), None, norms=1)
    mlp = dense_mlp(settings, hidden) if symbol == MLP else _moe_mlp(settings, hidden)
    if mlp is None:
        raise UserError(
            f"{settings.spell(pattern.setting)} has experts (E), but {settings.spell('num_moe_experts')} is not given",
            f"add for example {settings.example('num_moe_experts')}",
        )
    return LayerSpec(None, mlp, norms=1)


def _prediction_layer(settings: MegatronSettings, hidden: int, pattern: HybridPattern) -> LayerSpec:
    """The blocks of one depth as one layer: attention or a mixer, and an MLP or experts, each with a norm before it."""
    blocks = _hybrid_layers(settings, hidden, pattern, pattern.prediction)
    return replace(blocks[0], mlp=blocks[-1].mlp, norms=len(blocks))


def _has_layer_norm(settings: MegatronSettings) -> bool:
    return settings.word("normalization", ("LayerNorm", "RMSNorm"), "LayerNorm") == "LayerNorm"


def _attention(settings: MegatronSettings, hidden: int, window: int | None, *, latent: bool) -> AttentionSpec:
    heads = settings.size("num_attention_heads", "heads", 0)
    bias = settings.flag("add_bias_linear", default=True)
    rotary = settings.text("position_embedding_type") in ("rope", "mrope", "yarn")
    sinks = settings.word("softmax_type", ("vanilla", "off-by-one", "learnable"), "vanilla") == "learnable"
    if latent:
        rope = settings.size("qk_pos_emb_head_dim", "head_dim", 64)
        return AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=settings.size("qk_head_dim", "head_dim", 128) + rope,
            value_dim=settings.size("v_head_dim", "head_dim", 128),
            out_bias=bias,
            window=window,
            sinks=sinks,
            latent=LatentSpec(
                q_rank=settings.maybe_size("q_lora_rank", "hidden_size")
                if "q_lora_rank" in settings.values
                else settings.defaults["q_lora_rank"] or None,
                kv_rank=settings.size("kv_lora_rank", "hidden_size", settings.defaults["kv_lora_rank"]),
                rope_dim=rope,
            ),
        )
    groups = settings.size("num_query_groups", "heads", heads)
    check_divides(
        groups,
        heads,
        f"{settings.spell('num_attention_heads')} = {heads} is not a multiple of {settings.spell('num_query_groups')} = {groups}",
        f"numbers of query groups that divide {heads}",
    )
    qkv_bias = bias or settings.flag("add_qkv_bias")
    qk_norm = settings.flag("qk_layernorm")
    return AttentionSpec(
        heads=heads,
        kv_heads=groups,
        head_dim=_head_dim(settings, hidden, heads),
        qkv_bias=qkv_bias,
        out_bias=bias,
        window=window,
        qk_norm="head" if qk_norm else None,
        qk_norm_bias=qk_norm and _has_layer_norm(settings),
        sinks=sinks,
        rotary=rotary,
        gated=settings.flag("attention_output_gate"),
    )


def _head_dim(settings: MegatronSettings, hidden: int, heads: int) -> int:
    given = settings.maybe_size("kv_channels", "head_dim")
    if given is None and hidden % heads:
        raise UserError(
            f"{settings.spell('hidden_size')} = {hidden} is not a multiple of "
            f"{settings.spell('num_attention_heads')} = {heads}, and {settings.spell('kv_channels')} is not given",
            f"numbers of heads that divide {hidden}: {divisors_text(hidden)}; or add {settings.example('kv_channels')}",
        )
    return given or hidden // heads


def dense_mlp(settings: MegatronSettings, hidden: int) -> MlpSpec:
    """The feed-forward block of a layer without experts."""
    gated, activation = settings.flag("gated_linear_unit"), settings.text("activation_func", "gelu")
    width = settings.maybe_size("ffn_hidden_size", "intermediate_size")
    if width is None:
        narrow = settings.defaults["swiglu_keeps_parameters"] and gated and activation == "silu"
        width = int((4 * hidden * 2 / 3) / 64) * 64 if narrow else 4 * hidden
        what = f"{settings.spell('ffn_hidden_size')} (by default from {settings.spell('hidden_size')} = {hidden})"
        check_size(what, width, "intermediate_size")
    bias = settings.flag("add_bias_linear", default=True)
    return MlpSpec(width, gated=gated, activation=activation, up_bias=bias, down_bias=bias)


def _moe_mlp(settings: MegatronSettings, hidden: int) -> MoeSpec | None:
    experts = settings.maybe_count("num_moe_experts", "experts")
    if experts is None:
        return None
    top_k = settings.size("moe_router_topk", "experts", 2)
    if top_k > experts:
        raise UserError(
            f"{settings.spell('moe_router_topk')} = {top_k} is more than {settings.spell('num_moe_experts')} = {experts}",
            "for example " + settings.assign.format(settings.spell("moe_router_topk"), experts),
        )
    dense = dense_mlp(settings, hidden)
    width = settings.size("moe_ffn_hidden_size", "intermediate_size", dense.intermediate_size)
    shared = settings.maybe_count("moe_shared_expert_intermediate_size", "intermediate_size")

    return MoeSpec(
        experts=experts,
        top_k=top_k,
        expert=replace(dense, intermediate_size=width, stored_fused=True),
        shared=replace(dense, intermediate_size=shared) if shared else None,
        shared_gate=bool(shared) and settings.flag("moe_shared_expert_gate"),
        router_bias=dense.up_bias,
        latent=settings.maybe_count("moe_latent_size", "hidden_size"),
    )


def _window(settings: MegatronSettings) -> int | None:
    """How many positions a query sees, including its own. Megatron counts only those before it, and -1 means all."""
    if not settings.given("window_size"):
        return None
    what, value = settings.spell("window_size"), settings.numbers("window_size")
    left = value if isinstance(value, int) else value[0] if len(value) == 2 else -2
    if left < -1:
        raise UserError(f"{what} must be two numbers: positions before and positions after", "for example 4096,0")
    return None if left == -1 else check_size(what, left + 1, "sequence_length")


def other_model(evidence: str, what: str) -> UserError:
    """The error for a model that has the settings of a GPT but is not one. `evidence`: what shows it, as in "pretrain_t5.py
    trains"."""
    return UserError(
        f"{evidence} {what}; only GPT models and hybrids can be read from Megatron settings",
        f"trace it with {option('module', 'FILE.py:FUNCTION')}, or give its Hugging Face config.json with {option('config')}",
    )


def _reject_not_modelled(settings: MegatronSettings) -> None:
    variant = settings.text(VARIANT).lower()
    if variant not in ("", "none", SPARSE_ATTENTION, *LINEAR_ATTENTION):
        raise UserError(
            f"{settings.spell(VARIANT)} {shown(variant)} is not supported for a file",
            f"supported: {', '.join((*LINEAR_ATTENTION, SPARSE_ATTENTION))}; for others, trace the model with "
            f"{option('module', 'FILE.py:FUNCTION')}",
        )
    for name, meaning in FACTS["not_modelled"].items():
        if settings.values.get(name) not in (None, False, "False", "false", ""):
            raise UserError(
                f"{settings.spell(name)} {meaning}, which is not supported for a file",
                f"trace the model instead: {option('module', 'FILE.py:FUNCTION')}",
            )


def _require_sizes(settings: MegatronSettings, pattern: HybridPattern | None, unknown_names: Collection[str]) -> None:
    not_needed = {"num_layers"} if pattern else set()
    if pattern and not {ATTENTION, LATENT, SPARSE}.intersection(pattern.layers + pattern.prediction):
        not_needed.add("num_attention_heads")
    missing = [name for name in REQUIRED if name not in not_needed and not settings.given(name)]
    if missing:
        wanted = [settings.spell(name) for name in missing]
        # Very similar: --hiden-size, but not --hidden-dropout.
        similar = {name: closest(name, unknown_names, 1, cutoff=0.801) for name in wanted}
        misspelled = [f"{close[0]} (did you mean {name}?)" for name, close in similar.items() if close]
        raise UserError(
            f"the file has no {' and no '.join(wanted)}" + (f"; it has {', '.join(misspelled)}" if misspelled else ""),
            f"add for example {', '.join(settings.example(name) for name in missing)}",
        )


def model_findings(settings: MegatronSettings, model: ModelSpec) -> Iterator[Finding]:
    """What was assumed about the model, or not included."""
    spell = settings.spell
    if model.vocab_size is None:
        yield finding("vocabulary-missing", setting=spell("vocab_size"), example=settings.example("vocab_size"))
    uses_default = any(isinstance(layer.mlp, MlpSpec) for layer in model.layers)
    uses_default |= not settings.given("moe_ffn_hidden_size") and any(layer.is_moe for layer in model.layers)
    if uses_default and not settings.given("ffn_hidden_size"):
        width = dense_mlp(settings, model.hidden_size).intermediate_size
        yield finding("mlp-width-default", setting=spell("ffn_hidden_size"), width=width)

    pattern = hybrid_pattern(settings)
    if pattern and pattern.depths and not model.prediction_layers:
        yield finding(
            "prediction-layers-not-included", setting=spell(pattern.setting), added=option("mtp_layers", pattern.depths)
        )
