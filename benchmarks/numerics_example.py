"""Trains a small Llama on the CPU, records it, and writes the result that docs/numerics.md shows.

    python benchmarks/numerics_example.py docs/measured/numerics_small_llama.json.gz       # about ten minutes on two cores

4 layers of hidden size 256, 150 steps on the sources of Python's standard library, BF16 with float32 masters.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import gemmscope
from training_model import SIZES, Llama, Text

STEPS, RECORDED = 150, 8


def record(path: Path) -> None:
    """The last steps of a short training."""
    size = replace(SIZES["toy"], hidden=256, intermediate=768, layers=4, heads=4, sequence=256, batch=4)
    torch.manual_seed(0)
    model = Llama(size, seed=0).to(torch.bfloat16)
    text = Text(size, STEPS, seed=0, windows=1, device="cpu")
    parameters = list(model.parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1)
    with gemmscope.record_tensors(model, path, steps=RECORDED, after=STEPS - RECORDED) as recording:
        for step in range(STEPS):
            loss = model(text.batch(step))
            loss.backward()
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = parameter.grad.float() if parameter.grad is not None else None
                parameter.grad = None
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=True):
                    parameter.copy_(master)
            recording.step()
            if step % 25 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Record, compute, write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.safetensors"
        record(path)
        result = gemmscope.quantization_errors(path, bound=0.08)
    command = "gemmscope numerics recording.safetensors --bound 8%"
    shown = result.model_copy(update={"command": command, "origin": "recording.safetensors", "model_name": "a small Llama"})
    Path(sys.argv[1]).write_bytes(gzip.compress(shown.to_json().encode(), 9, mtime=0))
    print(shown)


if __name__ == "__main__":
    main()
