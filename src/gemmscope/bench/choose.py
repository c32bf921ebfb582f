"""What to measure with: the backend, the recipes and the modes, decided before anything starts.

Whatever cannot run here is rejected at once, with the reason and with what can run. The parent only reads the driver, the list of
installed packages and the tables of recipes; the worker then asks the framework itself.
"""

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gemmscope.choices import MODES, Mode
from gemmscope.errors import UserError, option, shown
from gemmscope.findings import Finding, finding
from gemmscope.gpu.environment import Environment, GpuFacts, environment
from gemmscope.gpu.specs import gpu
from gemmscope.gpu.visible import usable_gpu, visible_gpu
from gemmscope.options.measuring import MeasuringOptions, RecipeOptions, TimingOptions
from gemmscope.recipe.frameworks import backends, frameworks, other_backend
from gemmscope.recipe.recipes import BASELINE, recipe
from gemmscope.recipe.recipes import recipes as all_recipes
from gemmscope.recipe.support import support


def named_recipes(options: RecipeOptions) -> list[str] | None:
    """The recipes that were named, BF16 always among them and first; None if they are to be chosen."""
    if options.recipes is None:
        return None
    if not options.recipes:
        raise UserError(f"{option('recipes')} is empty", f"recipes: {', '.join(all_recipes())}")
    names = list(dict.fromkeys([BASELINE, *(recipe(name).name for name in options.recipes)]))
    if both := [name for name in names if name in options.left_out]:
        raise UserError(f"{option('recipes')} includes {both[0]}, which is also skipped", "use only one of them")
    return names


def chosen_modes(options: RecipeOptions) -> list[Mode]:
    """Both, or those that were named."""
    if unknown := [mode for mode in options.modes or () if mode not in MODES]:
        raise UserError(f"there is no mode {shown(unknown[0])}", f"modes: {', '.join(MODES)}")
    return list(options.modes or MODES)


def check_for_step(options: RecipeOptions) -> None:
    """A `UserError` for what a training step does not have: GEMMs alone."""
    if chosen_modes(options) == ["pre-quantized"]:
        message = f"a training step includes quantization; {option('pre_quantize')} is only for GEMMs"
        raise UserError(message, "remove it, or use gemmscope bench")


def _for_framework(choices: MeasuringOptions, framework: str) -> tuple[MeasuringOptions, tuple[Finding, ...]]:
    """The options, with the backend that this framework trains with unless something else was requested or is installed."""
    backend = other_backend(framework)
    if not backend or choices.backend is not None or choices.recipes is not None or choices.on_cpu:
        return choices, ()
    if missing_package(backend):
        return choices, (finding("framework-backend-missing", framework=framework, backend=backend),)
    return choices.but(backend=backend), (finding("framework-backend", framework=framework, backend=backend),)


@dataclass(frozen=True)
class Choice:
    """The decision. `findings` tell what was decided differently from the request."""

    backend: str
    recipes: list[str]
    modes: list[Mode]
    findings: tuple[Finding, ...] = ()


def choose(choices: MeasuringOptions, machine: Environment, *, framework: str = "") -> Choice:
    """Decide, or a `UserError` with the reason. `framework`: whose config it is; its own backend is preferred."""
    choices, findings = _for_framework(choices, framework)
    modes, named = chosen_modes(choices), named_recipes(choices)
    device = _device(choices)
    gpu = usable_gpu(machine, share=choices.share_gpu) if device == "cuda" else None
    backend = _backend(choices.backend, device, named)
    if isinstance(choices, TimingOptions) and choices.cache_weights and not frameworks()[backend].caches_weights:
        raise UserError(
            f"{option('cache_weights')} is not possible with the {backend} backend: it keeps no quantized weights between runs",
            f"remove it, or add {option('backend', 'transformer_engine')}",
        )
    if frameworks()[backend].gemms_only and "autocast" in modes:
        if modes == ["autocast"]:
            raise UserError(
                f"the {backend} backend has no autocast mode: it measures GEMMs only, on inputs quantized beforehand",
                "measure the pre-quantized mode, or install transformer_engine or torchao",
            )
        modes, findings = ["pre-quantized"], (*findings, finding("gemms-only-backend", backend=backend))
    return Choice(backend, _recipes(named, choices.left_out, backend, gpu), modes, findings)


