"""Draws the figures of the documentation from real output: `make pictures`. A test fails when the text in one is stale."""

from __future__ import annotations

import html
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import gemmscope as gs
from gemmscope.document import document
from gemmscope.results.read import read_result
from gemmscope.writers import terminal
from gemmscope.writers.figure import save_figures

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
TRACE = DOCS.parent / "tests/data/traces/recast_weights.json.gz"
sys.path[:0] = [str(DOCS), str(DOCS.parent / "tests")]
import worked_example  # noqa: E402
from support.fleet_files import shown_fleet  # noqa: E402

COMMAND = "gemmscope shapes --preset qwen3-30b-a3b --micro-batch-size 4 --sequence-length 4096 --tp 2 --sequence-parallel --ep 8"


def draw_shapes(path: Path) -> None:
    """The output of the command, as a picture of a terminal."""
    job = gs.load("qwen3-30b-a3b").on(micro_batch_size=4, sequence_length=4096, tp=2, sequence_parallel=True, ep=8)
    console = Console(record=True, width=100, highlight=False, file=io.StringIO())
    console.print(f"[bold green]$[/] {COMMAND}", soft_wrap=False)
    terminal.show(document(job.shapes()), console=console)
    path.write_text(console.export_svg(title="gemmscope shapes", unique_id="gemmscope-shapes"), encoding="utf-8")


def draw_step(path: Path) -> None:
    """The waterfall that `gemmscope report --figures` draws of a step recorded on an H200."""
    with tempfile.TemporaryDirectory() as name:
        save_figures([document(worked_example.llama_step())], Path(name))
        path.write_bytes((Path(name) / "waterfall.svg").read_bytes())


def draw_sweep(path: Path) -> None:
    """Two sizes of Llama-3.1-8B varied, forecast for an H200."""
    job = gs.load("llama-3.1-8b").on(micro_batch_size=1, sequence_length="2k")
    job.sweep("h200", micro_batch_size=[1, 2, 4, 8], sequence_length=["1k", "2k", "4k", "8k"]).save(path)


def draw_plan(path: Path) -> None:
    """Layouts of a small Llama on eight H100s."""
    gs.load("llama-3.2-1b").plan("h100", 8, global_batch=64, sequence_length="8k").save(path)


DRAWN: dict[str, Callable[[Path], None]] = {
    "shapes.svg": draw_shapes,
    "bench-h200.svg": lambda path: worked_example.bench().save(path),
    "step-h200.svg": draw_step,
    "forecast.svg": lambda path: worked_example.forecast("b300", "h200").save(path),
    "sweep.svg": draw_sweep,
    "plan.svg": draw_plan,
    "numerics.svg": lambda path: read_result(DOCS / "measured/numerics_small_llama.json.gz").save(path),
    "explain.svg": lambda path: gs.explain_trace(TRACE).save(path),
    "fleet.svg": lambda path: shown_fleet().save(path),
    "speedups-blackwell.svg": lambda path: worked_example.draw_blackwell(str(path)),
}


def labels(svg: str) -> list[str]:
    """The text in a figure, without the numbers along the axes."""
    texts = [html.unescape(text) for text in re.findall(r">([^<>]*[^<>\s][^<>]*)</(?:text|tspan)>", svg)]
    return [text for text in texts if re.search(r"[^\d.\s]", text)]


def main() -> None:
    """Draw all figures."""
    for name, draw in DRAWN.items():
        draw(IMAGES / name)


if __name__ == "__main__":
    main()
