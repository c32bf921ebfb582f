"""The worked example of the documentation (hidden 4096, intermediate 16384, 32 heads, 24 layers, 31 x 512 tokens): its numbers.

Measured ones are those of a bench recorded on an H200; the others are forecasts. `outputs.py` writes the tables and sentences of
this file into the pages, `pictures.py` draws its figures.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

import gemmscope as gs
from gemmscope import units
from gemmscope.document.linears import linears_sections
from gemmscope.document.table import Table
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import BenchResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.linears import Linears, Winner
from gemmscope.toml import parse_toml
from gemmscope.workload.cases import MODES, Mode
from gemmscope.writers.figure import STYLE
from gemmscope.writers.markdown import pipe_table
from gemmscope.writers.panels import CLEAR, COLORS, DARK, REST, lighter

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))
from support.run_files import recorded_bench  # noqa: E402

BLACKWELL = {"b300": "B300", "b200": "B200"}
SIZES = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 24}
STEP = "codon5b_l8"  # the same layers, eight of them, as a training step


@cache
def bench() -> BenchResult:
    """On an H200, measured."""
    return recorded_bench("first")


@cache
def forecast(*gpus: str) -> ForecastResult:
    """On GPUs that were not there."""
    return gs.load(**SIZES).on(micro_batch_size=31, sequence_length=512).forecast(*gpus)


def measured() -> Linears:
    """The linears of the bench."""
    return bench().linears


def forecast_linears(gpu: str) -> Linears:
    """Those of a forecast."""
    return forecast(gpu).gpus[0].linears


def steps() -> dict[str, Any]:
    """By recipe: the training step of eight such layers on an H200, predicted and real (`docs/accuracy.md`)."""
    kept = json.loads((DOCS / "measured" / "h200_steps.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = kept["transformer_engine"][STEP]["recipes"]
    return found


# --- tables and sentences ----------------------------------------------------------------------------------------------


def h200_table() -> str:
    """What was measured, both modes."""
    return _modes(measured())


def blackwell_tables() -> str:
    """What is forecast, both modes, GPU by GPU."""
    return "\n\n".join(f"{title}, FORECAST:\n\n{_modes(forecast_linears(gpu))}" for gpu, title in BLACKWELL.items())


def _modes(linears: Linears) -> str:
    """Every recipe in both modes."""
    summary = linears_sections(linears)[0].blocks[0]
    assert isinstance(summary, Table)
    return pipe_table(summary)


def conclusions() -> str:
    """What follows, in sentences that hold for the numbers of today."""
    found, step = measured(), steps()
    winner, upper = (_winner(found, mode) for mode in MODES)
    block, gemms = (_speedup(found, "FP8Block", mode) for mode in MODES)
    best = winner.best
    lines = [
        f"**On an H200: {best}.** The linears have a speedup of {_value(winner)} over {BASELINE}; the hardware allows "
        f"{_value(upper)} ({upper.best}). FP8Block keeps {block.value:.2f}: its GEMMs alone reach only {gemms.value:.2f}.",
        *(_blackwell_sentence(gpu, title) for gpu, title in BLACKWELL.items()),
        "**A training step gains less than its linears**: the speedup of eight such layers is "
        f"{step[best]['predicted']['value']:.2f} in {best} on the H200 (predicted; the real model: {step[best]['real']:.2f}), "
        f"and {_step_sentence()}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _blackwell_sentence(gpu: str, title: str) -> str:
    found = forecast_linears(gpu)
    winner, upper = (_winner(found, mode) for mode in MODES)
    rivals = f"; too close to call against {units.names(winner.rivals)}" if winner.rivals else "; every other recipe is slower"
    assert winner.speedup is not None
    return (
        f"**On a {title}, FORECAST: {winner.best}**, {units.speedup(winner.speedup)} of {_value(upper)} that the hardware would "
        f"allow ({upper.best}){rivals}."
    )


def _step_sentence() -> str:
    """The fastest step on each Blackwell GPU."""
    parts = []
    for gpu, title in BLACKWELL.items():
        step = forecast(gpu).gpus[0].step
        assert step is not None
        assert step.winner is not None
        parts.append(f"{_value(step.winner)} in {step.winner.best} on a {title}")
    return f"for all 24 the forecast is {' and '.join(parts)}"


def _winner(found: Linears, mode: Mode) -> Winner:
    return found.winners[mode]


def _value(winner: Winner) -> str:
    assert winner.speedup is not None
    return f"{winner.speedup.value:.2f}"


def _speedup(found: Linears, name: str, mode: Mode) -> Interval:
    speedup = found.speedup(name, mode)
    assert speedup is not None
    return speedup


def side_by_side() -> str:
    """The tutorial's table: what was measured on the H200 beside what is forecast for it and for a B300."""
    h200, b300 = forecast_linears("h200"), forecast_linears("b300")
    lines = [
        "| recipe | mode | H200, measured [95%] | H200, FORECAST [90%] | B300, FORECAST [90%] |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name in (each for each in b300.recipes if each != BASELINE):
        for mode in MODES:
            cells = [_cell(found, name, mode) for found in (measured(), h200, b300)]
            if cells[2]:
                lines.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: Linears, name: str, mode: Mode) -> str:
    """A speedup, or that the GPU does not run it; empty where the recipe has no number of its own."""
    if name in found.recipes and found.measured_as(name, mode) != name:
        return ""
    speedup = found.speedup(name, mode) if name in found.recipes else None
    return f"{speedup.value:.3f} {units.ends(speedup)}" if speedup is not None else "does not run"


