"""FlexAttention, as a trace sees it. Imports torch: only the trace worker imports this file.

PyTorch's `flex_attention` does not run on the meta device, so the trace replaces it by a function that only produces shapes. It
counts the pairs of positions that the block mask allows: its `mask_mod`, a function of positions, is evaluated on the CPU. A mask
that reads tensors without values counts as one whose values are not known.
"""

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gemmscope.workload.ops import ALL_VISIBLE

try:
    from torch.nn.attention import flex_attention as flex
except ImportError:  # before PyTorch 2.5
    flex = None

MOST_PAIRS = 2**22  # of one mask that are evaluated: of a longer sequence, evenly spaced queries
_ORIGINAL: Any = flex.flex_attention if flex is not None else None

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Fraction | None], torch.Tensor]
"""Queries, keys, values and the share of pairs that are visible (None: not known), to the output."""

_attend: list[Attend] = []  # of the recordings that run; the last one counts


def install() -> None:
    """Replace the function. Must run before a module of the user's imports it; outside a recording, nothing changes."""
    if flex is not None:
        flex.flex_attention = _replaced


@contextlib.contextmanager
def recorded(attend: Attend) -> Iterator[None]:
    """Inside this context, calls of `flex_attention` go to `attend`."""
    _attend.append(attend)
    try:
        yield
    finally:
        _attend.pop()


def _replaced(query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, *args: Any, **named: Any) -> Any:
    if not _attend:
        return _ORIGINAL(query, key, value, score_mod, block_mask, *args, **named)
    settings = dict(zip(("scale", "enable_gqa", "return_lse", "kernel_options"), args, strict=False)) | named
    share = ALL_VISIBLE if block_mask is None else visible_share(block_mask, query.shape[-2], key.shape[-2])
    output = _attend[-1](query, key, value, share)
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
