"""Times the kernels of mixers on this GPU, forward and backward, and names them: what a forecast of hybrids is fitted to.

    python benchmarks/mixers_on_gpu.py OUT.csv [KIND …] [--warm-up]

One row for each kind, size and number of tokens; for one batch also a row for every kernel with its time. MixerKernels of
flash-linear-attention are tuned when they first run, which takes a minute for each kind: `--warm-up` only does that, so that
several kinds can be tuned at the same time. `--check` compares the results with those of transformers.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gemmscope.step.mixer_kernels import CONV, FLA, MAMBA, MixerKernels

BATCHES = ((1, 8192), (4, 4096), (1, 32768))
REPEATS = 8
Case = tuple[list[torch.Tensor], Callable[..., torch.Tensor]]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    """A random leaf."""
    return (torch.randn(*shape, device=device) * 0.5).to(dtype).requires_grad_()


def ssd(kernels: MixerKernels, batch: int, length: int, heads: int, groups: int, key: int, value: int) -> Case:
    """The state-space scan of Mamba-2."""
    device = kernels.device
    sizes = ((heads, value), (heads,), (groups, key), (groups, key))
    x, dt, b, c = (tensor(batch, length, *size, device=device) for size in sizes)
    a, d, bias = (tensor(heads, dtype=torch.float32, device=device) for _ in range(3))

    def run(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return kernels.ssd(x, dt, -torch.exp(a), b, c, chunk=128 if key > 64 else 256, skip=d, dt_bias=bias)

    return [x, dt, b, c], run


def lightning(kernels: MixerKernels, batch: int, length: int, heads: int, groups: int, key: int, value: int) -> Case:  # noqa: ARG001
    """Lightning attention."""
    q, k, v = (tensor(batch, length, heads, size, device=kernels.device) for size in (key, key, value))
    decay = -torch.rand(heads, device=kernels.device)
    return [q, k, v], lambda q, k, v: kernels.lightning(q, k, v, decay)


def delta(kernels: MixerKernels, batch: int, length: int, heads: int, groups: int, key: int, value: int) -> Case:
    """The gated delta rule."""
    sizes = ((groups, key), (groups, key), (heads, value), (heads,))
    q, k, v, beta = (tensor(batch, length, *size, device=kernels.device) for size in sizes)
    decay, a_log, dt_bias = _decay(kernels, batch, length, heads)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return kernels.delta_rule(q, k, v, decay, beta, a_log=a_log, dt_bias=dt_bias)

    return [q, k, v, decay, beta], run


def kda(kernels: MixerKernels, batch: int, length: int, heads: int, groups: int, key: int, value: int) -> Case:
    """Kimi delta attention."""
    sizes = ((groups, key), (groups, key), (heads, value), (heads,))
    q, k, v, beta = (tensor(batch, length, *size, device=kernels.device) for size in sizes)
    decay, a_log, dt_bias = _decay(kernels, batch, length, heads, key)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return kernels.delta_rule(q, k, v, decay, beta, a_log=a_log, dt_bias=dt_bias)

    return [q, k, v, decay, beta], run


def _decay(kernels: MixerKernels, batch: int, length: int, heads: int, *rest: int) -> tuple[torch.Tensor, ...]:
    """The decay of every token, and the two parameters that scale it."""
    device = kernels.device
    a_log, dt_bias = (tensor(*size, dtype=torch.float32, device=device) for size in ((heads,), (heads, *rest)))
    return tensor(batch, length, heads, *rest, device=device), a_log, dt_bias


def conv(kernels: MixerKernels, batch: int, length: int, heads: int, groups: int, key: int, value: int) -> Case:  # noqa: ARG001
    """A causal convolution of four positions with SiLU."""
    x, weight = tensor(batch, length, heads * value, device=kernels.device), tensor(heads * value, 4, device=kernels.device)
    return [x, weight], lambda x, weight: kernels.conv(x, weight, None, "silu")


def gated_norm(kernels: MixerKernels, batch: int, length: int, heads: int, groups: int, key: int, value: int) -> Case:  # noqa: ARG001
    """The norm of every head, then the gate."""
    x, z = (tensor(batch, length, heads * value, device=kernels.device) for _ in range(2))
    weight = tensor(value, device=kernels.device)

    def run(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.gated_norm(x, z, weight, eps=1e-6, group=value, gate_first=False)

    return [x, z, weight], run


def grouped_norm(kernels: MixerKernels, batch: int, length: int, heads: int, groups: int, key: int, value: int) -> Case:  # noqa: ARG001
    """The gate, then the norm of every group."""
    x, z = (tensor(batch, length, heads * value, device=kernels.device) for _ in range(2))
    weight = tensor(heads * value, device=kernels.device)

    def run(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.gated_norm(x, z, weight, eps=1e-6, group=heads * value // groups, gate_first=True)

    return [x, z, weight], run


# Kind -> what makes it, and its sizes: (heads, groups or key heads, key or state, value or head)
KINDS: dict[str, tuple[Callable[..., Case], Sequence[tuple[int, int, int, int]]]] = {
    "ssd": (ssd, ((64, 8, 128, 64), (128, 8, 128, 64))),  # Nemotron-3 Nano, Nemotron-H
    "gated delta rule": (delta, ((32, 16, 128, 128), (16, 16, 128, 128))),  # Qwen3-Next; a smaller one
    "kda": (kda, ((32, 32, 128, 128), (16, 16, 128, 128))),  # Kimi Linear
    "lightning": (lightning, ((64, 64, 128, 128), (16, 16, 128, 128))),  # MiniMax-01
    "conv": (conv, ((64, 64, 128, 128), (96, 8, 128, 64))),
    "gated norm": (gated_norm, ((32, 16, 128, 128),)),
    "grouped norm": (grouped_norm, ((64, 8, 128, 64),)),
}


def elapsed_ms(work: Callable[[], Any]) -> float:
    """The median time of one run, in a burst that keeps the GPU busy."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1000
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    torch.cuda._sleep(20_000_000)
    for mark in marks[:-1]:
        mark.record()
        work()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in pairwise(marks))


