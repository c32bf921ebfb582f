"""Derives the operations of one micro-batch on one rank from a model and a run, in closed form.

Read `layer_ops` first: it lists the operations of a transformer layer in the order they run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_lowercase
from typing import Any, cast

from gemmscope import roles
from gemmscope.errors import UserError, option
from gemmscope.findings import Finding, finding
from gemmscope.model.layer_spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, MoeSpec
from gemmscope.model.spec import EVERY_SECOND, ModelSpec, RunSpec, recomputed_facts
from gemmscope.workload import sharding
from gemmscope.workload.mixers import mixer_ops
from gemmscope.workload.ops import (
    ADAPTERS,
    Activation,
    Attention,
    Elementwise,
    Embedding,
    Gemm,
    GroupedLinear,
    Linear,
    Loss,
    Norm,
    Op,
    Optimizer,
    with_counts,
)  # fmt: skip
from gemmscope.workload.rank_ops import bottleneck, linear, norm, on_sequence_shard, residual, shard_rows, visible_pairs
from gemmscope.workload.residual_streams import layer_input_ops, stream_ops
from gemmscope.workload.sparse import compressed_attention, indexer_ops, sparse

EMBEDDING, HEAD, STEP, PREDICTION = "embedding", "head", "step", "prediction layer"


@dataclass(frozen=True)
class Workload:
    """All operations of one rank. `stage` is its pipeline stage; `findings` say what was padded, replicated or chosen."""

    ops: tuple[Op, ...]
    stage: int
    findings: tuple[Finding, ...] = ()
    layers: Mapping[str, int] = field(default_factory=dict)  # by section: how many layers of the kind; empty if it was traced

    def gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs of all linears in the order they run; equal ones of the same op are counted together."""
        counts: Counter[Gemm] = Counter()
        for op in self.ops:
            if isinstance(op, Linear):
                for gemm in op.gemms():
                    counts[replace(gemm, count=1)] += gemm.count
        return with_counts(counts)

    @property
    def parameters(self) -> int:
        return sum(op.all_parameters for op in self.ops)


def with_adapters(ops: Iterable[Op], run: RunSpec) -> Iterator[Op]:
    """With LoRA, all weights are frozen, and adapters follow the linears that have them; else the same operations."""
    for op in ops:
        if run.lora is None:
            yield op
            continue
        yield replace(op.running("fprop", "dgrad") if isinstance(op, Linear) else op, frozen=True)
        if isinstance(op, Linear) and _is_adapted(op, run):
            yield from _adapters(op, run.lora)


def _is_adapted(op: Linear, run: RunSpec) -> bool:
    """By default, all linears that recipes quantize have adapters, but neither experts nor the output head."""
    if run.lora_linears:
        return not {op.role, op.block.lower().replace(" ", "-"), op.label.rpartition(".")[2]}.isdisjoint(run.lora_linears)
    return op.quantized and op.facts.part == "GEMMs" and op.groups == 1 and op.block != "experts"


def _adapters(op: Linear, rank: int) -> Iterator[Op]:
    """A to the rank, B from it to the outputs, and the sum: forward scales B's output and adds it, backward adds up dX."""
    if rank > (most := min(op.inputs, op.outputs)):
        raise UserError(
            f"{option('lora', rank)} is larger than {op.name}, which has {op.inputs} inputs and {op.outputs} outputs",
            f"give at most {option('lora', most)}, or name other linears: {option('lora_linears', 'mlp')}",
        )
    shared: dict[str, Any] = {
        name: getattr(op, name)
        for name in ("tokens", "count", "section", "forward_runs", "shares_weights", "rows")
        if hasattr(op, name)
    }
    kind = GroupedLinear if "rows" in shared else Linear
    for role, inputs, outputs in (("lora-a", op.inputs, rank), ("lora-b", rank, op.outputs)):
        label, parameters = f"{op.name} {roles.role(role).name}", op.groups * inputs * outputs
        yield kind(role=role, label=label, beside=op.role, inputs=inputs, outputs=outputs, parameters=parameters, **shared)
    yield Elementwise(
        role="lora-sum", rows=op.tokens, width=op.outputs, count=op.count, section=op.section, forward_runs=op.forward_runs,
        forward_tensors=3, backward_tensors=2 + 3 * op.inputs / op.outputs,
    )  # fmt: skip


