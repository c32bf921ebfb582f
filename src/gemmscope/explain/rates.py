"""How fast GEMMs ran, compared with each other and with the peak rate of the GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.explain.place import LOW
from gemmscope.explain.view import TimedWork
from gemmscope.gpu.specs import spec_of
from gemmscope.toml import load_data

LARGE_FLOPS = 5e10  # of a GEMM that fills the GPU
# Rate of large low-precision GEMMs over BF16, where the trace does not show it: measured on an H200 (FP8 1.85, blocks 1.5).
USUAL_RATIO = {"FP8": 1.85, "FP8 blocks": 1.5, "MXFP8": 1.7, "FP4": 2.5}


@dataclass(frozen=True)
class GpuRates:
    """Peak rates in TFLOP/s. `usual`: the share of them that large GEMMs reach in training."""

    peaks: dict[str, float]
    usual: float

    def peak(self, precision: str) -> float | None:
        names = {"FP8": "fp8", "FP8 blocks": "fp8", "MXFP8": "fp8", "FP4": "fp4", "BF16": "bf16", "FP16": "bf16"}
        return self.peaks.get(names.get(precision, ""))


@cache
def gpu_rates(name: str) -> GpuRates | None:
    """The GPU with this driver name; None if it is not known.

    >>> gpu_rates("NVIDIA H200").peak("BF16"), gpu_rates("NVIDIA Something")
    (989.0, None)
    """
    facts = load_data("gemmscope.explain", "gpu_rates.toml")
    spec = spec_of(name)
    if spec is not None:
        peaks = {name: float(rate) for name, rate in spec.tflops.items()}
        return GpuRates(peaks, facts["usual"].get(spec.name, facts["usual"]["other"]))
    for rule in facts["gpu"]:
        if re.search(rule["found"], name):
            peaks = {key: float(rule[key]) for key in ("bf16", "fp8", "fp4") if key in rule}
            return GpuRates(peaks, float(rule["usual"]))
    return None


def rates(items: Sequence[TimedWork]) -> dict[str, float]:
    """TFLOP/s of large GEMMs by precision."""
    sums: dict[str, list[float]] = {}
    for item in items:
        gemm = item.gemm
        if gemm is not None and gemm.flops >= LARGE_FLOPS and item.work.time > 0:
            found = sums.setdefault(gemm.precision, [0.0, 0.0])
            found[0] += gemm.flops
            found[1] += item.work.time
    return {precision: flops / time / 1e6 for precision, (flops, time) in sums.items()}


def gain_ratio(items: Sequence[TimedWork]) -> float:
    """Speedup of low-precision GEMMs over BF16: from this trace, else the usual value."""
    found = rates(items)
    low = [(precision, found[precision]) for precision in LOW if precision in found]
    if low and "BF16" in found:
        return max(max(rate for _, rate in low) / found["BF16"], 1.05)
    present = {item.gemm.precision for item in items if item.gemm is not None}
    return max((USUAL_RATIO[precision] for precision in LOW if precision in present), default=USUAL_RATIO["FP8"])


def facts_clock(facts: dict[str, Any]) -> tuple[float, float, list[str]] | None:
    """Mean SM clock in MHz during the recording, the highest possible, and the throttle reasons; None if not recorded."""
    clock = facts.get("clock")
    if not isinstance(clock, dict) or not isinstance(clock.get("readings"), list):
        return None
    readings = [each for each in clock["readings"] if isinstance(each, dict) and _is_clock(each.get("sm_mhz"))]
    greatest = clock.get("max_sm_mhz")
    if not readings or not _is_clock(greatest):
        return None
    throttled = [each.get("throttle") for each in readings]
    reasons = sorted({str(reason) for each in throttled if isinstance(each, list) for reason in each})
    return sum(each["sm_mhz"] for each in readings) / len(readings), float(greatest or 0.0), reasons


def _is_clock(value: Any) -> bool:
    """Whether this is a plausible clock rate.

    >>> _is_clock(1980), _is_clock(float("nan")), _is_clock("1980"), _is_clock(True)
    (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e6
