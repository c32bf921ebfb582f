"""Functions that stand in for kernels in a trace: they only produce shapes, and record what they stand for. Imports torch: only
the trace worker imports this file.

**Kernels of mixers.** transformers calls a recurrence (a state-space scan, a delta rule) and its causal convolution by the
functions named in `STAND_INS`. Without the kernels' packages they fall back to plain PyTorch: loops over positions or chunks,
whose GEMMs are not those of the kernels and whose operators take minutes to dispatch at long sequences. So the trace replaces
them, and records the sizes that the model hands to the kernel.

**FlexAttention.** PyTorch's `flex_attention` does not run on the meta device. Its stand-in counts the pairs of positions that
the block mask allows: its `mask_mod`, a function of positions, is evaluated on the CPU. A mask that reads tensors without
values counts as one whose values are not known.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gemmscope.workload.recorder import Recorder
from gemmscope.workload.scans import Scan, causal_conv, scan_role
from gemmscope.workload.traced_ops import ALL_VISIBLE

DELTA_CHUNK = 64  # of flash-linear-attention's kernels


@contextlib.contextmanager
def replaced(recorder: Recorder) -> Iterator[None]:
    """Replace the kernels in the files of transformers that define the parts of the recorded module."""
    files = {type(part).__module__ for part in recorder.module.modules()}
    with contextlib.ExitStack() as patches:
        for file in sorted(files):
            for name, stand_in in STAND_INS.items():
                if file.startswith("transformers.") and hasattr(sys.modules[file], name):
                    patches.enter_context(mock.patch.object(sys.modules[file], name, partial(stand_in, recorder)))
        yield


def blank(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A result that is not computed: without values on the meta device, zeros elsewhere. Nothing records that it is filled."""
    output = tensor.new_empty(shape)
    if not output.is_meta:
        with _disable_current_modes():
            output.zero_()
    return output


class _ShapesOnly(torch.autograd.Function):  # type: ignore[misc]
    """What `shapes_only` returns, and its backward pass."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, make: Any, backward: Any, kept: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs, *kept)
        ctx.recorder, ctx.count, output = recorder, backward, make()
        recorder.barrier(list(inputs), [output])
        return cast(torch.Tensor, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needed, saved = ctx.needs_input_grad[4:], ctx.saved_tensors  # which a recomputed layer provides only once
        ctx.count(needed)
        gradients = [torch.empty_like(tensor) if needs else None for tensor, needs in zip(saved, needed, strict=False)]
        ctx.recorder.barrier([gradient, *saved], [tensor for tensor in gradients if tensor is not None])
        return None, None, None, None, *gradients


def shapes_only(
    recorder: Recorder,
    inputs: Sequence[Any],
    make: Callable[[], torch.Tensor],
    backward: Callable[[Sequence[bool]], None] = lambda _: None,
    kept: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """A function of these tensors (what is none is left out) that only makes its output, and gradients of theirs.

    `backward` is called when it runs backward, with which of the tensors need a gradient; `kept` is what it keeps beside them.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return cast(torch.Tensor, _ShapesOnly.apply(recorder, make, backward, kept, *tensors))


def _mixed(recorder: Recorder, *inputs: Any) -> torch.Tensor:
    """The result of a mixer's kernel, with the shape of the first input."""
    return shapes_only(recorder, inputs, lambda: blank(inputs[0], tuple(inputs[0].shape)))