def _without_first_gradients(ops: Sequence[Op], layers: Mapping[str, int]) -> Iterator[Op]:
    """With LoRA, nothing before the first adapter needs a gradient: linears before it, and those that read the same tensor,
    run without dgrad in the first layer."""
    first = next(place for place, op in enumerate(ops) if op.role == ADAPTERS[0])
    begins = cast(Linear, ops[first])
    for place, op in enumerate(ops):
        before = place < first or (op.section == begins.section and isinstance(op, Linear) and op.tensor == begins.tensor)
        if not isinstance(op, Linear) or not before:
            yield op
            continue
        once = op.count // layers.get(op.section, 1)
        yield replace(op.running("fprop", "wgrad"), count=once)
        if op.count > once:
            yield replace(op, count=op.count - once)


def with_lora(workload: Workload, run: RunSpec, name: str) -> Workload:
    """The workload with frozen weights and adapters, if the run has LoRA; a `UserError` if nothing can have adapters."""
    if run.lora is None:
        return workload
    ops = tuple(with_adapters(workload.ops, run))
    linears = [op for op in ops if isinstance(op, Linear)]
    adapted = dict.fromkeys(op.label.removesuffix(f" {op.facts.name}") for op in linears if op.role == ADAPTERS[0])
    if not adapted:
        known = {part for op in linears for part in (op.block.lower().replace(" ", "-"), op.key) if part}
        asked = f"{option('lora_linears', ','.join(run.lora_linears))} names no linear of {name}"
        raise UserError(
            asked if run.lora_linears else f"{option('lora', run.lora)}: {name} has no linears that adapters can be added to",
            f"its linears: {', '.join(sorted(known))}" if known else "gemmscope shapes lists what it runs",
        )
    if workload.layers and workload.stage == 0:
        ops = tuple(_without_first_gradients(ops, workload.layers))
    trained = sum(op.trained_parameters for op in linears)
    every = trained + sum(op.updated for op in ops if isinstance(op, Optimizer))
    about = finding("lora", rank=run.lora, ops=list(adapted), trained=trained / 1e6, share=trained / every)
    ops = tuple(replace(op, updated=trained) if isinstance(op, Optimizer) else op for op in ops)
    return replace(workload, ops=ops, findings=(*workload.findings, about))


def derive(model: ModelSpec, run: RunSpec) -> Workload:
    """The operations one rank runs for one micro-batch, forward and backward, and the optimizer's for one step.

    >>> from gemmscope.model.spec import from_hyperparameters
    >>> model = from_hyperparameters(hidden_size=4096, intermediate_size=16384, num_attention_heads=32, num_hidden_layers=24)
    >>> workload = derive(model, RunSpec(micro_batch_size=31, sequence_length=512))
    >>> [gemm.shape for gemm in workload.gemms()][:3]
    ['15872x4096x12288', '15872x12288x4096', '4096x15872x12288']
    """
    sharding.check(model, run)
    bounds = sharding.stage_layers(model, run)
    stages = _different_stages(model, run, bounds) if run.pp_stage is None else [run.pp_stage]
    candidates = [(tuple(_stage(model, run, stage, *bounds[stage])), stage) for stage in stages]
    ops, stage = max(candidates, key=lambda pair: sum(op.total().flops for op in pair[0]))
    parameters = sum(op.all_parameters for op in ops)
    optimizer = Optimizer(role="optimizer", section=STEP, updated=parameters)
    layers = {section: count for section, _, count in _sections(model, *bounds[stage])}
    if model.prediction_layers and stage == run.pp - 1:
        layers[PREDICTION] = model.prediction_layers
    return with_lora(Workload((*ops, optimizer), stage, tuple(_findings(model, run, stage, ops)), layers), run, model.name)


