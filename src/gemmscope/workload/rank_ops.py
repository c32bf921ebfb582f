"""The operations that all kinds of layers consist of, with the sizes of one rank: linears, norms, and what a mask allows."""

from collections.abc import Iterator
from dataclasses import replace

from gemmscope.model.spec import ModelSpec, RunSpec
from gemmscope.workload.ops import Elementwise, GroupedLinear, Linear, Norm, Op


def linear(
    role: str, run: RunSpec, inputs: int, outputs: int, *, bias: bool | int = False, rows: tuple[int, ...] = (),
    section: str = "", copies: int = 1,
) -> Linear:  # fmt: skip
    """A linear on all tokens of this rank, or on its experts' rows. `bias`: yes, no, or the number of outputs that have one."""
    parameters = inputs * outputs + (outputs if bias is True else int(bias))
    if rows:
        parameters *= len(rows)
        return GroupedLinear(role=role, tokens=sum(rows), rows=rows, inputs=inputs, outputs=outputs, parameters=parameters)
    return Linear(
        role=role, tokens=run.tokens, inputs=inputs, outputs=outputs, parameters=parameters, section=section, copies=copies
    )


def on_sequence_shard(op: Linear, run: RunSpec) -> Linear:
    """A linear that tensor parallelism does not split: on this rank's share of the sequence, or the same on every rank."""
    if run.sequence_parallel and run.sequence_parallel_linears:
        return replace(op, tokens=op.tokens // run.tp)
    return replace(op, copies=run.tp)


def shard_rows(run: RunSpec) -> tuple[int, int]:
    """(tokens, copies) of the operations between the tensor-parallel blocks."""
    return (run.tokens // run.tp, 1) if run.sequence_parallel else (run.tokens, run.tp)


def norm(model: ModelSpec, run: RunSpec, role: str, width: int, section: str = "") -> Norm:
    """RMSNorm or LayerNorm, as the model has it."""
    rows, copies = shard_rows(run)
    return Norm(
        role=role, rows=rows, width=width, copies=copies, section=section,
        parameters=width * (model.norm.weight + model.norm.bias),
    )  # fmt: skip


def bottleneck(
    model: ModelSpec, run: RunSpec, name: str, rank: int, outputs: int, *, beside: int = 0, down_bias: bool = False,
    up_bias: bool = False,
) -> Iterator[Op]:  # fmt: skip
    """Down to `rank` features on every rank (and to some `beside` them), a norm, and up to this rank's share of the outputs."""
    yield on_sequence_shard(linear(f"{name}-down", run, model.hidden_size, rank + beside, bias=down_bias), run)
    yield latent_norm(model, run, f"{name}-latent-norm", rank)
    yield linear(f"{name}-up", run, rank, outputs, bias=up_bias)


def latent_norm(model: ModelSpec, run: RunSpec, role: str, width: int) -> Norm:
    """A norm on the output tokens of a projection that tensor parallelism does not split."""
    return norm(model, replace(run, sequence_parallel=run.sequence_parallel and run.sequence_parallel_linears), role, width)


def residual(model: ModelSpec, run: RunSpec) -> Elementwise:
    """The residual add: the output of a block is added to its input."""
    rows, copies = shard_rows(run)
    return Elementwise(role="residual", rows=rows, width=model.hidden_size, copies=copies, forward_tensors=3, backward_tensors=3)


def visible_pairs(sequence: int, *, causal: bool, window: int | None, chunk: int | None = None) -> int:
    """How many (query, key) pairs the mask allows in one sequence.

    A causal query sees itself and the positions before it, at most `window` in total, and only those of its own `chunk`; a
    bidirectional one sees `window` // 2 positions on either side of itself.

    >>> visible_pairs(4, causal=True, window=None), visible_pairs(4, causal=True, window=2)
    (10, 7)
    >>> visible_pairs(5, causal=True, window=None, chunk=2)
    7
    """
    if chunk is not None and chunk < sequence:
        whole, rest = divmod(sequence, chunk)
        per_chunk, in_rest = (visible_pairs(size, causal=causal, window=window) for size in (chunk, rest))
        return whole * per_chunk + in_rest
    if causal:
        reach = min(window or sequence, sequence)
        return reach * (reach + 1) // 2 + (sequence - reach) * reach
    if window is None:
        return sequence * sequence
    reach = min(window // 2, sequence - 1)
    return sequence * (2 * reach + 1) - reach * (reach + 1)
