"""Measure training steps of modules in BF16, eager and compiled, with the time of every kind of kernel. Needs a GPU.

Forecasts of traced modules are compared with it:

    python benchmarks/measure_modules.py docs/examples/vit.py:build docs/examples/dit.py:build > modules.jsonl

Every module has a process of its own. All of them compile at the same time, and then measure one after the other.
"""

import json
import multiprocessing
import sys
import time

import torch

from gemmscope.workload.factory import load_factory, loss_of

KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "convolutions": ("conv", "implicit_gemm", "dgrad", "wgrad"),
    "optimizer": ("adam", "multi_tensor"),
    "GEMMs": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "embedding": ("embedding", "index_put", "indexing_backward", "radix", "sort"),
    "copies": ("memcpy", "memset"),
}
WARM, SETTLING, MEASURED, PROFILED = 3, 10, 15, 3  # steps


def kind_of(name):
    """The kind of a kernel, by its name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "between GEMMs")


def stepper(built, compiled):
    """A function that runs one training step."""
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-5, fused=True)
    run = torch.compile(built.module) if compiled else built.module

    def step():
        loss_of(built, run(*built.args, **built.kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(step):
    """Milliseconds of a step and of its kernels, after the clock has settled."""
    for _ in range(SETTLING):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(MEASURED):
        step()
    issued_ms = (time.perf_counter() - began) / MEASURED * 1000
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - began) / MEASURED * 1000
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    parts, kernels = {}, 0
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            parts[kind_of(event.name)] = parts.get(kind_of(event.name), 0.0) + event.device_time / 1000 / PROFILED
            kernels += 1
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {"step_ms": step_ms, "issued_ms": issued_ms, "kernels": kernels / PROFILED, "parts_ms": parts, "peak_gb": peak}


def one_module(reference, everyone, turn, results):
    """Compile, wait for the others, measure alone."""
    built = load_factory(reference, None, None, "cuda")
    steps = {mode: stepper(built, mode == "compiled") for mode in ("compiled", "eager")}
    try:
        for step in steps.values():
            for _ in range(WARM):
                step()
        torch.cuda.synchronize()
    finally:
        everyone.wait(timeout=150)
    for mode, step in steps.items():
        with turn:
            results.put({"module": reference, "mode": mode, **measure(step)})
            torch.cuda.synchronize()


def main():
    """A line of JSON for each module and mode; a readable one on standard error."""
    references = sys.argv[1:]
    context = multiprocessing.get_context("spawn")
    everyone, turn, results = context.Barrier(len(references)), context.Lock(), context.Queue()
    workers = [context.Process(target=one_module, args=(reference, everyone, turn, results)) for reference in references]
    for worker in workers:
        worker.start()
    for _ in range(2 * len(references)):
        result = results.get(timeout=200)
        print(json.dumps(result), flush=True)
        parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(result["parts_ms"].items()))
        about = f"{result['step_ms']:.2f} ms, launched in {result['issued_ms']:.2f}, {result['kernels']:.0f} kernels"
        print(f"{result['module']} {result['mode']}: {about}, {result['peak_gb']:.1f} GB; {parts}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.join(timeout=5)


if __name__ == "__main__":
    main()