def _different_stages(model: ModelSpec, run: RunSpec, bounds: list[tuple[int, int]]) -> list[int]:
    """The first of every kind of pipeline stage: there may be thousands, and most are equal."""
    kinds: dict[tuple[bool, bool, tuple[tuple[LayerSpec, int], ...]], int] = {}
    for stage, (first, last) in enumerate(bounds):
        kinds.setdefault((stage == 0, stage == run.pp - 1, tuple(model.layer_groups(first, last))), stage)
    return list(kinds.values())


def _findings(model: ModelSpec, run: RunSpec, stage: int, ops: tuple[Op, ...]) -> Iterator[Finding]:
    if run.pp > 1 and run.pp_stage is None:
        yield finding("pipeline-stage-chosen", stage=stage, last=run.pp - 1)
    padded = {op.padding for op in ops if isinstance(op, Linear) and op.padding}
    if padded and model.vocab_size is not None:
        yield finding("vocabulary-padded", size=model.vocab_size, padded=sharding.padded_vocab(model.vocab_size, run))
    replicated = dict.fromkeys(op.name for op in ops if op.copies > 1 and isinstance(op, Linear))
    if replicated:
        yield finding("linears-replicated", ops=list(replicated))
    if run.ep > 1:
        yield finding("experts-shared", ranks=run.ep)
    if run.imbalance != 1.0 and run.ep > 1:
        yield finding("busiest-experts", imbalance=run.imbalance)
    if 0 < model.positions < run.sequence_length:
        yield finding("positions-exceeded", positions=model.positions, sequence=run.sequence_length)


def _stage(model: ModelSpec, run: RunSpec, stage: int, first: int, last: int) -> Iterator[Op]:
    """One pipeline stage, layers[first:last]: the first stage also has the embedding, the last one the head."""
    if stage == 0:
        yield from embedding_ops(model, run)
    for section, layer, count in _sections(model, first, last):
        for op in layer_ops(model, layer, run):
            yield replace(op, count=op.count * count, section=section)
    if stage == run.pp - 1:
        yield from head_ops(model, run)
        yield from prediction_ops(model, run)


def _sections(model: ModelSpec, first: int, last: int) -> list[tuple[str, LayerSpec, int]]:
    """The kinds of layers among these, each with a name that distinguishes it from the others, and how many there are:
    `MoE layer`, `layer, window 4096`, `Mamba-2 layer`."""
    groups = list(model.layer_groups(first, last))
    features, names = [_features(layer) for layer, _ in groups], list[str]()
    plain, differ = all(layer.is_plain for layer, _ in groups), len({layer.is_moe for layer, _ in groups}) > 1
    for (layer, _), own in zip(groups, features, strict=True):
        kind = ("MoE layer" if layer.is_moe else "dense layer") if differ else "layer"
        parts = [kind if plain else f"{layer.kind} layer"]
        parts += [text for key, text in own.items() if text and len({others[key] for others in features if key in others}) > 1]
        names.append(", ".join(parts))
    letters = [f" {ascii_lowercase[names[:place].count(name) % 26]}" for place, name in enumerate(names)]
    unique = [name + letter if names.count(name) > 1 else name for name, letter in zip(names, letters, strict=True)]
    return [(name, *group) for name, group in zip(unique, groups, strict=True)]


def layers_by_section(model: ModelSpec, first: int, last: int) -> dict[str, list[int]]:
    """The places of these layers in the model, by the section that their ops have."""
    sections = {layer: section for section, layer, _ in _sections(model, first, last)}
    result: dict[str, list[int]] = {section: [] for section in sections.values()}
    for place, layer in enumerate(model.layers[first:last], start=first):
        result[sections[layer]].append(place)
    return result


def _features(layer: LayerSpec) -> dict[str, str]:
    """What may distinguish a layer from others of its kind: what its attention sees, whose keys it uses, its MLP."""
    features, spec = dict[str, str](), layer.attention
    if spec is not None:
        reach = f"window {spec.window}" if spec.window else "full attention"
        if spec.compressed is not None and spec.compressed.rate:
            reach = f"{spec.compressed.rate} to 1 compressed"
        features = {"reach": f"chunk {spec.chunk}" if spec.chunk else reach, "keys": "shared keys" if spec.shares_kv else ""}
    if isinstance(layer.mlp, MlpSpec):
        sparse = "sparse activation" if layer.mlp.sparse else ""
        features |= {"width": f"intermediate {layer.mlp.intermediate_size}", "activation": sparse}
    if layer.shared_block is not None:
        features["shared block"] = f"shared block {layer.shared_block + 1}"
    return features


