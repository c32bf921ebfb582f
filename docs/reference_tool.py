"""How far Transformer Engine's GEMM benchmark script is from real training steps: the tables of `accuracy.md`."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from gemmscope.toml import parse_toml

DOCS = Path(__file__).parent


@cache
def facts() -> dict[str, Any]:
    """The recorded numbers."""
    return parse_toml((DOCS / "measured" / "reference_tool_h200.toml").read_text(encoding="utf-8"))


@cache
def predicted() -> dict[tuple[str, str], float]:
    """What `gemmscope step` predicted for the same models, on another machine (`accuracy.md`)."""
    kept = json.loads((DOCS / "measured" / "h200_steps.json").read_text(encoding="utf-8"))["transformer_engine"]
    return {
        (model, name): times["predicted"]["value"]
        for model, of_model in kept.items()
        for name, times in of_model["recipes"].items()
    }


def errors() -> tuple[list[float], list[float]]:
    """The relative error of every case: the script's, and that of `gemmscope step`."""
    cases = [(model, name, real) for model, times in facts()["models"].items() for name, real in times["step"].items()]
    script = [abs(facts()["models"][model]["script"][name] / real - 1) for model, name, real in cases]
    return script, [abs(predicted()[model, name] / real - 1) for model, name, real in cases]


def losers() -> list[tuple[str, str]]:
    """Cases that the script calls slower than BF16, although the step is faster."""
    return [
        (model, name)
        for model, numbers in facts()["models"].items()
        for name, real in numbers["step"].items()
        if numbers["script"][name] < 1 < real
    ]


def summary() -> str:
    """The errors in one paragraph."""
    off, ours = errors()
    wall = facts()["wall_s"]
    script, again = [sum(pair) for pair in wall["script"]], wall["bench"][1:]
    called = ", ".join(f"{name} on {model}" for model, name in losers())
    counted = facts()["as_te_benchmark"]
    alike = [value / facts()["models"][model]["script"][name] - 1 for model, of in counted.items() for name, value in of.items()]
    return "\n".join(
        [
            f"* The script is {statistics.mean(off):.0%} off on average, {max(off):.0%} at worst ({len(off)} cases).",
            f"* `gemmscope step`, run on another H200, is {statistics.mean(ours):.1%} off on average, {max(ours):.1%} at worst.",
            f"* The script reports {len(losers())} recipes as slower than BF16 that speed up the real step: {called}.",
            f"* Both modes of codon5b took the script {min(script):.0f} to {max(script):.0f} s; `gemmscope bench` took "
            f"{wall['bench'][0]:.0f} s the first time and {min(again):.0f} to {max(again):.0f} s later, on the same machine.",
            f"* When linears are counted as in the script, `gemmscope bench --as-te-benchmark` is {min(map(abs, alike)):.0%} to "
            f"{max(map(abs, alike)):.0%} lower ({' and '.join(counted)}, another H200): it measures the sustained state.",
        ]
    )


def table() -> str:
    """Every case, beside the prediction of `gemmscope step` for the same model."""
    lines = [
        "| model | recipe | real step | script | error | `gemmscope step` | its error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, numbers in facts()["models"].items():
        for name, real in numbers["step"].items():
            script, ours = numbers["script"][name], predicted()[model, name]
            both = f"{script:.2f} | {script / real - 1:+.1%} | {ours:.3f} | {ours / real - 1:+.1%}".replace("-0.0%", "0.0%")
            lines.append(f"| {model} | {name} | {real:.3f} | {both} |")
    return "\n".join(lines)
