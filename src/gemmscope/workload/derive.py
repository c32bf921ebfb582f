"""Derives the operations of one micro-batch on one rank from a model and a run, in closed form.

Read `layer_ops` first: it lists the operations of a transformer layer in the order they run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from gemmscope.findings import Finding, finding
from gemmscope.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RunSpec
from gemmscope.workload import sharding
from gemmscope.workload.mixers import mixer_ops
from gemmscope.workload.ops import (
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

EMBEDDING, HEAD, STEP = "embedding", "head", "step"


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
        return sum(op.parameters * op.count for op in self.ops)


def derive(model: ModelSpec, run: RunSpec) -> Workload:
    """The operations one rank runs for one micro-batch, forward and backward, and the optimizer's for one step.

    >>> from gemmscope.model.flags import from_hyperparameters
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
    parameters = sum(op.parameters * op.count for op in ops)
    optimizer = Optimizer(name="Optimizer", section=STEP, updated=parameters)
    layers = {section: count for section, _, count in _sections(model, *bounds[stage])}
    return Workload((*ops, optimizer), stage, tuple(_findings(model, run, stage, ops)), layers)


def _different_stages(model: ModelSpec, run: RunSpec, bounds: list[tuple[int, int]]) -> list[int]:
    """The first of every kind of pipeline stage: there may be thousands, and most are equal."""
    if run.pp < 3:
        return list(range(run.pp))
    numbers: dict[LayerSpec, int] = {}
    by_id = {id(layer): layer for layer in model.layers}  # most models repeat one object: hash it once
    known = {key: numbers.setdefault(layer, len(numbers)) for key, layer in by_id.items()}
    order = [known[id(layer)] for layer in model.layers]
    kinds: dict[tuple[bool, bool, tuple[int, ...]], int] = {}
    for stage, (first, last) in enumerate(bounds):
        kinds.setdefault((stage == 0, stage == run.pp - 1, tuple(order[first:last])), stage)
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


def _sections(model: ModelSpec, first: int, last: int) -> list[tuple[str, LayerSpec, int]]:
    """The kinds of layers among these, each with a name that distinguishes it from the others, and how many there are."""
    groups = list(model.layer_groups(first, last))
    layers = [layer for layer, _ in groups]
    return [(_section(layers, layer), layer, count) for layer, count in groups]


def _section(layers: list[LayerSpec], layer: LayerSpec) -> str:
    """A name for this kind of layer that distinguishes it from the others: `MoE layer`, `layer, window 4096`, `Mamba-2 layer`."""
    if all(other.is_plain for other in layers):
        kind = ("MoE layer" if layer.is_moe else "dense layer") if len({other.is_moe for other in layers}) > 1 else "layer"
    else:
        kind = f"{layer.kind} layer"
    windows = {other: other.attention.window if other.attention is not None else None for other in layers}
    if layer.attention is not None and len({windows[other] for other in layers if other.attention is not None}) > 1:
        kind += f", window {windows[layer]}" if windows[layer] else ", full attention"
    similar = [other for other in layers if other.kind == layer.kind and windows[other] == windows[layer]]
    return kind if len(similar) == 1 else f"{kind} {'abcdefghijklmnopqrstuvwxyz'[similar.index(layer) % 26]}"


def embedding_ops(model: ModelSpec, run: RunSpec) -> Iterator[Op]:
    """What comes before the first layer."""
    if model.vocab_size is None:
        return
    vocab, width = sharding.padded_vocab(model.vocab_size, run) // run.tp, model.embedding_width
    position_width = model.hidden_size if model.positions_on_hidden else width
    tables = vocab * width + model.positions * position_width + model.token_types * width + model.unused_parameters
    yield Embedding(name="Embedding", section=EMBEDDING, tokens=run.tokens, vocab=vocab, width=width, parameters=tables)
    if model.embedding_norm:
        yield _norm(model, run, "Embedding Norm", width, EMBEDDING)
    if model.embedding_size is not None and model.embedding_size != model.hidden_size:
        yield replace(_embedding_projection(model, run, "Embedding In Proj", width, model.hidden_size), section=EMBEDDING)


