"""Small traces made by hand, and the recorded ones."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gemmscope.explain.diagnose import TraceDiagnosis, diagnose
from gemmscope.explain.recorded_trace import read_trace
from gemmscope.findings import Finding

DATA = Path(__file__).parent.parent / "data"
RECORDED = DATA / "traces"
FP8 = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT"
BF16 = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
CAST = "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*)"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>"


def recorded(name: str) -> Path:
    return RECORDED / f"{name}.json.gz"


def events_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return content


def codes(findings: Iterable[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def fact(findings: Iterable[Finding], code: str, name: str) -> Any:
    """A fact of the finding with this code."""
    return next(finding for finding in findings if finding.code == code).facts[name]


def as_expected(diagnosis: TraceDiagnosis) -> bool:
    """Nothing is wrong, and all linears run in low precision."""
    return (
        diagnosis.verdict.code == "step-as-expected"
        and round(float(fact([diagnosis.verdict], "step-as-expected", "low_share")), 2) == 1
    )


class Builder:
    """Kernels one after the other on streams, each launched `ahead` microseconds before it may run."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.number = 0

    def kernel(
        self, name: str, start: float, time: float, *, stream: Any = 7, launched: float | None = None, **more: Any
    ) -> None:
        self.number += 1
        arguments = {"stream": stream, "device": 0, "correlation": self.number, **more.pop("args", {})}
        self.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": time,
                "args": arguments,
                **more,
            }
        )
        if launched is not None:
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": launched, "dur": 3}
            self.events.append({**launch, "args": {"correlation": self.number}})

    def mark(self, name: str, start: float, time: float, category: str = "user_annotation", **more: Any) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": time, **more})

    def write(self, path: Path, **head: Any) -> Path:
        text = json.dumps({"deviceProperties": [{"name": "NVIDIA H200"}], **head, "traceEvents": self.events})
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    def diagnose(self, path: Path, **head: Any) -> TraceDiagnosis:
        return diagnose(read_trace(self.write(path, **head)))


def steady(steps: int = 3, *, product: str = FP8, count: int = 20, begin: float = 1000.0) -> Builder:
    """Steps of products with a cast each and an optimizer, launched far ahead: nothing is wrong with them."""
    builder = Builder()
    moment = begin
    for step in range(steps):
        first = moment
        for _ in range(count):
            builder.kernel(CAST, moment, 10.0, launched=first - 900.0)
            builder.kernel(product, moment + 10.0, 100.0, launched=first - 900.0)
            moment += 110.0
        builder.kernel(ADAM, moment, 50.0, launched=first - 900.0)
        moment += 50.0
        builder.mark(f"ProfilerStep#{step + 5}", first - 950.0, moment - first - 1.0)
    return builder


def shared_trace(name: str) -> Path:
    """A trace of another project, which is not part of this one: they are in GEMMSCOPE_TRACES or beside the repository."""
    folders = [Path(given)] if (given := os.environ.get("GEMMSCOPE_TRACES")) else []
    folders += [parent / "shared" / "data" / "traces" for parent in DATA.parents]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is not here: traces of other projects are not part of the repository")