def _device(choices: MeasuringOptions) -> str:
    device = choices.device or ("cpu" if choices.backend == "cpu" else "cuda")
    if device not in ("cuda", "cpu"):
        raise UserError(f"{option('device')} {shown(device)} is not known", "it can be cuda or cpu")
    return device


def supported(name: str, gpus: Sequence[str] | None = None) -> bool | None:
    """Whether any of these GPUs, or the one that is here, supports a recipe; None if no GPU is here.

    >>> supported("MXFP8", ["h200"]), supported("MXFP8", ["h200", "b200"])
    (False, True)
    """
    if gpus is not None:
        return any(support(name, gpu(chip).capability).runs for chip in gpus)
    here = visible_gpu(environment())
    return support(name, here.capability).runs if here is not None and here.capability is not None else None


def _backend(requested: str | None, device: str, named: Sequence[str] | None) -> str:
    """The backend that was requested, or the first that is installed and has every named recipe."""
    possible = backends(device)
    if requested is not None:
        requested = requested.replace("-", "_")
        if requested not in backends():
            raise UserError(f"{option('backend')} {shown(requested)} is not known", f"it can be {', '.join(backends())}")
        if requested not in possible:
            raise UserError(
                f"the {requested} backend does not measure on {device}",
                f"remove {option('backend')} or {option('device')}, or name a pair that fits",
            )
        possible = (requested,)
    elif named is not None and device == "cuda":
        possible = _with_recipes(named)
    missing = {backend: missing_package(backend) for backend in possible}
    chosen = next((backend for backend in possible if not missing[backend]), None)
    if chosen is None:
        needed = " or ".join(dict.fromkeys(missing.values()))
        raise UserError(
            f"measuring on {device} needs {needed}, which is not installed", "gemmscope doctor shows what is installed"
        )
    return chosen


def _with_recipes(named: Sequence[str]) -> tuple[str, ...]:
    wanted = [recipe(name) for name in named if recipe(name).quantizes]
    able = tuple(backend for backend in backends("cuda") if all(backend in given.backends for given in wanted))
    if not able:
        homes = "; ".join(f"{given.name}: {', '.join(given.backends)}" for given in wanted)
        raise UserError("no single backend has all these recipes", f"measure them in separate runs ({homes})")
    return able


def missing_package(backend: str) -> str:
    """The first package that a backend needs and that is not installed; empty if all are there."""
    return next((package for package in frameworks()[backend].packages if importlib.util.find_spec(package) is None), "")


def _recipes(named: Sequence[str] | None, left_out: Collection[str], backend: str, gpu: GpuFacts | None) -> list[str]:
    """The named ones, each of which must be able to run here; or all that can."""
    reasons = {name: _why_not(name, backend, gpu) for name in all_recipes()}
    able = [name for name, reason in reasons.items() if not reason]
    if reasons[BASELINE]:
        raise UserError(f"{BASELINE}, which every other recipe is compared with, cannot run here: {reasons[BASELINE]}")
    for name in named or ():
        if reasons[name]:
            raise UserError(f"{name} cannot be measured here: {reasons[name]}", f"recipes that can run here: {', '.join(able)}")
    return [name for name in (named or able) if name not in left_out]


def _why_not(name: str, backend: str, gpu: GpuFacts | None) -> str:
    """Why this recipe does not run there; empty if it does, as far as the tables know."""
    homes = recipe(name).backends
    if backend not in homes:
        return f"the {backend} backend does not have it, {option('backend', ' or '.join(homes))} does"
    if gpu is None or gpu.capability is None:
        return ""
    return support(name, gpu.capability).why_not(f"this {gpu.name}", gpu.capability)
