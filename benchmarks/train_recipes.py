"""Trains a small Llama in BF16 and in every recipe, from the same weights on the same batches, and writes down the losses.

    python benchmarks/train_recipes.py FOLDER                                      # on a GPU: 30M parameters, all recipes
    python benchmarks/train_recipes.py FOLDER --recipes BF16,emulated:NVFP4 --seeds 0,1 --steps 500 --seconds 500 --jobs 4
    python benchmarks/train_recipes.py FOLDER --size toy --device cpu --recipes BF16,emulated:MXFP8,emulated:NVFP4 --steps 200
    python benchmarks/train_report.py FOLDER                                       # the losses and their gaps

Every run is a process and writes FOLDER/RECIPE-seedN.json; runs whose file is there, or in the folder of `--earlier`, are not run
again, so the work can be split over several calls (`--seconds`: no run starts that would not end in time). Runs of one seed have
the same initial weights and the same batches in the same order, so their losses are compared batch by batch. Recipes that the GPU
has run with their library (Transformer Engine, torchao); `emulated:` ones run with gemmscope's emulated linears.

BF16 runs four times per seed: as it is, with the last bit of one weight changed (`BF16+bit`), with the last bit of half of all
weights changed (`BF16+bits`), and with every batch in two halves whose gradients are summed (`BF16+order`). How these differ is
noise. Recipes are compared with the mean of the four, because one BF16 run alone is as much a matter of luck as they are.

Weights are BF16 with float32 masters in AdamW, as in Megatron. The linears of the layers are quantized; embedding, head,
attention and norms are not. Modules are not compiled, so that everything outside the linears is the same code in all runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training_model import SIZES, Llama, Text

BASELINE, BIT, BITS, ORDER = "BF16", "BF16+bit", "BF16+bits", "BF16+order"
REAL = {
    "FP8Current": "transformer_engine",
    "FP8Delayed": "transformer_engine",
    "FP8Block": "transformer_engine",
    "FP8Tensorwise": "torchao",
    "FP8Rowwise": "torchao",
}
EMULATED = "emulated:"
RECIPES = (BASELINE, BIT, BITS, ORDER, *REAL, *(EMULATED + name for name in ("FP8Current", "MXFP8", "NVFP4")))
PLAIN_NVFP4 = "NVFP4Plain"  # without stochastic rounding and Hadamard transform: a coarser recipe to compare with
LAST = 0.1  # the share of the steps whose loss is reported
CURVE = 40  # points of the loss curve that are kept
CHECK_EVERY = 100  # steps between two looks at the loss: looking waits for the GPU
GRACE = 20.0  # seconds that a running process may exceed the time limit


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison have in common."""

    size: str = "30M"
    steps: int = 2000
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    validation_windows: int = 1024
    device: str = "cuda"

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a hundredth, so that the last losses have little noise."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.learning_rate * (0.01 + 0.495 * (1 + math.cos(math.pi * progress)))


Precision = Callable[[], AbstractContextManager[Any]]


def in_recipe(model: Llama, recipe: str, settings: Settings, seed: int) -> Precision:
    """Convert the model to the recipe. Returns what makes the context of a forward pass."""
    if recipe.startswith(EMULATED):
        from compiled_quantizers import compiled
        from gemmscope.numerics.evaluation.emulate import Emulation

        name, on_gpu = recipe.removeprefix(EMULATED), settings.device != "cpu"
        how, base = compiled() if on_gpu else {"seed": seed}, "NVFP4" if name == PLAIN_NVFP4 else name
        emulation = Emulation(model, base, why_kept=lambda path: "the head" if path == "lm_head" else "", **how)
        if name == PLAIN_NVFP4:
            emulation.passes = _without_randomness(base)
        return lambda: emulation
    if recipe in REAL:
        from gemmscope.recipe.recipes import recipe as find_recipe

        if REAL[recipe] == "torchao":
            from gemmscope.step.kits.torchao import TorchaoKit as Kit
        else:
            from gemmscope.step.kits.transformer_engine import TransformerEngineKit as Kit
        kit = Kit(find_recipe(recipe), device=settings.device, compiled="none")
        kit.convert(model, model.low_precision_linears())
        return kit.low_precision
    return nullcontext


def _without_randomness(recipe: str) -> Any:
    """Operands of a recipe without stochastic rounding and Hadamard transform."""
    from gemmscope.numerics.quantizers import operands

    def plain(operand: Any) -> Any:
        return replace(operand, quantizer=replace(operand.quantizer, stochastic=False, signs=()))

    return {name: tuple(map(plain, operands(recipe, name))) for name in ("fprop", "dgrad", "wgrad")}


