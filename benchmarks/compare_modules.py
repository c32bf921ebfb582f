"""Compare forecasts of traced modules with steps measured by `measure_modules.py`, as a Markdown table. Needs torch, no GPU.

python benchmarks/compare_modules.py modules.jsonl h200
"""

import json
import sys
from pathlib import Path

from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.step import StepForecast
from gemmscope.forecast.traced import launches
from gemmscope.gpu.specs import gpu
from gemmscope.model.spec import RunSpec
from gemmscope.workload.factory import load_factory
from gemmscope.workload.trace import as_workload
from gemmscope.workload.trace_worker import trace_built

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
BETWEEN = ("norms and activations", "head and loss", "embedding", "other", "copies")


def main():
    """A row for each module and mode: the step, and what runs between GEMMs."""
    lines, chip = Path(sys.argv[1]).read_text().splitlines(), gpu(sys.argv[2])
    workloads = {}
    print(
        "| module | mode | measured ms | forecast ms [90%] | measured, between GEMMs | forecast | kernels, measured | forecast |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in filter(None, lines):
        result = json.loads(line)
        name = Path(result["module"].rpartition(":")[0]).stem
        if name not in workloads:
            workloads[name] = as_workload(trace_built(load_factory(f"{EXAMPLES / name}.py:build", None, None, "meta")))
        fused = result["mode"] == "compiled"
        forecast = StepForecast(Forecaster(chip, "sustained"), None, RunSpec(1, 1), workloads[name], fused=fused)
        step, parts = forecast.step("BF16"), result["parts_ms"]
        interval = step.interval
        between = sum(ms for part, ms in step.parts_ms.items() if part in BETWEEN)
        seen = parts.get("between GEMMs", 0.0) + parts.get("embedding", 0.0) + parts.get("copies", 0.0)
        print(
            f"| {name} | {result['mode']} | {result['step_ms']:.1f} "
            f"| {interval.value:.1f} [{interval.low:.1f}, {interval.high:.1f}] "
            f"| {seen:.1f} | {between:.1f} | {result['kernels']:.0f} | {launches(workloads[name].ops, fused=fused):.0f} |"
        )
        print(f"{name} {result['mode']}: measured {parts}; forecast {step.parts_ms}", file=sys.stderr)


if __name__ == "__main__":
    main()
