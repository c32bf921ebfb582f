"""Whether observers change a training: every kind of loop in tests/support/training_loops.py, and loops with Transformer Engine,
torchao and CUDA, with `record_tensors`, `trace_me` and both. Losses, weights and random states are compared bit for bit.

    python benchmarks/observer_matrix.py                           # on the CPU, without loops that need a GPU
    python benchmarks/observer_matrix.py --device cuda             # on a GPU, compiled with Inductor
    python benchmarks/observer_matrix.py --only "experts"          # loops whose name has this text

Each loop first runs twice without observers: if these runs differ, the loop itself is not deterministic, and is not compared.
Exit code 1 if an observer changed something, raised, or recorded less than it should.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from torch import Tensor, nn

from gemmscope.numerics import probes
from support import training_loops
from support.training_loops import OBSERVERS, Block, Experts, Loop, Network, Training, differences, loop_of, plain, run

LONG = 32  # tokens: FP8 kernels need multiples of 16


def float8() -> nn.Module:
    """torchao's FP8 training; emulated on a CPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulated = not torch.cuda.is_available() or torch.get_default_device().type == "cpu"
    return convert_to_float8_training(Network(Block(), Block()), config=Float8LinearConfig(emulate=emulated))  # type: ignore[no-any-return]


def transformer_engine(kind: str) -> nn.Module:
    """Layers of Transformer Engine."""
    te = importlib.import_module("transformer_engine.pytorch")
    width = training_loops.WIDTH
    layers: dict[str, Callable[[], nn.Module]] = {
        "Linear": lambda: te.Linear(width, width, device="cuda"),
        "LayerNormLinear": lambda: te.LayerNormLinear(width, width, device="cuda"),
        "LayerNormMLP": lambda: te.LayerNormMLP(width, 4 * width, device="cuda"),
    }
    model = Network(layers[kind](), layers[kind]())
    model.head = te.Linear(width, width, device="cuda")
    return model


def in_fp8(recipe: str) -> training_loops.Step:
    """A step in Transformer Engine's autocast."""

    def step(model: Any, x: Tensor, _: Training) -> Tensor:
        te = importlib.import_module("transformer_engine.pytorch")
        chosen = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
        autocast = getattr(te, "autocast", None)
        with autocast(enabled=True, recipe=chosen) if autocast else te.fp8_autocast(enabled=True, fp8_recipe=chosen):
            output = model(x)
        loss: Tensor = (output.float() - x.detach().flip(-1)).square().mean()
        loss.backward()
        return loss

    return step


def scaled(model: Any, x: Tensor, training: Training) -> Tensor:
    """FP16 with a loss scale."""
    scaler = torch.amp.GradScaler()
    with torch.autocast("cuda", dtype=torch.float16):
        loss: Tensor = model(x).float().square().mean()
    scaler.scale(loss).backward()
    training.kept.append(scaler.state_dict())
    return loss


def graphed() -> nn.Module:
    """A layer as a CUDA graph."""
    model = Network()
    x = torch.randn(24, training_loops.WIDTH, device="cuda", requires_grad=True)
    model.layers[0] = torch.cuda.make_graphed_callables(model.layers[0], (x,))
    return model


def default_device(model: Any, x: Tensor, training: Training) -> Tensor:
    """New tensors are made on the GPU."""
    with torch.device("cuda"):
        return plain(model, x, training)


def library_loops(device: str) -> Iterator[Loop]:
    """Loops that need another library or a GPU."""

    def long(_: int) -> int:
        return LONG

    if importlib.util.find_spec("torchao"):
        yield Loop("torchao float8", loop_of(float8, tokens=long))
    if device == "cuda":
        if importlib.util.find_spec("transformer_engine"):
            for kind, recipe in (
                ("Linear", "Float8CurrentScaling"), ("Linear", "DelayedScaling"), ("LayerNormLinear", "DelayedScaling"),
                ("LayerNormMLP", "Float8CurrentScaling"), ("LayerNormMLP", "DelayedScaling"),
            ):  # fmt: skip
                build = lambda kind=kind: transformer_engine(kind)  # noqa: E731
                yield Loop(f"te.{kind}, {recipe}", loop_of(build, in_fp8(recipe), tokens=long))
        yield Loop("GradScaler", loop_of(step=scaled))
        yield Loop("CUDA graph", loop_of(graphed), complete=False)
        yield Loop("default device", loop_of(lambda: Network(Block(), Experts("batched")), default_device))


def all_loops(device: str) -> list[Loop]:
    """Every loop that this machine can run."""
    kinds = [*training_loops.loops(), *training_loops.compiled_loops(), *training_loops.slow_loops()]
    return [*kinds, *training_loops.parallel_loops(), *library_loops(device)]


def problems(loop: Loop, observers: str, expected: training_loops.Outcome, folder: Path, device: str) -> list[str]:
    """What observers changed, and what they did not record."""
    try:
        outcome = run(loop, observers, folder, device)
    except Exception:  # it is an observer's: without them the loop has run twice
        traceback.print_exc()
        return ["raised"]
    changed = differences(expected, outcome)
    lacks = [f"{len(changed)} values differ: {', '.join(changed[:3])}"] if changed else []
    if observers != "trace":
        lacks += ["nothing recorded"] * (outcome.recorded < loop.recorded)
        lacks += [f"not recorded: {outcome.missing[0]}"] if outcome.missing and loop.complete else []
    return lacks + ["no trace"] * (observers != "record" and outcome.traced < loop.traced)


def main() -> int:
    """Run all loops and print a line for each; 1 if an observer changed one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", metavar="TEXT", help="loops whose name has this text")
    parser.add_argument("--observers", nargs="+", default=OBSERVERS, choices=OBSERVERS)
    parser.add_argument("--probes", action="store_true", help="compute probes too, which takes longer")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if not given.probes:
        probes.compute_probes = lambda *_, **__: {}
    if given.device == "cuda":
        training_loops.BACKEND = "inductor"
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("nccl" if given.device == "cuda" else "gloo", **store)
        for loop in (one for one in all_loops(given.device) if given.only in one.name):
            began = time.monotonic()
            try:
                expected, again = (run(loop, "", folder, given.device) for _ in range(2))
            except Exception:
                traceback.print_exc()
                print(f"{loop.name:46} does not run on this machine", flush=True)
                continue
            cells = ["not deterministic"]
            if not differences(expected, again):
                results = {one: problems(loop, one, expected, folder, given.device) for one in given.observers}
                failed += any(results.values())
                cells = [f"{one}: {'; '.join(lacks) or 'same'}" for one, lacks in results.items()]
            print(f"{loop.name:46} {time.monotonic() - began:5.1f} s  {', '.join(cells)}", flush=True)
        torch.distributed.destroy_process_group()
    print("the training is the same in all loops" if not failed else f"{failed} loops differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
