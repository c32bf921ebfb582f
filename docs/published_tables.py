"""Tables of docs/measured/runs.md about steps on several GPUs: published training runs beside their forecasts."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from gemmscope.forecast.calibration import calibrated
from gemmscope.forecast.linears import Forecaster
from gemmscope.forecast.stacks import software_on
from gemmscope.forecast.step import StepForecast
from gemmscope.gpu.specs import gpu
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.toml import parse_toml
from gemmscope.workload.derive import derive

NOT_RUN = ("exposed communication", "pipeline bubble", "idle, host-bound")  # by one rank alone
DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))
from published_runs import Compared, Scorer, published_runs, summary  # noqa: E402


@cache
def compared() -> list[Compared]:
    """All published runs."""
    return Scorer(published_runs()).compared()


def runs_summary() -> str:
    """Median errors and how many runs lie inside their error bars: fitted, with each model or GPU left out, and others."""
    left_out = parse_toml((DOCS / "measured/published_fit.toml").read_text("utf-8"))
    rows = []
    groups = summary(compared())
    for kind in ("dense", "with experts"):
        count, error, inside = groups[f"fitted, {kind}"]
        rows.append((kind, "fitted", count, error, inside))
        for group, name in (("model", "its model left out of the fit"), ("gpu", "its GPU left out of the fit")):
            of = left_out[group][kind]
            rows.append((kind, name, of["runs"], of["median"], of["inside"]))
        count, error, inside = groups[f"not fitted, {kind}"]
        rows.append((kind, "other runs, which were not fitted", count, error, inside))
    lines = ["| models | runs | number | median error | inside the 90% error bar |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [f"| {kind} | {which} | {count} | {error:.1%} | {inside} of {count} |" for kind, which, count, error, inside in rows]
    return "\n".join(lines)


def other_software() -> str:
    """Runs of other software, each family left out of the fit: errors of tokens/s by source, and how well the bars hold."""
    known = parse_toml((DOCS / "measured/other_software.toml").read_text("utf-8"))
    lines = [
        "| source | runs | stack named: error | inside | bar | unnamed: error | inside | bar |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for source in known["named"]:
        cells = [known[way][source] for way in ("named", "unnamed")]
        shown = [f"{of['median']:.1%} | {of['inside']:.0%} | ±{of['half_width']:.0%}" for of in cells]
        name = "**one vote per source**" if source == "all" else source
        lines.append(f"| {name} | {cells[0]['runs']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def fitted_runs() -> str:
    """The runs that were fitted."""
    return _table([comparison for comparison in compared() if comparison.run.fitted])


def other_runs() -> str:
    """The runs that were not fitted."""
    return _table([comparison for comparison in compared() if not comparison.run.fitted])


def _table(some: list[Compared]) -> str:
    lines = [
        "| model | GPUs | recipe | layout | batch | container | tokens/s/GPU | forecast [90%] | error | inside |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for comparison in some:
        run, tokens = comparison.run, comparison.tokens_per_s
        bar = f"{tokens.value:,.0f} [{tokens.low:,.0f}, {tokens.high:,.0f}]"
        batch = f"{run.micro_batch} of {run.global_batch}"
        lines.append(
            f"| {run.preset} | {run.gpus} {run.gpu} | {run.recipe} | {run.layout} | {batch} | {run.container} |"
            f" {run.tokens_per_s:,.0f} | {bar} | {comparison.error:+.1%} | {'yes' if comparison.holds else 'no'} |"
        )
    return "\n".join(lines)


def experts_on_h200() -> str:
    """Layers with experts as `gemmscope step` measured them, beside the forecast of what one rank computes."""
    chip = gpu("h200")  # its software does not fuse the biases of experts
    forecaster = Forecaster(chip, "sustained", measured=calibrated("h200")[0], software=software_on(chip, "nvidia-26.04"))
    lines = [
        "| model | batch | recipe | launch, ms per layer | forecast | GPU, ms per layer | forecast |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for measured in parse_toml((DOCS / "measured/h200_experts.toml").read_text("utf-8"))["step"]:
        model, layers = presets.load(measured["preset"]).model, measured["layers"]
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in measured["run"].items()}
        assert model is not None
        run = RunSpec(**settings, optimizer_state="bf16", zero=0)
        forecast = StepForecast(forecaster, model, run, derive(model, run))
        batch = f"{run.micro_batch_size} x {run.sequence_length}, EP{run.ep}"
        for name in ("BF16", "FP8Current", "FP8Delayed", "FP8Block"):
            step, real = forecast.step(name), measured[name]
            computed = sum(ms for part, ms in step.parts_ms.items() if part not in NOT_RUN)
            lines.append(
                f"| {measured['preset']} | {batch} | {name} | {real['host_ms'] / layers:.1f}"
                f" | {step.launched.launch_ms / layers:.1f} |"
                f" {real['busy_ms'] / layers:.1f} | {computed / layers:.1f} |"
            )
    return "\n".join(lines)
