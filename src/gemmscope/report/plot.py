"""The picture of a bench run: one stacked bar per recipe, for papers and pull requests.

Each bar is a model's linears in one micro-batch: every op in its colour, fprop and dgrad plain, wgrad lighter, and what
quantizing takes as a hatched part of its own on top. Above stands the speedup over BF16 with its 95% interval.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmscope.errors import UserError
from gemmscope.recipe.recipes import BASELINE
from gemmscope.report.bench import BenchReport

if TYPE_CHECKING:
    from gemmscope.measure.breakdown import Breakdown
    from gemmscope.measure.task import Mode

COLOURS = ("#2f6b9a", "#d98032", "#4f9d69", "#a4557f", "#8c7b5a", "#5b6fb5", "#c0524a", "#6aa3a0")
HEADS = {"autocast": "Autocast: forward and backward, quantizing included", "pre-quantized": "Pre-quantized: products alone"}


def save_plot(report: BenchReport, title: str, path: str) -> None:
    """Draw both modes side by side and write the file; its ending says in which format (png, svg, pdf)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    widths = [max(len(report.columns(mode)), 1) for mode in report.modes]
    size = (2 + 1.5 * sum(widths), 5.6)
    figure, panels = plt.subplots(1, len(widths), figsize=size, squeeze=False, sharey=True, width_ratios=widths)
    for panel, mode in zip(panels[0], report.modes, strict=True):
        _bars(panel, report, mode)
    panels[0][0].set_ylabel("ms per micro-batch, all linears (lighter: wgrad)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(len(labels), 6), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout(rect=(0, 0.04 + 0.035 * (len(labels) // 6 + 1), 1, 1))
    try:
        figure.savefig(Path(path), dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(f"the plot cannot be written to {path}: {error}", "for example -o bench.png") from error
    finally:
        plt.close(figure)


def _bars(panel: Any, report: BenchReport, mode: Mode) -> None:
    """One mode: a bar for every recipe that has all its parts."""
    names = [name for name in report.columns(mode) if report.results.totals(name, mode) is not None]
    tallest = 0.0
    for position, name in enumerate(names):
        height = 0.0
        for index, case in enumerate(report.results.cases()):
            cell = report.cell(case, name, mode)
            if cell is not None:
                height = _stack(panel, cell, position, height, COLOURS[index % len(COLOURS)], first=position == 0)
        height = _quantizing(panel, report, name, mode, position, height)
        panel.text(position, height, _above(report, name, mode, height), ha="center", va="bottom", fontsize=9)
        tallest = max(tallest, height)
    panel.set_xticks(range(len(names)), names)
    panel.set_title(HEADS[mode], fontsize=10)
    panel.set_ylim(0, max(tallest * 1.18, panel.get_ylim()[1]))
    panel.spines[["top", "right"]].set_visible(False)


def _stack(panel: Any, cell: Breakdown, position: int, bottom: float, colour: str, *, first: bool) -> float:
    """The products of one op: fprop and dgrad together, wgrad lighter. Returns the new height."""
    count = cell.case.count
    products = cell.product_ms()
    if not products:  # not split into passes: one plain block
        products = {"fprop": cell.total.value, "dgrad": 0.0, "wgrad": 0.0}
    forward, wgrad = (products["fprop"] + products["dgrad"]) * count, products["wgrad"] * count
    label = cell.case.op if first else None
    panel.bar(position, forward, bottom=bottom, color=colour, width=0.62, edgecolor="white", linewidth=0.6, label=label)
    panel.bar(position, wgrad, bottom=bottom + forward, color=colour, alpha=0.6, width=0.62, edgecolor="white", linewidth=0.6)
    return bottom + forward + wgrad


def _quantizing(panel: Any, report: BenchReport, name: str, mode: Mode, position: int, bottom: float) -> float:
    cells = [cell for case in report.results.cases() if (cell := report.cell(case, name, mode))]
    spent = sum(sum(cell.quantize_ms.values()) * cell.case.count for cell in cells)
    if spent:
        label = None if "quantizing" in panel.get_legend_handles_labels()[1] else "quantizing"
        style = {"facecolor": "#e8e8e8", "edgecolor": "#555555", "hatch": "////", "linewidth": 0.6}
        panel.bar(position, spent, bottom=bottom, width=0.62, label=label, **style)
    return bottom + spent


def _above(report: BenchReport, name: str, mode: Mode, height: float) -> str:
    """The speedup with its interval, or what stands in its way."""
    if name == BASELINE:
        return f"{height:.0f} ms"
    if report.falls_back(name, mode):
        return f"{height:.0f} ms\nFALLBACK"
    found = report.results.speedup(name, mode)
    return f"{height:.0f} ms\n{found.value:.2f}x\n[{found.low:.2f}, {found.high:.2f}]" if found else f"{height:.0f} ms"
