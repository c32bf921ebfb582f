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


@cache
def found_in(name: str) -> TraceDiagnosis:
    """The diagnosis of a recorded trace."""
    return diagnose(read_trace(recorded(name)))


@cache
def explanation(name: str = "recompute") -> ExplainResult:
    """The result of `gemmscope explain` for a recorded trace."""
    return explain([recorded(name)], command=f"gemmscope explain {name}.json.gz")
