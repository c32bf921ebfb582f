"""Whether observers change a training: every kind of loop in tests/support/training_loops.py, and loops with Transformer Engine,
torchao and CUDA, with `record_tensors`, `trace_me` and both. Losses, weights, gradients, and the states of the optimizer, of FP8
scaling and of all random numbers are compared bit for bit.

    python benchmarks/observer_matrix.py build                                      # on the CPU
    python benchmarks/observer_matrix.py build --device cuda --jobs 6 --minutes 4   # on a GPU, compiled with Inductor
    python benchmarks/observer_matrix.py build --only "experts"                     # loops whose name has this text
    python benchmarks/observer_matrix.py build --observers forks                    # with the forks of the prototype fork_loop.py

Each loop first runs twice without observers: if these runs differ, the loop itself is not deterministic, and is not compared.
Loops run in several processes, so that one that ends its process costs one row. The table is printed and written to
FOLDER/observers.txt, what the processes say to FOLDER/observers.log. Exit code 1 if an observer changed something, raised, ended
the process, or recorded less than it should. Loops that do not run here, or not within `--minutes`, are listed as such.
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
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
os.environ.setdefault("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # a loop loads its own state
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from torch import Tensor, nn

import fork_loop
from gemmscope.numerics import measure
from support import training_loops
from support.training_loops import (
    OBSERVERS,
    RECORDED,
    STEPS,
    Block,
    Experts,
    Loop,
    Network,
    Training,
    accumulated,
    averaged,
    differences,
    loop_of,
    plain,
    run,
    state_round_trip,
)  # fmt: skip

GPU_WIDTH = 128  # of layers and micro-batches: FP8 kernels need multiples of 16, with block scales of 128; forks emulate no less
RECIPES = measure.variants
FEW = [f"{name}/transformer_engine" for name in ("NVFP4", "FP8Delayed")]  # with stochastic rounding, and with a history
ENDED, NOT_IN_TIME = "the process ended", "not run in time"
FORKS = "forks"
REFUSED = set[str]()  # loops that `fork_losses` refuses


def float8(recipe: str, device: str, *, compiled: bool = False) -> nn.Module:
    """torchao's FP8 training; emulated on a CPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", device != "cuda")
    model = Network(Block(), Block())
    convert_to_float8_training(model, config=config)
    for layer in model.layers if compiled else ():
        layer.compile(backend=training_loops.BACKEND)
    return model


