"""What every forecast starts from: the GPUs that were named, their state, and the recipes that they run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemmscope.bench.choose import named_recipes
from gemmscope.choices import CLOCK_STATES, ClockState
from gemmscope.errors import UserError, option, reject, shown
from gemmscope.findings import Finding, finding
from gemmscope.forecast.communication import network_facts
from gemmscope.forecast.gemm import model
from gemmscope.forecast.training import gemm_format, only_torchao, torchao_known
from gemmscope.gpu.specs import GpuSpec, described, gpu, gpus
from gemmscope.job.rank_workload import RankWorkload
from gemmscope.numerics.evaluation.requested_mix import Mixes, MixRequest, priced_mixes, quantized_ops
from gemmscope.options.measuring import RecipeOptions
from gemmscope.reading import LIMITS, read_text
from gemmscope.recipe.frameworks import backends, other_backend
from gemmscope.recipe.precisions import precisions
from gemmscope.recipe.recipes import BASELINE, recipe, recipes
from gemmscope.recipe.support import architectures, support
from gemmscope.toml import parse_toml
from gemmscope.workload.ops import PASSES


def chips_of(names: Sequence[str], power_limit: float | None = None) -> list[GpuSpec]:
    """The GPUs in the order they were named, each once, with the power limit that was asked for."""
    if not names:
        known = f"add a name such as h200, or {option('gpu', 'b300,h200')}; known: {', '.join(gpus())}"
        raise UserError("no GPU is named", known)
    chips = {(spec := _described(name) if name.endswith(".toml") else gpu(name)).name: spec for name in names}.values()
    limit = option("power_limit", f"{power_limit:g}") if power_limit is not None else ""
    return [chip if power_limit is None else chip.limited_to(power_limit, limit) for chip in chips]


def _described(file: str) -> GpuSpec:
    """The GPU that a TOML file of the user describes. Its architecture must be known, and a GPU with measured collectives."""
    hint = 'a GPU file has facts such as like = "h100" and bandwidth_tbps = 2.4'
    spec = described(parse_toml(read_text(file, LIMITS["gpu"]["bytes"], hint)), Path(file).stem.lower())
    able, networks = sorted({chip.collectives_of for chip in gpus().values()}), network_facts()["networks"]
    unknown, lacks = f"{file}: compute capability {spec.architecture} is not known", f"{file} lacks collectives_of"
    reject(
        (spec.architecture not in architectures(), unknown, f"known: {', '.join(architectures())}"),
        (spec.collectives_of not in able, f"{lacks}: a GPU whose collectives were measured", f"one of {', '.join(able)}"),
        (spec.network not in networks, f"{file}: {shown(spec.network)} is not a known network", f"known: {', '.join(networks)}"),
    )
    return spec


def one_chip(names: Sequence[str], power_limit: float | None = None) -> GpuSpec:
    """The only GPU that was named."""
    chips = chips_of(names, power_limit)
    if len(chips) > 1:
        raise UserError(f"a plan is for one type of GPU, not for {', '.join(chip.name for chip in chips)}", "plan each by itself")
    return chips[0]


def known_state(state: str) -> ClockState:
    """The state, if there is one of this name."""
    if state not in CLOCK_STATES:
        raise UserError(f"{option('state')} {shown(state)} is not known", "it can be sustained (as in training) or burst")
    return state


def choose_recipes(
    chips: Sequence[GpuSpec], requested: RecipeOptions, framework: str = ""
) -> dict[str, tuple[list[str], list[Finding]]]:
    """The recipes to forecast on each GPU, and what there is to know about them.

    Those named must run on at least one of the GPUs; by default, all that a GPU runs of the library that the framework trains
    with, which is Transformer Engine unless the framework has another.
    """
    other = other_backend(framework)
    backend = other or backends()[0]
    usual = [name for name, known in recipes().items() if backend in known.backends]
    named = named_recipes(requested)
    wanted = [name for name in named or usual if name not in requested.left_out]
    choices = {}
    for chip in chips:
        reasons = {name: _why_not(name, chip) for name in wanted}
        chosen = [name for name in wanted if not reasons[name]]
        notes = {name: support(name, chip.capability).note for name in chosen}
        findings = [finding("recipe-emulated", recipe=name, how=note) for name, note in notes.items() if note]
        if named is None and other:
            findings.append(finding("framework-backend", framework=framework, backend=backend))
        borrowed = [name for name in chosen if name != BASELINE and ((named is None and other) or only_torchao(recipe(name)))]
        if borrowed and not torchao_known(chip):
            findings.append(finding("torchao-not-measured", recipes=borrowed))
        left_out = {name: why for name, why in reasons.items() if why and (named is not None or only_torchao(recipe(name)))}
        findings += [finding("recipe-left-out", recipe=name, reason=why) for name, why in left_out.items()]
        if named is None and chosen == [BASELINE] and not requested.left_out and not left_out:
            findings.append(finding("only-baseline-runs", gpu=chip.name, reason=next(filter(None, reasons.values()))))
        choices[chip.name] = chosen, findings
    for name in wanted if named is not None else ():
        if not any(name in chosen for chosen, _ in choices.values()):
            able = [other for other in recipes() if not all(_why_not(other, chip) for chip in chips)]
            runs = any(support(name, chip.capability).runs for chip in chips)
            problem = (
                f"{name} cannot {'be forecast for' if runs else 'run on'} {' or '.join(choices)}: {_why_not(name, chips[0])}"
            )
            raise UserError(problem, f"recipes that can: {', '.join(able)}")
    return choices


def forecastable(name: str, wanted: Sequence[str]) -> list[str]:
    """Those recipes that a GPU runs and that can be forecast for it, BF16 first.

    >>> forecastable("h200", ["fp8block", "mxfp8"])
    ['BF16', 'FP8Block']
    """
    chip, names = gpu(name), [BASELINE, *(recipe(given).name for given in wanted)]
    return [candidate for candidate in dict.fromkeys(names) if not _why_not(candidate, chip)]


def _why_not(name: str, chip: GpuSpec) -> str:
    """Why a recipe cannot run on a GPU, or cannot be forecast for it; empty if it can."""
    if recipe(name).backends == ("cpu",):
        return "it only runs on CPUs"
    architectures()[chip.architecture]  # without it, the table says nothing about this GPU
    if reason := support(name, chip.capability).why_not(chip.name, chip.capability):
        return reason
    rates = (precisions()[gemm_format(recipe(name), pass_name, chip)].rate for pass_name in PASSES)
    missing = [rate for rate in rates if rate not in chip.tflops]
    return f"the file of {chip.name} gives no tflops.{missing[0]}" if missing else ""


def common_fields(command: str, state: ClockState) -> dict[str, Any]:
    """What every result has, with the origin of the fitted numbers."""
    fitted = model().coefficients
    return {"command": command, "coefficients": f"{fitted.source}; {fitted.fitted}", "state": state}


def mixes_on(chip: GpuSpec, asked: MixRequest | None, names: Sequence[str], subject: RankWorkload) -> Mixes:
    """The mixes to forecast for one GPU; what it does not run is left out, with the reason."""
    if asked is None:
        return Mixes()
    needed = [recipe(name).name for name in (asked.recipe, asked.kept.recipe) if name is not None]
    missing = [name for name in needed if name not in forecastable(chip.name, needed)]
    if missing:
        return Mixes((), (finding("mix-left-out", recipe=missing[0], gpu=chip.name),))
    model = subject.source.model
    return priced_mixes(asked, names, quantized_ops(model, subject.run, subject.workload), model)
