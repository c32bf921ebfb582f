"""The operations of a mixer: projections, causal convolution, recurrence, gated norm, output projection.

Tensor parallelism splits heads and groups, as Megatron does. Frameworks run the input projections as one GEMM; the checkpoint's
own code may split them (`MixerSpec.stored`).

What recipes quantize: Megatron's `in_proj` (with the columns of gates, write strength and decay) and `out_proj`, both linears of
Transformer Engine (megatron/core/ssm/gated_delta_net.py, mamba_mixer.py). torchao and Transformer Engine's autocast convert every
linear of the checkpoint's code whose sides are multiples of 16: the bottlenecks of KDA's gates too.
"""

from collections.abc import Iterator
from dataclasses import replace

from gemmscope.model.layer_spec import MixerKind, MixerSpec
from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.ops import Activation, Elementwise, Norm, Op
from gemmscope.workload.rank_ops import linear
from gemmscope.workload.scans import Scan, causal_conv, scan_role


def mixer_ops(model: ModelSpec, spec: MixerSpec, run: RunSpec) -> Iterator[Op]:
    """All operations of one mixer on this rank, in the order they run."""
    part = replace(spec, heads=spec.heads // run.tp, groups=max(1, spec.groups // run.tp))
    yield from _inputs(model, part, run)
    if part.conv_kernel:
        channels = part.inner + (0 if part.kind in ("selective scan", "short convolution") else 2 * part.keys)
        weights = channels * (part.conv_kernel + part.conv_bias)
        yield causal_conv(run.tokens, channels, part.conv_kernel, weights)
    if part.kind == "lightning attention":  # without a convolution
        yield Activation(role="mixer-activation", rows=run.tokens, width=2 * part.keys + part.inner)
    if part.kind == "selective scan":  # the time step, B and C depend on the convolved values
        states = part.rank + 2 * part.key_dim
        yield linear("mixer-x", run, part.inner, states)
        if part.state_norm:
            weights = states if part.state_norm == "weighted" else 0
            yield Norm(role="mixer-state-norm", rows=run.tokens, width=states, parameters=weights)
        yield linear("mixer-time-step", run, part.rank, part.inner, bias=True)
    if part.kind != "short convolution":
        yield Scan(
            role=scan_role(part.kind), rule=part.kind, batch=run.micro_batch_size, sequence=run.sequence_length // run.cp,
            heads=part.heads, groups=part.groups, key_dim=part.key_dim, value_dim=part.value_dim, chunk=part.chunk,
            parameters=_scan_parameters(part),
        )  # fmt: skip
    if part.norm:
        weights = part.value_dim if part.norm == "head" else part.inner
        yield Norm(role="mixer-norm", rows=run.tokens, width=part.inner, parameters=weights)
    if part.gated:
        yield Elementwise(
            role="mixer-gate", rows=run.tokens, width=part.inner, forward_tensors=3, backward_tensors=5,
            forward_flops=6, backward_flops=10, kept_tensors=1, count=2 if part.kind == "short convolution" else 1,
        )  # fmt: skip
    yield linear("mixer-out", run, part.inner, model.hidden_size, bias=spec.out_bias)


def _inputs(model: ModelSpec, part: MixerSpec, run: RunSpec) -> Iterator[Op]:
    """The projections of the hidden state, as one GEMM or as stored."""
    widths = input_widths(part)
    pieces = part.stored if run.separate_projections and part.stored else ("".join(widths),)
    for piece in pieces:
        role = "mixer-in" if len(pieces) == 1 else f"mixer-in-{piece}"
        yield linear(role, run, model.hidden_size, sum(widths[letter] for letter in piece), bias=part.in_bias)
    if part.kind == "kda":  # the gates of decay and output go through a bottleneck
        for gate in ("decay", "output")[: 1 if part.full_rank_gate else 2]:
            yield linear(f"mixer-{gate}-gate-down", run, model.hidden_size, part.rank, copies=run.tp)
            yield linear(
                f"mixer-{gate}-gate-up", run, part.rank, part.heads * (part.key_dim if gate == "decay" else part.value_dim)
            )


COLUMNS: dict[MixerKind, str] = {
    "ssd": "zvkqa", "gated delta rule": "qkvzba", "kda": "qkvb", "lightning attention": "qkvz", "selective scan": "vz",
    "short convolution": "qkv",
}  # fmt: skip
"""What the input projection makes, in the order of the models' own code: queries, keys, values, output gate (z), write strength
(b), decay (a)."""


def input_widths(part: MixerSpec) -> dict[str, int]:
    """Columns of the input projection by letter. A short convolution gates its values before and after, by q and k."""
    keys = part.inner if part.kind == "short convolution" else part.keys
    widths = {"q": keys, "k": keys, "v": part.inner, "z": part.inner, "b": part.heads, "a": part.heads}
    columns = COLUMNS[part.kind] + ("z" if part.full_rank_gate else "")
    return {letter: widths[letter] for letter in columns if letter != "z" or part.gated}


def _scan_parameters(part: MixerSpec) -> int:
    """Vectors of the recurrence: decay, time step's bias, and the direct path (D) of state-space models."""
    heads, states = part.heads, part.inner * part.key_dim
    known = {"ssd": 3 * heads, "selective scan": states + part.inner, "gated delta rule": 2 * heads}
    return {**known, "kda": heads + heads * part.key_dim}.get(part.kind, 0)