class Cast(Network):
    """Layers in PyTorch's autocast: scales of rows need BF16 outputs."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([inside]), nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return super().forward(x)


class Engine(nn.Module):
    """A network of Transformer Engine's layers in its autocast. `run`: how a layer is called, as for checkpoints."""

    def __init__(self, kind: str, recipe: str, *, quantized: bool = False, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.te, width = importlib.import_module("transformer_engine.pytorch"), training_loops.WIDTH
        states = importlib.import_module("transformer_engine.pytorch.quantization")
        states.FP8GlobalStateManager.reset()  # the maxima of other loops
        importlib.import_module("transformer_engine.debug.pytorch.debug_state").TEDebugState.layer_count = 1  # names of layers
        layers: dict[str, Callable[[], nn.Module]] = {
            "Linear": lambda: self.te.Linear(width, width),
            "LayerNormLinear": lambda: self.te.LayerNormLinear(width, width),
            "LayerNormMLP": lambda: self.te.LayerNormMLP(width, 4 * width),
            "GroupedLinear": lambda: self.te.GroupedLinear(2, width, width),
            "TransformerLayer": lambda: self.te.TransformerLayer(width, 4 * width, 2, attention_dropout=0.0),
        }
        self.kind, self.run = kind, run
        self.recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)()
        with self.te.quantized_model_init(enabled=quantized, recipe=self.recipe):
            self.layers, self.head = nn.ModuleList(layers[kind]() for _ in range(2)), self.te.Linear(width, width)

    def __getstate__(self) -> dict[str, Any]:
        """Without the library itself, for copies."""
        return {name: value for name, value in self.__dict__.items() if name != "te"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "te": importlib.import_module("transformer_engine.pytorch")})  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, **known: bool) -> Tensor:
        splits = ([len(x) // 2] * 2,) if self.kind == "GroupedLinear" else ()
        x = x.unsqueeze(1) if self.kind == "TransformerLayer" else x  # [tokens, batch, width]
        with self.te.autocast(enabled=True, recipe=self.recipe):
            for layer in self.layers:
                x = layer(x, *splits, **known) if self.run is None else self.run(layer, x)
            return self.head(x.reshape(-1, x.shape[-1]), **known)  # type: ignore[no-any-return]


def cached_weights(model: Any, x: Tensor, training: Training) -> Tensor:
    """Two micro-batches, of which the second one uses the quantized weights of the first one."""
    losses = [
        plain(partial(model, is_first_microbatch=not number), part, training).detach()
        for number, part in enumerate(x.detach().chunk(2))
    ]
    return torch.stack(losses).mean()


def recomputed(layer: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    """A layer with Transformer Engine's own checkpoints."""
    te = importlib.import_module("transformer_engine.pytorch")
    return te.checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


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


def tokens(device: str, parts: int = 1) -> Callable[[int], int]:
    """As many as the kernels of FP8 need, for so many micro-batches."""
    return lambda _: parts * (GPU_WIDTH if device == "cuda" else 32)


def torchao_loops(device: str) -> Iterator[Loop]:
    """torchao's FP8 training: eager and compiled, accumulated, copied."""
    one, three = tokens(device), tokens(device, 3)
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        for compiled in (False, True):
            build = partial(lambda *given, **known: Cast(float8(*given, **known)), recipe, device, compiled=compiled)
            yield Loop(f"torchao {recipe}, {'compiled' if compiled else 'eager'}", loop_of(build, tokens=one))
    build = partial(float8, "tensorwise", device)
    yield Loop("torchao tensorwise, float32", loop_of(build, tokens=one))
    yield Loop("torchao tensorwise, accumulated", loop_of(build, accumulated, tokens=three))
    yield Loop("torchao tensorwise, average by deepcopy", loop_of(build, averaged, tokens=one))


def engine_loops() -> Iterator[Loop]:
    """Transformer Engine's layers in FP8: accumulated, recomputed, copied, with quantized weights."""
    one, two, three = (tokens("cuda", parts) for parts in (1, 2, 3))
    delayed, current = "DelayedScaling", "Float8CurrentScaling"
    for kind in ("Linear", "LayerNormLinear", "LayerNormMLP"):
        for recipe in (delayed, current, "Float8BlockScaling"):
            build = partial(Engine, kind, recipe)
            yield Loop(f"te.{kind}, {recipe}", loop_of(build, tokens=one))
            yield Loop(f"te.{kind}, {recipe}, accumulated", loop_of(build, accumulated, tokens=three))
    for recipe in (delayed, current):
        build = partial(Engine, "Linear", recipe)
        yield Loop(f"te.Linear, {recipe}, cached weights", loop_of(build, cached_weights, tokens=two))
        yield Loop(f"te.Linear, {recipe}, average by deepcopy", loop_of(build, averaged, tokens=one))
        yield Loop(f"te.Linear, {recipe}, state_dict and back", loop_of(build, state_round_trip, tokens=one))
        for reentrant in (True, False):
            build = partial(Engine, "LayerNormMLP", recipe, run=partial(recomputed, reentrant=reentrant))
            name = f"te.LayerNormMLP, {recipe}, {'reentrant' if reentrant else 'non-reentrant'} checkpoints"
            yield Loop(name, loop_of(build, tokens=one), complete=False)
        yield Loop(f"te.GroupedLinear, {recipe}", loop_of(partial(Engine, "GroupedLinear", recipe), tokens=two))
    layer = partial(Engine, "TransformerLayer", current)
    yield Loop(f"te.TransformerLayer, {current}", loop_of(layer, tokens=one), complete=False)
    weights = partial(Engine, "Linear", current, quantized=True)
    yield Loop(f"te.Linear, {current}, FP8 weights", loop_of(weights, tokens=one), complete=False)


def library_loops(device: str) -> Iterator[Loop]:
    """Loops that need another library or a GPU."""
    if device == "cuda" and importlib.util.find_spec("transformer_engine"):
        yield from engine_loops()
    if importlib.util.find_spec("torchao"):
        yield from torchao_loops(device)
    if device == "cuda":
        yield Loop("GradScaler", loop_of(step=scaled))
        yield Loop("CUDA graph", loop_of(graphed), complete=False)
        yield Loop("default device", loop_of(lambda: Network(Block(), Experts("batched")), default_device))


def all_loops(device: str) -> dict[str, Loop]:
    """Every loop that this machine can run, those of libraries and those that take long first."""
    slow = [*training_loops.slow_loops(), *training_loops.compiled_loops()]
    loops = [*library_loops(device), *slow, *training_loops.loops(), *training_loops.parallel_loops()]
    return {loop.name: loop for loop in loops}


def forked(loop: Loop) -> Loop:
    """The loop, with forks of very few steps before one of its steps."""

    def start(device: str) -> Training:
        training = loop.start(device)

        def step(number: int) -> Any:
            if number == RECORDED[0]:
                how: dict[str, Any] = {"recipes": "MXFP8", "steps": STEPS, "controls": 1, "state": [training]}
                with mock.patch.multiple(fork_loop, LEAST_STEPS=STEPS, PILOT=1):
                    result = fork_loop.fork_losses(training.model, None, training.step, range(number, number + STEPS), **how)
                REFUSED.update([loop.name] if result is None else [])
            return training.step(number)

        return replace(training, step=step)

    return replace(loop, start=start)


def problems(loop: Loop, observers: str, expected: training_loops.Outcome, folder: Path, device: str) -> list[str]:
    """What observers changed, and what they did not record."""
    try:
        watched, observer = (forked(loop), "") if observers == FORKS else (loop, observers)
        outcome = run(watched, observer, folder, device)
    except Exception:  # it is an observer's: without them the loop has run twice
        traceback.print_exc()
        return ["raised"]
    changed = differences(expected, outcome)
    lacks = [f"{len(changed)} values differ: {', '.join(changed[:3])}"] if changed else []
    if observers == FORKS:
        return lacks
    if observers != "trace":
        lacks += ["nothing recorded"] * (outcome.recorded < loop.recorded)
        lacks += [f"not recorded: {outcome.missing[0]}"] if outcome.missing and loop.complete else []
    return lacks + ["no trace"] * (observers != "record" and outcome.traced < loop.traced)


def row(loop: Loop, observers: list[str], folder: Path, device: str) -> tuple[bool, str]:
    """Run one loop without observers, twice, and with them: whether they changed it, and its row of the table."""
    try:
        expected, again = (run(loop, "", folder, device) for _ in range(2))
    except Exception as error:
        traceback.print_exc()
        return False, f"does not run on this machine: {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    if own := differences(expected, again):
        return False, f"not deterministic: {len(own)} values differ without observers: {', '.join(own[:8])}"
    lacks = {one: problems(loop, one, expected, folder, device) for one in observers}
    same = {one: "same, refused" if one == FORKS and loop.name in REFUSED else "same" for one in lacks}
    return any(lacks.values()), ", ".join(f"{one}: {'; '.join(missing) or same[one]}" for one, missing in lacks.items())


def work(requests: Connection, given: argparse.Namespace, log: Path) -> None:
    """A process that runs loops by their names."""
    with log.open("ab", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.device == "cuda" or FORKS in given.observers:
        training_loops.WIDTH = GPU_WIDTH
    if given.device == "cuda":
        training_loops.BACKEND = "inductor"
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("nccl" if given.device == "cuda" else "gloo", **store)
        loops, of_libraries = all_loops(given.device), {one.name for one in library_loops(given.device)}
        while (loop := loops.get(requests.recv())) is not None:
            print(f"--- {loop.name}", flush=True)
            every = given.all_recipes or loop.name in of_libraries or loop.name == "plain"
            measure.variants = RECIPES if every else lambda: {name: RECIPES()[name] for name in FEW}
            began = time.monotonic()
            outcome = row(loop, given.observers, folder, given.device)
            requests.send((time.monotonic() - began, *outcome))
        torch.distributed.destroy_process_group()


class Matrix:
    """Loops that wait, processes that run them, and rows."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.failed, self.lines = given, 0, list[str]()
        self.waiting = [name for name in all_loops(given.device) if given.only in name]
        self.ends = time.monotonic() + 60 * given.minutes
        self.log, self.table = given.folder / "observers.log", given.folder / "observers.txt"
        self.running: dict[Connection, tuple[Any, str]] = {}

    def run(self) -> int:
        """Run all loops; 1 if an observer changed one."""
        self.given.folder.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        for _ in range(min(self.given.jobs, len(self.waiting))):
            self._start()
        while self.running and time.monotonic() < self.ends:
            for ready in wait(list(self.running), max(0.0, self.ends - time.monotonic())):
                self._ready(ready)  # type: ignore[arg-type]
        for process, name in self.running.values():
            process.kill()
            self._add(name, NOT_IN_TIME)
        for name in self.waiting:
            self._add(name, NOT_IN_TIME)
        same = sum(line.count(": same") == len(self.given.observers) for line in self.lines)
        others = len(self.lines) - same - self.failed
        self._line(f"{len(self.lines)} loops: {same} the same with observers, {self.failed} not, {others} not compared")
        return int(self.failed > 0)

    def _start(self) -> None:
        context = get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, self.given, self.log), daemon=True)
        process.start()
        there.close()
        self._next(here, process)

    def _next(self, here: Connection, process: Any) -> None:
        """Give a process its next loop; without one, let it end."""
        if self.waiting:
            self.running[here] = process, self.waiting.pop(0)
            here.send(self.running[here][1])
        else:
            self.running.pop(here, None)
            here.send("")

    def _ready(self, here: Connection) -> None:
        process, name = self.running[here]
        try:
            seconds, failed, text = here.recv()
            self._add(name, text, seconds, failed=failed)
        except (EOFError, OSError):
            process.join()
            del self.running[here]
            self._add(name, f"{ENDED}, exit code {process.exitcode}", failed=True)
            if self.waiting:
                self._start()
            return
        self._next(here, process)

    def _add(self, name: str, text: str, seconds: float = 0.0, *, failed: bool = False) -> None:
        self.failed += failed
        self._line(f"{name:58} {seconds:6.1f} s  {text}")

    def _line(self, line: str) -> None:
        """Print a line; the table is complete at any time."""
        self.lines.append(line)
        print(line, flush=True)
        self.table.write_text("\n".join(self.lines) + "\n")


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the table and the log are written")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", metavar="TEXT", help="loops whose name has this text")
    parser.add_argument("--observers", nargs="+", default=OBSERVERS, choices=(*OBSERVERS, FORKS))
    parser.add_argument(
        "--all-recipes", action="store_true", help="measure all recipes in all loops, not only those of libraries"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so long, with fewer loops")
    return Matrix(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
