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
from gemmscope.writers import terminal
from gemmscope.writers.figure import save_figures

IMAGES = Path(__file__).parent / "images"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
import worked_example  # noqa: E402

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


DRAWN: dict[str, Callable[[Path], None]] = {
    "shapes.svg": draw_shapes,
    "bench-h200.svg": lambda path: worked_example.bench().save(path),
    "step-h200.svg": draw_step,
    "forecast.svg": lambda path: worked_example.forecast("b300", "h200").save(path),
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
