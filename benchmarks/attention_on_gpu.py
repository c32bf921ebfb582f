"""Times attention by implementation on this GPU: what the multipliers of attention in forecasts are to be measured with.

    python benchmarks/attention_on_gpu.py OUT.csv [--seconds 200] [--dry-run]

PyTorch's own implementations (cuDNN, FlashAttention, memory-efficient, math, FlexAttention) and FlashAttention 3 where its
package is installed, over head size, length, causality, grouped-query attention and pass. One row for each: the median of
several bursts with the GPU never at rest, TFLOP/s (FLOPs of allowed pairs, backward twice forward), and the implementation that
kernel names show, in the words of `step` and `explain`. Cases come in random order, so that a time limit leaves out a random
part; the last line counts them. `--dry-run`: tiny sizes on the CPU, to check the script.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from gemmscope.engine.kernels import MATH, attention_backend

TOKENS, HIDDEN = 16384, 4096  # of each case: long sequences come in small batches
BURSTS, BURST_S, HEAT_S = 5, 0.04, 3.0
SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
LONGEST = {MATH: 4096}  # with more, its scores do not fit
FLEX_HEADS = (128,)  # every size is compiled, which takes seconds
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One case. `groups`: how many heads of queries share one of keys and values."""

    implementation: str
    head_size: int
    length: int
    causal: bool
    groups: int

    @property
    def forward_flops(self) -> float:
        pairs = self.length * (self.length + 1) / 2 if self.causal else float(self.length**2)
        return 4 * max(TOKENS // self.length, 1) * HIDDEN * pairs


def shapes(*, dry_run: bool) -> list[Shape]:
    """All cases in random order."""
    heads, lengths = ((64,), (32, 64)) if dry_run else ((64, 128, 256), (1024, 4096, 16384))
    names = [MATH, "FlashAttention"] if dry_run else [*SDPA, "FlexAttention", "FlashAttention 3"]
    every = [Shape(*sizes) for sizes in product(names, heads, lengths, (True, False), (1, 4))]
    possible = [
        shape
        for shape in every
        if shape.length <= LONGEST.get(shape.implementation, shape.length)
        and (shape.implementation != "FlexAttention" or (shape.head_size in FLEX_HEADS and shape.causal))
    ]
    random.Random(1).shuffle(possible)
    return possible


def attention(shape: Shape, device: str) -> Attend:
    """The function that computes this case; whatever it raises means that it cannot run here."""
    if shape.implementation == "FlashAttention 3":
        import flash_attn_interface

        return lambda q, k, v: flash_attn_interface.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.causal)
    if shape.implementation == "FlexAttention":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda _b, _h, query, key: query >= key, None, None, shape.length, shape.length, device=device)
        compiled = torch.compile(flex_attention)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=shape.groups > 1)
    backend = SDPA[shape.implementation]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.groups > 1)

    return attend


def seconds(run: Callable[[], Any], device: str) -> float:
    """The median time of one run, over bursts that follow each other without a rest."""

    def burst(count: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    count = max(int(BURST_S / max(burst(1), 1e-6)), 1)
    return statistics.median(burst(count) for _ in range(BURSTS))


def measured(shape: Shape, device: str) -> Iterator[dict[str, Any]]:
    """A row for each pass."""
    heads, batch = HIDDEN // shape.head_size, max(TOKENS // shape.length, 1) if device == "cuda" else 1
    counts = (heads, heads // shape.groups, heads // shape.groups)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(batch, count, shape.length, shape.head_size, device=device, dtype=dtype, requires_grad=True)
        for count in counts
    )
    attend = attention(shape, device)
    out = attend(q, k, v)
    gradient = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    activities = [ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        attend(q, k, v), backward()
    ran = sorted({name for event in recorded.key_averages() if (name := attention_backend(event.key)) is not None})
    for name, run, flops in (("forward", lambda: attend(q, k, v), 1), ("backward", backward, 2)):
        taken = seconds(run, device)
        rate = flops * shape.forward_flops * batch / max(TOKENS // shape.length, 1) / taken / 1e12
        yield {**asdict(shape), "pass": name, "ms": f"{taken * 1000:.4f}", "tflops": f"{rate:.2f}", "kernels": "; ".join(ran)}


def main() -> int:
    """Measure every case that there is time for, and write each as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device, until, missing = "cpu" if options.dry_run else "cuda", time.monotonic() + options.seconds, 0
    if device == "cuda":
        square, heated = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16), time.monotonic() + HEAT_S
        while time.monotonic() < heated:
            square @ square
            torch.cuda.synchronize()
    fields = ["implementation", "head_size", "length", "causal", "groups", "pass", "ms", "tflops", "kernels"]
    with Path(options.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        for shape in shapes(dry_run=options.dry_run):
            if time.monotonic() > until:
                missing += 1
                continue
            try:
                rows = list(measured(shape, device))
            except (ImportError, RuntimeError) as error:  # not installed, not for this GPU or size, out of memory
                print(f"{shape}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
                continue
            writer.writerows(rows)
            file.flush()
    print(f"{missing} cases are missing: the time limit was {options.seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
