"""Hybrid models of Megatron: a pattern with one symbol per layer, and layers with linear attention.

In `M-M*-|ME/*E`, every symbol is a layer with a single block: M Mamba, G gated delta net, * attention, + latent attention, - MLP,
E experts. Bars separate pipeline stages, and a slash precedes the layers of multi-token prediction. Brackets group layers that
Megatron builds as one; their layers count as without them. Older files give the shares of attention and MLP layers instead, which
Megatron spreads evenly over the Mamba layers.

A GPT model can have linear attention too: `experimental_attention_variant` names it, and `linear_attention_freq` says which
layers keep ordinary attention. Sparse attention (`dsa`, or D in a pattern) is latent attention with an indexer.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, replace

from gemmscope.errors import UserError, shown
from gemmscope.model.layer_spec import AttentionSpec, IndexerSpec, MixerSpec
from gemmscope.model.limits import LARGEST, check_divides
from gemmscope.model.megatron_settings import FACTS, MegatronSettings, all_but_every

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
ATTENTION_SHARE, MLP_SHARE = "hybrid_attention_ratio", "hybrid_mlp_ratio"
HYBRID, PREDICTION_PATTERN = "is_hybrid_model", "mtp_hybrid_override_pattern"
MAMBA, DELTA, ATTENTION, LATENT, SPARSE, MLP, EXPERTS = "MG*+D-E"
STAGE, PREDICTION = "|", "/"
SYMBOLS: dict[str, str] = FACTS["hybrid_symbols"]
VARIANT, EVERY = "experimental_attention_variant", "linear_attention_freq"
LINEAR_ATTENTION, SPARSE_ATTENTION = ("gdn", "gated_delta_net"), "dsa"
INDEXER = {"dsa_indexer_n_heads": "heads", "dsa_indexer_head_dim": "head_dim", "dsa_indexer_topk": "sequence_length"}
CONVOLUTION, SSD_CHUNK = 4, 128  # of Megatron's Mamba layers: megatron/core/ssm/mamba_mixer.py


@dataclass(frozen=True)
class HybridPattern:
    """The layers of a hybrid model: a symbol for each, how many each part of the pipeline has, and the layers of prediction."""

    setting: str  # where it comes from
    layers: str
    parts: tuple[int, ...]
    prediction: str = ""  # the layers of one depth
    depths: int = 0

    @property
    def single_depths(self) -> int:
        """The depths of prediction, if each is one layer: one block, or attention or a mixer before an MLP or experts; else 0."""
        one_layer = re.fullmatch("[^-E][-E]|.", self.prediction)
        return self.depths if one_layer else 0


def hybrid_pattern(settings: MegatronSettings) -> HybridPattern | None:
    """The pattern of a hybrid model, given or from shares; None for any other model."""
    for name in PATTERNS:
        if settings.values.get(name) not in (None, ""):
            return _parsed(settings, name)
    shares = [_share(settings, name) for name in (ATTENTION_SHARE, MLP_SHARE)]
    if not (settings.flag(HYBRID) or any(shares)) or not settings.given("num_layers"):
        return None
    if sum(shares) > 1:
        raise UserError(
            f"{settings.spell(ATTENTION_SHARE)} and {settings.spell(MLP_SHARE)} must not add up to more than 1",
            "they are shares of all layers; the others are Mamba layers",
        )
    layers = spread(settings.size("num_layers", "layers", 0), *shares)
    return HybridPattern(ATTENTION_SHARE if any(shares) else HYBRID, layers, (len(layers),))


def _share(settings: MegatronSettings, name: str) -> float:
    if not settings.given(name):
        return 0.0
    value = settings.single(name)
    with suppress(ValueError):
        if 0 <= (share := float(str(value))) <= 1:
            return share
    raise UserError(f"{settings.spell(name)} must be between 0 and 1, not {shown(value)}", "it is a share of all layers: 0.1")


def spread(layers: int, attention_share: float, mlp_share: float) -> str:
    """The pattern of a number of layers with these shares of attention and MLP, spread evenly over Mamba layers.

    >>> spread(12, 0.25, 0.25)
    'MM*-MM*-M*M-'
    """
    attention, mlp = round(layers * attention_share), round(layers * mlp_share)
    mamba = layers - attention
    pattern = [ATTENTION if chosen else MAMBA for chosen in _evenly(layers, mamba / (attention + 1))]
    places = [place for place, symbol in enumerate(pattern) if symbol == MAMBA]
    if mlp:
        for place, chosen in zip(places, _evenly(len(places), (mamba - mlp) / mlp), strict=True):
            pattern[place] = MLP if chosen else MAMBA
    return "".join(pattern)


def _evenly(places: int, gap: float) -> list[bool]:
    """Which places are chosen, where one follows on every `gap` others. As Megatron does, errors of rounding add up."""
    due, chosen = gap, list[bool]()
    for _ in range(places):
        chosen.append(due < 0.5)
        due += gap if chosen[-1] else -1
    return chosen


def _parsed(settings: MegatronSettings, name: str) -> HybridPattern:
    what, value = settings.spell(name), settings.single(name)
    text = value.strip() if isinstance(value, str) else ""
    main, *predictions = text.split(PREDICTION)
    layers = main.translate(str.maketrans("", "", "[]|"))
    _check_symbols(what, layers)
    parts = [len(part) for part in main.translate(str.maketrans("", "", "[]")).split(STAGE)]
    if not 0 < sum(parts) <= LARGEST["layers"]:
        raise UserError(f"{what} must be one symbol per layer, not {shown(value)}", "for example M-M*-M-M*-")
    if settings.given("num_layers") and settings.whole("num_layers") != sum(parts):
        count = settings.whole("num_layers")
        raise UserError(
            f"{what} has {sum(parts)} layers, but {settings.spell('num_layers')} is {count}",
            f"write one symbol for each of the {count} layers, or remove {settings.spell('num_layers')}",
        )
    if len(set(predictions)) > 1:
        raise UserError(
            f"{what} has different layers of multi-token prediction: {' and '.join(map(shown, predictions[:3]))}",
            "Megatron needs the same after every /",
        )
    prediction = predictions[0] if predictions else settings.text(PREDICTION_PATTERN)
    _check_symbols(what if predictions else settings.spell(PREDICTION_PATTERN), prediction)
    depths = len(predictions) or settings.maybe_count("mtp_num_layers", "layers") or 0
    return HybridPattern(name, layers, tuple(parts), prediction if depths else "", depths if prediction else 0)


def _check_symbols(what: str, layers: str) -> None:
    for symbol in dict.fromkeys(layers):
        if symbol not in SYMBOLS:
            known = ", ".join(f"{letter} {meaning}" for letter, meaning in SYMBOLS.items())
            other = FACTS["hybrid_symbols_not_modelled"].get(symbol)
            meaning = f"{other}, not supported for a file" if other else "not a layer"
            raise UserError(
                f"{what} has {shown(symbol)}, which is {meaning}",
                f"layers: {known}; | separates pipeline stages, / precedes layers of multi-token prediction",
            )


def mamba_mixer(settings: MegatronSettings, hidden: int) -> MixerSpec:
    """The mixer of a Mamba-2 layer, as Megatron builds it: twice as wide as the model, unless the file gives the heads."""
    head_dim = settings.size("mamba_head_dim", "head_dim", 64)
    heads = settings.maybe_size("mamba_num_heads", "heads")
    if heads is None and 2 * hidden % head_dim:
        raise UserError(
            f"twice {settings.spell('hidden_size')} = {2 * hidden} is not a multiple of "
            f"{settings.spell('mamba_head_dim')} = {head_dim}, and {settings.spell('mamba_num_heads')} is not given",
            f"add for example {settings.example('mamba_num_heads')}",
        )
    heads, groups = heads or 2 * hidden // head_dim, settings.size("mamba_num_groups", "heads", 8)
    check_divides(
        groups,
        heads,
        f"{settings.spell('mamba_num_groups')} = {groups} does not divide the {heads} heads of a Mamba layer",
        f"numbers of groups that divide {heads}",
    )
    return MixerSpec(
        kind="ssd",
        heads=heads,
        value_dim=head_dim,
        groups=groups,
        key_dim=settings.size("mamba_state_dim", "head_dim", 128),
        conv_kernel=CONVOLUTION,
        conv_bias=True,
        chunk=SSD_CHUNK,
        norm="group",
    )


def delta_mixer(settings: MegatronSettings) -> MixerSpec:
    """The mixer of a gated delta net, as Megatron builds it."""
    heads = settings.size("linear_num_value_heads", "heads", 32)
    groups = settings.size("linear_num_key_heads", "heads", 16)
    check_divides(
        groups,
        heads,
        f"{settings.spell('linear_num_value_heads')} = {heads} is not a multiple of "
        f"{settings.spell('linear_num_key_heads')} = {groups}",
        f"numbers of key heads that divide {heads}",
    )
    return MixerSpec(
        kind="gated delta rule",
        heads=heads,
        value_dim=settings.size("linear_value_head_dim", "head_dim", 128),
        groups=groups,
        key_dim=settings.size("linear_key_head_dim", "head_dim", 128),
        conv_kernel=settings.size("linear_conv_kernel_dim", "head_dim", 4),
        norm="head",
    )


def linear_attention_layers(settings: MegatronSettings, layers: int) -> list[bool]:
    """Which layers of a GPT model have linear attention: all but every N-th, or those with a 1 in the list."""
    if settings.text(VARIANT).lower() not in LINEAR_ATTENTION:
        return [False] * layers
    linear = settings.layers(EVERY, layers, all_but_every)
    if linear is None:
        raise UserError(
            f"{settings.spell(VARIANT)} {settings.text(VARIANT)} needs {settings.spell(EVERY)}: the layers without it",
            f"for example {settings.example(EVERY)}: every fourth layer",
        )
    return linear


def sparse(settings: MegatronSettings, attention: AttentionSpec, layer: int) -> AttentionSpec:
    """A layer's latent attention with an indexer, or with the positions that an earlier layer's indexer chose."""
    if attention.latent is None or attention.latent.q_rank is None:
        raise UserError(
            "sparse attention (DSA) can be read only with latent attention and a low rank of the queries",
            f"add {settings.spell('multi_latent_attention')} and for example {settings.example('q_lora_rank')}",
        )
    missing = [name for name in INDEXER if not settings.given(name)]
    if missing:
        raise UserError(
            f"sparse attention (DSA) needs {' and '.join(map(settings.spell, missing))}",
            f"for example {', '.join(map(settings.example, missing))}",
        )
    every = settings.size("dsa_indexer_topk_freq", "layers", 1)
    first = settings.maybe_count("dsa_indexer_skip_topk_offset", "layers") or 1
    heads, dim, top_k = (settings.size(name, limit, 0) for name, limit in INDEXER.items())
    chooses = max(layer + 1 - first, 0) % every == 0
    return replace(attention, top_k=top_k, indexer=IndexerSpec(heads, dim) if chooses else None)
