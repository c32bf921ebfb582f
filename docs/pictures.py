"""Draws the pictures of the documentation from real output: `make pictures`. A test fails when words in one are stale."""

from __future__ import annotations

import html
import io
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gemmscope.document.bench import bench_document
from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.report import formats, shapes
from gemmscope.report.page.figures import save_figures
from gemmscope.report.page.kinds import report_of
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import totals
from gemmscope.writers.figure import save_figure

IMAGES = Path(__file__).parent / "images"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
import worked_example  # noqa: E402
from support.run_files import put, recorded_step  # noqa: E402

COMMAND = "gemmscope shapes --preset qwen3-30b-a3b --micro-batch-size 4 --sequence-length 4096 --tp 2 --sequence-parallel --ep 8"


def draw_shapes(path: Path) -> None:
    """The same calls as the command makes, on a console that remembers what it showed."""
    source = presets.load("qwen3-30b-a3b")
    assert source.model is not None
    run = RunSpec(4, 4096, tp=2, sequence_parallel=True, ep=8)
    workload = derive(source.model, run)
    summary = totals(workload, run, source.model)
    console = Console(record=True, width=100, highlight=False, file=io.StringIO())
    console.print(f"[bold green]$[/] {COMMAND}", soft_wrap=False)
    formats.print_tables(
        [shapes.gemm_table(workload, summary)],
        shapes.headline(source.model.name, source.model, run, workload),
        [*shapes.closing(summary), *(f"note: {note}" for note in workload.notes)],
        console,
    )
    path.write_text(console.export_svg(title="gemmscope shapes", unique_id="gemmscope-shapes"), encoding="utf-8")


def draw_bench(path: Path) -> None:
    """What `gemmscope bench -o` draws, of the bench recorded on an H200."""
    document = bench_document(worked_example.bench())
    title = "24 layers of hidden size 4096, 31 x 512 tokens, on NVIDIA H200: measured"
    save_figure(replace(document, title=title), path)


def draw_step(path: Path) -> None:
    """What `gemmscope report --figures` draws, of a step recorded on an H200."""
    run = recorded_step("llama8b")
    run["model"]["name"] = "Llama-3.1-8B's shape"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_figures(report_of([put(folder, "step.json", run)]), folder)
        path.write_bytes((folder / "waterfall.svg").read_bytes())


DRAWN: dict[str, Callable[[Path], None]] = {
    "shapes.svg": draw_shapes,
    "bench-h200.svg": draw_bench,
    "step-h200.svg": draw_step,
    "forecast.svg": lambda path: worked_example.forecast("b300", "h200").save(path),
    "speedups-h200.svg": lambda path: worked_example.draw_h200(str(path)),
    "speedups-blackwell.svg": lambda path: worked_example.draw_blackwell(str(path)),
}


def words(svg: str) -> list[str]:
    """What can be read in a picture. Where lines run, and the numbers along axes, are the business of whatever drew it."""
    found = [html.unescape(text) for text in re.findall(r">([^<>]*[^<>\s][^<>]*)</(?:text|tspan)>", svg)]
    return [text for text in found if re.search(r"[^\d.\s]", text)]


def main() -> None:
    """All of them."""
    for name, draw in DRAWN.items():
        draw(IMAGES / name)


if __name__ == "__main__":
    main()