def kernels_of(work: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and milliseconds of every kernel of one run, summed by name."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    rows = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(((event.key, event.self_device_time_total / 1000) for event in rows), key=lambda row: -row[1])


def main() -> None:
    """Time every requested kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--warm-up", action="store_true", help="Only run each size once, on the smallest batch.")
    parser.add_argument("--check", action="store_true", help="Compare with transformers, on a short sequence.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--without", nargs="*", default=[], help="Packages not to use.")
    parser.add_argument("--small", action="store_true", help="A single small batch, to try it on a CPU.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    new = not arguments.out.exists()
    with arguments.out.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            columns = "kind package batch length heads groups key value forward_ms backward_ms kernel kernel_ms"
            writer.writerow(columns.split())
        for kind in arguments.kinds or KINDS:
            make, sizes = KINDS[kind]
            for size in sizes:
                if arguments.check:
                    check(kind, arguments.device, arguments.without, size, make)
                    continue
                batches = ((1, 128),) if arguments.small else BATCHES[:1] if arguments.warm_up else BATCHES
                for batch, length in batches:
                    kernels = MixerKernels(arguments.device, without=frozenset(arguments.without))
                    measure(writer, kind, kernels, (batch, length, *size), make, warm_up=arguments.warm_up)
                    file.flush()


def check(kind: str, device: str, without: Sequence[str], size: Sequence[int], make: Callable[..., Case]) -> None:
    """How far output and gradients are from those of transformers, relative to the largest value."""
    results, package = [], ""
    for left_out in (frozenset(without), frozenset((MAMBA, CONV, FLA))):
        torch.manual_seed(0)
        kernels = MixerKernels(device, without=left_out)
        inputs, run = make(kernels, 2, 256, *size)
        out = run(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
        package = package or "+".join(dict.fromkeys(kernels.sources.values()))
    far = [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(*results, strict=True)]
    print(f"check {kind:18} {tuple(size)} {package}: " + " ".join(f"{error:.1e}" for error in far), flush=True)


def measure(
    writer: Any, kind: str, kernels: MixerKernels, size: Sequence[int], make: Callable[..., Case], *, warm_up: bool
) -> None:
    """One row, and on the first batch its kernels."""
    began = time.perf_counter()
    try:
        inputs, run = make(kernels, *size)
        out = run(*inputs)
        gradient = torch.randn_like(out)
        torch.autograd.grad(out, inputs, gradient)
        if kernels.device == "cuda":
            torch.cuda.synchronize()
        package = "+".join(dict.fromkeys(kernels.sources.values()))
        if warm_up:
            print(f"{kind:18} {size} {package}: {time.perf_counter() - began:.1f} s", flush=True)
            return
        forward = elapsed_ms(lambda: run(*inputs))
        out = run(*inputs)
        backward = elapsed_ms(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))
    except Exception as error:  # this size, not the others
        print(f"{kind:18} {size} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return
    writer.writerow([kind, package, *size, f"{forward:.4f}", f"{backward:.4f}", "", ""])
    print(f"{kind:18} {size} {package}: forward {forward:.3f} ms, backward {backward:.3f} ms", flush=True)
    if tuple(size[:2]) == BATCHES[1]:
        for name, milliseconds in kernels_of(lambda: torch.autograd.grad(run(*inputs), inputs, gradient)):
            writer.writerow([kind, package, *size, "", "", name, f"{milliseconds:.4f}"])


if __name__ == "__main__":
    main()
