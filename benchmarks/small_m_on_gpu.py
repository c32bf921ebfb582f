"""Times GEMMs of few rows on this GPU, to see how far forecasts hold below the sizes that were fitted (m < 512).

    python benchmarks/small_m_on_gpu.py OUT.csv

Needs torch with CUDA and nothing else; takes four minutes on an H200. Each GEMM runs as PyTorch does it (cuBLAS, and CUTLASS for
rowwise scales): bf16, and fp8 with one scale for each tensor, rowwise or in blocks, on inputs quantized beforehand. Weights are
rotated so that none is still in the L2 cache, launches are replayed from a CUDA graph, and the GPU rests before each
measurement (burst).
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

import torch

ROWS = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
SITES = (
    (1024, 1024), (2048, 1024), (1024, 4096), (2048, 2048), (6144, 2048), (2048, 8192), (4096, 4096), (6144, 4096), (14336, 4096),
    (28672, 4096), (4096, 14336), (5120, 5120), (2560, 9216), (8192, 8192), (10240, 8192), (28672, 8192), (8192, 28672),
    (32768, 4096), (1536, 7168), (7168, 2048), (18432, 7168), (7168, 18432), (512, 7168), (768, 2048),
)  # fmt: skip
COLD_BYTES = 192 * 2**20
REST_S, LEAST_MS, ROUNDS = 0.02, 4.0, 5


def quantized(shape: tuple[int, int]) -> torch.Tensor:
    """A random matrix in FP8."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def operands(fmt: str, m: int, n: int, k: int) -> list:
    """One call for each copy of the weight."""
    size = n * k * (2 if fmt == "bf16" else 1)
    copies = max(2, min(64, COLD_BYTES // size))
    if fmt == "bf16":
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        return [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
    x, weights = quantized((m, k)), [quantized((n, k)) for _ in range(copies)]
    if fmt == "fp8":
        scales = [torch.ones((), device="cuda")] * 2
    elif fmt == "fp8-rowwise":
        scales = [torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")]
    else:
        scales = [torch.ones(k // 128, m, device="cuda").t(), torch.ones(n // 128, k // 128, device="cuda").t()]
    return [lambda w=w: torch._scaled_mm(x, w.t(), scales[0], scales[1], out_dtype=torch.bfloat16) for w in weights]


def time_ms(calls: list) -> float:
    """The median over rounds of graph replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    replays = max(1, round(LEAST_MS / begin.elapsed_time(end)))
    times = []
    for _ in range(ROUNDS):
        time.sleep(REST_S)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / replays / len(kept))
    return sorted(times)[ROUNDS // 2]


def main() -> None:
    """Measure every size in every format that works."""
    began = time.time()
    with Path(sys.argv[1]).open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["format", "m", "k", "n", "ms"])
        for fmt in ("bf16", "fp8", "fp8-rowwise", "fp8-block"):
            for n, k in SITES:
                for m in ROWS:
                    try:
                        calls = operands(fmt, m, n, k)
                        out.writerow([fmt, m, k, n, f"{time_ms(calls):.6f}"])
                    except RuntimeError as error:
                        print(fmt, m, n, k, str(error)[:150], flush=True)
                        torch.cuda.synchronize()
                        if fmt == "fp8-block":
                            break
            print(fmt, f"done after {time.time() - began:.0f} s", torch.cuda.get_device_name(), torch.__version__, flush=True)
            file.flush()


if __name__ == "__main__":
    main()
