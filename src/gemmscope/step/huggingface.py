"""A Hugging Face model for a training step: built from its config with newly initialized weights, its own class and attention."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from gemmscope.step.mixer_kernels import CONV, FLA, MAMBA, TRANSFORMERS, WRONG_GRADIENTS, gated_backward_is_wrong
from gemmscope.step.module_plan import ModulePlan, truncated
from gemmscope.workload.factory import Built
from gemmscope.workload.failures import naming
from gemmscope.workload.huggingface import huggingface_model, training_inputs

# Functions of mixers that transformers takes from other packages where they are installed: the first words of their names.
MIXERS = ("chunk_gated_delta_rule", "fused_recurrent_gated", "causal_conv1d", "mamba_", "selective_", "chunk_kda", "lightning")
DECODING = ("update", "recurrent", "single")  # in the names of those that run one token at a time
WRAPPED = ("implementation", "func", "fn")  # what wrappers call the function inside
PACKAGES = {"fla": FLA, "mamba_ssm": MAMBA, "causal_conv1d": CONV, "transformers": TRANSFORMERS}
NOT_WHEN_EXPORTED = "is_new_implementation"  # in a wrapper (5.17) that takes transformers' own code while a model is exported
EXPORTED = (
    "this PyTorch tells compiled code that it is being exported, and transformers then runs its own; use --compile none, "
    "or PyTorch 2.13 or newer"
)


@dataclass(frozen=True)
class ModelKernels:
    """Which package each function of the mixers comes from, and why another one was not used."""

    sources: dict[str, str]
    refused: dict[str, str]


def live_huggingface(plan: ModulePlan, device: str, precision: torch.dtype) -> Built:
    """The model of a config with its first `plan.depth` layers (0: all), and random inputs with labels."""
    assert plan.config is not None
    config = truncated(plan.config, plan.depth) if plan.depth else dict(plan.config)
    hide_wrong_kernels()
    with naming("building the model from its config"):
        model = huggingface_model(config, device, precision)
    if plan.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = training_inputs(model, plan.micro_batch_size, plan.sequence_length or None, device, precision)
    return Built(model, (), inputs, own_inputs=next(iter(inputs)) != "input_ids")


def hide_wrong_kernels() -> None:
    """Where flash-linear-attention would refuse the backward pass, make transformers fall back to its own code."""
    if gated_backward_is_wrong():
        sys.modules["fla"] = None  # type: ignore[assignment]


@cache
def compiled_as_exported() -> bool:
    """Whether code that is compiled is told that it is being exported: PyTorch 2.11 does so, 2.13 does not."""

    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_exporting() else x

    return bool(torch.compile(asked, backend="eager")(torch.zeros(1)))


def mixers(model: nn.Module, *, compiled: bool = False) -> ModelKernels:
    """Which implementation each function of its mixers has: the package that it comes from, or PyTorch code of transformers.

    transformers looks for flash-linear-attention, mamba-ssm and causal-conv1d when it imports a model, and falls back to
    functions of its own. Kernels of the hub are used only on request. Older versions keep the chosen function as an attribute of
    the mixer, newer ones (5.22) inside a wrapper.
    """
    files = {type(part).__module__ for part in model.modules()}
    functions: dict[str, Any] = {}
    for file in sorted(name for name in files if name.startswith("transformers.models.")):
        functions |= {_name(name, value): value for name, value in vars(sys.modules[file]).items() if inspect.isfunction(value)}
    for part in model.modules():
        functions |= {name: value for name, value in vars(part).items() if inspect.isfunction(value)}
    sources = {name: _package(function) for name, function in sorted(functions.items()) if _is_mixer(name)}
    hidden = sys.modules.get("fla", sys) is None
    refused = {name: WRONG_GRADIENTS for name in sources if hidden and sources[name] == TRANSFORMERS}
    unused = [name for name, package in sources.items() if compiled and package != TRANSFORMERS and _is_wrapped(functions[name])]
    if unused and compiled_as_exported():
        sources |= dict.fromkeys(unused, TRANSFORMERS)
        refused |= dict.fromkeys(unused, EXPORTED)
    return ModelKernels(sources, refused)


def _is_wrapped(function: Any) -> bool:
    """Whether transformers decides at every call which implementation runs."""
    while inspect.isfunction(function):
        inside = _inside(function)
        if NOT_WHEN_EXPORTED in inside:
            return True
        function = next((value for name, value in inside.items() if name in WRAPPED and value is not function), None)
    return False


def _is_mixer(name: str) -> bool:
    return name.startswith(MIXERS) and not any(word in name for word in DECODING)


def _inside(function: Any) -> dict[str, Any]:
    """What a wrapper holds."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _name(name: str, function: Any) -> str:
    """What a package would call it."""
    return str(_inside(function).get("func_name", name)).removeprefix("torch_")


def _package(function: Any) -> str:
    """Where a function comes from; of a wrapper of transformers, the implementation inside it."""
    while inspect.isfunction(function):
        inside = next((value for name, value in _inside(function).items() if name in WRAPPED), None)
        if inside is None or inside is function or not callable(inside):
            break
        function = inside
    package = str(getattr(function, "__module__", None)).partition(".")[0]
    return PACKAGES.get(package, package)
