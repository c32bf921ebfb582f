"""Measure the training step of a module in BF16, eager or compiled, with the time of every kind of kernel. Needs a GPU.

Forecasts of traced modules are compared with it:

    python benchmarks/measure_modules.py docs/examples/vit.py:build compiled > vit.json
"""

import json
import sys
import time

import torch

from gemmscope.workload.factory import load_factory, loss_of

KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "convolutions": ("conv", "implicit_gemm", "cudnn", "dgrad", "wgrad"),
    "optimizer": ("adam", "multi_tensor"),
    "GEMMs": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "embedding": ("embedding", "index_put", "indexing_backward", "radix", "sort"),
    "copies": ("memcpy", "memset"),
}


def kind_of(name):
    """The kind of a kernel, by its name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def measure(reference, mode, steps=20):
    """Milliseconds of a step and of its kernels, after the clock has settled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    built = load_factory(reference, None, None, "cuda")
    module = built.module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    run = torch.compile(module) if mode == "compiled" else module

    def step():
        loss_of(built, run(*built.args, **built.kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.time()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    compiled_s = time.time() - began
    for _ in range(15):  # the clock settles
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    host_ms = (time.perf_counter() - began) / steps * 1000
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - began) / steps * 1000
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kinds, kernels, largest = {}, 0, {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent = event.device_time / 3000
            kinds[kind_of(event.name)] = kinds.get(kind_of(event.name), 0.0) + spent
            largest[event.name] = largest.get(event.name, 0.0) + spent
            kernels += 1
    top = sorted(largest.items(), key=lambda pair: -pair[1])[:12]
    return {
        "module": reference, "mode": mode, "step_ms": step_ms, "issued_ms": host_ms, "kernels": kernels / 3, "parts_ms": kinds,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "compile_s": compiled_s,
        "largest": [(name[:90], ms) for name, ms in top],
    }  # fmt: skip


if __name__ == "__main__":
    reference, mode = sys.argv[1:3]
    result = measure(reference, mode)
    print(json.dumps(result))
    shown = ", ".join(f"{kind} {ms:.2f}" for kind, ms in result["parts_ms"].items())
    print(f"{reference} {mode}: {result['step_ms']:.2f} ms, {result['kernels']:.0f} kernels; {shown}", file=sys.stderr)