def embedding_ops(model: ModelSpec, run: RunSpec) -> Iterator[Op]:
    """What comes before the first layer."""
    if model.vocab_size is None:
        return
    vocab, width = sharding.padded_vocab(model.vocab_size, run) // run.tp, model.embedding_width
    position_width = model.hidden_size if model.positions_on_hidden else width
    tables = vocab * width + model.positions * position_width + model.token_types * width + model.unused_parameters
    yield Embedding(role="embedding", section=EMBEDDING, tokens=run.tokens, vocab=vocab, width=width, parameters=tables)
    if model.embedding_norm:
        yield norm(model, run, "embedding-norm", width, EMBEDDING)
    if model.embedding_size is not None and model.embedding_size != model.hidden_size:
        bias = model.embedding_projection_bias
        yield linear("embedding-in", run, width, model.hidden_size, bias=bias, section=EMBEDDING, copies=run.tp)
    if model.layer_inputs is not None:
        rows, inputs = model.layer_inputs.vocab_size, model.layer_inputs.width * len(model.layers)
        yield Embedding(
            role="layer-inputs", section=EMBEDDING, tokens=run.tokens, vocab=rows, width=inputs, parameters=rows * inputs
        )
    for extra in model.first_linears:
        yield replace(_beside(extra, run), section=EMBEDDING)
    if model.layer_inputs is not None:  # those of all layers are normed together
        inputs_norm = norm(model, run, "layer-input-norm", model.layer_inputs.width, EMBEDDING)
        yield replace(inputs_norm, rows=inputs_norm.rows * len(model.layers))


def layer_ops(model: ModelSpec, layer: LayerSpec, run: RunSpec) -> Iterator[Op]:
    """The operations of a layer, in order. `forward_runs` is 2 for recomputed ones, less for a share of the layers."""
    norms = [replace(norm(model, run, "norm", model.hidden_size), count=layer.norms)] if layer.norms else []
    gemms, runs = 0, 2 if run.recompute_share == 1 else 1 + run.recompute_share
    for op in (*norms, *_blocks(model, layer, run)):
        gemms += isinstance(op, Linear) and not isinstance(op, GroupedLinear)
        yield replace(op, forward_runs=runs) if _recomputed(op, run, gemms) else op


def _recomputed(op: Op, run: RunSpec, gemms: int) -> bool:
    """Whether backward runs an op again. `gemms`: how many plain linears the layer has run until then."""
    if run.recompute != "selective":
        return run.recompute == "full"
    if EVERY_SECOND in run.recompute_modules:
        plain = isinstance(op, Linear) and not isinstance(op, GroupedLinear)
        return not isinstance(op, Attention) and not (plain and gemms % 2)
    return any(op.role in recomputed_facts()["modules"][name] for name in run.recompute_modules or ("core_attn",))


def _blocks(model: ModelSpec, layer: LayerSpec, run: RunSpec) -> Iterator[Op]:
    """What a layer adds to its input: attention or a mixer, then the feed-forward block; and linears beside them."""
    if layer.shared_block is not None:
        yield from _shared_block(model, layer, run)
        layer = replace(layer, attention=None, mlp=None)
    mlp = layer.mlp
    if layer.streams is not None:
        yield from stream_ops(model, layer.streams, run)
    if layer.earlier_states is not None:
        yield replace(earlier_states(run, model.hidden_size, layer.earlier_states + 1), count=2)
    if layer.attention is not None:
        yield from _attention(model, layer.attention, run)
    if layer.mixer is not None:
        yield from mixer_ops(model, layer.mixer, run)
    mixed = layer.streams is not None and layer.streams.kind == "hyper-connections"  # which add the outputs of blocks themselves
    if (layer.attention is not None or layer.mixer is not None) and not mixed:
        yield replace(residual(model, run), parameters=layer.extra_parameters)
    for extra in layer.extra:
        yield _beside(extra, run)
    if mlp is not None:
        yield from _moe(model, mlp, run) if isinstance(mlp, MoeSpec) else _feed_forward(model, mlp, run, "mlp", run.tp)
        if not mixed:
            yield residual(model, run)
    yield from layer_input_ops(model, layer, run)


