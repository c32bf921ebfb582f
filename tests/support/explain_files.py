"""Recorded traces with the cause that each was made to suffer from, their diagnoses, and results of `explain`."""

from __future__ import annotations

from functools import cache

from gemmscope.explain.diagnose import TraceDiagnosis, diagnose
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.results.explain import ExplainResult
from support.commands import explain
from support.traces import recorded

FIRST_CAUSE = {
    "eager_torchao": "unfused",
    "host_bound": "host",
    "host_bound_bf16": "host",
    "accumulation_host_bound": "host",
    "accumulation_host_bound_cached": "host",
    "syncs": "host",
    "backward_in_bf16": "backward-high",
    "unaligned_mlp": "left-out",
    "unaligned_torchao": "left-out",
    "recast_weights": "recast",
    "recompute": "recompute",
    "recompute_torch": "recompute",
    "long_sequence": "attention",
    "large_head": "head",
    "idle_loader": "elsewhere",
    "low_clock": "throttled",
    "experts": "experts",
    "rowwise_casts": "quantization",
    "healthy_te_current": "",
    "healthy_te_delayed": "",
    "healthy_te_block": "",
    "healthy_torchao_compiled": "",
    "cached_weights": "",
    "healthy_te_bf16": "not-low",
    "compiled_bf16": "not-low",
    "long_sequence_bf16": "not-low",
    "large_head_bf16": "not-low",
}

# Recorded before, recorded after the fix, the causes that it removes
REAL_FIXES = [
    ("low_clock", "healthy_te_current", ["throttled"]),
    ("recompute", "healthy_te_current", ["recompute"]),
    ("recast_weights", "cached_weights", ["recast"]),
    ("accumulation_host_bound", "accumulation_host_bound_cached", ["recast"]),
    ("healthy_te_bf16", "healthy_te_current", ["not-low"]),
    ("healthy_te_bf16", "healthy_te_delayed", ["not-low"]),
    ("healthy_te_bf16", "healthy_te_block", ["not-low"]),
    ("compiled_bf16", "healthy_torchao_compiled", ["not-low"]),
    ("long_sequence_bf16", "long_sequence", ["not-low"]),
    ("large_head_bf16", "large_head", ["not-low"]),
    ("unaligned_mlp", "healthy_te_current", ["left-out"]),
    ("unaligned_torchao", "healthy_torchao_compiled", ["left-out"]),
    ("backward_in_bf16", "healthy_te_current", ["backward-high", "fusing"]),  # the MLP was split into modules that do not fuse
    ("rowwise_casts", "healthy_torchao_compiled", ["quantization"]),
    ("idle_loader", "healthy_te_current", ["elsewhere"]),
    ("eager_torchao", "healthy_torchao_compiled", ["unfused"]),  # four layers, and three
]


@cache
def found_in(name: str) -> TraceDiagnosis:
    """The diagnosis of a recorded trace."""
    return diagnose(read_trace(recorded(name)))


@cache
def explanation(name: str = "recompute") -> ExplainResult:
    """The result of `gemmscope explain` for a recorded trace."""
    return explain([recorded(name)], command=f"gemmscope explain {name}.json.gz")


def with_the_fix(before: str, after: str, codes: list[str]) -> tuple[list[float], float]:
    """Milliseconds of a step without the causes, predicted: the estimate, the most and the least; and recorded."""
    diagnosis, account = found_in(before), found_in(after).account
    causes = [cause for cause in diagnosis.causes if cause.code in codes]
    assert len(causes) == len(codes)
    speedups = [(cause.speedup_without, *(cause.speedup_range or [cause.speedup_without] * 2)) for cause in causes]
    gains = zip(*([1 - 1 / speedup for speedup in own] for own in speedups), strict=True)
    layers = 4 / 3 if before == "eager_torchao" else 1.0  # four layers were recorded before, and three after
    beside_layers = account.parts_ms["head and loss"] + account.parts_ms["embedding"]
    real_ms = layers * (account.step_ms - beside_layers) + beside_layers
    return [diagnosis.account.step_ms * (1 - sum(gain)) for gain in gains], real_ms
