"""What to measure with: the backend, the recipes and the modes, settled before anything starts.

Whatever cannot run here is said at once, with the reason and with what can. The parent only looks at the driver, at which
packages are installed, and at the tables of recipes; the framework has the last word, in the worker.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmscope.cli.bench_options import ChoiceOptions
from gemmscope.errors import UserError, shown

if TYPE_CHECKING:
    from gemmscope.gpu.environment import Environment, GpuFacts
    from gemmscope.workload.cases import Mode

# Backend → the packages it needs, in the order of preference.
PACKAGES = {
    "transformer_engine": ("torch", "transformer_engine"),
    "torchao": ("torch", "torchao"),
    "torch": ("torch",),
    "cpu": ("torch",),
}
ON_GPU = ("transformer_engine", "torchao", "torch")
CACHE_WEIGHTS = ("transformer_engine",)
PRODUCTS_ONLY = ("torch",)


@dataclass(frozen=True)
class Choice:
    """What measures, in which precisions and modes. `notes` say what was chosen for the reader."""

    backend: str
    recipes: list[str]
    modes: list[Mode]
    notes: tuple[str, ...] = ()


def choose(options: ChoiceOptions, machine: Environment, *, cache_weights: bool = False) -> Choice:
    """Settle it, or a `UserError` with the reason."""
    modes = options.modes()
    named = options.named()
    device = _device(options)
    gpu = _gpu(machine, share=options.share_gpu) if device == "cuda" else None
    backend = _backend(options.backend, device, named)
    if cache_weights and backend not in CACHE_WEIGHTS:
        raise UserError(
            f"--cache-weights is not possible with the {backend} backend: it holds no quantized weights from one run to the next",
            "leave it out, or add --backend transformer_engine",
        )
    notes: tuple[str, ...] = ()
    if backend in PRODUCTS_ONLY and "autocast" in modes:
        if modes == ["autocast"]:
            raise UserError(
                f"the {backend} backend has no autocast mode: it measures products alone, on quantized operands",
                "leave out --autocast-only, or install transformer_engine or torchao",
            )
        modes, notes = ["pre-quantized"], (f"the {backend} backend measures products alone: no autocast mode",)
    recipes = _recipes(named, options.left_out(), backend, gpu)
    return Choice(backend, recipes, modes, notes)


def _device(options: ChoiceOptions) -> str:
    device = options.device or ("cpu" if options.backend == "cpu" else "cuda")
    if device not in ("cuda", "cpu"):
        raise UserError(f"--device {shown(device)} is not known", "it can be cuda or cpu")
    return device


def visible_gpu(machine: Environment) -> GpuFacts | None:
    """The GPU that will be measured on: the first that CUDA_VISIBLE_DEVICES lets through, by number or UUID."""
    first = (machine.visible_devices or "").split(",")[0].strip()
    if machine.visible_devices is not None and first in ("", "-1"):
        return None
    if first.startswith("GPU-"):
        return next((gpu for gpu in machine.gpus if gpu.uuid and gpu.uuid.startswith(first)), None)
    index = int(first) if first.isascii() and first.isdigit() and len(first) < 4 else 0
    return machine.gpus[index] if index < len(machine.gpus) else None


def _gpu(machine: Environment, *, share: bool) -> GpuFacts:
    """The GPU to measure on; refused if there is none, or if others use it."""
    gpu = visible_gpu(machine)
    if gpu is None:
        hidden = f" (CUDA_VISIBLE_DEVICES is {machine.visible_devices!r})" if machine.gpus else ""
        raise UserError(
            f"there is no NVIDIA GPU here to measure on{hidden}",
            "gemmscope forecast --gpu answers for GPUs that are not here; --device cpu shows that measuring works, not how fast",
        )
    if (gpu.processes or (gpu.utilization or 0) > 10) and not share:
        processes = f"processes {', '.join(map(str, gpu.processes))}"
        who = processes if gpu.processes else f"something that keeps it {gpu.utilization}% busy"
        raise UserError(f"the GPU is in use by {who}: times measured beside it are not this model's", "wait, or add --share-gpu")
    return gpu


def _backend(asked: str | None, device: str, named: Sequence[str] | None) -> str:
    """The backend asked for, or the first that is installed and has every recipe named."""
    possible: tuple[str, ...] = ("cpu",) if device == "cpu" else ON_GPU
    if asked is not None:
        asked = asked.replace("-", "_")
        if asked not in PACKAGES:
            raise UserError(f"--backend {shown(asked)} is not known", f"it can be {', '.join(PACKAGES)}")
        if asked not in possible:
            raise UserError(
                f"the {asked} backend does not measure on {device}", "leave out --backend, or --device, or name a pair that fits"
            )
        possible = (asked,)
    elif named is not None and device == "cuda":
        possible = _with_recipes(named)
    missing = {backend: _missing(backend) for backend in possible}
    chosen = next((backend for backend in possible if not missing[backend]), None)
    if chosen is None:
        needed = " or ".join(dict.fromkeys(package for package in missing.values()))
        raise UserError(f"measuring on {device} needs {needed}, which is not installed", "gemmscope doctor says what is here")
    return chosen


def _with_recipes(named: Sequence[str]) -> tuple[str, ...]:
    """The backends that have every recipe named."""
    from gemmscope.recipe.recipes import recipe

    wanted = [recipe(name) for name in named if recipe(name).quantizes]
    found = tuple(backend for backend in ON_GPU if all(backend in each.backends for each in wanted))
    if not found:
        homes = "; ".join(f"{each.name}: {', '.join(each.backends)}" for each in wanted)
        raise UserError("no one backend has all these recipes", f"measure them in runs of their own ({homes})")
    return found


def _missing(backend: str) -> str:
    """The first package that it lacks."""
    return next((package for package in PACKAGES[backend] if importlib.util.find_spec(package) is None), "")


def _recipes(named: Sequence[str] | None, left_out: set[str], backend: str, gpu: GpuFacts | None) -> list[str]:
    """Those named, each of which must be able to run here; or all that can."""
    from gemmscope.recipe.recipes import BASELINE
    from gemmscope.recipe.recipes import recipes as all_recipes

    reasons = {name: _why_not(name, backend, gpu) for name in all_recipes()}
    able = [name for name, reason in reasons.items() if not reason]
    if reasons[BASELINE]:
        raise UserError(f"{BASELINE}, which every other recipe is compared with, cannot run here: {reasons[BASELINE]}")
    for name in named or ():
        if reasons[name] and name not in left_out:
            raise UserError(f"{name} cannot be measured here: {reasons[name]}", f"recipes that can run here: {', '.join(able)}")
    return [name for name in (named or able) if name not in left_out]


def _why_not(name: str, backend: str, gpu: GpuFacts | None) -> str:
    """Why this recipe does not run there; empty if it does, as far as the tables know."""
    from gemmscope.recipe.recipes import recipe
    from gemmscope.recipe.support import support

    homes = recipe(name).backends
    if backend not in homes:
        return f"the {backend} backend does not have it, --backend {' or '.join(homes)} does"
    if gpu is None or gpu.capability is None:
        return ""
    return support(name, gpu.capability).why_not(f"this {gpu.name}", gpu.capability)