def _embedding_projection(model: ModelSpec, run: RunSpec, name: str, inputs: int, outputs: int) -> Linear:
    """Between an embedding and a hidden size that differ, the same on every tensor-parallel rank."""
    return replace(_linear(name, run, inputs, outputs, bias=model.embedding_projection_bias), copies=run.tp)


def layer_ops(model: ModelSpec, layer: LayerSpec, run: RunSpec) -> Iterator[Op]:
    """The operations of one layer in the order they run. `forward_runs` is 2 for recomputed ones."""
    runs = 2 if run.recompute == "full" else 1
    if layer.norms:
        yield replace(_norm(model, run, "Norm", model.hidden_size), count=layer.norms, forward_runs=runs)
    for op in _blocks(model, layer, run):
        repeated = runs == 2 or (run.recompute == "selective" and isinstance(op, Attention))
        yield replace(op, forward_runs=2 if repeated else 1)


def _blocks(model: ModelSpec, layer: LayerSpec, run: RunSpec) -> Iterator[Op]:
    """What a layer adds to its input: attention or a mixer, then the feed-forward block; and linears beside them."""
    mlp = layer.mlp
    if layer.attention is not None:
        yield from _attention(model, layer.attention, run)
    if layer.mixer is not None:
        yield from mixer_ops(model, layer.mixer, run)
    if layer.attention is not None or layer.mixer is not None:
        yield replace(_residual(model, run), parameters=layer.extra_parameters)
    for one in layer.extra:
        linear = _linear(one.name, run, one.inputs, one.outputs, bias=one.bias)
        yield replace(linear, count=one.count, quantized=one.quantized, copies=run.tp)
    if mlp is not None:
        yield from _moe(model, mlp, run) if isinstance(mlp, MoeSpec) else _feed_forward(model, mlp, run, "MLP", run.tp)
        yield _residual(model, run)


