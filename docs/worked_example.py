"""The worked example of the documentation (hidden 4096, intermediate 16384, 32 heads, 24 layers, 31 x 512 tokens): its numbers.

Measured ones are those of a bench recorded on an H200, taken again by the code of today; the others are forecasts. `outputs.py`
writes the tables and sentences of this file into the pages, `pictures.py` draws its figures.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemmscope as gs
from gemmscope.forecast.sweep import rivals_of
from gemmscope.interval import Interval
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.bench import times_faster
from gemmscope.report.page.markdown import pipe_table
from gemmscope.report.page.rows import Rows, modes_table, same_kernels
from gemmscope.report.plot import CLEAR, COLOURS, DARK, REST, STYLE, lighter, write_figure
from gemmscope.store.benchfile import row_record, speedup_records, total_records
from gemmscope.toml import parse_toml

if TYPE_CHECKING:
    from gemmscope.api import Result
    from gemmscope.measure.findings import Findings
    from gemmscope.store.forecastfile import ForecastFile

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))
from support.run_files import replayed_bench  # noqa: E402

MODES = ("autocast", "pre-quantized")
BLACKWELL = {"b300": "B300", "b200": "B200"}
SIZES = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32, "num_hidden_layers": 24}
STEP = "codon5b_l8"  # the same layers, eight of them, as a training step


@cache
def bench() -> Findings:
    """On an H200, measured."""
    return replayed_bench("first")


@cache
def forecast(*gpus: str) -> Result[ForecastFile]:
    """On GPUs that were not there."""
    return gs.load(**SIZES).on(micro_batch_size=31, sequence_length=512).forecast(*gpus)


@cache
def measured() -> Rows:
    """The bench, row by row."""
    found = bench()
    return Rows([row_record(cell) for cell in found.cells()], list(speedup_records(found)), list(total_records(found)))


def forecast_rows(gpu: str) -> Rows:
    """A forecast in the same form."""
    [found] = forecast(gpu).file.gpus
    return Rows(found.rows, found.speedups, found.totals, doubt="90% error bar")


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
    return "\n\n".join(f"{title}, FORECAST:\n\n{_modes(forecast_rows(gpu))}" for gpu, title in BLACKWELL.items())


def _modes(found: Rows) -> str:
    table = modes_table(found)
    assert table is not None
    return pipe_table(table)


def conclusions() -> str:
    """What follows, in sentences that hold for the numbers of today."""
    found, step = measured(), steps()
    (best, gain), (raw, hardware) = (_best(found, mode) for mode in MODES)
    block, products = (_gain(found, "FP8Block", mode) for mode in MODES)
    lines = [
        f"**On an H200: {best}.** The linears run {gain.value:.2f} times as fast as in {BASELINE}, of {hardware.value:.2f} "
        f"that the hardware gives ({raw}). FP8Block keeps {block.value:.2f}: "
        f"its products alone gain no more than {products.value:.2f}.",
        *(_blackwell_sentence(gpu, title) for gpu, title in BLACKWELL.items()),
        f"**A training step gains less than its linears**: eight such layers gain {step[best]['predicted']['value']:.2f} "
        f"in {best} on the H200 (predicted; the real model: {step[best]['real']:.2f}), and {_step_words()}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _blackwell_sentence(gpu: str, title: str) -> str:
    found = forecast_rows(gpu)
    (best, gain), (raw, hardware) = (_best(found, mode) for mode in MODES)
    others = [(name, _gain(found, name, "autocast")) for name in found.recipes if name != BASELINE]
    rivals = rivals_of(best, gain, others)
    doubt = f"; its error bar overlaps {_listed(rivals)}: too close to call" if rivals else "; no other error bar reaches it"
    rest = [each for name, each in others if name != best]
    alike = max(each.low for each in rest) < min(each.high for each in rest)
    among = " The FP8 recipes cannot be told apart." if alike else ""
    return (
        f"**On a {title}, FORECAST: {best}**, {times_faster(gain)} of {hardware.value:.2f} that the hardware would give "
        f"({raw}){doubt}.{among}"
    )


def _listed(names: list[str]) -> str:
    *most, last = (f"{name}'s" for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def _step_words() -> str:
    """The fastest step on each Blackwell GPU."""
    parts = []
    for gpu, title in BLACKWELL.items():
        [found] = forecast(gpu).file.gpus
        gains = {each.recipe: each.speedup for each in found.step if each.speedup is not None}
        name = max(gains, key=lambda each: gains[each].value)
        parts.append(f"{gains[name].value:.2f} in {name} on a {title}")
    return f"all 24 are forecast to gain {' and '.join(parts)}"


def _best(found: Rows, mode: str) -> tuple[str, Interval]:
    best = found.best(mode)
    assert best is not None
    return best[0], _gain(found, best[0], mode)


def _gain(found: Rows, name: str, mode: str) -> Interval:
    gain = found.gain(name, mode)
    assert gain is not None
    assert gain.low is not None
    assert gain.high is not None
    return Interval(gain.value, gain.low, gain.high)


def side_by_side() -> str:
    """The tutorial's table: what was measured on the H200 beside what is forecast for it and for a B300."""
    h200, b300 = forecast_rows("h200"), forecast_rows("b300")
    lines = [
        "| recipe | mode | H200, measured [95%] | H200, FORECAST [90%] | B300, FORECAST [90%] |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name in (each for each in b300.recipes if each != BASELINE):
        for mode in MODES:
            cells = [_words(found, name, mode) for found in (measured(), h200, b300)]
            if cells[2]:
                lines.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(found: Rows, name: str, mode: str) -> str:
    """A speedup, or that the GPU does not run it; empty where the recipe has no number of its own."""
    gain = found.gain(name, mode)
    if gain is not None:
        return f"{gain.value:.3f} {gain.interval}"
    return "" if mode == "pre-quantized" and same_kernels(name, found.recipes) else "does not run"


def readme_table() -> str:
    """The README's: the linears in both modes, and eight such layers as a training step, on the H200."""
    found, step = measured(), steps()
    names = [name for name in found.recipes if name != BASELINE]
    rows = {
        "linears, forward and backward (autocast)": [_times(found, name, "autocast") for name in names],
        "their products alone (pre-quantized)": [_times(found, name, "pre-quantized") for name in names],
        "a training step of eight such layers, predicted": [f"{step[name]['predicted']['value']:.3f}x" for name in names],
        "the real model, right after": [f"{step[name]['real']:.3f}x" for name in names],
    }
    lines = [f"| times as fast as {BASELINE} | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    return "\n".join([*lines, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows.items())])


def _times(found: Rows, name: str, mode: str) -> str:
    gain = found.gain(name, mode)
    return f"{gain.value:.3f}x" if gain is not None else f"as {same_kernels(name, found.recipes)}"


def step_table() -> str:
    """The tutorial's table of the step."""
    lines = ["| recipe | predicted [95%] | real | why less than the products |", "| --- | --- | ---: | --- |"]
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
            found, times = forecast_rows(gpu), of_gpu[mode]
            for name, time_ms in times.items():
                total = found.total(name, mode)
                assert total is not None
                ours = f"{total.total_ms.value:.0f} [{total.total_ms.low:.0f}, {total.total_ms.high:.0f}]"
                gain = "1" if name == BASELINE else f"{times[BASELINE] / time_ms:.2f}"
                words = "1" if name == BASELINE else _two_digits(_gain(found, name, mode))
                lines.append(f"| {of_gpu['title']} | {mode} | {name} | {gain} | {words} | {time_ms:.0f} | {ours} |")
    return "\n".join(lines)


def _two_digits(found: Interval) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


# --- figures -------------------------------------------------------------------------------------------------------------

LOOKS: dict[str, dict[str, Any]] = {
    "autocast": {"facecolor": COLOURS[0]},
    "pre-quantized": {"facecolor": lighter(COLOURS[0])},
}
LEGEND = {"autocast": "autocast: with quantizing, as training pays", "pre-quantized": "pre-quantized: the products alone"}


def draw_h200(path: str) -> None:
    """Hopper: measured."""
    _draw({"NVIDIA H200, measured (95% intervals)": measured()}, path)


def draw_blackwell(path: str) -> None:
    """Blackwell: forecast."""
    _draw({f"{title}, FORECAST (90% error bars)": forecast_rows(gpu) for gpu, title in BLACKWELL.items()}, path)


def _draw(panels: dict[str, Rows], path: str) -> None:
    """A panel for each GPU, one below the other: every recipe with both modes side by side."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 0.5 + 2.7 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
        for axis, (title, found) in zip(axes, panels.items(), strict=True):
            _panel(axis, title, found)
        tallest = max(gain.speedup.high or 0.0 for found in panels.values() for gain in found.speedups if not gain.op)
        axes[0].set_ylim(0, tallest * 1.15)  # room for the numbers
        handles = [Patch(**LOOKS[mode], label=LEGEND[mode]) for mode in MODES]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
        write_figure(figure, path)


def _panel(axis: Any, title: str, found: Rows) -> None:
    from matplotlib.ticker import MultipleLocator

    names = [name for name in found.recipes if name != BASELINE]
    for place, name in enumerate(names):
        for mode, shift in zip(MODES, (-0.2, 0.2), strict=True):
            if found.gain(name, mode) is not None:
                _bar(axis, place + shift, _gain(found, name, mode), mode)
            elif shared := same_kernels(name, found.recipes):
                _shared_bar(axis, place + shift, _gain(found, shared, mode), shared)
    axis.axhline(1, color=DARK, linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.yaxis.set_major_locator(MultipleLocator(0.5))
    axis.set_ylabel(f"times as fast as {BASELINE}")
    axis.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axis.yaxis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axis.tick_params(axis="x", length=0)


def _bar(axis: Any, x: float, gain: Interval, mode: str) -> None:
    axis.bar(x, gain.value, 0.38, **LOOKS[mode])
    reach = [[gain.value - gain.low], [gain.high - gain.value]]
    axis.errorbar(x, gain.value, yerr=reach, color="black", linewidth=0.9, capsize=2.5)
    above: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axis.annotate(f"{gain.value:.2f}x", (x, gain.high), (0, 3), fontsize=8.5, fontweight="bold", **above)


def _shared_bar(axis: Any, x: float, gain: Interval, shared: str) -> None:
    """Products that are another recipe's: its height, without a number of their own."""
    axis.bar(x, gain.value, 0.38, facecolor="white", edgecolor=REST, linewidth=0.8, linestyle="--")
    axis.text(x, gain.value / 2, f"as {shared}", rotation=90, ha="center", va="center", fontsize=7.5, color=DARK, bbox=CLEAR)
