"""Print every health figure of this machine's GPUs, idle and under load, and how long it takes to read them.

    python benchmarks/health_on_gpu.py

Without torch, only the idle figures are printed.
"""

from __future__ import annotations

import sys
import threading
import time

from gemmscope.gpu.environment import node_name
from gemmscope.gpu.health import Health, health_facts, health_figures, health_problems
from gemmscope.gpu.nvml import Gpu, open_nvml

LOAD_S = 3.0


def main() -> int:
    """Print the figures of every GPU; 1 without a driver."""
    nvml = open_nvml()
    if nvml is None:
        print("no NVIDIA driver here", file=sys.stderr)
        return 1
    for index in range(nvml.count()):
        gpu = nvml.gpu(index)
        if gpu is None:
            continue
        print(
            f"{node_name()} GPU {gpu.index()}: {gpu.query('Name')}, {gpu.uuid()}, PCI bus {gpu.pci_bus()}, serial {gpu.serial()}"
        )
        idle, idle_ms = timed(gpu)
        loaded, loaded_ms = under_load(gpu)
        print(f"  reading took {idle_ms:.1f} ms idle" + (f", {loaded_ms:.1f} ms under load" if loaded else ""))
        for name, figure in health_figures().items():
            value = idle.get(name, "-")
            change = f" -> {loaded.get(name, '-')}" if loaded and loaded.get(name, "-") != value else ""
            print(f"  {name:<28} {value}{change}  ({figure['meaning']})")
        problems = health_problems(loaded or idle, under_load=bool(loaded))
        print("  problems: " + ("; ".join(f"{problem.text} ({problem.remedy})" for problem in problems) or "none"))
    return 0


def timed(gpu: Gpu) -> tuple[Health, float]:
    """The figures, and the milliseconds to read them."""
    begin = time.perf_counter()
    health = health_facts(gpu)
    return health, 1e3 * (time.perf_counter() - begin)


def under_load(gpu: Gpu) -> tuple[Health, float]:
    """The figures while GEMMs run on this GPU, after some seconds; nothing without torch or where CUDA does not show the GPU."""
    try:
        import torch
    except ImportError:
        return {}, 0.0
    uuids = [
        f"GPU-{str(torch.cuda.get_device_properties(i).uuid).removeprefix('GPU-')}" for i in range(torch.cuda.device_count())
    ]
    if gpu.uuid() not in uuids:
        return {}, 0.0
    stop = threading.Event()
    matrix = torch.randn(8192, 8192, device=f"cuda:{uuids.index(gpu.uuid() or '')}", dtype=torch.bfloat16)

    def work() -> None:
        while not stop.is_set():
            for _ in range(20):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize(matrix.device)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(LOAD_S)
    try:
        return timed(gpu)
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
