"""The summary of `accuracy.md`, from the recorded measurements; README shows some of its rows."""

from __future__ import annotations

import json
import re
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

from gemmscope.forecast.gemm import model
from gemmscope.toml import parse_toml

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks")]
import published_tables  # noqa: E402
import reference_tool  # noqa: E402
from published_runs import summary as of_published_runs  # noqa: E402
from step_on_gpu import errors as errors_of_steps  # noqa: E402

STEP, SAME_RUN = "speedup by `step`", "the real model in the same run"
IN_README = ("step, same run", "step, other machine", "forecast, speedup", "dense", "experts", "named", "unnamed", "script")


def table() -> str:
    """All rows."""
    return _table(rows().values())


def in_short() -> str:
    """The rows of the README."""
    return _table(cells for name, cells in rows().items() if name in IN_README)


def _table(lines: Any) -> str:
    heads = ["what", "compared with", "cases", "error", "at worst", "inside the 90% error bar"]
    rule = ["---", "---", "---:", "---:", "---:", "---:"]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *lines])


@cache
def rows() -> dict[str, list[str]]:
    """Every claim by its name: what, compared with what, number of cases, error, worst error, share inside the error bar."""
    kept = json.loads((DOCS / "measured/h200_steps.json").read_text("utf-8"))
    software = parse_toml((DOCS / "measured/other_software.toml").read_text("utf-8"))
    bridge = of_published_runs(published_tables.compared())
    left_out = parse_toml((DOCS / "measured/published_fit.toml").read_text("utf-8"))["model"]
    script, _ = reference_tool.errors()
    of_te, of_torchao = (kept[name] for name in ("transformer_engine", "torchao"))
    return {
        "step, same run": [STEP, SAME_RUN, *_mean(errors_of_steps(of_te, "real"))],
        "step, other machine": [STEP, "another H200, with a script of its own", *_mean(errors_of_steps(of_te, "before"))],
        "step, torchao": [STEP, f"{SAME_RUN}, torchao", *_mean(errors_of_steps(of_torchao, "real"))],
        **_of_h200_steps(),
        "GEMMs": ["GEMM time by `forecast`", "sizes that were not fitted, by GPU and format", *_of_gemms()],
        "dense": _tokens("Megatron-Bridge, dense models, not fitted", *bridge["not fitted, dense"]),
        "experts": _tokens("Megatron-Bridge, models with experts, not fitted", *bridge["not fitted, with experts"]),
        **{
            f"{kind}, left out": _tokens(
                f"Megatron-Bridge, {text}, their model left out of the fit", of["runs"], of["median"], of["inside"]
            )
            for kind, text, of in (
                ("dense", "dense models", left_out["dense"]),
                ("experts", "models with experts", left_out["with experts"]),
            )
        },
        "named": _of_software("12 other sources, software named with `--stack`", software["named"]["all"]),
        "unnamed": _of_software("12 other sources, software not named", software["unnamed"]["all"]),
        "script": ["Transformer Engine's script", "real training steps", *_mean(script, digits=0)],
    }


def _mean(errors: list[float], digits: int = 2) -> list[str]:
    return [f"{len(errors)}", f"{statistics.mean(errors):.{digits}%} mean", f"{max(errors):.{digits}%}", ""]


def _of_h200_steps() -> dict[str, list[str]]:
    """The first summary of forecast steps: from public measurements alone."""
    page = (DOCS / "measured/forecasts.md").read_text("utf-8")
    match = re.search(
        r"Speedups: (\S+) off on average, (\S+) at worst; (\d+ of (\d+)) inside the bar. Times: (\S+) and ([\d.]+%)", page
    )
    assert match is not None
    of = "training steps on an H200"
    return {
        "forecast, speedup": ["speedup by `forecast`", of, match[4], f"{match[1]} mean", match[2], match[3]],
        "forecast, time": ["step time by `forecast`", of, "16", f"{match[5]} mean", match[6], ""],
    }


def _of_gemms() -> list[str]:
    series = [entry.held_out for entry in model().coefficients.series]
    medians, inside = ([of[name] for of in series] for name in ("median", "covered"))
    cases = f"{sum(of['rows'] for of in series):,.0f}"
    return [cases, f"{min(medians):.1%} to {max(medians):.1%} median", "", f"{min(inside):.0%} to {max(inside):.0%}"]


def _tokens(truth: str, count: int, error: float, inside: int) -> list[str]:
    return ["tokens/s by `forecast`", truth, f"{count}", f"{error:.1%} median", "", f"{inside} of {count}"]


def _of_software(truth: str, of: dict[str, Any]) -> list[str]:
    return ["tokens/s by `forecast`", truth, f"{of['runs']}", f"{of['median']:.1%} median", "", f"{of['inside']:.0%}"]