class Masters:
    """AdamW on float32 copies of BF16 parameters."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        groups = [
            {"params": [master for master in self._masters if master.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [master for master in self._masters if master.dim() == 1], "weight_decay": 0.0},
        ]
        fused = settings.device != "cpu"
        self._optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)

    def step(self, rate: float) -> None:
        """One step with the gradients of the BF16 parameters, clipped to norm 1."""
        gradients = [master.grad for master in self._masters]
        torch._foreach_copy_(gradients, [parameter.grad for parameter in self._parameters])
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)
        for parameter in self._parameters:
            parameter.grad = None


def flip_last_bits(model: nn.Module, seed: int, *, one: bool) -> None:
    """Change the last bit of one weight of the first layer, or of about half of all weights."""
    if one:
        model.get_submodule("layers.0.mlp.down_proj").weight.data.view(torch.int16)[0, 0] ^= 1
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        flips = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int16)
        parameter.data.view(torch.int16).bitwise_xor_(flips.to(parameter.device))


def train(recipe: str, seed: int, settings: Settings, record: Path | None = None) -> dict[str, Any]:
    """One run: the losses of its last steps, its validation loss, and how long it took."""
    begin, size = time.perf_counter(), SIZES[settings.size]
    torch.manual_seed(seed)
    text = Text(size, settings.steps, seed, settings.validation_windows, settings.device)
    model = Llama(size, seed).to(settings.device, torch.bfloat16)
    if recipe in (BIT, BITS):
        flip_last_bits(model, seed, one=recipe == BIT)
    precision = in_recipe(model, recipe, settings, seed)
    masters, losses = Masters(model, settings), torch.zeros(settings.steps, device=settings.device)
    parts = 2 if recipe == ORDER else 1
    warm, started = min(20, settings.steps // 2), begin
    with _recording(model, record, settings.steps) as recording:
        for step in range(settings.steps):
            if step == warm:
                _wait(settings.device)
                started = time.perf_counter()
            for part in text.batch(step).chunk(parts):
                with precision():
                    loss = model(part) / parts
                loss.backward()
                losses[step] += loss.detach()
            masters.step(settings.rate(step))
            if recording is not None:
                recording.step()
            if step % CHECK_EVERY == 0 and not math.isfinite(losses[step].item()):
                break
    _wait(settings.device)
    seconds = time.perf_counter() - started
    curve = losses.tolist()[: step + 1]
    last = curve[-max(int(LAST * settings.steps), 1) :]
    return {
        "recipe": recipe,
        "seed": seed,
        "settings": vars(settings),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": settings.steps * size.tokens,
        "text": text.description,
        "finished": len(curve) == settings.steps and math.isfinite(curve[-1]),
        "train_loss": sum(last) / len(last),
        "validation_loss": _validation(model, text, precision),
        "validation_loss_bf16": _validation(_in_bf16(model, settings), text, nullcontext),
        "curve": [sum(piece) / len(piece) for piece in _pieces(curve, CURVE)],
        "ms_per_step": 1e3 * seconds / max(settings.steps - warm, 1),
        "seconds": time.perf_counter() - begin,
        "device": torch.cuda.get_device_name() if settings.device != "cpu" else "CPU",
        "versions": _versions(),
    }


def _recording(model: nn.Module, path: Path | None, steps: int) -> AbstractContextManager[Any]:
    """Tensors of the last steps, for `gemmscope numerics`."""
    if path is None:
        return nullcontext()
    import gemmscope

    recorded = min(8, steps)
    return gemmscope.record_tensors(model, path, steps=recorded, after=max(steps - recorded - 1, 0))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _in_bf16(model: nn.Module, settings: Settings) -> Llama:
    """The trained weights in a model that quantizes nothing."""
    plain = Llama(SIZES[settings.size], 0).to(settings.device, torch.bfloat16)
    trained = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(trained[name])
    return plain


@torch.no_grad()
def _validation(model: nn.Module, text: Text, precision: Precision) -> float:
    losses = []
    for batch in text.validation():
        with precision():
            losses.append(model(batch))
    return float(torch.stack(losses).mean())


def _pieces(values: list[float], count: int) -> list[list[float]]:
    length = max(len(values) // count, 1)
    return [values[start : start + length] for start in range(0, len(values) - length + 1, length)]


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "transformer_engine", "torchao", "triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def file_of(folder: Path, recipe: str, seed: int) -> Path:
    """Where a run is written."""
    return folder / f"{recipe.replace(':', '-').replace('+', '-')}-seed{seed}.json"


@contextmanager
def kernels_side_by_side() -> Iterator[bool]:
    """Lets processes run their kernels on one GPU at the same time (CUDA MPS) instead of in turn, where that is installed."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}  # processes that train inherit them
        started = subprocess.run([control, "-d"], check=False).returncode == 0
        try:
            yield started
        finally:
            if started:
                subprocess.run([control], input=b"quit\n", check=False)


@dataclass
class Running:
    """A process that trains."""

    recipe: str
    seed: int
    process: subprocess.Popen[bytes]
    begin: float