def _attention(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    yield from _latent_projections(model, spec, run) if spec.latent else _projections(model, spec, run)
    if spec.qk_norm is not None:
        yield _qk_norm(model, spec, run)
    if spec.rotary:
        width = (spec.latent.rope_dim * (spec.heads + 1) if spec.latent else spec.q_width + spec.k_width) // run.tp
        yield Elementwise(
            name="Rotary", rows=run.tokens, width=width, forward_tensors=2, backward_tensors=2, forward_flops=3, backward_flops=3
        )
    queries = run.sequence_length // run.cp
    yield Attention(
        name="Attention", batch=run.micro_batch_size, heads=spec.heads // run.tp, kv_heads=spec.kv_heads // run.tp,
        queries=queries, keys=run.sequence_length, head_dim=spec.head_dim, value_dim=spec.value_head_dim,
        pairs=visible_pairs(run.sequence_length, causal=spec.causal, window=spec.window) / run.cp,
        causal=spec.causal, window=spec.window, parameters=spec.heads // run.tp if spec.sinks else 0,
    )  # fmt: skip
    yield _linear("Attn Out", run, spec.out_width // run.tp, model.hidden_size, bias=spec.out_bias)


def _projections(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    """Q, K and V: one GEMM (Transformer Engine, Megatron) or three (Hugging Face), split by heads."""
    parts = [
        ("Q Proj", spec.q_width // run.tp, spec.q_bias),
        ("K Proj", spec.k_width // run.tp, spec.k_bias),
        ("V Proj", spec.v_width // run.tp, spec.v_bias),
    ]
    if run.separate_projections and not spec.stored_fused:
        for name, width, bias in parts:
            yield _linear(name, run, model.hidden_size, width, bias=bias)
    else:
        biased = sum(width for _, width, bias in parts if bias)
        yield _linear("QKV Proj", run, model.hidden_size, sum(width for _, width, _ in parts), bias=biased)


def _latent_projections(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Iterator[Op]:
    """Latent attention: down to the bottleneck on every rank, a norm, and up to this rank's heads."""
    assert spec.latent is not None
    latent, heads, hidden = spec.latent, spec.heads // run.tp, model.hidden_size
    # The norms run on the output tokens of the projections before them.
    narrow = replace(run, sequence_parallel=run.sequence_parallel and run.sequence_parallel_linears)
    if latent.q_rank is None:
        yield _linear("Q Proj", run, hidden, heads * spec.head_dim, bias=spec.q_bias)
    else:
        yield _on_sequence_shard(_linear("Q Down Proj", run, hidden, latent.q_rank, bias=latent.down_bias), run)
        yield _norm(model, narrow, "Q Latent Norm", latent.q_rank)
        yield _linear("Q Up Proj", run, latent.q_rank, heads * spec.head_dim, bias=spec.q_bias)
    down = _linear("KV Down Proj", run, hidden, latent.kv_rank + latent.rope_dim, bias=latent.down_bias)
    yield _on_sequence_shard(down, run)
    yield _norm(model, narrow, "KV Latent Norm", latent.kv_rank)
    key_value = spec.head_dim - latent.rope_dim + spec.value_head_dim
    yield _linear("KV Up Proj", run, latent.kv_rank, heads * key_value, bias=spec.k_bias)


def _feed_forward(model: ModelSpec, spec: MlpSpec, run: RunSpec, name: str, tp: int, rows: tuple[int, ...] = ()) -> Iterator[Op]:
    """Up, activation, down; with `rows`, a grouped GEMM over that many experts. Gate and up are one GEMM by default."""
    width, hidden = spec.intermediate_size // tp, model.hidden_size
    tokens = sum(rows) if rows else run.tokens
    separate = run.separate_projections and not spec.stored_fused
    ups = [f"{name} Gate", f"{name} Up"] if spec.gated and separate else [f"{name} Gate+Up" if spec.gated else f"{name} Up"]
    for up in ups:
        outputs = width * (2 if spec.gated and not separate else 1)
        yield _linear(up, run, hidden, outputs, bias=spec.up_bias, rows=rows)
    learned = 2 if spec.activation == "xielu" else 0  # the slopes of its two halves
    activation = Activation(name=f"{name} Activation", rows=tokens, width=width, function=spec.activation, parameters=learned)
    if spec.gated:  # reads gate and up and writes one result; backward also writes both gradients
        activation = replace(activation, forward_tensors=3, backward_tensors=5, forward_flops=9, backward_flops=15)
    yield activation
    yield _linear(f"{name} Down", run, width, hidden, bias=spec.down_bias, rows=rows)


def _moe(model: ModelSpec, spec: MoeSpec, run: RunSpec) -> Iterator[Op]:
    """Router, token dispatch, the experts' grouped GEMMs, token combine; and the shared expert."""
    hidden = model.hidden_size
    router = _linear("Router", run, hidden, spec.experts, bias=spec.router_bias)
    yield _on_sequence_shard(replace(router, quantized=False), run)
    rows = sharding.expert_rows(spec, run)
    sent = run.tokens * spec.top_k * run.expert_tp // run.tp
    move = Elementwise(name="Token Dispatch", rows=sent, width=hidden, forward_tensors=2, backward_tensors=2, forward_flops=0)
    yield move
    yield from _feed_forward(model, spec.expert, run, "Expert", run.expert_tp, rows)
    yield replace(move, name="Token Combine")
    if spec.shared is not None:
        yield from _feed_forward(model, spec.shared, run, "Shared Expert", run.tp)
        if spec.shared_gate:
            yield _on_sequence_shard(replace(_linear("Shared Expert Scale", run, hidden, 1), quantized=False), run)


def head_ops(model: ModelSpec, run: RunSpec) -> Iterator[Op]:
    """What comes after the last layer: norm, vocabulary, loss."""
    if model.final_norm:
        yield _norm(model, run, "Final Norm", model.hidden_size, HEAD)
    if model.vocab_size is None or not model.head_output:
        return
    width = model.hidden_size
    if model.head_transform:
        transform = _linear("Head Transform", run, width, model.embedding_width, bias=model.head_transform_bias, section=HEAD)
        yield replace(transform, copies=run.tp)
        yield _norm(model, run, "Head Norm", model.embedding_width, HEAD)
    elif model.embedding_width != model.hidden_size:
        yield replace(_embedding_projection(model, run, "Embedding Out Proj", width, model.embedding_width), section=HEAD)
    vocab = sharding.padded_vocab(model.vocab_size, run)
    head = _linear("LM Head", run, model.embedding_width, vocab // run.tp, bias=model.head_bias, section=HEAD)
    is_tied = model.tied_embeddings and run.pp == 1  # a later stage has its own copy of the table
    shared = model.embedding_width * (vocab // run.tp) if is_tied else 0
    yield replace(head, padding=(vocab - model.vocab_size), parameters=head.parameters - shared)
    yield Loss(name="Loss", section=HEAD, rows=run.tokens, width=vocab // run.tp)


def _linear(
    name: str, run: RunSpec, inputs: int, outputs: int, *, bias: bool | int = False, rows: tuple[int, ...] = (), section: str = ""
) -> Linear:
    """A linear on all tokens of this rank, or on its experts' rows. `bias`: yes, no, or the number of outputs that have one."""
    parameters = inputs * outputs + (outputs if bias is True else int(bias))
    if rows:
        parameters *= len(rows)
        return GroupedLinear(name=name, tokens=sum(rows), rows=rows, inputs=inputs, outputs=outputs, parameters=parameters)
    return Linear(name=name, tokens=run.tokens, inputs=inputs, outputs=outputs, parameters=parameters, section=section)


def _on_sequence_shard(linear: Linear, run: RunSpec) -> Linear:
    """A linear that tensor parallelism does not split: on this rank's share of the sequence, or the same on every rank."""
    if run.sequence_parallel and run.sequence_parallel_linears:
        return replace(linear, tokens=linear.tokens // run.tp)
    return replace(linear, copies=run.tp)


def _shard_rows(run: RunSpec) -> tuple[int, int]:
    """(tokens, copies) of the operations between the tensor-parallel blocks."""
    return (run.tokens // run.tp, 1) if run.sequence_parallel else (run.tokens, run.tp)


def _norm(model: ModelSpec, run: RunSpec, name: str, width: int, section: str = "") -> Norm:
    rows, copies = _shard_rows(run)
    return Norm(
        name=name, rows=rows, width=width, copies=copies, section=section,
        parameters=width * (model.norm.weight + model.norm.bias),
    )  # fmt: skip


def _qk_norm(model: ModelSpec, spec: AttentionSpec, run: RunSpec) -> Norm:
    heads = (spec.heads + spec.kv_heads) // run.tp
    weights = {"head": 2 * spec.head_dim, "each_head": heads * spec.head_dim, "full": heads * spec.head_dim}
    parameters = weights[str(spec.qk_norm)] * (model.norm.weight + spec.qk_norm_bias)
    return Norm(name="QK Norm", rows=run.tokens * heads, width=spec.head_dim, parameters=parameters)


def _residual(model: ModelSpec, run: RunSpec) -> Elementwise:
    rows, copies = _shard_rows(run)
    return Elementwise(
        name="Residual Add", rows=rows, width=model.hidden_size, copies=copies, forward_tensors=3, backward_tensors=3
    )


def visible_pairs(sequence: int, *, causal: bool, window: int | None) -> int:
    """How many (query, key) pairs the mask allows in one sequence.

    A causal query sees itself and the positions before it, at most `window` in total; a bidirectional one sees `window` // 2
    positions on either side of itself.

    >>> visible_pairs(4, causal=True, window=None), visible_pairs(4, causal=True, window=2)
    (10, 7)
    """
    if causal:
        reach = min(window or sequence, sequence)
        return reach * (reach + 1) // 2 + (sequence - reach) * reach
    if window is None:
        return sequence * sequence
    reach = min(window // 2, sequence - 1)
    return sequence * (2 * reach + 1) - reach * (reach + 1)
