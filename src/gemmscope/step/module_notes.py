"""Findings about a live module, as codes and facts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gemmscope.step.conversion import summary
from gemmscope.step.module import LiveModule, ModuleStep
from gemmscope.workload.layers import expert_weights

Note = tuple[str, dict[str, Any]]


def built_notes(live: LiveModule, compiled: str) -> Iterator[Note]:
    """Notes on the module itself, before any recipe."""
    if live.objective.squares:
        yield "loss-of-squares", {}
    if live.cast:
        yield "module-cast", {}
    if compiled == "layers" and not live.layers:
        yield "no-layers-to-compile", {"module": type(live.built.module).__name__}
    if weights := expert_weights(live.built.module):
        yield "experts-not-converted", {"count": weights}
    if compiled == "whole" and live.masked is False and _masks_when_compiled(live):
        yield "attention-mask-explicit", {}


def _masks_when_compiled(live: LiveModule) -> bool:
    """Whether transformers builds masks while it is compiled: older versions always do, newer ones with PyTorch before 2.14.

    Source: `_ignore_causal_mask_sdpa` of transformers/masking_utils.py in 5.17 and 5.22, which refers to pytorch#176499.
    """
    if not any(type(part).__module__.startswith("transformers.models.") for part in live.built.module.modules()):
        return False
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    decides = getattr(sys.modules.get("transformers.masking_utils"), "_ignore_causal_mask_sdpa", None)
    newer = decides is not None and "is_torchdynamo_exporting" in decides.__code__.co_names
    return version < (2, 14) or not newer


def linear_notes(steps: Iterable[object]) -> Iterator[Note]:
    """Which linears run in low precision: once for all recipes that convert the same ones."""
    first: dict[str, ModuleStep] = {}  # by recipe: the deepest
    for step in steps:
        if isinstance(step, ModuleStep) and step.kit.recipe.quantizes:
            first.setdefault(step.kit.recipe.name, step)
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name, deepest in first.items():
        low, high = summary(deepest.conversion)
        alike.setdefault((tuple(low), tuple(high)), []).append(name)
    for (converted, kept), recipes in alike.items():
        yield "linears-converted", {"recipes": recipes, "converted": list(converted)}
        if kept:
            yield "linears-kept", {"recipes": recipes, "kept": list(kept)}
