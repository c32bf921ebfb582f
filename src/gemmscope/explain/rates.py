"""How fast the GPU of a trace can be: the peak rates of its GEMMs, and the clock at which it ran."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from gemmscope.gpu.specs import spec_of
from gemmscope.toml import load_data

FORMATS = {"FP8": "fp8", "FP8 blocks": "fp8", "MXFP8": "fp8", "FP4": "fp4", "BF16": "bf16", "FP16": "bf16"}


@dataclass(frozen=True)
class GpuRates:
    """Peak rates in TFLOP/s. `usual`: the share of them that large GEMMs reach in training."""

    peaks: dict[str, float]
    usual: float
    bandwidth_tbps: float = 0.0

    def peak(self, precision: str) -> float | None:
        return self.peaks.get(FORMATS.get(precision, ""))


@cache
def gpu_rates(name: str) -> GpuRates | None:
    """The GPU with this driver name; None if it is not known.

    >>> gpu_rates("NVIDIA H200").peak("BF16"), gpu_rates("NVIDIA Something")
    (989.0, None)
    """
    facts = load_data("gemmscope.explain", "gpu_rates.toml")
    spec = spec_of(name)
    if spec is not None:
        return GpuRates(dict(spec.tflops), facts["usual"].get(spec.name, facts["usual"]["other"]), spec.bandwidth_tbps)
    rules = (rule for rule in facts["gpu"] if re.search(rule["device"], name))
    return next((GpuRates(rule["tflops"], rule["usual"]) for rule in rules), None)


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
