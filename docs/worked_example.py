"""Numbers of the worked example of the documentation: hidden 4096, intermediate 16384, 32 heads, 24 layers, 31 x 512 tokens.

Measured numbers come from a bench recorded on an H200; the others are forecasts. `outputs.py` writes the tables and sentences of
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
from gemmscope.choices import MODES, Mode
from gemmscope.document.linears import linears_sections
from gemmscope.document.palette import recipe_key
from gemmscope.document.table import Table
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.results.bench import BenchResult
from gemmscope.results.forecast import ForecastResult
from gemmscope.results.linears import Linears
from gemmscope.results.step import StepResult
from gemmscope.toml import parse_toml
from gemmscope.units import ends, speedup
from gemmscope.writers.drawing import CLEAR, NORMAL, SOFT, face, whiskers
from gemmscope.writers.figure import STYLE, UNDATED, WIDTH_IN
from gemmscope.writers.markdown import pipe_table

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "tests"), str(DOCS.parent / "benchmarks")]
from step_on_gpu import verdict_text  # noqa: E402
from support.run_files import recorded_bench  # noqa: E402
from support.step_files import recorded_step  # noqa: E402

BLACKWELL = {"b300": "B300", "b200": "B200"}
SIZES = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 24}
STEP = "codon5b_l8"  # the same layers, eight of them, as a training step


@cache
def bench() -> BenchResult:
    """The bench recorded on an H200."""
    return recorded_bench("first")


@cache
def llama_step() -> StepResult:
    """Eight layers of Llama-3.1-8B's shape recorded on an H200, without the cost and the observed speedup of the tests."""
    result = recorded_step("llama8b")
    recipes = tuple(time.model_copy(update={"cost": None}) for time in result.step.recipes)
    findings = tuple(finding for finding in result.findings if not finding.code.startswith("observed-"))
    step = result.step.model_copy(update={"recipes": recipes})
    return result.model_copy(update={"step": step, "findings": findings, "observed_speedup": None})


@cache
def forecast(*gpus: str) -> ForecastResult:
    """The forecast for these GPUs."""
    return gs.load(**SIZES).on(micro_batch_size=31, sequence_length=512).forecast(*gpus)


def measured() -> Linears:
    """The linears of the bench."""
    return bench().linears


def forecast_linears(gpu: str) -> Linears:
    """The same linears, forecast."""
    [on_gpu] = forecast(gpu).gpus
    return on_gpu.linears


@cache
def as_te_benchmark(gpu: str) -> Linears:
    """The same linears, forecast as Transformer Engine's GEMM benchmark script counts them."""
    [on_gpu] = gs.load(**SIZES).on(micro_batch_size=31, sequence_length=512).forecast(gpu, as_te_benchmark=True).gpus
    return on_gpu.linears


def steps() -> dict[str, Any]:
    """By recipe: the training step of eight such layers on an H200, predicted and real (`docs/accuracy.md`)."""
    kept = json.loads((DOCS / "measured" / "h200_steps.json").read_text(encoding="utf-8"))
    recipes: dict[str, Any] = kept["transformer_engine"][STEP]["recipes"]
    return recipes


def modes_table(linears: Linears) -> Table:
    """All linears in every recipe, autocast beside pre-quantized."""
    blocks = [block for section in linears_sections(linears) for block in section.blocks]
    return next(block for block in blocks if isinstance(block, Table) and "All linears" in block.title)


# --- tables and sentences ----------------------------------------------------------------------------------------------


def blackwell_tables() -> str:
    """Forecast speedups, both modes, one table for each GPU."""
    return "\n\n".join(
        f"{title}, FORECAST:\n\n{pipe_table(modes_table(forecast_linears(gpu)))}" for gpu, title in BLACKWELL.items()
    )


