"""`gemmscope trace-me`: the lines that record a good trace for `gemmscope explain`."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  gemmscope trace-me
  gemmscope trace-me --kind trainer >> callbacks.py
"""

LOOP = """\
import gemmscope

with gemmscope.trace_me("step.json.gz", steps=3, after=10) as trace:   # skips 10 steps, records 3, then costs nothing
    for batch in loader:
        train_step(batch)                                              # forward, backward, optimizer.step(), as it is
        trace.step()                                                   # after every step
"""

TRAINER = """\
import gemmscope
from transformers import TrainerCallback

class Record(TrainerCallback):                                         # Trainer(..., callbacks=[Record()])
    def on_train_begin(self, *_, **__):
        self.trace = gemmscope.trace_me("step.json.gz", steps=3, after=10).__enter__()
    def on_step_end(self, *_, **__):
        self.trace.step()
    def on_train_end(self, *_, **__):
        self.trace.__exit__(None, None, None)
"""

PLAIN = """\
from torch.profiler import ProfilerActivity, profile, schedule         # without gemmscope on the training machine

with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True,
             schedule=schedule(wait=9, warmup=1, active=3, repeat=1),
             on_trace_ready=lambda p: p.export_chrome_trace("step.json.gz")) as p:
    for batch in loader:
        train_step(batch)
        p.step()
"""
KINDS = {"loop": LOOP, "trainer": TRAINER, "plain": PLAIN}


def known_kind(text: str) -> str:
    """One of the kinds."""
    if text not in KINDS:
        raise typer.BadParameter(f"must be {', '.join(KINDS)}, got {text!r}")
    return text


def command(
    kind: Annotated[
        str, typer.Option(parser=known_kind, metavar="KIND", help="loop (your own), trainer (Hugging Face), plain (torch alone).")
    ] = "loop",
) -> None:
    """Print the lines that record a trace from your own training loop.

    Put them around the loop: they wait until the run is warm, record a few steps with the shapes of all operators, and write one
    small gzipped file with the GPU clock. In a distributed job rank 0 writes; `ranks=(0, 1)` for more. To compare with BF16,
    record it the same way: gemmscope explain fp8.json.gz --baseline bf16.json.gz
    """
    typer.echo(KINDS[kind], nl=False)
    typer.echo("\n# then: gemmscope explain step.json.gz", nl=True)