def _causal_conv(recorder: Recorder, x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """x is [batch, channels, sequence], the weight [channels, kernel]."""
    batch, channels, sequence = x.shape
    recorder.scan(causal_conv(batch * sequence, channels, weight.shape[-1]))
    return _mixed(recorder, x, weight, bias)


def _ssd(recorder: Recorder, x: Any, dt: Any, a: Any, b: Any, c: Any, chunk_size: int, *_: Any, **others: Any) -> Any:
    """x is [batch, sequence, heads, head size], B and C are [batch, sequence, groups, state size]."""
    batch, sequence, heads, value_dim = x.shape
    _, _, groups, key_dim = b.shape
    recorder.scan(_scan("ssd", (batch, sequence), (heads, value_dim), (groups, key_dim), chunk_size))
    output = _mixed(recorder, x, dt, a, b, c, others.get("D"), others.get("dt_bias"), others.get("z"))
    return (output, x.new_empty(batch, heads, value_dim, key_dim)) if others.get("return_final_states") else output


def _selective_scan(recorder: Recorder, x: Any, dt: Any, a: Any, b: Any, c: Any, *others: Any, **named: Any) -> Any:
    """x is [batch, channels, sequence], A [channels, state size]."""
    batch, channels, sequence = x.shape
    recorder.scan(_scan("selective scan", (batch, sequence), (channels, 1), (1, a.shape[-1])))
    output = _mixed(recorder, x, dt, a, b, c, *others, *(named.get(name) for name in ("D", "z", "delta_bias")))
    return (output, x.new_empty(batch, channels, a.shape[-1])) if named.get("return_last_state") else output


def _delta_rule(rule: str, recorder: Recorder, q: Any, k: Any, v: Any, g: Any, beta: Any, *_: Any, **named: Any) -> Any:
    """Queries and keys are [batch, sequence, key heads, key size], values [batch, sequence, heads, value size]."""
    batch, sequence, heads, value_dim = v.shape
    chunk = named.get("chunk_size", DELTA_CHUNK)
    recorder.scan(_scan(rule, (batch, sequence), (heads, value_dim), tuple(k.shape[2:]), chunk))
    state = v.new_empty(batch, heads, k.shape[-1], value_dim) if named.get("output_final_state") else None
    return _mixed(recorder, v, q, k, g, beta), state


def _scan(rule: Any, rows: tuple[int, int], values: tuple[int, int], keys: tuple[int, ...], chunk: int = DELTA_CHUNK) -> Scan:
    return Scan(
        role=scan_role(rule), rule=rule, batch=rows[0], sequence=rows[1], heads=values[0], value_dim=values[1],
        groups=keys[0], key_dim=keys[1], chunk=chunk,
    )  # fmt: skip


def _absent(*_: Any, **__: Any) -> None:
    """A kernel that does more than the recurrence: the model then calls its parts."""


STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv,
    "mamba2_chunk_scan": _ssd,
    "mamba2_split_conv1d_scan_combined": _absent,
    "mamba_selective_scan": _selective_scan,
    "mamba_inner_fn": _absent,
    "torch_chunk_gated_delta_rule": partial(_delta_rule, "gated delta rule"),
    "chunk_kimi_delta_attention": partial(_delta_rule, "kda"),
}
"""By the name that transformers gives the function."""


try:
    from torch.nn.attention import flex_attention as flex
except ImportError:  # before PyTorch 2.5
    flex = None

MOST_PAIRS = 2**22  # of one mask that are evaluated: of a longer sequence, evenly spaced queries
_ORIGINAL: Any = flex.flex_attention if flex is not None else None

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Fraction | None], torch.Tensor]
"""Queries, keys, values and the share of pairs that are visible (None: not known), to the output."""

attend: Attend | None = None  # of the recording that runs


def install_flex() -> None:
    """Replace the function. Must run before a module of the user's imports it; outside a recording, nothing changes."""
    if flex is not None:
        flex.flex_attention = _flex


def _flex(query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, *args: Any, **named: Any) -> Any:
    if attend is None:
        return _ORIGINAL(query, key, value, score_mod, block_mask, *args, **named)
    settings = dict(zip(("scale", "enable_gqa", "return_lse", "kernel_options"), args, strict=False)) | named
    share = ALL_VISIBLE if block_mask is None else visible_share(block_mask, query.shape[-2], key.shape[-2])
    output = attend(query, key, value, share)
    if settings.get("return_aux") is None and not settings.get("return_lse"):
        return output
    sums = query.new_zeros(query.shape[:-1], dtype=torch.float32)
    return (output, sums) if settings.get("return_lse") else (output, flex.AuxOutput(lse=sums, max_scores=sums))


def visible_share(block_mask: Any, queries: int, keys: int) -> Fraction | None:
    """The share of all pairs that a block mask allows; None where that depends on values that are not known."""
    batch, heads = block_mask.shape[:2]
    count = min(queries, max(MOST_PAIRS // max(keys, 1), 1))
    try:
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            number = torch.arange(count, device="cpu")
            at = (number % batch, number // batch % heads, (2 * number + 1) * queries // (2 * count))
            over_keys = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
            visible = torch.vmap(over_keys, in_dims=(0, 0, 0, None))(*at, torch.arange(keys, device="cpu"))
            pairs = int(visible.expand(count, keys).sum())
    except Exception:  # whatever a function of the user's does with positions on the CPU
        return None
    return Fraction(pairs, count * keys) if pairs else None  # a mask that hides every sampled pair tells nothing
