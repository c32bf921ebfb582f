"""How fast the GPU of a trace can be: the peak rates of its GEMMs, and the clock at which it ran."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.gpu.specs import spec_of
from gemmscope.recipe.precisions import precision_in_traces
from gemmscope.toml import load_data

WEIGHTS = " weights"  # of fewer bits, in the name of a precision


@dataclass(frozen=True)
class GpuRates:
    """Peak rates in TFLOP/s by format. `usual`: the share of them that large GEMMs reach in training. `source`: of GPUs that only
    `explain` knows."""

    peaks: dict[str, float]
    usual: float
    bandwidth_tbps: float
    source: str = ""

    def peak(self, precision: str) -> float | None:
        """The rate that holds for this precision, the first that the GPU has. Weights in fewer bits are multiplied in BF16."""
        known = precision_in_traces().get("BF16" if precision.endswith(WEIGHTS) else precision)
        return next((self.peaks[name] for name in (known.rates if known else ()) if name in self.peaks), None)

    def least_us(self, precision: str, flops: float, size_bytes: float) -> float | None:
        """The shortest time of a GEMM: what its FLOPs take at the usual rate, or its bytes at the bandwidth of the memory."""
        peak = self.peak(precision)
        return max(flops / (peak * self.usual) / 1e6, size_bytes / self.bandwidth_tbps / 1e6) if peak else None


@cache
def gpu_rates(name: str) -> GpuRates | None:
    """The GPU with this driver name; None if it is not known.

    >>> gpu_rates("NVIDIA H200").peak("BF16"), gpu_rates("Tesla V100-SXM2-16GB").peak("FP16"), gpu_rates("NVIDIA Something")
    (989.0, 125, None)
    """
    spec = spec_of(name)
    if spec is not None:
        return GpuRates(dict(spec.tflops), spec.usual_share, spec.bandwidth_tbps)
    rules = (rule for rule in load_data("gemmscope.gpu", "other_gpus.toml")["gpu"] if re.search(rule["device"], name))
    return next((GpuRates(rule["tflops"], rule["usual_share"], rule["bandwidth_tbps"], rule["source"]) for rule in rules), None)


def has_fp8(name: str, properties: dict[str, Any]) -> bool | None:
    """Whether the GPU multiplies in FP8: by its table, its name, or the compute capability in the trace; None if nothing shows
    it.

    >>> has_fp8("NVIDIA H100 80GB HBM3", {}), has_fp8("Tesla V100-SXM2-16GB", {}), has_fp8("AMD Instinct MI250X", {})
    (True, False, False)
    >>> has_fp8("", {"computeMajor": 7, "computeMinor": 5, "warpSize": 32}), has_fp8("", {}), has_fp8("AMD Something", {})
    (False, None, None)
    """
    rates, facts = gpu_rates(name), load_data("gemmscope.gpu", "other_gpus.toml")["no_fp8"]
    if rates is not None:
        return "fp8" in rates.peaks
    if re.search(facts["names"], name):
        return False
    capability = compute_capability(properties)
    if capability is None or is_amd(name, properties):
        return None
    return capability >= float(facts["first_capability"])


def is_amd(name: str, properties: dict[str, Any]) -> bool:
    """Whether this is a GPU of AMD: by its name, or the width of its wavefronts.

    >>> is_amd("AMD Instinct MI300X", {}), is_amd("", {"warpSize": 64}), is_amd("NVIDIA H100", {"warpSize": 32})
    (True, True, False)
    """
    return re.search(r"\bAMD\b|Instinct|Radeon|\bMI\d+", name) is not None or (not name and properties.get("warpSize") == 64)


def compute_capability(properties: dict[str, Any]) -> float | None:
    """The compute capability as a number, such as 8.9; None if it is not known.

    >>> compute_capability({"computeMajor": 8, "computeMinor": 9}), compute_capability({"computeMajor": "x"})
    (8.9, None)
    """
    major, minor = properties.get("computeMajor"), properties.get("computeMinor", 0)
    whole = all(isinstance(part, int) and not isinstance(part, bool) and 0 <= part < 100 for part in (major, minor))
    return float(f"{major}.{minor}") if whole else None


def facts_clock(facts: dict[str, Any]) -> tuple[float, float, list[str]] | None:
    """Mean SM clock in MHz during the recording, the highest possible, and the throttle reasons; None if not recorded."""
    clock = facts.get("clock")
    if not isinstance(clock, dict) or not isinstance(clock.get("readings"), list):
        return None
    readings = [reading for reading in clock["readings"] if isinstance(reading, dict) and _is_clock(reading.get("sm_mhz"))]
    highest = clock.get("max_sm_mhz")
    if not readings or not _is_clock(highest):
        return None
    throttled = [reading.get("throttle") for reading in readings]
    reasons = sorted({str(reason) for reasons in throttled if isinstance(reasons, list) for reason in reasons})
    return sum(reading["sm_mhz"] for reading in readings) / len(readings), float(highest or 0.0), reasons


def _is_clock(value: Any) -> bool:
    """Whether this is a plausible clock rate.

    >>> _is_clock(1980), _is_clock(float("nan")), _is_clock("1980"), _is_clock(True)
    (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e6
