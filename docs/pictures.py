"""Draws the README's picture from real output: `make pictures`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from gemmscope.model import presets
from gemmscope.model.spec import RunSpec
from gemmscope.report import formats, shapes
from gemmscope.workload.derive import derive
from gemmscope.workload.summary import totals

COMMAND = "gemmscope shapes --preset qwen3-30b-a3b --micro-batch-size 4 --sequence-length 4096 --tp 2 --sequence-parallel --ep 8"


def main() -> None:
    """The same calls as the command makes, on a console that remembers what it showed."""
    source = presets.load("qwen3-30b-a3b")
    assert source.model is not None
    run = RunSpec(4, 4096, tp=2, sequence_parallel=True, ep=8)
    workload = derive(source.model, run)
    summary = totals(workload, run, source.model)
    console = Console(record=True, width=100, highlight=False)
    console.print(f"[bold green]$[/] {COMMAND}", soft_wrap=False)
    formats.print_tables(
        [shapes.gemm_table(workload, summary)],
        shapes.headline(source.model.name, source.model, run, workload),
        [*shapes.closing(summary), *(f"note: {note}" for note in workload.notes)],
        console,
    )
    path = Path(__file__).parent / "images" / "shapes.svg"
    path.write_text(console.export_svg(title="gemmscope shapes", unique_id="gemmscope-shapes"), encoding="utf-8")


if __name__ == "__main__":
    main()
