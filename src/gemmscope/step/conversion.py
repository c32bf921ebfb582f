"""Which linears of a live module run in low precision, and which parts of it are its layers.

One forward pass in BF16 shows on how many rows every `nn.Linear` is called. All are converted, as frameworks do, except the head,
routers, tiny ones, and those of sizes that the recipe cannot run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmscope.grouping import grouped
from gemmscope.step.kits.plain import Kit
from gemmscope.workload.module_parts import why_not_converted
from gemmscope.workload.ops import why_high_precision

NOT_CALLED = "never called as a module: its weight is used directly, or not at all"


@dataclass
class LinearUse:
    """One `nn.Linear` as the forward pass called it: the numbers of rows that it multiplied."""

    inputs: int
    outputs: int
    rows: list[int] = field(default_factory=list)
    why_not: str = ""  # it cannot be converted, in any recipe
    last_call: int = 0  # its place among all calls


def record_linears(module: nn.Module, forward: Callable[[], object]) -> tuple[dict[str, LinearUse], list[bool]]:
    """Every linear by its path, as one call of `forward` uses it; and whether each attention was given an explicit mask."""
    linears = {path: child for path, child in module.named_modules() if isinstance(child, nn.Linear)}
    uses = {path: LinearUse(one.in_features, one.out_features, why_not=why_not_converted(one)) for path, one in linears.items()}
    masked: list[bool] = []
    attend, calls = functional.scaled_dot_product_attention, count()

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        masked.append((args[3] if len(args) > 3 else kwargs.get("attn_mask")) is not None)
        return attend(*args, **kwargs)

    hooks = [one.register_forward_pre_hook(partial(_called, uses[path], calls)) for path, one in linears.items()]
    try:
        functional.scaled_dot_product_attention = attention
        try:
            with torch.no_grad():
                forward()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            masked.clear()
            for use in uses.values():
                use.rows.clear()
            forward()  # computes gradients itself, such as a gradient penalty or forces
    finally:
        functional.scaled_dot_product_attention = attend
        for hook in hooks:
            hook.remove()
    return uses, masked


def _called(use: LinearUse, calls: Iterator[int], _: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs and isinstance(inputs[0], torch.Tensor):
        use.rows.append(inputs[0].numel() // max(inputs[0].shape[-1], 1))
        use.last_call = next(calls)


def decide(uses: dict[str, LinearUse], head: str | None, kit: Kit) -> dict[str, str]:
    """Why a recipe does not run each linear in low precision, by its path; empty if it does."""
    return {path: "the head" if path == head else _why_not(path, use, kit) for path, use in uses.items()}


def _why_not(path: str, use: LinearUse, kit: Kit) -> str:
    if not use.rows:
        return NOT_CALLED
    of_kit = (kit.why_not_linear(rows, use.inputs, use.outputs) for rows in dict.fromkeys(use.rows))
    return why_high_precision(path, use.inputs, use.outputs) or use.why_not or next(filter(None, of_kit), "")


def summary(reasons: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What was converted, and what was not and why, a line for every kind of linear."""
    by_reason = grouped((reason, path) for path, reason in reasons.items())
    lines = {
        reason: [f"{count} x {path}" if count > 1 else path for path, count in alike(paths).items()]
        for reason, paths in by_reason.items()
    }
    converted = lines.pop("", [])
    return converted, [f"{line} ({reason})" for reason, kept in lines.items() for line in kept]


def alike(paths: Sequence[str]) -> Counter[str]:
    """Paths with numbers replaced by *, and how many there are of each.

    >>> alike(["layers.0.up", "layers.1.up", "head"])
    Counter({'layers.*.up': 2, 'head': 1})
    """
    return Counter(re.sub(r"(?:(?<=\.)|^)\d+(?=\.|$)", "*", path) for path in paths)