def run_all(
    folder: Path, recipes: list[str], seeds: list[int], jobs: int, limit: float, options: list[str], earlier: Path | None = None
) -> int:
    """Train the runs that neither folder has, `jobs` at a time, seed by seed. Returns how many failed or were not started."""
    folders = [folder, *([earlier] if earlier is not None else [])]
    begin, longest = time.perf_counter(), dict[str, float]()
    waiting = [
        (recipe, seed) for seed in seeds for recipe in recipes if not any(file_of(one, recipe, seed).exists() for one in folders)
    ]
    running: list[Running] = []
    missing = 0
    try:
        while waiting or running:
            elapsed = time.perf_counter() - begin
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                done = file_of(folder, one.recipe, one.seed).exists()
                longest[one.recipe] = max(longest.get(one.recipe, 0.0), time.perf_counter() - one.begin)
                missing += not done
                outcome = _summary(folder, one) if done else f"{one.recipe}, seed {one.seed}: failed"
                print(f"{elapsed:6.0f} s  {outcome}", flush=True)
            while waiting and len(running) < jobs:
                recipe, seed = waiting.pop(0)
                needed = longest.get(recipe, max(longest.values(), default=0.0))
                if elapsed + needed > limit:
                    missing += 1
                    left = f"{limit - elapsed:.0f} s are left, {needed:.0f} s are needed"
                    print(f"{elapsed:6.0f} s  {recipe}, seed {seed}: not started, {left}", flush=True)
                    continue
                running.append(Running(recipe, seed, _started(folder, recipe, seed, options), time.perf_counter()))
            if elapsed > limit + GRACE:
                missing += len(running)
                break
            time.sleep(0.2)
    finally:
        for one in running:  # none goes on alone
            one.process.kill()
    return missing


def _started(folder: Path, recipe: str, seed: int, options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(folder), "--one", recipe, "--seeds", str(seed), *options]
    with file_of(folder, recipe, seed).with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _summary(folder: Path, one: Running) -> str:
    run = json.loads(file_of(folder, one.recipe, one.seed).read_text())
    losses = f"train {run['train_loss']:.4f}  validation {run['validation_loss']:.4f}"
    return f"{one.recipe:<22} seed {one.seed}  {losses}  {run['ms_per_step']:6.1f} ms/step  {run['seconds']:5.0f} s"


def main() -> None:
    """Parse options; train one run, or start the processes of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", default="", help=f"default: {','.join(RECIPES)}")
    parser.add_argument("--seeds", default="0,1,2,3,4,5")
    parser.add_argument("--jobs", type=int, default=6, help="runs side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit: no run starts that would not end in time")
    parser.add_argument("--earlier", type=Path, help="a folder with runs that are done")
    parser.add_argument("--record", action="store_true", help="record tensors at the end of the BF16 run of seed 0")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    common = parser.add_argument_group("the same for all runs")
    common.add_argument("--size", choices=SIZES, default=Settings.size)
    common.add_argument("--steps", type=int, default=Settings.steps)
    common.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    common.add_argument("--warmup", type=int, default=Settings.warmup)
    common.add_argument("--validation-windows", type=int, default=Settings.validation_windows)
    common.add_argument("--device", default=Settings.device)
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    shared = given.folder / "settings.json"
    if given.one:
        _run_one(given.folder, given.one, seeds[0], Settings(**json.loads(shared.read_text())), record=given.record)
        return
    settings = Settings(**{name: getattr(given, name) for name in vars(Settings()) if hasattr(given, name)})
    on_cpu = settings.device == "cpu"
    recipes = given.recipes.split(",") if given.recipes else [name for name in RECIPES if not (on_cpu and name in REAL)]
    known = {*RECIPES, EMULATED + PLAIN_NVFP4, *(EMULATED + name for name in (*REAL, "FP8RowwiseGWHP"))}
    if unknown := sorted({*recipes} - known):
        parser.error(f"unknown recipe {unknown[0]}: one of {', '.join(sorted(known))}")
    given.folder.mkdir(parents=True, exist_ok=True)
    if shared.exists() and json.loads(shared.read_text()) != vars(settings):
        parser.error(f"{given.folder} has runs with other settings, {shared.read_text()}: choose another folder")
    shared.write_text(json.dumps(vars(settings)))
    options = ["--record"] if given.record else []
    with nullcontext() if on_cpu else kernels_side_by_side():
        missing = run_all(given.folder, recipes, seeds, given.jobs, given.seconds, options, given.earlier)
    sys.exit(bool(missing))


def _run_one(folder: Path, recipe: str, seed: int, settings: Settings, *, record: bool) -> None:
    path = file_of(folder, recipe, seed)
    result = train(
        recipe, seed, settings, path.with_suffix(".safetensors") if record and (recipe, seed) == (BASELINE, 0) else None
    )
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