def earlier_states(run: RunSpec, hidden: int, states: float) -> Elementwise:
    """A mean of several states, weighted by their scores: the product of each one's norm with a vector."""
    rows, copies = shard_rows(run)
    return Elementwise(
        role="earlier-states", rows=rows, width=hidden, copies=copies, parameters=2 * hidden, forward_tensors=states + 1,
        backward_tensors=2 * states + 1, forward_flops=6 * states, backward_flops=12 * states, kept_tensors=0,
    )  # fmt: skip


def _beside(one: LinearSpec, run: RunSpec) -> Linear:
    """A linear that tensor parallelism does not split."""
    return replace(linear(one.role, run, one.inputs, one.outputs, bias=one.bias, copies=run.tp), count=one.count)


def _shared_block(model: ModelSpec, layer: LayerSpec, run: RunSpec) -> Iterator[Op]:
    """Attention and a feed-forward block whose weights several layers use. Its output is added to the mixer's input."""
    ops: list[Op] = []
    if layer.attention is not None:
        width = layer.attention.input_size or model.hidden_size
        ops += [norm(model, run, "attention-norm", width), *_attention(model, layer.attention, run)]
    if isinstance(layer.mlp, MlpSpec):
        ops += [norm(model, run, "mlp-norm", model.hidden_size), *_feed_forward(model, layer.mlp, run, "mlp", run.tp)]
    yield from (replace(op, shares_weights=True) for op in ops)
    yield residual(model, run)


