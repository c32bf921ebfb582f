"""What a training step computes, as plain data that crosses the process boundary as JSON: a model with the sizes of one rank.

Layers of a kind are alike, so a step of the real depth needs the weights of a few only: `slots` says which weights each layer
uses. Layers that share a slot share its memory, not its gradients: every layer runs the kernels it would run in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from typing import Any

from pydantic import TypeAdapter

from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding
from gemmscope.model.spec import LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RunSpec
from gemmscope.workload import sharding
from gemmscope.workload.derive import derive

MOST_WEIGHTS = 4  # layers whose weights are held, of all kinds together


@dataclass(frozen=True)
class StackPlan:
    """One rank's step: `layers` in the order they run, `slots[i]` the weights that layer i uses, `expert_rows` by layer."""

    hidden_size: int
    layers: tuple[LayerSpec, ...]
    slots: tuple[int, ...]
    norm: NormSpec
    vocab_size: int | None
    tied_embeddings: bool
    head_bias: bool
    micro_batch_size: int
    sequence_length: int
    expert_rows: tuple[int, ...] = ()
    embeds: bool = True  # the first pipeline stage does
    heads: bool = True  # the last one does
    accumulation: int = 1
    recompute: str = "none"

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.sequence_length

    def low_precision_sizes(self) -> dict[str, int]:
        """The sizes of all GEMMs that may run in low precision, by name."""
        sizes = {"tokens": self.tokens, "hidden size": self.hidden_size}
        for layer in dict.fromkeys(self.layers):
            attention, mlp = layer.attention, layer.mlp
            assert attention is not None
            assert mlp is not None
            sizes["attention's output width"] = attention.out_width
            if attention.latent is None:  # one GEMM makes all three
                sizes["width of queries, keys and values"] = attention.q_width + attention.k_width + attention.v_width
            else:
                latent, plain = attention.latent, attention.head_dim - attention.latent.rope_dim
                sizes |= {"width of queries": attention.q_width, "key/value rank": latent.kv_rank}
                sizes["key/value rank and rotary part"] = latent.kv_rank + latent.rope_dim
                sizes["width of keys and values"] = attention.heads * (plain + attention.value_head_dim)
                sizes |= {"query rank": latent.q_rank} if latent.q_rank is not None else {}
            if isinstance(mlp, MoeSpec):
                sizes["expert's intermediate size"] = mlp.expert.intermediate_size
                sizes |= {"shared expert's intermediate size": mlp.shared.intermediate_size} if mlp.shared is not None else {}
            else:
                sizes["intermediate size"] = mlp.intermediate_size
        return sizes

    def with_depth(self, depth: int) -> StackPlan:
        """So many of its layers, evenly chosen, so that each kind keeps its share."""
        chosen = [index * self.depth // depth for index in range(depth)]
        return replace(self, layers=tuple(self.layers[i] for i in chosen), slots=tuple(self.slots[i] for i in chosen))

    def with_batch(self, micro_batch_size: int, sequence_length: int) -> StackPlan:
        """The same layers on another batch."""
        rows = tuple(max(16, row * micro_batch_size * sequence_length // self.tokens // 16 * 16) for row in self.expert_rows)
        return replace(self, micro_batch_size=micro_batch_size, sequence_length=sequence_length, expert_rows=rows)

    def padded(self, multiple: int) -> StackPlan:
        """Experts' tokens in multiples of what a recipe needs: 16 they are already."""
        return replace(self, expert_rows=tuple(-(-rows // multiple) * multiple for rows in self.expert_rows))

    def unrolled(self) -> StackPlan:
        """Every layer with weights of its own: the real model."""
        return replace(self, slots=tuple(range(self.depth)))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StackPlan:
        """The inverse of `dataclasses.asdict`, after JSON has made lists of its tuples."""
        return TypeAdapter(StackPlan).validate_python(data)


def plan_step(model: ModelSpec, run: RunSpec) -> tuple[StackPlan, list[Finding]]:
    """The step of one rank, and what it runs differently from the model."""
    sharding.check(model, run)
    _check_layers(model, run)
    if run.cp > 1:
        raise UserError(
            "a step under context parallelism cannot be run on one GPU: its queries attend to keys of other ranks",
            f"leave out {option('cp')}, or use gemmscope forecast, which supports it",
        )
    stage = derive(model, run).stage
    first, last = sharding.stage_layers(model, run)[stage]
    chosen = model.layers[first:last]
    if not chosen:
        message = f"pipeline stage {stage} holds no layer: its step has nothing to gain"
        raise UserError(message, f"choose another with {option('pp_stage')}")
    embeds, heads = stage == 0, stage == run.pp - 1
    vocab = sharding.padded_vocab(model.vocab_size, run) // run.tp if model.vocab_size is not None else None
    if mixed := [layer for layer in chosen if not layer.is_plain]:
        raise UserError(
            f"a step with layers of {mixed[0].kind} is not yet supported", "use gemmscope forecast, which supports it"
        )
    if any(layer.attention is not None and (layer.attention.top_k is not None or layer.attention.gated) for layer in chosen):
        raise UserError("a step with sparse or gated attention is not yet supported", "use gemmscope forecast, which supports it")
    layers = tuple(_of_rank(layer, run) for layer in chosen)
    moe = next((layer.mlp for layer in chosen if isinstance(layer.mlp, MoeSpec)), None)
    plan = StackPlan(
        hidden_size=model.hidden_size,
        layers=layers,
        slots=share_weights(layers),
        norm=model.norm,
        vocab_size=vocab if embeds or heads else None,
        embeds=embeds,
        heads=heads,
        tied_embeddings=model.tied_embeddings and embeds and heads,
        head_bias=model.head_bias,
        micro_batch_size=run.micro_batch_size,
        sequence_length=run.sequence_length,
        expert_rows=tuple(max(16, rows) for rows in sharding.expert_rows(moe, run)) if moe is not None else (),
        accumulation=run.gradient_accumulation,
        recompute=run.recompute,
    )
    padded = plan.padded(16)  # low-precision GEMMs need a multiple of 16 tokens: frameworks pad each expert's
    left_out = [finding("prediction-layers-not-run", layers=model.prediction_layers)] if model.prediction_layers and heads else []
    return padded, _differences(model, run, chosen) + left_out


def share_weights(layers: tuple[LayerSpec, ...]) -> tuple[int, ...]:
    """Which weights each layer uses: those of a few layers in turn, at least one of every kind.

    >>> a, b = "dense", "MoE"
    >>> share_weights((a, a, a, a, a, a)), share_weights((a, b, b, b, b, b))
    ((0, 1, 2, 3, 0, 1), (0, 1, 2, 3, 1, 2))
    """
    kinds = list(dict.fromkeys(layers))
    if len(kinds) > MOST_WEIGHTS:
        raise UserError(
            f"the model has {len(kinds)} kinds of layers, and a stack holds the weights of {MOST_WEIGHTS} at most",
            f"choose a pipeline stage with fewer kinds: {option('pp')} and {option('pp_stage')}",
        )
    sizes = dict.fromkeys(kinds, 1)
    for _ in range(MOST_WEIGHTS - len(kinds)):  # one more for the kind with most layers for each slot that it has
        growing = max(kinds, key=lambda kind: layers.count(kind) / sizes[kind])
        sizes[growing] += 1 if sizes[growing] < layers.count(growing) else 0
    ends = accumulate(sizes.values())
    slots = {kind: cycle(range(end - sizes[kind], end)) for kind, end in zip(kinds, ends, strict=True)}
    return tuple(next(slots[layer]) for layer in layers)


def _of_rank(layer: LayerSpec, run: RunSpec) -> LayerSpec:
    """A layer with the heads and widths that one tensor-parallel rank holds."""
    whole, mlp = layer.attention, layer.mlp
    assert whole is not None
    assert mlp is not None
    attention = replace(whole, heads=whole.heads // run.tp, kv_heads=max(1, whole.kv_heads // run.tp))
    if isinstance(mlp, MlpSpec):
        return replace(layer, attention=attention, mlp=_narrow(mlp, run.tp))
    shared = _narrow(mlp.shared, run.tp) if mlp.shared is not None else None
    return replace(layer, attention=attention, mlp=replace(mlp, expert=_narrow(mlp.expert, run.expert_tp), shared=shared))


def _narrow(mlp: MlpSpec, parts: int) -> MlpSpec:
    return replace(mlp, intermediate_size=mlp.intermediate_size // parts)


def _differences(model: ModelSpec, run: RunSpec, layers: tuple[LayerSpec, ...]) -> list[Finding]:
    """What the stack does not run as the model does."""
    attentions = [layer.attention for layer in layers if layer.attention is not None]
    mlps = [layer.mlp for layer in layers]
    blocks = [
        block for mlp in mlps for block in ((mlp.expert, mlp.shared) if isinstance(mlp, MoeSpec) else (mlp,)) if block is not None
    ]
    norms = sorted({layer.norms for layer in layers} - {2})
    unknown = list(dict.fromkeys(block.activation for block in blocks if activation_kind(block.activation) is None))
    conditions = {
        "windows-not-run": any(attention.window for attention in attentions),
        "sinks-not-run": any(attention.sinks for attention in attentions),
        "qk-norms-not-run": any(attention.qk_norm for attention in attentions),
        "two-norms-run": bool(norms),
        "activation-replaced": bool(unknown),
        "communication-not-run": run.tp * run.cp * run.ep * run.pp > 1,
        "sequence-parallel-not-run": run.sequence_parallel and run.tp > 1,
        "separate-projections-not-run": run.separate_projections,
        "latent-recompute-not-run": run.recompute == "selective" and any(attention.latent for attention in attentions),
        "head-transform-not-run": model.head_transform or model.embedding_size not in (None, model.hidden_size),
    }
    facts = {"two-norms-run": {"norms": list(map(str, norms))}, "activation-replaced": {"activations": unknown}}
    return [finding(code, **facts.get(code, {})) for code, applies in conditions.items() if applies]


def _check_layers(model: ModelSpec, run: RunSpec) -> None:
    """A `UserError` for layers that the stack cannot run as they are."""
    chunked = any(attention.chunk is not None and attention.chunk < run.sequence_length for attention in model.attentions)
    special = next((layer.special for layer in model.layers if layer.special), "attention in chunks" if chunked else "")
    if special:
        raise UserError(f"a step of layers with {special} is not yet supported", "use gemmscope forecast, which supports them")


ACTIVATION_KINDS = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu"}
EXACT_GELUS = ("gelu", "gelu_python")


def activation_kind(name: str) -> str | None:
    """Which of the activations that frameworks know a model's is; None if it is none of them.

    >>> activation_kind("swish"), activation_kind("gelu"), activation_kind("gelu_new"), activation_kind("xielu")
    ('silu', 'gelu', 'tanh gelu', None)
    """
    if name.startswith("gelu"):
        return "gelu" if name in EXACT_GELUS else "tanh gelu"
    return ACTIVATION_KINDS.get(name)