def conclusions() -> str:
    """Conclusions, as sentences made from the current numbers."""
    linears, step = measured(), steps()
    (best, gain), (raw, hardware) = (_best(linears, mode) for mode in MODES)
    block, block_gemms = (_speedup(linears, "FP8Block", mode) for mode in MODES)
    lines = [
        f"**On an H200: {best}.** The linears reach a speedup of {gain.value:.2f}x over {BASELINE}; the GEMMs alone reach "
        f"{hardware.value:.2f}x ({raw}). FP8Block reaches {block.value:.2f}x, because its GEMMs alone reach only "
        f"{block_gemms.value:.2f}x.",
        *(_blackwell_sentence(gpu, title) for gpu, title in BLACKWELL.items()),
        f"**A training step gains less than its linears**: eight such layers reach {step[best]['predicted']['value']:.2f}x in "
        f"{best} on the H200 (predicted; the real model: {step[best]['real']:.2f}x), and {_step_sentence()}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _blackwell_sentence(gpu: str, title: str) -> str:
    linears = forecast_linears(gpu)
    winner = linears.winners["autocast"]
    assert winner.speedup is not None
    raw, hardware = _best(linears, "pre-quantized")
    close = f"; too close to call against {' and '.join(winner.rivals)}" if winner.rivals else "; faster than every other recipe"
    return (
        f"**On a {title}, FORECAST: {winner.best}**, {speedup(winner.speedup)} with quantization; the GEMMs alone would reach "
        f"{hardware.value:.2f}x ({raw}){close}."
    )


def _step_sentence() -> str:
    """The fastest step on each Blackwell GPU."""
    parts = []
    for gpu, title in BLACKWELL.items():
        [on_gpu] = forecast(gpu).gpus
        assert on_gpu.step is not None
        winner = on_gpu.step.winner
        assert winner is not None
        assert winner.speedup is not None
        parts.append(f"{winner.speedup.value:.2f}x in {winner.best} on a {title}")
    return f"all 24 are forecast to reach {' and '.join(parts)}"


def _best(linears: Linears, mode: Mode) -> tuple[str, Interval]:
    winner = linears.winners[mode]
    assert winner.speedup is not None
    return winner.best, winner.speedup


def _speedup(linears: Linears, name: str, mode: Mode) -> Interval:
    speedup = linears.speedup(name, mode)
    assert speedup is not None
    return speedup


def side_by_side() -> str:
    """The tutorial's table: measured on the H200, forecast for the H200 and forecast for a B300, side by side."""
    h200, b300 = forecast_linears("h200"), forecast_linears("b300")
    lines = [
        "| recipe | mode | H200, measured [95%] | H200, FORECAST [90%] | B300, FORECAST [90%] |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name in (recipe for recipe in b300.recipes if recipe != BASELINE):
        for mode in MODES:
            if b300.measured_as(name, mode) == name:
                cells = [_text(linears, name, mode) for linears in (measured(), h200, b300)]
                lines.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(linears: Linears, name: str, mode: Mode) -> str:
    """A speedup, or that the GPU does not run the recipe."""
    if name not in linears.recipes:
        return "does not run"
    speedup = _speedup(linears, name, mode)
    return f"{speedup.value:.3f} {ends(speedup)}"


def step_table() -> str:
    """The tutorial's table of the step."""
    lines = ["| recipe | predicted [95%] | real | why less than the GEMMs |", "| --- | ---: | ---: | --- |"]
    for name, recipe in steps().items():
        predicted = Interval(**recipe["predicted"])
        lines.append(
            f"| {name} | {predicted.value:.3f} {ends(predicted)} | {recipe['real']:.3f} | {verdict_text(recipe['verdict'])} |"
        )
    return "\n".join(lines)


def published() -> str:
    """Numbers for this model from Transformer Engine's documentation, beside a forecast that counts as they do."""
    lines = [
        "| GPU | mode | recipe | published | FORECAST here [90%] | published ms | FORECAST ms [90%] |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for gpu, of_gpu in _published().items():
        for mode in MODES:
            linears, times = as_te_benchmark(gpu), of_gpu[mode]
            for name, time_ms in times.items():
                total = linears.total(name, mode)
                assert total is not None
                ours = f"{total.total_ms.value:.0f} {ends(total.total_ms, 0)}"
                gain = "1" if name == BASELINE else f"{times[BASELINE] / time_ms:.2f}"
                text = "1" if name == BASELINE else _two_digits(_speedup(linears, name, mode))
                lines.append(f"| {of_gpu['title']} | {mode} | {name} | {gain} | {text} | {time_ms:.0f} | {ours} |")
    return "\n".join(lines)


@cache
def _published() -> dict[str, Any]:
    facts = parse_toml((DOCS / "measured" / "published.toml").read_text(encoding="utf-8"))
    return {gpu: of_gpu for gpu, of_gpu in facts.items() if isinstance(of_gpu, dict)}


def published_summary() -> str:
    """How far the forecast is from the published numbers, and how often its error bars hold."""
    lines = []
    for gpu, of_gpu in _published().items():
        linears, errors, inside, gains = as_te_benchmark(gpu), list[float](), 0, 0
        for mode in MODES:
            for name, time_ms in of_gpu[mode].items():
                total = linears.total(name, mode)
                assert total is not None
                errors.append(abs(total.total_ms.value / time_ms - 1))
                if name != BASELINE:
                    speedup = _speedup(linears, name, mode)
                    gains += 1
                    inside += (speedup.low or 0) <= of_gpu[mode][BASELINE] / time_ms <= (speedup.high or 0)
        lines.append(
            f"* {of_gpu['title']}: the forecast times are {sum(errors) / len(errors):.0%} off on average, "
            f"{max(errors):.0%} at worst; {inside} of {gains} published speedups lie inside the error bars."
        )
    return "\n".join(lines)


def _two_digits(interval: Interval) -> str:
    return f"{interval.value:.2f} {ends(interval, 2)}"


# --- figures -------------------------------------------------------------------------------------------------------------

SHADES = {"autocast": "plain", "pre-quantized": "light"}
TITLE = "Linears of 24 layers, hidden size 4096, micro-batch 31, sequence 512"
LEGEND = {"autocast": "autocast: with quantization, as in training", "pre-quantized": "pre-quantized: the GEMMs alone"}


def draw_blackwell(path: str) -> None:
    """Draw the forecast for Blackwell GPUs."""
    _draw({f"{title}, FORECAST (90% error bars)": forecast_linears(gpu) for gpu, title in BLACKWELL.items()}, path)


def _draw(panels: dict[str, Linears], path: str) -> None:
    """A panel for each GPU, one below the other: every recipe with both modes side by side."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.7 + 2.5 * len(panels)), layout="constrained")
        figure.suptitle(TITLE, fontsize=9.5, fontweight="bold", x=0.01, ha="left")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
        for axis, (title, linears) in zip(axes, panels.items(), strict=True):
            _panel(axis, title, linears)
        tallest = max(entry.speedup.high or 0.0 for linears in panels.values() for entry in linears.speedups if not entry.op)
        axes[0].set_ylim(0, tallest * 1.15)  # room for the numbers
        handles = [Patch(**face("mark-total", SHADES[mode]), label=LEGEND[mode]) for mode in MODES]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=NORMAL)
        figure.savefig(path, metadata=UNDATED["svg"])


def _panel(axis: Any, title: str, linears: Linears) -> None:
    names = [name for name in linears.recipes if name != BASELINE]
    for place, name in enumerate(names):
        for mode, shift in zip(MODES, (-0.2, 0.2), strict=True):
            shared = linears.measured_as(name, mode)
            if shared == name:
                _bar(axis, place + shift, _speedup(linears, name, mode), face(recipe_key(name), SHADES[mode]))
            else:
                _shared_bar(axis, place + shift, _speedup(linears, shared, mode), shared)
    axis.axhline(1, color=SOFT, linewidth=0.8, linestyle="--", zorder=0.9)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.yaxis.set_major_locator(MultipleLocator(0.5))
    axis.set_ylabel(f"speedup over {BASELINE}")
    axis.set_title(title, fontsize=8.5, loc="left")
    axis.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axis.tick_params(axis="x", length=0)


def _bar(axis: Any, x: float, interval: Interval, style: dict[str, Any]) -> None:
    low, high = interval.low or interval.value, interval.high or interval.value
    axis.bar(x, interval.value, 0.38, **style)
    whiskers(axis, [x], [interval.value], ([interval.value - low], [high - interval.value]))
    above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axis.annotate(f"{interval.value:.2f}x", (x, high), (0, 3), fontsize=NORMAL, fontweight="bold", bbox=CLEAR, **above)


def _shared_bar(axis: Any, x: float, interval: Interval, shared: str) -> None:
    """A bar for a recipe with the GEMMs of another one: its height, without a number."""
    axis.bar(x, interval.value, 0.38, facecolor="white", edgecolor="#9a9a9a", linewidth=0.8, linestyle="--")
    axis.text(
        x, interval.value / 2, f"as {shared}", rotation=90, ha="center", va="center", fontsize=NORMAL, color=SOFT, bbox=CLEAR
    )