def _attention(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    if spec.compressed is not None:
        yield from compressed_attention(model, spec, run)
        return
    yield from _latent_projections(model, spec, run) if spec.latent else _projections(model, spec, run)
    if spec.qk_norm is not None:
        yield _qk_norm(model, spec, run)
    if spec.rotary:
        rotated = (spec.rotary_dim or spec.head_dim) * (spec.heads + (0 if spec.shares_kv else spec.kv_heads))
        width = (spec.latent.rope_dim * (spec.heads + 1) if spec.latent else rotated) // run.tp
        yield Elementwise(
            role="rotary", rows=run.tokens, width=width, forward_tensors=2, backward_tensors=2, forward_flops=3, backward_flops=3
        )
    if spec.temperature:
        yield Elementwise(
            role="attention-temperature", rows=run.tokens, width=spec.q_width // run.tp, forward_tensors=2, backward_tensors=2
        )
    pairs = visible_pairs(run.sequence_length, causal=spec.causal, window=spec.window, chunk=spec.chunk)
    attention = Attention(
        role="attention", batch=run.micro_batch_size, heads=spec.heads // run.tp, kv_heads=spec.kv_heads // run.tp,
        queries=run.sequence_length // run.cp, keys=run.sequence_length, head_dim=spec.head_dim, value_dim=spec.value_head_dim,
        pairs=pairs / run.cp, causal=spec.causal, window=spec.window or spec.chunk, shares_kv=spec.shares_kv,
        parameters=spec.heads // run.tp if spec.sinks else 0,
    )  # fmt: skip
    if spec.top_k is not None:
        chosen = visible_pairs(run.sequence_length, causal=spec.causal, window=spec.top_k) / run.cp
        if spec.indexer is not None:
            yield from indexer_ops(model, spec, run, attention.pairs, chosen)
        attention = sparse(attention, spec, chosen)
    yield attention
    if spec.gate_width:
        yield linear("attention-gate-proj", run, model.hidden_size, spec.gate_width // run.tp)
    if spec.gated or spec.gate_width:
        yield Elementwise(
            role="attention-gate", rows=run.tokens, width=spec.out_width // run.tp, forward_tensors=3, backward_tensors=5,
            forward_flops=5, backward_flops=8, kept_tensors=1,  # the context is kept by attention
        )  # fmt: skip
    yield linear("attention-out", run, spec.out_width // run.tp, model.hidden_size, bias=spec.out_bias)


def _projections(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    """Q, K and V: one GEMM (Transformer Engine, Megatron) or three (Hugging Face), split by heads."""
    parts = [
        ("q-proj", spec.q_proj_width // run.tp, spec.qkv_bias),
        ("k-proj", spec.k_width // run.tp, spec.qkv_bias),
        ("v-proj", spec.v_width // run.tp, spec.qkv_bias),
    ]
    parts = parts[: 1 if spec.shares_kv else 2 if spec.values_are_keys else 3]
    inputs = spec.input_size or model.hidden_size
    if run.separate_projections and not spec.stored_fused:
        for role, width, bias in parts:
            yield linear(role, run, inputs, width, bias=bias)
    else:
        biased = sum(width for _, width, bias in parts if bias)
        yield linear(
            "".join(role[0] for role, _, _ in parts) + "-proj", run, inputs, sum(width for _, width, _ in parts), bias=biased
        )


def _latent_projections(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    """Latent attention: down to the bottleneck on every rank, a norm, and up to this rank's heads."""
    assert spec.latent is not None
    latent, heads, down_bias, up_bias = spec.latent, spec.heads // run.tp, spec.latent.down_bias, spec.qkv_bias
    queries, keys = heads * spec.head_dim, heads * (spec.head_dim - latent.rope_dim + spec.value_head_dim)
    if latent.q_rank is None:
        yield linear("q-proj", run, model.hidden_size, queries, bias=up_bias)
    else:
        yield from bottleneck(model, run, "q", latent.q_rank, queries, down_bias=down_bias, up_bias=up_bias)
    yield from bottleneck(model, run, "kv", latent.kv_rank, keys, beside=latent.rope_dim, down_bias=down_bias, up_bias=up_bias)


def _feed_forward(
    model: ModelSpec, spec: MlpSpec, run: RunSpec, block: str, tp: int, rows: tuple[int, ...] = (), inputs: int | None = None
) -> Iterator[Op]:
    """Up, activation, down; with `rows`, a grouped GEMM over that many experts. Gate and up are one GEMM by default."""
    width, hidden = spec.intermediate_size // tp, inputs or model.hidden_size
    tokens = sum(rows) if rows else run.tokens
    separate = run.separate_projections and not spec.stored_fused
    ups = [f"{block}-gate", f"{block}-up"] if spec.gated and separate else [f"{block}-gate-up" if spec.gated else f"{block}-up"]
    for up in ups:
        outputs = width * (2 if spec.gated and not separate else 1)
        yield linear(up, run, hidden, outputs, bias=spec.up_bias, rows=rows)
    if spec.sparse:
        yield Elementwise(
            role=f"{block}-sparsity", rows=tokens, width=width, forward_tensors=4, backward_tensors=3, forward_flops=8,
            backward_flops=6,
        )  # fmt: skip
    learned = 2 if spec.activation == "xielu" else 0  # the slopes of its two halves
    activation = Activation(role=f"{block}-activation", rows=tokens, width=width, parameters=learned)
    if spec.gated:  # reads gate and up and writes one result; backward also writes both gradients
        activation = replace(activation, forward_tensors=3, backward_tensors=5, forward_flops=9, backward_flops=15)
    yield activation
    yield linear(f"{block}-down", run, width, hidden, bias=spec.down_bias, rows=rows)


def _moe(model: ModelSpec, spec: MoeSpec, run: RunSpec) -> Iterator[Op]:
    """Router, token dispatch, the experts' grouped GEMMs, token combine; and the shared expert."""
    hidden = model.hidden_size
    yield on_sequence_shard(linear("moe-router", run, hidden, spec.experts + spec.zero_experts, bias=spec.router_bias), run)
    rows = sharding.expert_rows(spec, run)
    sent = spec.computed(run.tokens * spec.top_k * run.expert_tp // run.tp)
    width = spec.latent or hidden
    move = Elementwise(role="token-dispatch", rows=sent, width=width, forward_tensors=2, backward_tensors=2, forward_flops=0)
    if spec.latent is not None:
        yield on_sequence_shard(linear("latent-down", run, hidden, width, bias=spec.latent_bias), run)
    yield move
    yield from _feed_forward(model, spec.expert, run, "expert", run.expert_tp, rows, width)
    yield replace(move, role="token-combine")
    if spec.latent_norm:
        yield norm(model, run, "latent-norm", width)
    if spec.latent is not None:
        yield on_sequence_shard(linear("latent-up", run, width, hidden, bias=spec.latent_bias), run)
    if spec.shared is not None:
        yield from _feed_forward(model, spec.shared, run, "shared-expert", run.tp)
    if spec.shared_gate:
        yield on_sequence_shard(linear("shared-expert-scale", run, hidden, 1), run)


def head_ops(model: ModelSpec, run: RunSpec) -> Iterator[Op]:
    """What comes after the last layer: norm, vocabulary, loss."""
    for extra in model.last_linears:
        yield replace(_beside(extra, run), section=HEAD)
    if model.final_norm:
        yield norm(model, run, "final-norm", model.hidden_size, HEAD)
    if model.vocab_size is None:
        return
    hidden, width = model.hidden_size, model.embedding_width
    if model.head_transform:
        yield linear("head-transform", run, hidden, width, bias=model.head_transform_bias, section=HEAD, copies=run.tp)
        yield norm(model, run, "head-norm", width, HEAD)
    elif width != hidden:
        yield linear("embedding-out", run, hidden, width, bias=model.embedding_projection_bias, section=HEAD, copies=run.tp)
    vocab = sharding.padded_vocab(model.vocab_size, run)
    head = linear("lm-head", run, width, vocab // run.tp, bias=model.head_bias, section=HEAD)
    is_tied = model.tied_embeddings and run.pp == 1  # a later stage has its own copy of the table
    # So do prediction layers, which embed tokens again.
    needs_table = model.prediction_layers > 0 and run.pp > 1 and not model.tied_embeddings
    copies = int(needs_table) - int(is_tied)
    yield replace(head, padding=(vocab - model.vocab_size), parameters=head.parameters + copies * width * (vocab // run.tp))
    yield Loss(role="loss", section=HEAD, rows=run.tokens, width=vocab // run.tp)


def prediction_ops(model: ModelSpec, run: RunSpec) -> Iterator[Op]:
    """The layers of multi-token prediction, if the model has any: each predicts one token further than the one before.

    As in the DeepSeek-V3 report (arXiv 2412.19437, section 2.2) and Megatron's MultiTokenPredictionLayer: the output of the layer
    before and the embedding of the next token are normed, concatenated and projected; a whole layer, in most models of the last
    kind, and a norm follow, and the vocabulary with another loss. Embedding and vocabulary are those of the model.
    """
    count, hidden = model.prediction_layers, model.hidden_size
    if not count:
        return
    if model.vocab_size is not None:
        vocab, width = sharding.padded_vocab(model.vocab_size, run) // run.tp, model.embedding_width
        yield Embedding(role="embedding", section=PREDICTION, count=count, tokens=run.tokens, vocab=vocab, width=width)
    norms = replace(norm(model, run, "prediction-norm", hidden), count=3)
    for op in (norms, linear("prediction-proj", run, 2 * hidden, hidden // run.tp), *layer_ops(model, model.predicting, run)):
        own = 1 if model.prediction_shared else count
        yield replace(op, count=op.count * own, section=PREDICTION)
        if count > own:
            yield replace(op, count=op.count * (count - own), section=PREDICTION, parameters=0)
    for op in head_ops(replace(model, final_norm=False), run):
        yield replace(op, count=op.count * count, parameters=0)


def _qk_norm(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Norm:
    heads = (spec.heads + (0 if spec.shares_kv else spec.kv_heads)) // run.tp
    weights = {"head": (1 if spec.shares_kv else 2) * spec.head_dim}.get(str(spec.qk_norm), heads * spec.head_dim)
    parameters = weights * (spec.qk_norm_weight * model.norm.weight + spec.qk_norm_bias)
    normed = heads + (spec.kv_heads // run.tp if spec.v_norm and not spec.shares_kv else 0)
    return Norm(role="qk-norm", rows=run.tokens * normed, width=spec.head_dim, parameters=parameters)