def readme_table() -> str:
    """The README's: the linears in both modes, and eight such layers as a training step, on the H200."""
    found, step = measured(), steps()
    names = [name for name in found.recipes if name != BASELINE]
    rows = {
        "linears, forward and backward (autocast)": [_times(found, name, "autocast") for name in names],
        "their GEMMs alone (pre-quantized)": [_times(found, name, "pre-quantized") for name in names],
        "a training step of eight such layers, predicted": [f"{step[name]['predicted']['value']:.3f}x" for name in names],
        "the real model, right after": [f"{step[name]['real']:.3f}x" for name in names],
    }
    lines = [f"| speedup over {BASELINE} | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    return "\n".join([*lines, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items())])


def _times(found: Linears, name: str, mode: Mode) -> str:
    other = found.measured_as(name, mode)
    return f"{_speedup(found, name, mode).value:.3f}x" if other == name else f"as {other}"


def step_table() -> str:
    """The tutorial's table of the step."""
    lines = ["| recipe | predicted [95%] | real | why less than the GEMMs |", "| --- | --- | ---: | --- |"]
    for name, each in steps().items():
        found = each["predicted"]
        words = f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
        lines.append(f"| {name} | {words} | {each['real']:.3f} | {each['verdict'].removeprefix('diluted by ')} |")
    return "\n".join(lines)


def published() -> str:
    """What Transformer Engine's documentation prints for this model, and what is forecast for the same GPU."""
    facts = parse_toml((DOCS / "measured" / "published.toml").read_text(encoding="utf-8"))
    lines = [
        "| GPU | mode | recipe | published | FORECAST here [90%] | published ms | FORECAST ms [90%] |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for gpu, of_gpu in facts.items():
        for mode in MODES if isinstance(of_gpu, dict) else ():
            found, times = forecast_linears(gpu), of_gpu[mode]
            for name, time_ms in times.items():
                total = found.total(name, mode)
                assert total is not None
                ours = f"{total.total_ms.value:.0f} [{total.total_ms.low:.0f}, {total.total_ms.high:.0f}]"
                gain = "1" if name == BASELINE else f"{times[BASELINE] / time_ms:.2f}"
                words = "1" if name == BASELINE else _two_digits(_speedup(found, name, mode))
                lines.append(f"| {of_gpu['title']} | {mode} | {name} | {gain} | {words} | {time_ms:.0f} | {ours} |")
    return "\n".join(lines)


def _two_digits(found: Interval) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


# --- figures -------------------------------------------------------------------------------------------------------------

STYLES: dict[Mode, dict[str, Any]] = {"autocast": {"facecolor": COLORS[0]}, "pre-quantized": {"facecolor": lighter(COLORS[0])}}
LEGEND: dict[Mode, str] = {"autocast": "autocast: with quantization", "pre-quantized": "pre-quantized: only the GEMMs"}


def draw_h200(path: str) -> None:
    """Hopper: measured."""
    _draw({"NVIDIA H200, measured (95% intervals)": measured()}, path)


def draw_blackwell(path: str) -> None:
    """Blackwell: forecast."""
    _draw({f"{title}, FORECAST (90% error bars)": forecast_linears(gpu) for gpu, title in BLACKWELL.items()}, path)


def _draw(panels: dict[str, Linears], path: str) -> None:
    """A panel for each GPU, one below the other: every recipe with both modes side by side."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 0.5 + 2.7 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
        for axis, (title, found) in zip(axes, panels.items(), strict=True):
            _panel(axis, title, found)
        tallest = max(each.speedup.high or 0.0 for found in panels.values() for each in found.speedups if not each.op)
        axes[0].set_ylim(0, tallest * 1.15)  # room for the numbers
        handles = [Patch(**STYLES[mode], label=LEGEND[mode]) for mode in MODES]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def _panel(axis: Any, title: str, found: Linears) -> None:
    names = [name for name in found.recipes if name != BASELINE]
    for place, name in enumerate(names):
        for mode, shift in zip(MODES, (-0.2, 0.2), strict=True):
            speedup, other = found.speedup(name, mode), found.measured_as(name, mode)
            if speedup is not None and other == name:
                _bar(axis, place + shift, speedup, mode)
            elif speedup is not None:
                _shared_bar(axis, place + shift, speedup, other)
    axis.axhline(1, color=DARK, linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.yaxis.set_major_locator(MultipleLocator(0.5))
    axis.set_ylabel(f"speedup over {BASELINE}")
    axis.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axis.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axis.tick_params(axis="x", length=0)


def _bar(axis: Any, x: float, speedup: Interval, mode: Mode) -> None:
    low, high = speedup.low or speedup.value, speedup.high or speedup.value
    axis.bar(x, speedup.value, 0.38, **STYLES[mode])
    reach = [[speedup.value - low], [high - speedup.value]]
    axis.errorbar(x, speedup.value, yerr=reach, color="black", linewidth=0.9, capsize=2.5)
    above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axis.annotate(f"{speedup.value:.2f}x", (x, high), (0, 3), fontsize=8.5, fontweight="bold", **above)


def _shared_bar(axis: Any, x: float, speedup: Interval, other: str) -> None:
    """GEMMs that are another recipe's: its height, without a number of their own."""
    axis.bar(x, speedup.value, 0.38, facecolor="white", edgecolor=REST, linewidth=0.8, linestyle="--")
    axis.text(x, speedup.value / 2, f"as {other}", rotation=90, ha="center", va="center", fontsize=7.5, color=DARK, bbox=CLEAR)
